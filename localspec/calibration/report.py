"""From what was measured to what it means: a verdict, tables for the terminal, a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from localspec.acceptance import Interval, Rule
from localspec.calibration.agreement import KindAgreement
from localspec.calibration.prompts import POOLED
from localspec.errors import InvalidOptionError
from localspec.plots import Curve, Panel, save_panels
from localspec.profile import best
from localspec.theory import speedup_from_tokens
from localspec.wording import counted

__all__ = ["Choice", "Findings", "MeasuredSpeed", "choose", "render", "save_picture", "verdict", "wrapped"]

_BAR_WIDTH = 36
_WIDTH = 80
_COLUMNS = 8  # draft lengths beside the kind, the best one and its interval


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """What a run of speculative generation really gained over plain decoding."""

    kind: str
    temperature: float
    num_draft_tokens: int
    speedup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything a report is made from.

    Attributes:
        target: its name.
        draft: its name.
        target_pass_s: seconds of one target pass over n = 1, 2, … tokens, at least up to the longest draft + 1.
        draft_pass_s: the same of the draft.
        agreements: per kind and temperature, ``POOLED`` included, with at least one entry at ``temperature``.
        temperature: the user's.
        rule: under which drafts are verified.
        sampler_cost: extra sampling time of a speculative step, in target passes over one token.
        measured: speeds that predictions are compared with.
        predict: makes speedups of tokens per step, knowing more than the costs above: plans and catching up.
    """

    target: str
    draft: str
    target_pass_s: tuple[float, ...]
    draft_pass_s: tuple[float, ...]
    agreements: tuple[KindAgreement, ...]
    temperature: float
    rule: Rule = "block"
    sampler_cost: float = 0.0
    measured: tuple[MeasuredSpeed, ...] = ()
    predict: Callable[[Sequence[float]], tuple[float, ...]] | None = None

    def __post_init__(self) -> None:
        if not any(a.temperature == self.temperature for a in self.agreements):
            raise InvalidOptionError(f"no agreement was measured at temperature {self.temperature:g}")

    @property
    def cost_ratio(self) -> float:
        """One draft pass / one target pass, over one token each."""
        return self.draft_pass_s[0] / self.target_pass_s[0]

    @property
    def verify_cost(self) -> tuple[float, ...]:
        """Cost of a target pass over n = 1, 2, … tokens, in passes over one."""
        return tuple(seconds / self.target_pass_s[0] for seconds in self.target_pass_s)

    def at_temperature(self) -> list[KindAgreement]:
        """Return the agreements at the user's temperature, the pooled one last."""
        chosen = [a for a in self.agreements if a.temperature == self.temperature]
        return sorted(chosen, key=lambda a: a.kind == POOLED)

    def speedups(self, tokens_per_step: Sequence[float]) -> tuple[float, ...]:
        """Return the speedup of every draft length whose tokens per step and costs are known."""
        if self.predict is not None:
            return self.predict(tokens_per_step)
        length = min(len(tokens_per_step), len(self.target_pass_s))
        return speedup_from_tokens(
            tokens_per_step[:length], min(self.cost_ratio, 1.0), self.verify_cost, self.sampler_cost
        )

    def intervals(self, agreement: KindAgreement) -> list[Interval] | None:
        """Return the interval of each speedup, as far as it comes from the agreement; None with a single prompt."""
        bounds = agreement.under(self.rule).intervals
        if bounds is None:
            return None
        low, high = (self.speedups(values) for values in ([b.low for b in bounds], [b.high for b in bounds]))
        return [Interval(a, b) for a, b in zip(low, high, strict=True)]


