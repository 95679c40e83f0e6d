"""The sampler chain written a second time: plain Python over sorted lists, float64, one token at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localspec.sampling import SamplingParams

Row = list[tuple[int, float]]  # token and logit, the likeliest first, the lower id first among equals


def reference(
    logits: Sequence[float] | NDArray[np.floating], params: SamplingParams, history: Sequence[int] = ()
) -> tuple[NDArray[np.float64], float]:
    """Return the law, and how close a cut was to rounding.

    The second number is the least distance, relative or in logits, between a threshold and what was compared with it,
    and between equals of which one was kept and the other was not (that is 0).
    """
    values = [float(value) for value in logits]
    for token, bias in params.biases:
        if token < len(values):
            values[token] += bias
    for token in params.banned:
        if token < len(values):
            values[token] = -math.inf
    if params.penalises:
        recent = list(history) if params.penalty_last_n is None else list(history)[-params.penalty_last_n :]
        for token, count in Counter(recent).items():
            if 0 <= token < len(values):
                worse = values[token] > 0
                values[token] *= 1 / params.repetition_penalty if worse else params.repetition_penalty
                values[token] -= count * params.frequency_penalty + params.presence_penalty
    row = [(token, value) for token, value in enumerate(values) if value > -math.inf]
    row.sort(key=lambda pair: (-pair[1], pair[0]))
    temperature = params.temperature
    order = ["top_k", "typical_p", "top_p", "min_p"]
    if params.sampler_order == "huggingface":
        if temperature == 0:
            return _point(row[0][0], len(values)), _lead(row)
        row = [(token, (value - row[0][1]) / temperature) for token, value in row]
        temperature, order = 1.0, ["top_k", "top_p", "min_p", "typical_p"]
    slack = math.inf
    for stage in order:
        row, close = _CUTS[stage](row, params)
        slack = min(slack, close)
    if temperature == 0:
        return _point(row[0][0], len(values)), min(slack, _lead(row))
    out = np.zeros(len(values))
    for token, value in row:
        out[token] = math.exp((value - row[0][1]) / temperature)
    return out / math.fsum(out), slack


def _lead(row: list[tuple[int, float]]) -> float:
    """How far the first of a sorted row is ahead: an exact tie is one to everybody, one within rounding is not."""
    return min((row[0][1] - value for _, value in row[1:] if value != row[0][1]), default=math.inf)


def _point(token: int, size: int) -> NDArray[np.float64]:
    out = np.zeros(size)
    out[token] = 1.0
    return out


def _lead(row: Row) -> float:
    return row[0][1] - row[1][1] if len(row) > 1 else math.inf


def _probs(row: Row) -> list[float]:
    weights = [math.exp(value - row[0][1]) for _, value in row]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _top_k(row: Row, params: SamplingParams) -> tuple[Row, float]:
    k = params.top_k
    if k == 0 or k >= len(row):
        return row, math.inf
    return row[:k], row[k - 1][1] - row[k][1]


def _until(row: Row, probs: list[float], keys: list[float], wanted: float, *, beyond: bool) -> tuple[Row, float]:
    """Keep the lowest keys until their probabilities reach ``wanted``, or with ``beyond`` exceed it."""
    order = sorted(range(len(row)), key=lambda i: (keys[i], row[i][0]))
    reached, slack, kept = 0.0, math.inf, 0
    for i in order:
        kept += 1
        reached += probs[i]
        slack = min(slack, abs(reached - wanted))
        if reached > wanted or (reached == wanted and not beyond):
            break
    if kept < len(order):
        slack = min(slack, abs(keys[order[kept]] - keys[order[kept - 1]]))
    chosen = sorted(order[:kept])
    return [row[i] for i in chosen], slack


def _top_p(row: Row, params: SamplingParams) -> tuple[Row, float]:
    if params.top_p == 1:
        return row, math.inf
    return _until(row, _probs(row), [-value for _, value in row], params.top_p, beyond=False)


def _typical_p(row: Row, params: SamplingParams) -> tuple[Row, float]:
    if params.typical_p == 1:
        return row, math.inf
    probs = _probs(row)
    top = row[0][1]
    log_total = math.log(math.fsum(math.exp(value - top) for _, value in row))
    surprise = [log_total + top - value for _, value in row]
    entropy = math.fsum(p * s for p, s in zip(probs, surprise, strict=True))
    return _until(row, probs, [abs(s - entropy) for s in surprise], params.typical_p, beyond=True)


def _min_p(row: Row, params: SamplingParams) -> tuple[Row, float]:
    if params.min_p == 0:
        return row, math.inf
    floor = row[0][1] + math.log(params.min_p)
    slack = math.inf if params.min_p == 1 else min(abs(value - floor) for _, value in row)
    return [pair for pair in row if pair[1] >= floor], slack


_CUTS = {"top_k": _top_k, "top_p": _top_p, "typical_p": _typical_p, "min_p": _min_p}
