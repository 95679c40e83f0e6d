"""Text around the models: characters across tokens, stop strings and chat templates."""

from localspec.text.streaming import IncrementalDecoder, StopResult, StopStrings

__all__ = ["IncrementalDecoder", "StopResult", "StopStrings"]
