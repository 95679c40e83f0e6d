"""An ordinary Jinja rendering of a chat template, set up as Hugging Face Transformers does it."""

import json

from jinja2.ext import LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render_plainly(source, messages, *, add_generation_prompt=True, **tokens):
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source).render(
        messages=[{"role": m.role, "content": m.content} for m in messages],
        add_generation_prompt=add_generation_prompt,
        tools=None,
        documents=None,
        **tokens,
    )
