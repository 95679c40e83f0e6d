"""Chat templates by name, for models whose file carries none, and the choice between all sources."""

from __future__ import annotations

from pathlib import Path

from localspec.errors import TemplateError
from localspec.reading import read_whole

__all__ = ["TEMPLATE_NAMES", "template_source"]

_CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

_GEMMA = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant') %}
        {{- raise_exception('Gemma knows no ' + message.role + ' role') }}
    {%- endif %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Gemma needs user and assistant messages in turns, the user first') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
    {{- message.content | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""

_LLAMA3 = """\
{{ bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {{- message.content | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_MISTRAL = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('Mistral knows no ' + message.role + ' role') }}
    {%- endif %}
{%- endfor %}
"""

_NAMED = {"chatml": _CHATML, "gemma": _GEMMA, "llama3": _LLAMA3, "mistral": _MISTRAL}

TEMPLATE_NAMES = tuple(_NAMED)


def template_source(choice: str | None, model_template: str | None) -> str:
    """Return the Jinja source to use: a named one, a file's, or without a ``choice`` the model's own.

    Raises TemplateError when the model has none, and for a name that is neither known nor a file. No
    template is ever guessed: a wrong one makes a model answer badly without a word of warning.
    """
    names = ", ".join(TEMPLATE_NAMES)
    if choice is None:
        if not model_template:
            raise TemplateError(
                "this model's file has no chat template (a base model, perhaps); "
                f"choose one with --template NAME or --template FILE (names: {names}), or use --raw"
            )
        return model_template
    if choice in _NAMED:
        return _NAMED[choice]
    try:
        return read_whole(Path(choice)).decode()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise TemplateError(f"no template {choice!r}: not one of {names}, and as a file: {reason}") from None
