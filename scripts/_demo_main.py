"""The part of scripts/demo.py that runs inside the environment: one prompt, without and with speculation."""

from __future__ import annotations

import sys
from pathlib import Path

import localspec

PROMPT = "Write a Python function that merges overlapping intervals, with type hints. Answer with code only."
NUM_DRAFT_TOKENS = 4
MAX_TOKENS = 128


def has_avx512() -> bool:
    """Whether this processor has the instructions that scripts/ik_kernels.h uses, as far as the system tells."""
    try:
        return "avx512_vnni" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False


def main() -> int:
    """Generate, compare, say what it means; returns the exit code."""
    session = localspec.load_pair()
    greedy = localspec.SamplingParams(temperature=0.0)

    def generate(num_draft_tokens: int, max_tokens: int = MAX_TOKENS) -> localspec.GenerationResult:
        return session.generate(PROMPT, params=greedy, max_tokens=max_tokens, num_draft_tokens=num_draft_tokens)

    generate(NUM_DRAFT_TOKENS, 8)  # the first pages of both files come from disk: not what is to be measured
    # Alternating, and the faster of two each: another program's burst of work must not decide the comparison.
    runs = [(n, generate(n)) for n in (0, NUM_DRAFT_TOKENS, NUM_DRAFT_TOKENS, 0)]
    plain, speculative = (
        max((result for n, result in runs if n == wanted), key=lambda result: result.stats.tokens_per_s)
        for wanted in (0, NUM_DRAFT_TOKENS)
    )
    print(f"> {PROMPT}\n\n{plain.text.rstrip()}\n", flush=True)
    for name, result in (("plain", plain), (f"{NUM_DRAFT_TOKENS} tokens drafted", speculative)):
        stats = result.stats
        print(
            f"{name:<18} {stats.tokens_per_s:6.1f} tokens/s  {stats.tokens_per_step:5.2f} tokens per target"
            f" pass  {stats.accepted} of {stats.drafted} drafted tokens accepted"
        )
    ratio = speculative.stats.tokens_per_s / plain.stats.tokens_per_s
    print(f"Speculation makes this prompt {ratio:.2f}x as fast as plain decoding on this machine.")
    if ratio < 1:
        print(
            "Checking drafts costs more than it saves here, which is what `localspec calibrate` finds out beforehand."
        )
        if has_avx512():
            print(
                "This processor has AVX-512, with which it costs hardly more than one token:"
                " python scripts/build_ik.py builds kernels that use it, and"
                " localspec calibrate --frontier --derive Q4_0+cut:32768 says what they bring (docs/backends.md)."
            )
    print("Next: localspec chat, or localspec calibrate (in .venv), or the pair qwen2.5-coder-1.5b-f16.")
    if plain.tokens == speculative.tokens:
        print(f"Both gave the same {len(plain.tokens)} tokens.")
        return 0
    pairs = zip(plain.tokens, speculative.tokens, strict=False)
    shorter = min(len(plain.tokens), len(speculative.tokens))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    print(f"They part after {same} tokens: rounding differs with the batch, which decides between near-ties.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except localspec.LocalspecError as error:
        sys.exit(f"localspec: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
