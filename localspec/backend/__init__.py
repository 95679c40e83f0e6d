"""Model files and model passes. Native libraries are loaded by ``llamacpp``, ``quantize`` and ``ik`` only."""

from localspec.backend.context import Context, FlashAttention, Span, can_roll_back

__all__ = ["Context", "FlashAttention", "Span", "can_roll_back"]
