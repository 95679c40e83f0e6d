"""Whether an answer is what a clean replay gives."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.backend import Context, Span

# Passes of different sizes run different kernels, and what they leave in the cache differs by rounding; a choice
# between two tokens whose logits are this close may then go either way.
NEAR_TIE = 1.0


def check_replay(judge: Context, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Assert that each of ``tokens`` is the greedy choice of ``judge``, a context of the target nothing else uses."""
    judge.truncate(0, 0)
    rows = judge.decode([Span(0, [*prompt, *tokens[:-1]], len(tokens))])
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        gap = float(row.max() - row[token])
        assert gap <= NEAR_TIE, f"token {i} of {len(tokens)} is {gap:.2f} below the best"
