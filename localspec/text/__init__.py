"""Text around the models: characters across tokens, stop strings and chat templates."""

from localspec.text.builtin import TEMPLATE_NAMES, template_source
from localspec.text.streaming import IncrementalDecoder, StopResult, StopStrings
from localspec.text.template import ROLES, ChatTemplate, Message, Piece, Rendered, split_control

__all__ = [
    "ROLES",
    "TEMPLATE_NAMES",
    "ChatTemplate",
    "IncrementalDecoder",
    "Message",
    "Piece",
    "Rendered",
    "StopResult",
    "StopStrings",
    "split_control",
    "template_source",
]
