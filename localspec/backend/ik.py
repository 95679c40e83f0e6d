"""ik_llama.cpp, a fork of llama.cpp whose kernels evaluate a few tokens for little more than one.

Its C library is bound here, with what its Python package leaves out: rows of logits, and forgetting the end of a
sequence. Importing this module loads it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from ctypes import CFUNCTYPE, POINTER, c_bool, c_char_p, c_float, c_int, c_int32, c_uint32, c_void_p
from pathlib import Path
from typing import Any, Final

import numpy as np

from localspec.backend.binding import Binding, ContextSettings, claim_process, on_log
from localspec.backend.ik_layout import Batch, ContextParams, ModelParams, check_layout
from localspec.backend.ik_library import find_library, library_identity
from localspec.backend.native import NativeContext as IkContext
from localspec.backend.native import NativeModel
from localspec.errors import BackendError

__all__ = ["BINDING", "IkContext", "IkModel"]

_Progress = CFUNCTYPE(c_bool, c_float, c_void_p)
_Log = CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_Ids = POINTER(c_int32)

_FUNCTIONS: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "llama_add_bos_token": (c_int32, (c_void_p,)),
    "llama_backend_init": (None, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_free": (None, (c_void_p,)),
    "llama_free_model": (None, (c_void_p,)),
    "llama_get_logits": (c_void_p, (c_void_p,)),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams)),
    "llama_kv_cache_seq_pos_max": (c_int32, (c_void_p, c_int32)),
    "llama_kv_cache_seq_pos_min": (c_int32, (c_void_p, c_int32)),
    "llama_kv_cache_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_log_set": (None, (_Log, c_void_p)),
    "llama_model_default_params": (ModelParams, ()),
    "llama_model_has_recurrent": (c_bool, (c_void_p,)),
    "llama_model_n_embd": (c_int32, (c_void_p,)),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_n_ctx_train": (c_int32, (c_void_p,)),
    "llama_n_vocab": (c_int32, (c_void_p,)),
    "llama_print_system_info": (c_char_p, ()),
    "llama_set_n_threads": (None, (c_void_p, c_uint32, c_uint32)),
    "llama_token_bos": (c_int32, (c_void_p,)),
    "llama_token_get_attr": (c_int, (c_void_p, c_int32)),
    "llama_token_is_eog": (c_bool, (c_void_p, c_int32)),
    "llama_token_to_piece": (c_int32, (c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool)),
    "llama_tokenize": (c_int32, (c_void_p, c_char_p, c_int32, _Ids, c_int32, c_bool, c_bool)),
}
"""What is used of the library: results and arguments. Its vocabulary functions take the model."""


def _load(path: Path) -> Any:
    """Load the library and declare its functions.

    Raises:
        BackendError: it cannot be loaded, or is not the one that is known here.
    """
    claim_process("ik_llama.cpp")
    if "llama_cpp" in sys.modules:
        raise BackendError("this process has imported llama_cpp, and ik_llama.cpp cannot be loaded beside it")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendError(f"{path} cannot be loaded: {error}; build it anew with scripts/build_ik.py") from None
    check_layout(library)
    for name, (result, arguments) in _FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise BackendError(f"{path} has no function {name}; build it anew with scripts/build_ik.py") from None
        function.restype, function.argtypes = result, list(arguments)
    return library


class _Binding:
    """The ``Binding`` of ik_llama.cpp."""

    name = "ik_llama.cpp"
    newer = "llama.cpp (--backend llamacpp)"
    batch_type = Batch
    # From 32 tokens on it recodes weights to 8 bits for the pass, and rows are no longer those of shorter passes:
    # with Q4_1 they were measured to differ by two thirds of their standard deviation.
    max_pass = 31
    shares_passes = False  # see ``_Contexts``

    def __init__(self, path: Path) -> None:
        self._path = path
        self._native = _load(path)
        self._log = _Log(on_log)  # kept alive here: the library holds only its address
        self._native.llama_log_set(self._log, None)
        self._native.llama_backend_init()

    def build(self) -> str:
        features = self._native.llama_print_system_info().decode(errors="replace").split("|")
        compiled = [name.strip() for name, _, value in (f.partition("=") for f in features) if value.strip() == "1"]
        return f"ik_llama.cpp {library_identity(self._path)}, {' '.join(compiled)}"

    def load_model(self, path: bytes, goes_on: Callable[[], bool]) -> Any:
        params = self._native.llama_model_default_params()
        params.n_gpu_layers = 0
        params.repack_tensors = True  # rows of several weights side by side: what makes short passes cheap
        callback = _Progress(lambda _fraction, _data: goes_on())
        params.progress_callback = ctypes.cast(callback, c_void_p)
        model = self._native.llama_model_load_from_file(path, params)
        if model and self._native.llama_model_has_recurrent(model):
            on_log(0, b"error: ik_llama.cpp runs no recurrent model here\n", None)
            self._native.llama_free_model(model)
            return None
        return model

    def free_model(self, model: Any) -> None:
        self._native.llama_free_model(model)

    def trained_context(self, model: Any) -> int:
        return int(self._native.llama_n_ctx_train(model))

    def vocabulary(self, model: Any) -> Any:
        return model

    def num_tokens(self, vocabulary: Any) -> int:
        return int(self._native.llama_n_vocab(vocabulary))

    def bos(self, vocabulary: Any) -> int:
        return int(self._native.llama_token_bos(vocabulary))

    def adds_bos(self, vocabulary: Any) -> bool:
        return int(self._native.llama_add_bos_token(vocabulary)) == 1

    def tokenize(self, vocabulary: Any, text: bytes, buffer: Any, room: int, control: bool) -> int:
        return int(self._native.llama_tokenize(vocabulary, text, len(text), buffer, room, False, control))

    def piece(self, vocabulary: Any, token: int, buffer: Any, room: int, control: bool) -> int:
        return int(self._native.llama_token_to_piece(vocabulary, token, buffer, room, 0, control))

    def ends_generation(self, vocabulary: Any, token: int) -> bool:
        return bool(self._native.llama_token_is_eog(vocabulary, token))

    def attributes(self, vocabulary: Any, token: int) -> int:
        return int(self._native.llama_token_get_attr(vocabulary, token))

    def new_context(self, model: Any, settings: ContextSettings) -> Any:
        params = self._native.llama_context_default_params()
        params.n_ctx = settings.capacity // settings.num_sequences
        params.n_seq_max = 1
        params.n_batch = params.n_ubatch = settings.max_pass
        params.n_threads = params.n_threads_batch = settings.threads
        params.flash_attn = settings.flash_attention != "off"
        contexts: list[Any] = []
        for _ in range(settings.num_sequences):
            context = self._native.llama_init_from_model(model, params)
            if not context:
                self._free(contexts)
                return None
            contexts.append(context)
        return _Contexts(
            contexts, settings.max_pass, self.num_tokens(model), int(self._native.llama_model_n_embd(model))
        )

    def free_context(self, context: _Contexts) -> None:
        self._free(context.each)

    def _free(self, contexts: list[Any]) -> None:
        for context in contexts:
            self._native.llama_free(context)

    def set_threads(self, context: _Contexts, threads: int) -> None:
        for one in context.each:
            self._native.llama_set_n_threads(one, threads, threads)

    def length(self, context: _Contexts, sequence: int) -> int:
        one = context.each[sequence]
        if self._native.llama_kv_cache_seq_pos_min(one, 0) < 0:
            return 0  # of an empty sequence the greatest position is said to be 0
        return int(self._native.llama_kv_cache_seq_pos_max(one, 0)) + 1

    def truncate(self, context: _Contexts, sequence: int, length: int) -> bool:
        return bool(self._native.llama_kv_cache_seq_rm(context.each[sequence], 0, length, -1))

    def copy(self, context: _Contexts, source: int, sequence: int, length: int) -> bool:
        return False  # each has a cache of its own

    def decode(self, context: _Contexts, batch: Any) -> int:
        num_rows, done = 0, list[tuple[int, int]]()
        context.address = None
        parts = _by_sequence(batch, context.width) if len(context.each) > 1 else [(batch, 0)]
        for part, sequence in parts:
            one = context.each[sequence]
            done.append((sequence, part.pos[0]))
            code = self._decode_one_sequence(one, part, context.width)
            if code != 0:  # the tokens may have their places in the cache by then
                for touched, start in done:
                    self.truncate(context, touched, start)
                return code
            if part.n_tokens == batch.n_tokens:
                context.address = self._native.llama_get_logits(one)
            else:
                num_rows += self._keep_rows(context, one, part, num_rows)
        if context.address is None:
            context.address = context.rows.ctypes.data
        return 0 if done else -1

    def _decode_one_sequence(self, one: Any, part: Any, width: int) -> int:
        """Decode tokens of one sequence.

        The library crashes where a pass is one token given as an embedding; twice the same one goes well, and the
        second is forgotten.
        """
        if part.token or part.n_tokens != 1:
            return int(self._native.llama_decode(one, part))
        position = part.pos[0]
        twice = Batch(
            n_tokens=2,
            embd=(c_float * (2 * width))(*part.embd[:width], *part.embd[:width]),
            pos=(c_int32 * 2)(position, position + 1),
            n_seq_id=(c_int32 * 2)(1, 1),
            seq_id=_ZEROS,
            logits=(ctypes.c_int8 * 2)(part.logits[0], 0),
        )
        code = int(self._native.llama_decode(one, twice))
        if code == 0:
            self._native.llama_kv_cache_seq_rm(one, 0, position + 1, -1)
        return code

    def _keep_rows(self, context: _Contexts, one: Any, part: Any, at: int) -> int:
        """Copy the rows of a part behind those of the parts before it; returns their number."""
        num_rows = sum(1 for i in range(part.n_tokens) if part.logits[i])
        if num_rows:
            target = context.rows[at : at + num_rows]
            ctypes.memmove(target.ctypes.data, self._native.llama_get_logits(one), target.nbytes)
        return num_rows

    def logits_address(self, context: _Contexts) -> int | None:
        return context.address


class _Contexts:
    """A native context for each sequence.

    In one for all, a sequence that is rolled back leaves a hole between the others' tokens. The library then takes
    too little of the cache for its end (``llama_kv_cache_cell_max`` looks at every 32nd place only), and what lies
    beyond is not attended to.
    """

    def __init__(self, each: list[Any], max_rows: int, vocabulary_size: int, width: int) -> None:
        self.each = each
        self.width = width  # of an embedding
        self.rows = np.empty((max_rows if len(each) > 1 else 0, vocabulary_size), np.float32)
        self.address: int | None = None


_ZERO = c_int32(0)
_ZEROS = (POINTER(c_int32) * 512)(*[ctypes.pointer(_ZERO)] * 512)


def _by_sequence(batch: Any, width: int) -> Iterator[tuple[Any, int]]:
    """Cut a batch where the sequence changes; each part is of sequence 0, and comes with its real number."""
    start = 0
    while start < batch.n_tokens:
        sequence = batch.seq_id[start][0]
        end = start + 1
        while end < batch.n_tokens and batch.seq_id[end][0] == sequence:
            end += 1
        part = Batch(
            n_tokens=end - start,
            token=_from(batch.token, start),
            embd=_from(batch.embd, start * width),
            pos=_from(batch.pos, start),
            n_seq_id=_from(batch.n_seq_id, start),
            seq_id=_ZEROS,
            logits=_from(batch.logits, start),
        )
        yield part, sequence
        start = end


def _from(array: Any, start: int) -> Any:
    """Return a C array from its element ``start`` on; NULL of NULL."""
    if not array:
        return None
    size = ctypes.sizeof(array._type_)
    return ctypes.cast(ctypes.addressof(array.contents) + start * size, type(array))


BINDING: Binding = _Binding(find_library())


class IkModel(NativeModel):
    """A GGUF file loaded by ik_llama.cpp; see ``NativeModel``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, BINDING)
