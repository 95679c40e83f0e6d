"""Model files and model passes. Only this package imports llama_cpp, and only ``llamacpp`` and ``quantize`` in it."""

from localspec.backend.context import Context, FlashAttention, Span, can_roll_back

__all__ = ["Context", "FlashAttention", "Span", "can_roll_back"]
