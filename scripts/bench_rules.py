"""Tokens per step of the block and the token rule on the default pair, from the same transcripts.

    python scripts/bench_rules.py            writes benchmarks/rules.json

The target writes, the draft scores, and the transcript recursion (docs/how-it-works.md) gives what every γ would have
taken under either rule: no luck of acceptance is in the comparison. Nothing is timed.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from _bench import write

from localspec.calibration.agreement import AgreementPlan, observe, summarise
from localspec.calibration.prompts import POOLED, built_in_prompts
from localspec.sampling import LLAMACPP_DEFAULTS, SamplingParams
from localspec.session import load_pair

PAIR = "qwen2.5-coder-1.5b"
TEMPERATURES = (0.7, 1.0)
MAX_DRAFT_TOKENS = 8
SETTINGS = {"no truncation": SamplingParams(), "llama.cpp's cuts": replace(LLAMACPP_DEFAULTS, temperature=1.0)}


def main() -> int:
    budget_s = float(sys.argv[1]) if len(sys.argv) > 1 else None
    session = load_pair(PAIR, context=1024, backend="llamacpp")
    results: dict[str, object] = {}
    for name, params in SETTINGS.items():
        plan = AgreementPlan(params=params, temperatures=TEMPERATURES, budget_s=budget_s)
        observations = list(
            observe(
                session.pair.target,
                session.pair.draft,  # type: ignore[arg-type]  # the pair has one
                built_in_prompts(),
                plan,
                encode=session.encode,
                ends_generation=session.vocabulary.ends_generation,
            )
        )
        for found in summarise(observations, max_draft_tokens=MAX_DRAFT_TOKENS):
            if found.kind != POOLED or found.temperature not in TEMPERATURES:
                continue
            row = {
                "tokens": found.num_tokens,
                "acceptance_rate": round(found.acceptance_rate, 4),
                "token": [round(value, 3) for value in found.token.tokens_per_step],
                "block": [round(value, 3) for value in found.block.tokens_per_step],
            }
            results[f"T {found.temperature}, {name}"] = row
            print(f"T {found.temperature}, {name}: {row}", file=sys.stderr)
    session.close()
    settings = {"pair": PAIR, "max_draft_tokens": MAX_DRAFT_TOKENS, "budget_s": budget_s}
    write("rules", settings, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
