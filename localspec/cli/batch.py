"""``localspec batch``: a file of prompts, a file of answers."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from localspec.cli.options import AutoOrNumber, generation_options, model_options, sampling_options, sampling_params
from localspec.cli.running import MODEL_OPTIONS, open_session, say
from localspec.errors import InvalidOptionError, StoreError
from localspec.reading import read_whole
from localspec.wording import counted

if TYPE_CHECKING:
    from localspec.batch import BatchSettings, Output, Pool, PromptFile, Summary, Tally
    from localspec.batching import BatchProgress

__all__ = ["batch"]

Drafting = tuple[tuple[str, str | int | None], ...]

_ERROR_RECORDS = 3


def _check_parallel(number: int) -> int:
    from localspec.loading import check_parallel

    return check_parallel(number)


@click.command()
@click.argument("prompts", metavar="INPUT")
@click.option(
    "--output", "-o", metavar="FILE", default="-", help="Where answers go; - is standard output.  [default: -]"
)
@model_options
@click.option(
    "--parallel",
    type=AutoOrNumber(_check_parallel),
    metavar="auto|B",
    help="Sequences in a pass; auto takes as many as pay.  [default: auto]",
)
@sampling_options
@generation_options
@click.option("--system", metavar="TEXT", help="System text in front of rows that bring none.")
@click.option("--raw", is_flag=True, help="Continue prompts as they stand, without the chat template.")
@click.option("--special", is_flag=True, help="With --raw: let control markers in prompts be control tokens.")
@click.option("--unordered", is_flag=True, help="Leave answers in the order in which they finished.")
@click.option("--restart", is_flag=True, help="Begin again: forget what the output file holds.")
@click.option("--retry-errors", is_flag=True, help="Do rows again that ended in an error.")
@click.option("--fail-fast", is_flag=True, help="Stop at the first error; the same as --max-errors 1.")
@click.option("--max-errors", type=click.IntRange(min=1), metavar="N", help="Stop at N errors in this run.")
@click.option("--summary", metavar="FILE", help="Write what the run did as JSON.")
@click.option(
    "--format",
    type=click.Choice(["localspec", "openai"]),
    default="localspec",
    show_default=True,
    metavar="localspec|openai",
    help="Shape of the output.",
)
@click.option("--ray", metavar="auto|ADDRESS", help="Spread the work over a Ray cluster; needs localspec[ray].")
@click.option("--cpus-per-worker", type=click.IntRange(min=1), metavar="N", help="With --ray: several on a machine.")
@click.pass_context
def batch(
    ctx: click.Context,
    /,
    prompts: str,
    output: str,
    unordered: bool,
    restart: bool,
    retry_errors: bool,
    fail_fast: bool,
    max_errors: int | None,
    summary: str | None,
    **values: Any,
) -> None:
    """Answer every row of INPUT, a JSONL file; - is standard input.

    A row is an object with "prompt" or "messages", an "id" (else its line number) and any sampling option, or a
    request of OpenAI's batch format. Each becomes one line of output, an answer or an error. Run again after whatever
    ended it, the same command goes on where it stopped.
    """
    from localspec.batch import PromptFile, run_batch
    from localspec.sampling import draft_params
    from localspec.text import Message

    params = sampling_params(dict(values))  # what is out of range is said before anything is loaded
    if values["draft_temperature"] is not None:
        draft_params(params, values["draft_temperature"])
    if values["raw"] and values["system"] is not None:
        raise InvalidOptionError(
            "--system needs the chat template; leave out --raw, or put the text into the prompts"
        )
    if values["system"] is not None:
        Message("system", values["system"])
    if values["ray"] is None and values["cpus_per_worker"] is not None:
        raise InvalidOptionError("--cpus-per-worker is about Ray workers; add --ray auto, or leave it out")
    bar = _Bar()
    with ExitStack() as stack:
        opened = stack.enter_context(PromptFile.opened(prompts))
        _check_output(output, opened)
        if summary is not None:
            _check_summary(Path(summary), opened, output)
        target = stack.enter_context(_output(output, not unordered, restart=restart, retry_errors=retry_errors))
        chosen = _drafting(values)
        pool = stack.enter_context(_pool(values, bar))
        settings = _settings(values, pool, chosen)
        resumable = _is_file(output) and opened.sha256 is not None
        stack.enter_context(bar.shown(opened.num_lines))
        try:
            done = run_batch(
                opened, target, pool, settings, max_errors=1 if fail_fast else max_errors, watch=bar.watch
            )
        except KeyboardInterrupt:
            bar.hide()
            _say_kept(bar.tally, output if resumable else None)
            raise
    if summary is not None:
        _write_summary(Path(summary), done)
    for line in _summary_lines(done, resumable=resumable):
        say(line)
    if done.all_errors:
        ctx.exit(_ERROR_RECORDS)


# From options to what a batch consists of


def _is_file(output: str) -> bool:
    """Whether ``output`` names a file or one to be, and not a pipe or a device."""
    path = Path(output)
    return output != "-" and (path.is_file() or not path.exists())


@contextmanager
def _output(name: str, ordered: bool, *, restart: bool, retry_errors: bool) -> Iterator[Output]:
    from localspec.batch import FileOutput, StreamOutput

    if _is_file(name) or Path(name).is_dir():
        with FileOutput.opened(Path(name), ordered=ordered, restart=restart, retry_errors=retry_errors) as output:
            yield output
        return
    if restart or retry_errors:
        raise InvalidOptionError(
            f"{'--restart' if restart else '--retry-errors'} needs an output file to go on with; name one with -o"
        )
    with (
        nullcontext(sys.stdout.buffer) if name == "-" else open(name, "wb") as stream,
        StreamOutput(stream, ordered=ordered) as output,
    ):
        yield output


@contextmanager
def _pool(values: dict[str, Any], bar: _Bar) -> Iterator[Pool]:
    from localspec.batch import LocalPool

    address, cpus = values.pop("ray"), values.pop("cpus_per_worker")
    draft = {name: values.pop(name) for name in ("parallel", "num_draft_tokens", "policy")}
    if address is None:
        # A profile's absence is said by the batch as well: it decides how many sequences run together.
        values["num_draft_tokens"] = draft["num_draft_tokens"]
        with open_session(values) as session:
            yield LocalPool(session, **draft, progress=bar.step)
        return
    from localspec.batch.pool import load_pool
    from localspec.batch.remote import RayPool, load_ray

    ray = load_ray()
    names = {name: values.pop(name) for name in (*MODEL_OPTIONS, "drafter")}
    for name in ("target", "draft", "template"):
        if names[name] is not None and Path(names[name]).exists():  # workers stand in another directory
            names[name] = str(Path(names[name]).resolve())
    make = partial(load_pool, **draft, **names, use_draft=not values.pop("no_draft"))
    with RayPool.opened(
        ray, make, address=address, cpus_per_worker=cpus, parallel=draft["parallel"], notice=say
    ) as pool:
        yield pool


def _drafting(values: dict[str, Any]) -> Drafting:
    """Return the options that decide texts and are not a row's to choose."""
    template = values["template"]
    if template is not None and Path(template).is_file():
        template = f"{template} {hashlib.sha256(read_whole(Path(template))).hexdigest()}"
    names = ("context", "num_draft_tokens", "policy")
    drafter = "none" if values["no_draft"] and values["drafter"] == "auto" else values["drafter"]
    return (*((name, values[name]) for name in names), ("drafter", drafter), ("template", template))


