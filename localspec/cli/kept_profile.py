"""``localspec calibrate --show``: the profile there is, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from localspec.cli.running import profile_options
from localspec.errors import InvalidOptionError

if TYPE_CHECKING:
    from localspec.profile import Profile, Verdict

__all__ = ["show_profile"]


def show_profile(values: dict[str, Any], drafts: tuple[str, ...], *, as_json: bool) -> None:
    """Print the profile of the pair that ``values`` and ``drafts`` name.

    Raises:
        InvalidOptionError: they do not name one pair.
        ProfileError: there is none that holds here.
    """
    from localspec.errors import ProfileError
    from localspec.loading import choose_backend, find_files
    from localspec.tuning import look_up_profile

    if len(drafts) > 1:
        raise InvalidOptionError(f"--show is about one pair, and {len(drafts)} drafts are named; give one of them")
    values["draft"] = drafts[0] if drafts else None
    files = find_files(values["pair"], target=values["target"], draft=values["draft"], progress=True)
    if files.draft is None:
        raise InvalidOptionError("a profile belongs to a pair; name the draft with --draft, or use --pair")
    backend = choose_backend(values["backend"], files, threads=values["threads"])
    lookup = look_up_profile(files.target, files.draft, threads=values["threads"], backend=backend)
    if lookup.profile is None:
        raise ProfileError(f"{lookup.problem}{profile_options(values)}" if lookup.problem else "there is no profile")
    if as_json:
        click.echo(lookup.profile.to_json(), nl=False)
        return
    from localspec.calibration.report import wrapped

    measured = f"measured {lookup.profile.created} with {lookup.profile.key.backend}"
    click.echo(wrapped(f"{files.target.name} with {files.draft.name}, {measured}"))
    for line in _summary(lookup.profile):
        click.echo(line)


def _summary(profile: Profile) -> Iterator[str]:
    yield f"threads {profile.threads}, flash attention {profile.flash_attention}"
    yield f"plain decoding {profile.plain_tokens_per_s:.1f} tokens/s"
    for change in profile.draft_temperatures:
        yield f"at temperature {change.temperature:g} the draft runs at {change.draft_temperature:g}"
    if not any(verdict.best_num_draft_tokens for verdict in profile.verdicts):
        yield "do not speculate with this pair on this machine"
        return
    temperatures = sorted({verdict.temperature for verdict in profile.verdicts})
    found = {(verdict.kind, verdict.temperature): verdict for verdict in profile.verdicts}
    yield "tokens to draft, and the speed that predicts, plain decoding being 1"
    yield f"{'temperature':14}" + "".join(f"{temperature:<14g}" for temperature in temperatures).rstrip()
    for kind in dict.fromkeys(verdict.kind for verdict in profile.verdicts):
        cells = [_advice(found.get((kind, temperature))) for temperature in temperatures]
        yield f"{kind:14.13}" + "".join(f"{cell:14}" for cell in cells).rstrip()


def _advice(verdict: Verdict | None) -> str:
    if verdict is None:
        return "-"
    best = verdict.best_num_draft_tokens
    return f"{best} ({verdict.speedup:.2f})" if best else "none"
