"""``localspec calibrate --backends``: the same measurement with each backend, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from localspec.errors import BackendError, InvalidOptionError
from localspec.wording import counted

if TYPE_CHECKING:
    from localspec.backend.choice import BackendName

__all__ = ["compare_backends", "named_backends"]


def compare_backends(names: str, *, as_json: bool) -> None:
    """Calibrate with every backend of a comma-separated list, and say which is fastest.

    Each keeps its profile, by which ``--backend auto`` chooses from then on.

    Raises:
        InvalidOptionError: the list is not one.
        BackendError: a library is missing, or a measurement failed.
    """
    chosen = named_backends(names)
    arguments = _repeated(click.get_current_context())
    results = {name: _measure(name, arguments) for name in chosen}
    fastest = max(results, key=lambda name: _speed(results[name]))
    if as_json:
        summary = {name: _summary(result) for name, result in results.items()}
        click.echo(json.dumps(results[fastest] | {"backend": fastest, "backends": summary}))
        return
    for name, result in results.items():
        click.echo(f"{name:<10} {_line(_summary(result))}")
    click.echo(f"\n{fastest} is the fastest; without --backend, generate and chat use it for this pair from now on.")
    click.echo(f"The rest of its profile: localspec calibrate --show --backend {fastest}")


def named_backends(names: str) -> list[BackendName]:
    """Return the backends of a comma-separated list; raises as ``compare_backends``."""
    from localspec.backend.choice import BACKENDS
    from localspec.backend.ik_library import find_library

    wanted = [name.strip() for name in names.split(",") if name.strip()]
    chosen = [name for one in dict.fromkeys(wanted) for name in BACKENDS if name == one]
    if not chosen or not set(wanted) <= set(BACKENDS):
        raise InvalidOptionError(f"--backends is {names!r}; list some of {', '.join(BACKENDS)}")
    if "ik" in chosen:
        find_library()  # before minutes are spent on the others
    return chosen


def _repeated(context: click.Context) -> list[str]:
    """Return the options of this command as they were given, but for those that are decided here."""
    given = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in ("backends", "backend", "as_json") or name not in context.params:
            continue
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        option = max(parameter.opts, key=len)
        if isinstance(parameter, click.Option) and parameter.is_flag:
            given += [option] if value else []
        else:
            for one in value if parameter.multiple else [value]:
                given.append(f"{option}={one}")
    return given


def _measure(name: str, arguments: list[str]) -> dict[str, Any]:
    """Run ``localspec calibrate`` with one backend; returns what it printed. An interrupt ends it early."""
    from localspec.backend.interrupts import deferred_interrupts

    click.echo(f"measuring with {name}", err=True)
    command = [sys.executable, "-m", "localspec", "calibrate", *arguments, "--backend", name, "--json"]
    with deferred_interrupts():  # it gets the same one, and says what it has
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode < 0:
        raise BackendError(f"measuring with {name} ended with signal {-done.returncode}; leave it out of --backends")
    if done.returncode:
        raise BackendError(f"measuring with {name} failed, as said above; leave it out of --backends, or mend that")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _summary(result: dict[str, Any]) -> dict[str, Any]:
    best = result["best_num_draft_tokens"]
    return {
        "tokens_per_s": _speed(result),
        "plain_tokens_per_s": result["profile"]["plain_tokens_per_s"],
        "best_num_draft_tokens": best,
        "predicted_speedup": result["predicted_speedup"][best],
        "verify_cost": result["verify_cost"],
    }


def _speed(result: dict[str, Any]) -> float:
    """Return the number by which ``--backend auto`` will choose."""
    from localspec.profile import Profile

    return Profile.from_json(json.dumps(result["profile"])).best_tokens_per_s


def _line(summary: dict[str, Any]) -> str:
    best = summary["best_num_draft_tokens"]
    how = f"with {counted(best, 'drafted token')}, {summary['predicted_speedup']:.2f}×" if best else "without drafts"
    return f"{summary['tokens_per_s']:6.1f} tokens/s {how}; plain {summary['plain_tokens_per_s']:.1f}"
