"""From names or paths to two loaded models that fit together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from localspec import registry
from localspec.backend import can_roll_back
from localspec.backend.choice import BackendChoice, BackendName, backend_in_use, check_backend, load_binding
from localspec.backend.compatibility import check_compatible
from localspec.backend.ik_library import find_library
from localspec.backend.model_header import ModelHeader, read_header
from localspec.backend.native import NativeContext, NativeModel, reads_embeddings
from localspec.backend.quantize import quantize
from localspec.errors import InvalidOptionError, OutOfMemoryError, RollbackError, UnsupportedModelError
from localspec.profile import Profile
from localspec.sampling import LLAMACPP_DEFAULTS, SamplingParams
from localspec.tuning import ProfileLookup, look_up_profile, remembered_backend
from localspec.wording import counted

__all__ = [
    "LoadedPair",
    "ModelFiles",
    "check_can_answer",
    "check_parallel",
    "check_rollback",
    "choose_backend",
    "find_files",
    "load_models",
    "max_parallel",
    "recommended_params",
    "widened",
]

MAX_CONTEXT = 1 << 24
"""Beyond any model; a guard against a slip of the keyboard."""


MAX_SEQUENCES = 64
"""More would not fit a pass, which reads a chunk of 128 tokens at most."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Two GGUF files; ``draft`` is None for plain decoding. The sampling is what the target's entry recommends."""

    target: Path
    draft: Path | None
    sampling: registry.RecommendedSampling = field(default_factory=registry.RecommendedSampling)


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """A target and a draft, ready to run.

    Attributes:
        target: the target's context.
        draft: the draft's, or None.
        target_header: what the target's file says of itself.
        draft_header: the same of the draft's.
        profile: what calibration found out about them on this machine, or why there is nothing.
        sampling: what the target's entry in models.toml recommends.
    """

    target: NativeContext
    draft: NativeContext | None
    target_header: ModelHeader
    draft_header: ModelHeader | None
    profile: ProfileLookup
    sampling: registry.RecommendedSampling = field(default_factory=registry.RecommendedSampling)

    @property
    def default_params(self) -> SamplingParams:
        """llama.cpp's defaults, and above them what is recommended."""
        return recommended_params(self.sampling)

    def close(self) -> None:
        """Free both models."""
        for context in (self.target, self.draft):
            if context is not None:
                context.close()
                context.model.close()


def recommended_params(sampling: registry.RecommendedSampling) -> SamplingParams:
    """Return llama.cpp's defaults, and above them what models.toml recommends for a target."""
    try:
        return replace(LLAMACPP_DEFAULTS, **sampling.settings())  # type: ignore[arg-type]  # it checks them
    except InvalidOptionError as error:
        raise InvalidOptionError(f"models.toml recommends sampling that cannot be used: {error}") from None


def check_parallel(value: object) -> int:
    """Return ``value`` if so many sequences can run together, else raise InvalidOptionError."""
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SEQUENCES:
        return value
    raise InvalidOptionError(f"parallel is {value!r}; use a whole number of sequences from 1 to {MAX_SEQUENCES}")


def find_files(
    pair: str | None = None,
    *,
    target: str | Path | None = None,
    draft: str | Path | None = None,
    use_draft: bool = True,
    progress: bool = False,
) -> ModelFiles:
    """Return the files of a pair, fetching or making what is not at hand; arguments as ``load_pair``."""
    if pair is not None and target is not None:
        raise InvalidOptionError(f"both the pair {pair!r} and the target {str(target)!r} are named; give one of them")
    if draft is not None and not use_draft:
        raise InvalidOptionError(f"the draft {str(draft)!r} is named and switched off; give one of the two options")
    if draft is not None and target is None and pair is None:
        raise InvalidOptionError(f"the draft {str(draft)!r} needs a target; name it with --target or --pair")
    names = registry.load()
    store = registry.Store(names, quantize=quantize)
    draft_model: str | Path | registry.ModelEntry | None = draft
    if target is None:
        entry = names.pair(pair)
        target_model: Path | registry.ModelEntry = entry.target
        draft_model = draft or entry.draft
    else:
        target_model = names.resolve(target)
    target_file = store.path(target_model, progress=progress)
    draft_file = store.path(draft_model, progress=progress) if draft_model is not None and use_draft else None
    if isinstance(target_model, registry.ModelEntry):
        return ModelFiles(target_file, draft_file, target_model.sampling)
    return ModelFiles(target_file, draft_file)


