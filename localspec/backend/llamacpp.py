"""llama.cpp, through llama-cpp-python's low-level interface."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from localspec.backend.binding import Binding, ContextSettings, claim_process, on_log
from localspec.backend.native import NativeContext as LlamaContext
from localspec.backend.native import NativeModel

claim_process("llama.cpp")

import llama_cpp as native  # noqa: E402 — importing it loads the library

__all__ = ["BINDING", "LlamaContext", "LlamaModel", "native_build"]

_log_callback = native.llama_log_callback(on_log)  # kept alive here: llama.cpp holds only its address
native.llama_log_set(_log_callback, ctypes.c_void_p(0))


class _Binding:
    """The ``Binding`` of llama.cpp."""

    name = "llama.cpp"
    newer = "a newer llama-cpp-python"
    batch_type = native.llama_batch
    max_pass = 128  # more are no faster on a CPU and delay an interrupt

    def build(self) -> str:
        features = native.llama_print_system_info().decode(errors="replace")
        compiled = " ".join(features.replace(" = 1", "").replace("|", "").split())
        return f"llama-cpp-python {native.__version__}, {compiled}"

    def load_model(self, path: bytes, goes_on: Callable[[], bool]) -> Any:
        native.llama_backend_init()
        params = native.llama_model_default_params()
        params.n_gpu_layers = 0
        callback = native.llama_progress_callback(lambda _fraction, _data: goes_on())
        params.progress_callback = callback
        return native.llama_model_load_from_file(path, params)

    def free_model(self, model: Any) -> None:
        native.llama_model_free(model)

    def trained_context(self, model: Any) -> int:
        return int(native.llama_model_n_ctx_train(model))

    def vocabulary(self, model: Any) -> Any:
        return native.llama_model_get_vocab(model)

    def num_tokens(self, vocabulary: Any) -> int:
        return int(native.llama_vocab_n_tokens(vocabulary))

    def bos(self, vocabulary: Any) -> int:
        return int(native.llama_vocab_bos(vocabulary))

    def adds_bos(self, vocabulary: Any) -> bool:
        return bool(native.llama_vocab_get_add_bos(vocabulary))

    def tokenize(self, vocabulary: Any, text: bytes, buffer: Any, room: int, control: bool) -> int:
        return int(native.llama_tokenize(vocabulary, text, len(text), buffer, room, False, control))

    def piece(self, vocabulary: Any, token: int, buffer: Any, room: int, control: bool) -> int:
        return int(native.llama_token_to_piece(vocabulary, token, buffer, room, 0, control))

    def ends_generation(self, vocabulary: Any, token: int) -> bool:
        return bool(native.llama_vocab_is_eog(vocabulary, token))

    def attributes(self, vocabulary: Any, token: int) -> int:
        return int(native.llama_vocab_get_attr(vocabulary, token))

    def new_context(self, model: Any, settings: ContextSettings) -> Any:
        params = native.llama_context_default_params()
        params.n_ctx = settings.capacity
        params.n_seq_max = settings.num_sequences
        # Below the number of sequences llama.cpp ends the process.
        params.n_batch = params.n_ubatch = max(settings.max_pass, settings.num_sequences)
        params.n_threads = params.n_threads_batch = settings.threads
        params.flash_attn_type = {"auto": -1, "off": 0, "on": 1}[settings.flash_attention]
        # One cache for all: sequences that add different numbers of tokens still share one pass over the weights
        # (with a cache each, llama.cpp splits such a batch), and a common prefix is copied without moving data.
        params.kv_unified = settings.num_sequences > 1
        params.swa_full = True  # a sliding-window cache forgets what a rollback needs
        params.no_perf = True
        return native.llama_init_from_model(model, params)

    def free_context(self, context: Any) -> None:
        native.llama_free(context)

    def set_threads(self, context: Any, threads: int) -> None:
        native.llama_set_n_threads(context, threads, threads)

    def length(self, context: Any, sequence: int) -> int:
        return int(native.llama_memory_seq_pos_max(native.llama_get_memory(context), sequence)) + 1

    def truncate(self, context: Any, sequence: int, length: int) -> bool:
        return bool(native.llama_memory_seq_rm(native.llama_get_memory(context), sequence, length, -1))

    def copy(self, context: Any, source: int, sequence: int, length: int) -> bool:
        native.llama_memory_seq_cp(native.llama_get_memory(context), source, sequence, 0, length)
        return True

    def decode(self, context: Any, batch: Any) -> int:
        return int(native.llama_decode(context, batch))

    def logits_address(self, context: Any) -> int | None:
        return ctypes.cast(native.llama_get_logits(context), ctypes.c_void_p).value


BINDING: Binding = _Binding()


def native_build() -> str:
    """Return the version of the binding and what its llama.cpp was compiled for, in one line."""
    return BINDING.build()


class LlamaModel(NativeModel):
    """A GGUF file loaded by llama.cpp; see ``NativeModel``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, BINDING)
