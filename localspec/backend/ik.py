"""ik_llama.cpp, a fork of llama.cpp whose kernels evaluate a few tokens for little more than one.

Its C library is bound here, with what its Python package leaves out: rows of logits, and forgetting the end of a
sequence. Importing this module loads it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_bool, c_char_p, c_float, c_int, c_int32, c_uint32, c_void_p
from pathlib import Path
from typing import Any, Final

from localspec.backend.binding import Binding, ContextSettings, claim_process, on_log
from localspec.backend.ik_layout import Batch, CacheView, ContextParams, ModelParams, check_layout
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
    "llama_kv_cache_defrag": (None, (c_void_p,)),
    "llama_kv_cache_seq_cp": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_kv_cache_seq_pos_max": (c_int32, (c_void_p, c_int32)),
    "llama_kv_cache_seq_pos_min": (c_int32, (c_void_p, c_int32)),
    "llama_kv_cache_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_kv_cache_update": (c_int32, (c_void_p,)),
    "llama_kv_cache_view_free": (None, (POINTER(CacheView),)),
    "llama_kv_cache_view_update": (None, (c_void_p, POINTER(CacheView))),
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

    def __init__(self, path: Path) -> None:
        self._path = path
        self._native = _load(path)
        self._log = _Log(on_log)  # kept alive here: the library holds only its address
        self._native.llama_log_set(self._log, None)
        self._native.llama_backend_init()

    def build(self) -> str:
        features = self._native.llama_print_system_info().decode(errors="replace").split("|")
        compiled = [name.strip() for name, _, value in (f.partition("=") for f in features) if value.strip() == "1"]
        if hasattr(self._native, "localspec_kernels"):  # scripts/build_ik.py put them in
            compiled.append("and localspec's kernels")
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
        params.n_ctx = settings.capacity
        params.n_seq_max = settings.num_sequences
        params.n_batch = params.n_ubatch = settings.max_pass
        params.n_threads = params.n_threads_batch = settings.threads
        # A token of one sequence may find nothing but others' tokens in a stretch of the cache, and then its flash
        # attention aborts the process.
        params.flash_attn = settings.flash_attention != "off" and settings.num_sequences == 1
        pointer = self._native.llama_init_from_model(model, params)
        if not pointer:
            return None
        context = _Context(pointer, settings.num_sequences, int(self._native.llama_model_n_embd(model)))
        if not 0 < settings.capacity <= self._free_room(context) == context.view.n_cells:
            self.free_context(context)
            raise BackendError(
                f"{self._path} does not tell of its cache what is expected; build it with scripts/build_ik.py"
            )
        return context

    def free_context(self, context: _Context) -> None:
        self._native.llama_kv_cache_view_free(context.view)
        self._native.llama_free(context.pointer)

    def set_threads(self, context: _Context, threads: int) -> None:
        self._native.llama_set_n_threads(context.pointer, threads, threads)

    def length(self, context: _Context, sequence: int) -> int:
        if self._native.llama_kv_cache_seq_pos_min(context.pointer, sequence) < 0:
            return 0  # of an empty sequence the greatest position is said to be 0
        return int(self._native.llama_kv_cache_seq_pos_max(context.pointer, sequence)) + 1

    def truncate(self, context: _Context, sequence: int, length: int) -> bool:
        context.has_holes = context.num_sequences > 1
        return bool(self._native.llama_kv_cache_seq_rm(context.pointer, sequence, length, -1))

    def copy(self, context: _Context, source: int, sequence: int, length: int) -> bool:
        self._native.llama_kv_cache_seq_cp(context.pointer, source, sequence, 0, length)
        return True

    def decode(self, context: _Context, batch: Any) -> int:
        """Decode a batch.

        The library crashes where a pass is one token given as an embedding; twice the same one goes well, and the
        second is forgotten.
        """
        if not self._close_holes(context):
            return -1
        if batch.token or batch.n_tokens != 1:
            return self._decode(context, batch)
        position, sequence = batch.pos[0], batch.seq_id[0][0]
        twice = Batch(
            n_tokens=2,
            embd=(c_float * (2 * context.width))(*batch.embd[: context.width], *batch.embd[: context.width]),
            pos=(c_int32 * 2)(position, position + 1),
            n_seq_id=(c_int32 * 2)(1, 1),
            seq_id=(_Ids * 2)(batch.seq_id[0], batch.seq_id[0]),
            logits=(ctypes.c_int8 * 2)(batch.logits[0], 0),
        )
        code = self._decode(context, twice)
        if code == 0:
            self.truncate(context, sequence, position + 1)
        return code

    def _decode(self, context: _Context, batch: Any) -> int:
        code = int(self._native.llama_decode(context.pointer, batch))
        if code != 0:  # the tokens may have their places in the cache by then
            for i in range(batch.n_tokens):
                if self.length(context, sequence := batch.seq_id[i][0]) > batch.pos[i]:
                    self.truncate(context, sequence, batch.pos[i])
        return code

    def _close_holes(self, context: _Context) -> bool:
        """Move what the cache holds to its beginning; False if the library does not, and rows would be wrong.

        A sequence that is rolled back, or ends, leaves holes between the others' tokens. The library looks for the
        end of what it holds at every 32nd place (with flash attention every 256th), and where a hole is there, what
        lies beyond is not attended to. One call moves a limited number of runs of tokens.
        """
        if not context.has_holes:
            return True
        for _ in range(context.view.n_cells):
            if self._free_room(context) == context.view.n_cells - context.view.used_cells:
                context.has_holes = False
                return True
            self._native.llama_kv_cache_defrag(context.pointer)
            if self._native.llama_kv_cache_update(context.pointer) != 0:
                break
        on_log(0, b"error: the cache cannot be moved together\n", None)
        return False

    def _free_room(self, context: _Context) -> int:
        """Return how many places there are behind the last token that the cache holds; 0 where holes are larger."""
        view = context.view
        self._native.llama_kv_cache_view_update(context.pointer, view)
        at_end = view.max_contiguous_idx + view.max_contiguous == view.n_cells
        return int(view.max_contiguous) if at_end else 0

    def logits_address(self, context: _Context) -> int | None:
        address: int | None = self._native.llama_get_logits(context.pointer)
        return address


class _Context:
    """A native context, and what is to be known of it.

    Attributes:
        pointer: the native handle.
        num_sequences: it was made for.
        width: of an embedding.
        has_holes: there may be room between the tokens that the cache holds.
        view: what the library tells of its cache.
    """

    def __init__(self, pointer: Any, num_sequences: int, width: int) -> None:
        self.pointer = pointer
        self.num_sequences = num_sequences
        self.width = width
        self.has_holes = False
        self.view = CacheView(n_seq_max=1)


BINDING: Binding = _Binding(find_library())


class IkModel(NativeModel):
    """A GGUF file loaded by ik_llama.cpp; see ``NativeModel``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, BINDING)
