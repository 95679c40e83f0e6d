"""Whether a draft can propose tokens for a target: both must mean the same text by the same ids.

The exact rule compares laws over ids, so ids are all it needs; but ids that stand for different text would
never be accepted, or would be accepted for the wrong reason. The rule here is the strict one: the same
tokenizer, the same handling of BOS and EOS, and identical pieces for every id that both have. Sizes may
differ by padding only: embedding tables are rounded up, so Qwen2.5 has 151,936 ids at 0.5B, 152,064 at 7B.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from localspec.backend.gguf import read_numbers, read_raw, read_strings
from localspec.errors import IncompatibleModelsError

if TYPE_CHECKING:
    from localspec.backend.model_header import ModelHeader

__all__ = ["MAX_PADDING", "check_compatible"]

MAX_PADDING: Final = 1024
"""Largest difference in vocabulary size that counts as padding, in ids; those ids must be unused as well."""

_UNUSED_TYPE: Final = 5  # llama.cpp's LLAMA_TOKEN_TYPE_UNUSED
_PLACEHOLDER: Final = re.compile(
    rb"\[PAD\d*\]|<pad\d*>|<unused\d+>|\[unused\d+\]|<dummy\d+>|<\|(?:reserved|dummy|extra)[\w-]*\|>",
    re.IGNORECASE,
)


def check_compatible(target: ModelHeader, draft: ModelHeader) -> None:
    """Return if ``draft`` can draft for ``target``, else raise :class:`IncompatibleModelsError`.

    The message names both vocabulary sizes and the first token that differs, with both texts.
    """
    reason = _difference_of_tokenizers(target, draft)
    if reason is None and read_raw(target.tokens) == read_raw(draft.tokens):
        return
    mine, theirs = read_strings(target.tokens), read_strings(draft.tokens)
    first = next((i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
    if reason is None and first is None:
        reason = _difference_of_tails(target, draft, mine, theirs)
        if reason is None:
            return
    where = ""
    if first is not None:
        texts = f"{_show(mine[first])} against {_show(theirs[first])}"
        where = f"; the first token that differs is {first}: {texts}"
    because = f" ({reason})" if reason else ""
    raise IncompatibleModelsError(
        f"target {target.path.name} ({len(mine):,} tokens) and draft {draft.path.name} "
        f"({len(theirs):,} tokens) "
        f"do not share a vocabulary{because}{where}. Choose a draft of the target's family: "
        "`localspec models list` has pairs"
    )


def _difference_of_tokenizers(target: ModelHeader, draft: ModelHeader) -> str | None:
    if target.tokenizer_model != draft.tokenizer_model:
        return f"tokenizer {target.tokenizer_model!r} against {draft.tokenizer_model!r}"
    pre = target.tokenizer_pre, draft.tokenizer_pre
    if None not in pre and pre[0] != pre[1]:
        return f"pre-tokenizer {pre[0]!r} against {pre[1]!r}"
    for name, mine, theirs in (
        ("BOS", target.bos_id if target.add_bos else None, draft.bos_id if draft.add_bos else None),
        ("EOS", target.eos_id if target.add_eos else None, draft.eos_id if draft.add_eos else None),
    ):
        if mine != theirs:
            words = ["no" if token is None else f"token {token} as" for token in (mine, theirs)]
            return f"the target adds {words[0]} {name}, the draft {words[1]} {name}"
    return None


def _difference_of_tails(
    target: ModelHeader, draft: ModelHeader, mine: list[bytes], theirs: list[bytes]
) -> str | None:
    """Every shared id agrees: say what is wrong with the ids only one of the two has, if anything."""
    shared = min(len(mine), len(theirs))
    owner, header, longer = ("target", target, mine) if len(mine) > shared else ("draft", draft, theirs)
    extra = len(longer) - shared
    if extra > MAX_PADDING:
        return f"the sizes differ by {extra:,}, more than padding explains (at most {MAX_PADDING:,})"
    types = read_numbers(header.token_types) if header.token_types else ()
    for token in range(shared, len(longer)):
        unused = token < len(types) and types[token] == _UNUSED_TYPE
        if not unused and not _PLACEHOLDER.fullmatch(longer[token]):
            return f"only the {owner} has token {token}, {_show(longer[token])}, which is not padding"
    return None


def _show(piece: bytes) -> str:
    text = piece.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 40 else text[:39] + "…")
