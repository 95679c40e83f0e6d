"""``localspec models``: list, fetch, inspect, trim and remove models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.errors import ModelNotFoundError

if TYPE_CHECKING:
    from localspec.registry import ModelEntry, PairEntry, Registry, Store

__all__ = ["models"]


@click.group()
def models() -> None:
    """List, fetch, inspect, trim and remove models.

    A NAME is that of a model or of a pair, a target with its draft; `localspec models list` shows both.
    """


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_models(as_json: bool) -> None:
    """List the pairs and models that have names."""
    registry, store = _open_store()
    if as_json:
        _print_json(
            {
                "default_pair": registry.default_pair,
                "store": str(store.root),
                "pairs": [_pair_as_json(pair, store) for pair in registry.pairs.values()],
                "models": [_model_as_json(model, registry, store) for model in registry.models.values()],
            }
        )
        return
    click.echo("Pairs (target + draft)")
    _print_table([_pair_row(pair, registry, store) for pair in registry.pairs.values()])
    click.echo("\nModels")
    _print_table([_model_row(model, registry, store) for model in registry.models.values()])
    click.echo("\n* not verified here: the hash is pinned when the file is first fetched")


@models.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--verify", is_flag=True, help="Hash the files again that are here already.")
def pull(names: tuple[str, ...], verify: bool) -> None:
    """Fetch models, by default those of the default pair."""
    registry, store = _open_store()
    wanted: dict[str, ModelEntry] = {}
    for name in names or (registry.default_pair,):
        wanted |= {entry.name: entry for entry in _members(registry, name, pair_first=True)}
    for entry in wanted.values():
        try:
            was_here = store.is_ready(entry)
            path = store.path(entry, progress=True)
            if verify and was_here:
                store.verify(entry, progress=True)
        except KeyboardInterrupt:
            click.echo(f"{entry.name}: interrupted; the same command goes on where it stopped", err=True)
            raise
        how = "verified again" if verify and was_here else "already here" if was_here else "ready"
        click.echo(f"{entry.name}: {how}, {path}", err=True)


@models.command()
@click.argument("name", metavar="NAME")
def path(name: str) -> None:
    """Print the path of a model, fetching it first if need be.

    For a pair that is two lines, the target first.
    """
    registry, store = _open_store()
    for entry in _members(registry, name, pair_first=False):
        click.echo(store.path(entry, progress=True))


@models.command()
@click.argument("name", metavar="NAME|FILE")
@click.argument("draft", metavar="[DRAFT]", required=False)
@click.option("--ctx", type=click.IntRange(min=1), default=4096, show_default=True, help="Context, in tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(name: str, draft: str | None, ctx: int, as_json: bool) -> None:
    """Show what a model file says of itself, without loading it.

    With DRAFT, or for a pair, also whether the two go together. Ends with 1 where they do not.
    """
    from localspec.cli.inspection import Inspection

    registry, store = _open_store()
    if draft is None and name in registry.pairs:
        entries: list[ModelEntry | Path] = list(_members(registry, name, pair_first=True))
    else:
        entries = [registry.resolve(each) for each in (name, draft) if each is not None]
    inspection = Inspection.of([_present(entry, store) for entry in entries], context=ctx)
    if as_json:
        _print_json(inspection.as_json())
    else:
        click.echo("\n".join(inspection.lines()))
    if inspection.problem is not None:
        raise inspection.problem


@models.command()
@click.argument("draft", metavar="DRAFT")
@click.option("--keep", type=int, default=32768, show_default=True, help="How many token ids to keep.")
@click.option(
    "--from",
    "sources",
    metavar="FILE|calibration",
    multiple=True,
    help="Keep what this text uses: a file of your own, or the built-in prompts; repeatable.  [default: calibration]",
)
@click.option("--target", metavar="NAME|FILE", help="Keep what this model answers to the built-in prompts, too.")
@click.option("--name", metavar="NAME", help="Add the draft to your models.toml under this name.")
def trim(draft: str, keep: int, sources: tuple[str, ...], target: str | None, name: str | None) -> None:
    """Make a quicker draft: one that proposes only the token ids your kind of text needs.

    It reads every token, and the target still says whatever it wants: only what is drafted for it is limited. Prints
    the path, for --draft.
    """
    from localspec.calibration.trimming import check_trim, prompt_texts, read_text
    from localspec.calibration.trimming import trim as make
    from localspec.cli.deriving import BUILT_IN_TEXT, describe, register, transcripts

    registry, store = _open_store()
    if name is not None:
        registry.check_new(name)
    source = store.path(registry.resolve(draft), progress=True)
    check_trim(source, keep)  # before a target answers for minutes
    texts: list[str] = []
    for each in dict.fromkeys(sources or (BUILT_IN_TEXT,)):
        texts += prompt_texts() if each == BUILT_IN_TEXT else [read_text(Path(each))]
    if target is not None:
        texts += transcripts(target)
    described = ", ".join([*(sources or (BUILT_IN_TEXT,)), *([f"answers of {target}"] if target else [])])
    trimmed = make(source, keep=keep, texts=texts, described=described)
    click.echo(f"{source.name}: {describe(trimmed)}", err=True)
    if name is not None:
        click.echo(f"{name}: added to {register(name, trimmed.path)}", err=True)
    click.echo(trimmed.path)


@models.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove(names: tuple[str, ...], yes: bool) -> None:
    """Delete models from the store, partial files included."""
    from localspec.registry import human_bytes

    registry, store = _open_store()
    entries = {entry.name: entry for name in names for entry in _members(registry, name, pair_first=False)}
    there = [entry for entry in entries.values() if store.bytes_on_disk(entry)]
    for entry in entries.values():
        if entry not in there:
            click.echo(f"{entry.name}: not in the store", err=True)
    for entry in there:
        size = human_bytes(store.bytes_on_disk(entry))
        made = [other.name for other in store.made_from(entry) if other not in there]
        if made:
            click.echo(
                f"{entry.name}: {', '.join(made)} was made from it and stays usable, "
                "but to make it again this model has to be fetched again",
                err=True,
            )
        if yes or click.confirm(f"Delete {entry.name} ({size})?", err=True):
            store.remove(entry, progress=True)
            click.echo(f"{entry.name}: deleted, {size} freed", err=True)


def _open_store() -> tuple[Registry, Store]:
    from localspec.backend.quantize import quantize
    from localspec.registry import Store, load

    registry = load()
    return registry, Store(registry, quantize=quantize)


def _members(registry: Registry, name: str, *, pair_first: bool) -> list[ModelEntry]:
    """The models a name stands for. Where a model and a pair share it, ``pair_first`` says which is meant."""
    if name in registry.pairs and (pair_first or name not in registry.models):
        pair = registry.pairs[name]
        return [pair.target, pair.draft]
    return [registry.model(name)]


def _present(entry: ModelEntry | Path, store: Store) -> tuple[str, Path]:
    """The name and file of what is to be inspected; nothing is fetched for a look."""
    if isinstance(entry, Path):
        return str(entry), entry
    if not store.is_ready(entry):
        raise ModelNotFoundError(f"{entry.name} is not in the store; `localspec models pull {entry.name}` fetches it")
    return entry.name, store.path(entry)


def _pair_row(pair: PairEntry, registry: Registry, store: Store) -> list[str]:
    members = {entry.name: entry for entry in (pair.target, pair.draft)}.values()
    sizes = [entry.bytes for entry in members]
    here = sum(store.is_ready(entry) for entry in members)
    state = "ready" if here == len(members) else "partly here" if here else "to fetch"
    mark = " (default)" if pair.name == registry.default_pair else "" if pair.verified else " *"
    return [pair.name + mark, state, _total(sizes), pair.good_for]


def _model_row(model: ModelEntry, registry: Registry, store: Store) -> list[str]:
    state = store.status(model).value
    size = store.location(model).stat().st_size if state == "ready" else model.bytes
    how = f"made from {model.derivation.base}" if model.derivation else model.licence
    return [model.name + ("" if registry.is_verified(model) else " *"), state, _total([size]), how]


def _total(sizes: list[int | None]) -> str:
    from localspec.registry import human_bytes

    known = [size for size in sizes if size is not None]
    return human_bytes(sum(known)) if len(known) == len(sizes) else "size unknown"


def _print_table(rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo(("  " + "  ".join(cells)).rstrip())


def _pair_as_json(pair: PairEntry, store: Store) -> dict[str, Any]:
    return {
        "name": pair.name,
        "target": pair.target.name,
        "draft": pair.draft.name,
        "good_for": pair.good_for,
        "verified": pair.verified,
        "ready": store.is_ready(pair.target) and store.is_ready(pair.draft),
    }


def _model_as_json(model: ModelEntry, registry: Registry, store: Store) -> dict[str, Any]:
    return {
        "name": model.name,
        "status": store.status(model).value,
        "path": str(store.location(model)),
        "bytes": model.bytes,
        "sha256": model.sha256,
        "licence": model.licence,
        "sources": [str(source) for source in model.sources],
        "made_from": model.derivation.base if model.derivation else None,
        "type": model.derivation.type_name if model.derivation else None,
        "verified": registry.is_verified(model),
    }


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