@dataclass(frozen=True, slots=True)
class Choice:
    """The best draft length for one kind of text.

    Attributes:
        kind: of text.
        num_draft_tokens: 0 is plain decoding, the choice wherever no gain is worth having.
        speedup: predicted; 1 without a draft.
        interval: of it; None with a single prompt.
        best_draft: the fastest among the lengths above 0, and its speedup; None where no other was considered.
    """

    kind: str
    num_draft_tokens: int
    speedup: float
    interval: Interval | None
    best_draft: tuple[int, float] | None

    @property
    def is_clear(self) -> bool:
        """Whether drafting gains by more than chance."""
        return self.num_draft_tokens > 0 and (self.interval is None or self.interval.low > 1)


def choose(findings: Findings) -> list[Choice]:
    """Return the best draft length for every kind at the user's temperature, for all kinds together last."""
    return [_choice(findings, agreement) for agreement in findings.at_temperature()]


def _choice(findings: Findings, agreement: KindAgreement) -> Choice:
    speedups = findings.speedups(agreement.under(findings.rule).tokens_per_step)
    chosen = best(speedups)
    drafting = max(range(1, len(speedups)), key=lambda gamma: (speedups[gamma], -gamma), default=None)
    intervals = findings.intervals(agreement)
    return Choice(
        kind=agreement.kind,
        num_draft_tokens=chosen,
        speedup=speedups[chosen],
        interval=intervals[chosen] if intervals else None,
        best_draft=None if drafting is None else (drafting, speedups[drafting]),
    )


def verdict(findings: Findings) -> str:
    """Say in one or two sentences whether to speculate, and how far.

    A kind whose gain may be chance is named as such.
    """
    choices = choose(findings)
    kinds = [choice for choice in choices if choice.kind != POOLED] or choices
    drafted = [choice for choice in kinds if choice.num_draft_tokens]
    if not drafted:
        return f"On this machine: do not speculate with this pair: {_why_not(findings, choices[-1])}."
    lengths: dict[int, list[str]] = {}
    for choice in sorted(drafted, key=lambda choice: -choice.speedup):
        doubt = "" if choice.is_clear else ", perhaps by chance"
        lengths.setdefault(choice.num_draft_tokens, []).append(f"{choice.kind} ({choice.speedup:.2f}x{doubt})")
    parts = [f"{counted(length, 'token')} for {_listed(names)}" for length, names in lengths.items()]
    plain = [choice.kind for choice in kinds if not choice.num_draft_tokens]
    if plain:
        parts.append(f"none for {_listed(plain)}")
    return f"On this machine: draft {'; '.join(parts)}."


def _why_not(findings: Findings, pooled: Choice) -> str:
    if pooled.best_draft is None:
        return "no draft length was measured"
    length, speed = pooled.best_draft
    # Four tokens is what people try first; a shorter curve speaks of its longest pass.
    checked = min(4, len(findings.verify_cost))
    return (
        f"a pass over {counted(checked, 'token')} costs {findings.verify_cost[checked - 1]:.1f} passes over one, a"
        f" draft pass {findings.cost_ratio:.2f}; the best draft ({counted(length, 'token')}) would run at"
        f" {speed:.2f} times plain speed" + (", no gain worth having" if speed > 1 else "")
    )