def _settings(values: dict[str, Any], pool: Pool, drafting: Drafting) -> BatchSettings:
    from localspec.batch import BatchSettings, RowDefaults

    params = sampling_params(values, pool.default_params)
    names = ("max_tokens", "stop", "rule", "draft_temperature", "system", "raw", "special")
    rows = RowDefaults(params=params, **{name: values[name] for name in names})
    return BatchSettings(rows=rows, seed=values["seed"], format=values["format"], drafting=drafting)


# What is said


class _Bar:
    """How far the batch is, on a terminal's stderr; elsewhere it says nothing.

    Attributes:
        tally: what is on disk.
    """

    def __init__(self) -> None:
        self.tally: Tally | None = None
        self._bar: Any = None
        self._started: float | None = None

    @contextmanager
    def shown(self, total: int | None) -> Iterator[None]:
        """Show it while the block runs."""
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="row", leave=False, dynamic_ncols=True, disable=not sys.stderr.isatty())
        try:
            yield
        finally:
            self.hide()

    def hide(self) -> None:
        """Take it away."""
        if self._bar is not None:
            self._bar.close()

    def watch(self, tally: Tally) -> None:
        """Take note of a line that is on disk."""
        if self.tally is None:
            # Only the rate of this run tells the time left, so what earlier ones did counts as a start.
            self._bar.initial = self._bar.n = self._bar.last_print_n = tally.resumed
        self.tally = tally
        self._bar.set_postfix_str(_speed(tally.tokens_per_s, tally.accepted_per_step), refresh=False)
        self._bar.update(tally.done - self._bar.n)

    def step(self, progress: BatchProgress) -> None:
        """Show the speed between two lines."""
        self._started = self._started or perf_counter()
        elapsed_s = perf_counter() - self._started
        if self._bar is not None and elapsed_s > 0 and progress.steps:
            per_step = progress.accepted / progress.steps
            self._bar.set_postfix_str(_speed(progress.tokens / elapsed_s, per_step), refresh=False)
            self._bar.update(0)  # which draws it if it is time to


