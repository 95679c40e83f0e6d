"""Running a template that came with a model file: foreign code, so sandboxed and bounded.

The environment offers what templates written for Hugging Face Transformers expect (its whitespace
settings, ``raise_exception``, ``strftime_now``, ``tojson`` that keeps order and characters, ``break`` and
``continue``, ``{% generation %}``), on Jinja's immutable sandbox. On top of it come limits on time
and on the size of any text it builds, since ``range`` in ``range`` or doubling a string would otherwise
hang or exhaust the machine.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localspec.errors import TemplateError

__all__ = ["SandboxedTemplate"]

# A long document in every message is far below, a runaway template soon above.
MAX_CHARACTERS = 8_000_000
# Real templates take milliseconds. CPU time, so that a busy machine does not refuse a good one.
MAX_CPU_S = 2.0

# What makes long values of short ones, and no template is known to need.
_GROWING_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "to_bytes", "translate", "zfill"})
_GROWING_FILTERS = ("batch", "center", "slice", "wordwrap")
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")


class SandboxedTemplate:
    """A compiled template that can only turn variables into text, within limits.

    Raises TemplateError, in one line, when the source does not compile or rendering fails.
    """

    def __init__(self, source: str) -> None:
        self._environment = _Environment()
        self._lock = threading.Lock()  # the budget belongs to one rendering at a time
        try:
            tree = self._environment.bounded(self._environment.parse(source))
            code = self._environment.compile(tree, filename="<chat template>")
            self._template = jinja2.Template.from_code(self._environment, code, self._environment.make_globals(None))
        except Exception as error:
            raise TemplateError(f"the chat template does not compile: {_one_line(error)}") from error

    def render(self, variables: Mapping[str, object], now: datetime) -> str:
        """Return the text; ``now`` is what ``strftime_now`` formats."""
        clock = {"strftime_now": now.strftime}
        parts: list[str] = []
        with self._lock:
            self._environment.start()
            try:
                for part in self._template.generate({**clock, **variables}):
                    self._environment.spend(len(part))
                    parts.append(part)
            # Whatever foreign code raises, from a wrong type to a recursion limit, is its refusal.
            except Exception as error:
                raise TemplateError(f"the chat template failed: {_one_line(error)}") from error
        return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a budget of CPU time and characters per rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationTag])
        self.filters["tojson"] = _to_json
        self.filters["format"] = lambda text, *values: self.join("%", str(text), values)
        self.filters["indent"] = _checked_indent(self.filters["indent"])
        self.filters["join"] = _checked_join(self.filters["join"])
        self.filters["replace"] = _checked_replace(self.filters["replace"])
        for name in _GROWING_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.start()

    def start(self) -> None:
        """Fill the budget."""
        self._deadline_s = time.thread_time() + MAX_CPU_S
        self._characters_left = MAX_CHARACTERS

    def tick(self) -> None:
        """Stop a template that runs too long; called from every loop and macro body."""
        if time.thread_time() > self._deadline_s:
            raise OverflowError(f"it ran for more than {MAX_CPU_S:g} s")

    def spend(self, characters: int) -> None:
        """Account for output."""
        self._characters_left -= characters
        if self._characters_left < 0:
            raise OverflowError(f"it wrote more than {MAX_CHARACTERS} characters")

    def bounded(self, tree: nodes.Template) -> nodes.Template:
        """Return the template with a tick in every body that can repeat, and checked ``~``."""
        for repeated in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            body: list[nodes.Node] = repeated.body  # type: ignore[attr-defined]
            body.insert(0, nodes.ExprStmt(tick).set_lineno(repeated.lineno))
        for concat in list(tree.find_all(nodes.Concat)):
            # Left in place with the checked call as its one operand: a node does not know its parent.
            parts = nodes.List(concat.nodes)
            call = nodes.Call(nodes.EnvironmentAttribute("concatenate"), [parts], [], None, None)
            concat.nodes = [call]
        tree.set_environment(self)
        return tree

    def concatenate(self, values: list[object]) -> str:
        """Jinja's ``~``: join values as text."""
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse an operation whose result would be huge, before it is made."""
        return self.join(operator, left, right)

    def join(self, operator: str, left: Any, right: Any) -> Any:
        """Evaluate one of the intercepted operators."""
        if operator == "%" and isinstance(left, str):
            if _WIDE_FORMAT.search(left):
                raise OverflowError(f"the format {left[:40]!r} pads too far")
            _check_size(len(left) + left.count("%") * _length(right))
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size(len(left) + len(right))
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    _check_size(len(text) * times if hasattr(text, "__len__") else times.bit_length())
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * right)
        return self.binop_table[operator](left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse, beside what the sandbox does, the methods that pad to any width, and bytes, which nobody needs."""
        if isinstance(obj, bytes) or (isinstance(obj, str | int) and attr in _GROWING_METHODS):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, /, *arguments: Any, **named: Any) -> Any:
        """Call a function of the template's, unless it is a method of text whose result would be huge."""
        text = getattr(function, "__self__", None)
        if isinstance(text, str):
            if function.__name__ == "join" and arguments:
                arguments = (list(arguments[0]),)  # an iterator would be used up by looking at it
                _check_size(len(text) * len(arguments[0]) + _length(arguments[0]))
            elif function.__name__ == "replace" and len(arguments) > 1:
                _check_replacement(text, *arguments[:2])
        return super().call(context, function, *arguments, **named)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Refuse ``str.format`` with widths, for the same reason."""
        text = getattr(value, "__self__", None)
        formatted = super().wrap_str_format(value)
        if formatted is None or not isinstance(text, str):
            return formatted
        if ":" in text:
            raise SecurityError(f"the format {text[:40]!r} may pad to any width")

        def checked(*arguments: Any, **named: Any) -> str:
            _check_size(len(text) + text.count("{") * _length((*arguments, *named.values())))
            return formatted(*arguments, **named)

        return checked


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks text for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and indent > 16:
        raise OverflowError(f"tojson with an indent of {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _checked_join(original: Callable[..., str]) -> Callable[..., str]:
    @jinja2.pass_eval_context
    def join(context: nodes.EvalContext, values: Any, d: str = "", attribute: str | int | None = None) -> str:
        values = list(values)
        _check_size(len(d) * len(values) + _length(values))
        return original(context, values, d, attribute)

    return join


def _checked_indent(original: Callable[..., str]) -> Callable[..., str]:
    def indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        _check_size(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))
        return original(text, width, first, blank)

    return indent


def _checked_replace(original: Callable[..., str]) -> Callable[..., str]:
    @jinja2.pass_eval_context
    def replace(context: nodes.EvalContext, s: Any, old: str, new: str, count: int | None = None) -> str:
        _check_replacement(str(s), old, new)
        return original(context, s, old, new, count)

    return replace


def _check_replacement(text: str, old: Any, new: Any) -> None:
    _check_size(len(text) + text.count(str(old)) * len(str(new)))


def _length(values: Any) -> int:
    """Return how many characters a value has as text, or the values of a list together."""
    if isinstance(values, list | tuple):
        return sum(len(v if isinstance(v, str) else str(v)) for v in values)
    return len(values if isinstance(values, str) else str(values))


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise OverflowError(f"it builds a value of more than {MAX_CHARACTERS} characters")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return (text if len(text) <= 200 else text[:199] + "…") + line