def render(findings: Findings, *, bar: str = "█") -> str:
    """Return the report for a terminal, at most 80 columns wide; ``bar`` is one character to draw bars with."""
    plain = 1 / findings.target_pass_s[0]
    head = [
        f"target  {findings.target}: {findings.target_pass_s[0] * 1000:.1f} ms a token,"
        f" {plain:.1f} tokens/s without a draft",
        f"draft   {findings.draft}: {findings.draft_pass_s[0] * 1000:.1f} ms a token,"
        f" {findings.cost_ratio:.2f} of the target's",
    ]
    head = [wrapped(line, indent=8) for line in head]
    sections = [head, _costs(findings, bar), _acceptance(findings), _prefixes(findings)]
    sections += [_speeds(findings), _measured(findings), [wrapped(verdict(findings))]]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def wrapped(text: str, *, indent: int = 0) -> str:
    """Break a text at the width of a report; lines after the first are indented."""
    return textwrap.fill(text, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def _costs(findings: Findings, bar: str) -> list[str]:
    costs = findings.verify_cost
    unit = _BAR_WIDTH / max(costs)
    lines = ["cost of a target pass over n tokens, in passes over one"]
    return lines + [f"{n:3}  {cost:5.2f}  {bar * round(cost * unit)}" for n, cost in enumerate(costs, 1)]


def _acceptance(findings: Findings) -> list[str]:
    kinds = dict.fromkeys(a.kind for a in findings.agreements)
    temperatures = sorted({a.temperature for a in findings.agreements})
    found = {(a.kind, a.temperature): a for a in findings.agreements}
    lines = ["chance that a drafted token is accepted, by temperature (95 % interval)"]
    lines.append(f"{'':14}" + "".join(f"{temperature:<18g}" for temperature in temperatures).rstrip())
    for kind in kinds:
        cells = [_rate(found.get((kind, temperature))) for temperature in temperatures]
        lines.append(f"{kind:14.13}" + "".join(f"{cell:18}" for cell in cells).rstrip())
    return lines


def _rate(agreement: KindAgreement | None) -> str:
    if agreement is None:
        return "-"
    interval = agreement.acceptance_interval
    return f"{agreement.acceptance_rate:.2f}" + (f" ({interval.low:.2f}-{interval.high:.2f})" if interval else "")


def _prefixes(findings: Findings) -> list[str]:
    agreement = findings.at_temperature()[-1]
    prefixes = agreement.under(findings.rule).accepted_prefix[1:9]
    if not prefixes:
        return []
    textbook = [agreement.acceptance_rate**i for i in range(1, len(prefixes) + 1)]
    return [
        f"chance that the first i drafted tokens all are, at temperature {findings.temperature:g}",
        f"{'i':14}" + _row(range(1, len(prefixes) + 1), "6d"),
        f"{'measured':14}" + _row(prefixes, "6.2f"),
        f"{'textbook':14}" + _row(textbook, "6.2f"),
    ]


def _speeds(findings: Findings) -> list[str]:
    agreements, choices = findings.at_temperature(), choose(findings)
    tables = [findings.speedups(agreement.under(findings.rule).tokens_per_step) for agreement in agreements]
    columns = _columns(len(tables[0]) - 1, {choice.num_draft_tokens for choice in choices} - {0})
    lines = [f"predicted speed by tokens drafted, at temperature {findings.temperature:g}; plain decoding is 1"]
    lines.append(f"{'':14}" + _row(columns, "6d") + "  best")
    for agreement, speedups, choice in zip(agreements, tables, choices, strict=True):
        numbers = _row([speedups[g] for g in columns], "6.2f")
        interval = choice.interval
        bounds = f" ({interval.low:.2f}-{interval.high:.2f})" if interval and choice.num_draft_tokens else ""
        lines.append(f"{agreement.kind:14.13}{numbers}  {choice.num_draft_tokens}{bounds}")
    return lines


def _columns(longest: int, best: set[int]) -> list[int]:
    """Return the draft lengths that there is room to show: the best ones, the short ones, and every fourth beyond."""
    others = [g for g in range(1, longest + 1) if g not in best and (g <= 6 or g % 4 == 0)]
    return sorted([*best, *others][:_COLUMNS])


def _measured(findings: Findings) -> list[str]:
    lines = []
    for point in findings.measured:
        predicted = _predicted(findings, point)
        if predicted is not None:
            error = f"{100 * (predicted / point.speedup - 1):+.0f} %"
            lines.append(
                f"{point.kind:14.13}{point.temperature:11g}{point.num_draft_tokens:7}"
                f"{predicted:11.2f}{point.speedup:10.2f}{error:>8}"
            )
    return [f"{'':14}temperature  draft  predicted  measured   error", *lines] if lines else []


def _predicted(findings: Findings, point: MeasuredSpeed) -> float | None:
    for agreement in findings.agreements:
        if (agreement.kind, agreement.temperature) == (point.kind, point.temperature):
            speedups = findings.speedups(agreement.under(findings.rule).tokens_per_step)
            return speedups[point.num_draft_tokens] if point.num_draft_tokens < len(speedups) else None
    return None


def save_picture(path: Path, findings: Findings) -> None:
    """Draw costs, acceptance and speeds; raises InvalidOptionError as ``plots.save_panels``."""
    kinds = dict.fromkeys(a.kind for a in findings.agreements)
    colours = {kind: None if kind == POOLED else i for i, kind in enumerate(kinds)}
    panels = [
        _cost_panel(findings),
        _speed_panel(findings, colours),
        _position_panel(findings, colours),
        _temperature_panel(findings, colours),
    ]
    save_panels(path, panels, title=f"{findings.target}  with draft  {findings.draft}")


def _cost_panel(findings: Findings) -> Panel:
    curves = [
        Curve(label, range(1, len(seconds) + 1), [1000 * s for s in seconds], colour=colour)
        for label, seconds, colour in (("target", findings.target_pass_s, 8), ("draft", findings.draft_pass_s, 9))
    ]
    return Panel("Cost of a pass", "tokens in the pass", "milliseconds", curves, from_zero=True, own_legend=True)


def _speed_panel(findings: Findings, colours: Mapping[str, int | None]) -> Panel:
    curves = []
    for agreement in findings.at_temperature():
        speedups = findings.speedups(agreement.under(findings.rule).tokens_per_step)
        band = findings.intervals(agreement) if agreement.kind == POOLED else None
        curves.append(
            Curve(agreement.kind, range(len(speedups)), speedups, band=band, colour=colours[agreement.kind])
        )
    for kind in colours:
        points = [m for m in findings.measured if (m.kind, m.temperature) == (kind, findings.temperature)]
        if points:
            x, y = [m.num_draft_tokens for m in points], [m.speedup for m in points]
            curves.append(Curve("measured", x, y, style="points", colour=colours[kind]))
    title = f"Predicted speed at temperature {findings.temperature:g}"
    return Panel(title, "tokens drafted per step", "relative to plain decoding", curves, baseline=1.0)


def _position_panel(findings: Findings, colours: Mapping[str, int | None]) -> Panel:
    curves = []
    for agreement in findings.at_temperature():
        prefixes = agreement.under(findings.rule).accepted_prefix
        curves.append(Curve(agreement.kind, range(len(prefixes)), prefixes, colour=colours[agreement.kind]))
        if agreement.kind == POOLED:
            textbook = [agreement.acceptance_rate**i for i in range(len(prefixes))]
            label = "all, by the textbook"
            curves.append(Curve(label, range(len(prefixes)), textbook, style="dashed", colour=None))
    title = f"Accepted together at temperature {findings.temperature:g}"
    return Panel(title, "first drafted tokens", "chance that all are accepted", curves, from_zero=True)


def _temperature_panel(findings: Findings, colours: Mapping[str, int | None]) -> Panel:
    curves = []
    for kind, colour in colours.items():
        chosen = sorted((a for a in findings.agreements if a.kind == kind), key=lambda a: a.temperature)
        intervals = [a.acceptance_interval for a in chosen if a.acceptance_interval]
        curves.append(
            Curve(
                kind,
                [a.temperature for a in chosen],
                [a.acceptance_rate for a in chosen],
                band=intervals if kind == POOLED and len(intervals) == len(chosen) else None,
                colour=colour,
            )
        )
    ticks = sorted({a.temperature for a in findings.agreements})
    return Panel("Acceptance by temperature", "temperature", "chance of acceptance", curves, ticks=ticks)


def _row(values: Iterable[float], form: str) -> str:
    return "".join(format(value, form) for value in values)


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