def load_models(
    pair: str | None = None,
    *,
    target: str | Path | None = None,
    draft: str | Path | None = None,
    use_draft: bool = True,
    context: int = 4096,
    threads: int | None = None,
    parallel: int | None = None,
    use_profile: bool = True,
    backend: BackendChoice = "auto",
    progress: bool = False,
) -> LoadedPair:
    """Load what ``find_files`` finds; arguments and errors as ``load_pair``.

    ``parallel`` sequences of ``context`` tokens each are made room for, by default one.

    A profile of the pair, if there is one and ``use_profile``, decides how the contexts run.

    The headers are read and compared before anything is loaded, so that what cannot work fails at once.
    """
    if isinstance(context, bool) or not isinstance(context, int) or not 1 <= context <= MAX_CONTEXT:
        raise InvalidOptionError(f"the context is {context!r}; use a whole number of tokens, such as 4096")
    check_backend(backend)
    if backend == "ik":
        find_library()  # if it is not here, that is known before models are fetched
    num_sequences = 1 if parallel is None else check_parallel(parallel)
    files = find_files(pair, target=target, draft=draft, use_draft=use_draft, progress=progress)
    chosen = choose_backend(backend, files, threads=threads, use_profile=use_profile)
    target_header = read_header(files.target)
    check_can_answer(target_header)
    draft_header = read_header(files.draft) if files.draft else None
    headers = [target_header]
    if draft_header is not None:
        check_compatible(target_header, draft_header)
        headers.append(draft_header)
    _check_memory(headers, context * num_sequences, remedy="a smaller --ctx" + " or --parallel" * (num_sequences > 1))
    binding = load_binding(chosen)
    # Both files before both caches: reading a file needs its size twice for a moment.
    models = [NativeModel(header.path, binding) for header in headers]
    lookup = ProfileLookup(None, None)
    if draft_header is not None and use_profile:
        lookup = look_up_profile(target_header.path, draft_header.path, threads=threads, backend=chosen)
    contexts = [_context(model, lookup.profile, context, num_sequences, threads) for model in models]
    if len(contexts) > 1:
        for loaded, header in zip(contexts, headers, strict=True):
            check_rollback(loaded, header)
        check_embeddings(contexts[1])
    draft_context = contexts[1] if len(contexts) > 1 else None
    return LoadedPair(contexts[0], draft_context, target_header, draft_header, lookup, files.sampling)


def choose_backend(
    choice: BackendChoice, files: ModelFiles, *, threads: int | None, use_profile: bool = True
) -> BackendName:
    """Return the backend for these files: the one chosen; for "auto" the one this process uses already, else the one
    that calibration found fastest here, if profiles count, else llama.cpp.
    """
    if choice != "auto":
        return choice
    remembered = remembered_backend(files.target, files.draft, threads=threads) if use_profile else None
    return backend_in_use() or remembered or "llamacpp"


def _context(
    model: NativeModel, profile: Profile | None, capacity: int, num_sequences: int, threads: int | None
) -> NativeContext:
    """Return a context that runs as calibration found best, or else with all cores and plain attention."""
    return NativeContext(
        model,
        capacity=capacity,
        num_sequences=num_sequences,
        threads=profile.threads if profile else threads,
        flash_attention=profile.flash_attention if profile else "off",
    )


def max_parallel(pair: LoadedPair, limit: int) -> int:
    """Return how many sequences, at most ``limit``, leave half of what memory is free to others."""
    headers = [header for header in (pair.target_header, pair.draft_header) if header is not None]
    each = sum(header.cache_bytes(pair.target.capacity) for header in headers)
    more = psutil.virtual_memory().available // 2 // each if each else limit
    return min(limit, pair.target.num_sequences + more)


def widened(pair: LoadedPair, num_sequences: int) -> LoadedPair:
    """Return the pair with contexts of so many sequences in place of its own, which are closed; the models stay.

    Raises:
        OutOfMemoryError: there is no room; the pair is as it was.
    """
    headers = [header for header in (pair.target_header, pair.draft_header) if header is not None]
    capacity = pair.target.capacity
    _check_memory(headers, capacity * num_sequences, remedy="a smaller --ctx or a smaller --parallel")
    made: list[NativeContext] = []
    try:
        for old in (pair.target, pair.draft):
            if old is not None:
                made.append(_context(old.model, pair.profile.profile, capacity, num_sequences, old.threads))
    except OutOfMemoryError:
        for context in made:
            context.close()
        raise
    for old in (pair.target, pair.draft):
        if old is not None:
            old.close()
    return replace(pair, target=made[0], draft=made[1] if len(made) > 1 else None)


def check_can_answer(header: ModelHeader) -> None:
    """Raise UnsupportedModelError for a model that has logits for a part of its vocabulary only."""
    if header.kept_ids is not None:
        raise UnsupportedModelError(
            f"{header.path} has logits for {header.kept_ids.count:,} ids only, of {header.vocabulary_size:,}: it can"
            " draft, not answer; name it as --draft"
        )


def check_rollback(context: NativeContext, header: ModelHeader) -> None:
    """Try whether an empty context can take tokens back.

    Raises:
        RollbackError: it cannot, so nothing can be drafted for it or by it.
    """
    tokens = [min(token, header.vocabulary_size - 1) for token in (300, 400, 500)]
    if context.capacity > len(tokens) and not can_roll_back(context, tokens):
        raise RollbackError(
            f"{header.path.name} ({header.architecture}) cannot take tokens back, so nothing can be drafted for it or"
            " by it; use the target without a draft (--no-draft)"
        )


def check_embeddings(context: NativeContext) -> None:
    """Try whether an empty context over a cut vocabulary takes embeddings as it takes ids.

    Raises:
        UnsupportedModelError: it does not, so it would not know the tokens it has no logits for.
    """
    if not reads_embeddings(context):
        raise UnsupportedModelError(
            f"{context.model.path.name}: {context.model.binding.name} does not read embeddings of this architecture"
            " as it reads ids, so that its vocabulary cannot be cut; draft with the whole model"
        )


def _check_memory(headers: list[ModelHeader], tokens: int, *, remedy: str = "a smaller --ctx") -> None:
    """Refuse caches that cannot fit: a system that overcommits would kill the process instead."""
    needed = sum(header.cache_bytes(tokens) for header in headers)
    available = psutil.virtual_memory().available
    if needed > available:
        raise OutOfMemoryError(
            f"caches for {counted(tokens, 'token')} take {registry.human_bytes(needed)} and"
            f" {registry.human_bytes(available)} of memory are free; use {remedy}"
        )