def _speed(tokens_per_s: float, accepted_per_step: float) -> str:
    return f"{tokens_per_s:.1f} tokens/s, {accepted_per_step:.2f} accepted per step"


def _say_kept(tally: Tally | None, output: str | None) -> None:
    if tally is None or output is None:
        return
    rows = counted(tally.done, "row") if tally.total is None else f"{tally.done} of {counted(tally.total, 'row')}"
    are = "is" if tally.done == 1 else "are"
    say(f"localspec: {rows} {are} done and kept in {output}; the same command goes on with the rest")


def _summary_lines(done: Summary, *, resumable: bool) -> list[str]:
    """Return what to say at the end."""
    counts = [counted(done.answers, "answer"), counted(done.errors, "error") if done.errors else "no errors"]
    if done.resumed:
        counts.append(f"{counted(done.resumed, 'row')} done before")
    lines = [", ".join(counts)]
    if done.answers:
        lines[0] += f"; {counted(done.tokens, 'token')} in {done.elapsed_s:.1f} s, {done.tokens_per_s:.1f} tokens/s"
        parts = [f"γ {done.num_draft_tokens:.1f} on average"]
        if done.parallel is not None:
            parts.insert(0, f"B {done.parallel}")
        if done.acceptance_rate is not None:
            parts += [f"{done.accepted_per_step:.2f} accepted per step", f"α {done.acceptance_rate:.2f}"]
        lines.append("; ".join(parts))
    if done.speedup_over_plain is not None:
        lines.append(
            f"{done.speedup_over_plain:.2f}× plain decoding of one row at a time,"
            f" {done.plain_tokens_per_s:.1f} tokens/s by {counted(done.sample_tokens, 'token')} of"
            f" {counted(done.sample_rows, 'row')}"
        )
    if not done.complete:
        left = ""
        if done.rows is not None:
            left = f" with {counted(done.rows - done.resumed - done.answers - done.errors, 'row')} left"
        lines.append(f"stopped by errors{left}" + ("; the same command goes on" if resumable else ""))
    elif done.all_errors and resumable:
        them = "it" if done.all_errors == 1 else "them"
        lines.append(f"{counted(done.all_errors, 'row')} ended in an error; --retry-errors does {them} again")
    return lines


def _check_output(output: str, prompts: PromptFile) -> None:
    from localspec.batch import files_beside

    if output == "-":
        return
    if prompts.is_same_file(Path(output)):
        raise InvalidOptionError(f"{output} is both input and output; give the answers another file")
    for path in files_beside(Path(output).resolve()):
        if prompts.is_same_file(path):
            raise InvalidOptionError(
                f"the input is {path}, which a run that writes {output} has for itself; give the answers another file"
            )


def _check_summary(path: Path, prompts: PromptFile, output: str) -> None:
    """Refuse before a night of work what would spoil it, or fail after it."""
    from localspec.batch import files_beside

    if str(path) == "-":
        raise InvalidOptionError("the summary is a file, and - is none; on stderr there is one in any case")
    answers = Path(output).resolve()
    taken = [] if output == "-" else [answers, *files_beside(answers)]
    if prompts.is_same_file(path) or path.resolve() in taken:
        raise InvalidOptionError(
            f"{path} is also the input, the output or what stands beside it; give the summary another file"
        )
    if path.is_dir() or not path.parent.is_dir():
        raise StoreError(f"the summary {path} cannot be written: it must be a file in a directory that exists")


def _write_summary(path: Path, done: Summary) -> None:
    try:
        path.write_text(json.dumps(done.to_dict(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"the summary {path} cannot be written: {error.strerror or error}") from None
