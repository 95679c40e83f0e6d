"""Prove that `localspec check` notices a broken build: break a copy of the package in many ways, and check each.

    python scripts/check_mutants.py [--pair NAME] [--budget TIME] [NAME ...]

Every mutant is a substitution in the source; it fails loudly when the line it changes is no longer there. Prints
which part caught which mutant, and leaves with 1 if one is missed, or if the unbroken build does not pass.
benchmarks/mutants.json keeps what every mutant's last run found. NAME is a part of a name; "unbroken" is one too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAIR = "smollm2-135m"
BUDGET = "6s"
RECORD = ROOT / "benchmarks" / "mutants.json"
UNBROKEN = "unbroken"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One way to break the package.

    Attributes:
        name: what is broken.
        file: below the package.
        old: the text that is replaced, which must occur exactly once.
        new: by what.
        caught_by: parts of which one at least must fail.
        budget: that it takes to notice.
    """

    name: str
    file: str
    old: str
    new: str
    caught_by: tuple[str, ...]
    budget: str = BUDGET


MUTANTS = (
    Mutant(
        "residual is p",
        "sampling/rules.py",
        "    return rest[0] if rest else p[num_accepted]\n",
        "    return p[num_accepted]\n",
        ("rule",),
    ),
    Mutant(
        "wrong bonus row in the rule",
        "sampling/rules.py",
        "    if num_accepted == len(q):\n        return p[num_accepted]\n",
        "    if num_accepted == len(q):\n        return p[num_accepted - 1]\n",
        ("rule",),
    ),
    Mutant(
        "wrong bonus row in the engine",
        "engine.py",
        "make_law(self._logits[index], self._params, recent)",
        "make_law(self._logits[max(0, min(index, len(self._logits) - 2))], self._params, recent)",
        ("greedy", "replay"),
    ),
    Mutant(
        "target rows shifted",
        "engine.py",
        "make_law(self._logits[index], self._params, recent)",
        "make_law(self._logits[index - 1], self._params, recent)",
        ("greedy", "replay"),
    ),
    Mutant(
        "a single token is not taken back",
        "backend/native.py",
        "        if held <= length:\n",
        "        if held <= length + 1:\n",
        ("rollback",),
    ),
    Mutant(  # what is tried when a model is loaded stays right
        "a single token is not taken back, and its length says it is",
        "backend/native.py",
        "        del self._lengths[sequence]\n        if not self._binding.truncate(",
        "        self._lengths[sequence] = length\n"
        "        if (length < 8 or held > length + 1) and not self._binding.truncate(",
        ("rollback",),
    ),
    Mutant(
        "a token of the text before stays in the cache",
        "engine.py",
        "        return min(shared, self.target.length(sequence))\n",
        "        return min(shared + 1, self.target.length(sequence))\n",
        ("greedy", "generations"),
    ),
    Mutant(
        "truncation leaves one token too many",
        "engine.py",
        "            self._forget(g.sequence, len(g.history) - 1)\n",
        "            self._forget(g.sequence, len(g.history))\n",
        ("greedy", "replay"),
    ),
    Mutant(
        "the draft keeps a rejected token",
        "engine.py",
        "            self.drafter.keep(sequence, length)\n",
        "            self.drafter.keep(sequence, length + 1)\n",
        ("greedy", "replay"),
    ),
    Mutant(
        "discard after drawing",
        "drafters.py",
        "        draft.tokens.append(token)\n        draft.laws.append(law)\n",
        "        if law.prob(token) < 0.4:\n            return False\n"
        "        draft.tokens.append(token)\n        draft.laws.append(law)\n",
        ("replay",),
    ),
    Mutant(
        "block rule with the token rule's residual",
        "sampling/rules.py",
        "        scale = scales[num_accepted]\n",
        "        scale = 1.0\n",
        ("rule",),
    ),
    Mutant(
        "block rule stops at the first failure",
        "sampling/rules.py",
        "        num_accepted = len(scales) - 1\n"
        "        while num_accepted and not u[num_accepted - 1] < _block_pass(p, q, scales, num_accepted):\n"
        "            num_accepted -= 1\n",
        "        num_accepted = 0\n"
        "        while num_accepted < len(scales) - 1:\n"
        "            if not u[num_accepted] < _block_pass(p, q, scales, num_accepted + 1):\n"
        "                break\n"
        "            num_accepted += 1\n",
        ("rule",),
    ),
    Mutant(
        "acceptance with <=",
        "sampling/rules.py",
        "if not u[num_accepted] * q[num_accepted].prob(token) < p[num_accepted].prob(token):",
        "if not u[num_accepted] * q[num_accepted].prob(token) <= p[num_accepted].prob(token):",
        ("rule",),
    ),
    Mutant(
        "q of another temperature than drawn from",
        "drafters.py",
        "        draft.laws.append(law)\n",
        "        draft.laws.append(make_law(row[: self._width], SamplingParams()))\n",
        ("replay",),
    ),
    Mutant(
        "draft laws in the wrong order",
        "drafters.py",
        "        draft.laws.append(law)\n",
        "        draft.laws.insert(0, law)\n",
        ("replay",),
    ),
    Mutant(
        "penalties count rejected tokens",
        "engine.py",
        "recent = self._recent.then(self._drafted[:index])",
        "recent = self._recent.then(self._drafted)",
        ("replay",),
    ),
    Mutant(
        "penalties forget the drafted prefix",
        "engine.py",
        "recent = self._recent.then(self._drafted[:index])",
        "recent = self._recent.then([])",
        ("replay",),
    ),
    Mutant(
        "the policy looks at the drawn token",
        "drafters.py",
        "        if not request.plan.draws("
        "lambda: draft_confidence(row[: self._width], law, request.params)):\n"
        "            return False\n"
        "        token = request.draw(law, len(draft.tokens))\n",
        "        token = request.draw(law, len(draft.tokens))\n"
        "        if not request.plan.draws(lambda: law.prob(token)):\n"
        "            return False\n",
        ("replay",),
    ),
    Mutant(
        "the draft's temperature is applied to the target",
        "engine.py",
        "        laws = _Laws(logits, request.params, g.history, draft.tokens)\n",
        "        laws = _Laws(logits, request.draft_params or request.params, g.history, draft.tokens)\n",
        ("replay",),
    ),
    Mutant(
        "copied tokens count as drawn by chance",
        "lookup.py",
        "        return Draft(tokens, [SparseLaw.point(token) for token in tokens])\n",
        "        points = [SparseLaw.point(token) for token in tokens]\n"
        "        return Draft(tokens, [SparseLaw(point.ids, point.probs / 2) for point in points])\n",
        ("replay",),
    ),
    Mutant(
        "sequences of a batch get each other's rows",
        "engine.py",
        "        rows = np.split(logits, ends[:-1])\n",
        "        rows = np.split(logits, ends[:-1])[::-1]\n",
        ("replay",),
    ),
    Mutant(
        "the token rule accepts a tenth more",
        "sampling/rules.py",
        "            if not u[num_accepted] * q[num_accepted].prob(token) < p[num_accepted].prob(token):",
        "            if not u[num_accepted] * q[num_accepted].prob(token) < 1.1 * p[num_accepted].prob(token):",
        ("rule",),
    ),
    Mutant(
        "the recovered token is drawn with the first acceptance's number",
        "sampling/rules.py",
        ".draw(float(u[-1])))",
        ".draw(float(u[0])))",
        ("rule", "replay"),
    ),
    Mutant(
        "draft and verification share their noise",
        "sampling/noise.py",
        "    VERIFY = 2\n",
        "    VERIFY = 1\n",
        ("replay",),
    ),
    Mutant(
        "every step draws the same noise",
        "sampling/noise.py",
        "    return _mix(_mix(_mix(seed + _GOLDEN) ^ position) + stream * _GOLDEN)\n",
        "    return _mix(_mix(_mix(seed + _GOLDEN)) + stream * _GOLDEN)\n",
        ("replay",),
    ),
    Mutant(
        "temperature has no effect after a cut",
        "sampling/chain.py",
        "    weights = np.exp((values - values.max()) / temperature)\n",
        "    weights = np.exp(values - values.max())\n",
        ("replay",),
    ),
    Mutant(
        "coupled noise of the wrong position",
        "sampling/rules.py",
        "        own = p[i].race(PositionNoise(seed, position + i))\n",
        "        own = p[i].race(PositionNoise(seed, position))\n",
        ("replay", "generations"),
    ),
    Mutant(
        "the coupled rule lets the draft's token stand",
        "sampling/rules.py",
        "            return Verification(i, own)\n",
        "            return Verification(i, token)\n",
        ("replay", "generations"),
    ),
    Mutant(
        "one number draws all drafts of a step",
        "sampling/noise.py",
        "        self._index += 1\n        return (_mix(self._key",
        "        self._index += self._index < 1\n        return (_mix(self._key",
        ("replay",),
    ),
    Mutant(
        "every step drafts by the same numbers",
        "engine.py",
        "noise = StepNoise(g.request.seed, depth, Stream.DRAFT)",
        "noise = StepNoise(g.request.seed, 0, Stream.DRAFT)",
        ("replay",),
    ),
    Mutant(
        "the window of penalties grows with drafts",
        "sampling/chain.py",
        "history[-params.penalty_last_n :] if params.penalty_last_n else history",
        "history",
        ("replay",),
    ),
    Mutant(
        "drafts go beyond the context",
        "engine.py",
        "min(g.request.max_tokens - g.stats.tokens, self.target.capacity - depth) - 1\n",
        "g.request.max_tokens - g.stats.tokens - 1\n",
        ("endings",),
    ),
    Mutant(
        "a prompt that is read in pieces has gaps",
        "drafters.py",
        "context.decode([Span(sequence, tokens[held : held + chunk], 0)])",
        "context.decode([Span(sequence, [*tokens[held : held + chunk - 1], tokens[0]], 0)])",
        ("generations",),
    ),
    Mutant(
        "a draw from the whole vocabulary misses a chunk",
        "sampling/laws.py",
        "below = edges[chunk - 1] if chunk else 0.0",
        "below = edges[chunk - 2] if chunk > 1 else 0.0",
        ("rule",),
    ),
    Mutant(
        "a difference of whole laws forgets the draft's total",
        "sampling/laws.py",
        "q.weights[:shared_size] * q.weights.dtype.type(1.0 / q.total)",
        "q.weights[:shared_size] * q.weights.dtype.type(1.0 / p.total)",
        ("rule",),
    ),
    Mutant(
        "a difference of a whole law and a copy takes half of it",
        "sampling/laws.py",
        "weights[q.ids[shared]] -= q.probs[shared]",
        "weights[q.ids[shared]] -= q.probs[shared] / 2",
        ("rule",),
    ),
    Mutant(
        "a race over the whole vocabulary asks one group",
        "sampling/laws.py",
        "self._members(np.flatnonzero(least / heaviest <= soonest))",
        "self._members(np.array([heaviest.argmax()]))",
        ("rule",),
    ),
    Mutant(
        "noise is not exponential",
        "sampling/noise.py",
        "return -np.log1p(-((bits",
        "return (((bits",
        ("replay",),
    ),
    Mutant(
        "stop strings in a draft are overlooked",
        "engine.py",
        "watched = g.request.watch is not None and g.request.watch(token)",
        "watched = g.request.watch is not None and g.request.watch(token) and i == len(tokens) - 1",
        ("endings",),
    ),
    Mutant(
        "tokens follow the end",
        "engine.py",
        "                tokens = tokens[: i + 1]\n                break\n",
        "                break\n",
        ("endings",),
    ),
    Mutant(
        "max_tokens is one too many",
        "engine.py",
        "            elif num_emitted == g.request.max_tokens:\n",
        "            elif num_emitted > g.request.max_tokens:\n",
        ("endings",),
    ),
    Mutant(
        "statistics count drafts behind the end",
        "engine.py",
        'min(len(draft.tokens), len(emitted)) if g.finish_reason == "stop" else len(draft.tokens)',
        "len(draft.tokens)",
        ("endings",),
    ),
    Mutant(
        "the text shows part of the stop string",
        "text/streaming.py",
        "            return StopResult(text[:start], self._matched)\n",
        "            return StopResult(text[: start + 1], self._matched)\n",
        ("endings",),
    ),
)


def broken_copy(mutant: Mutant | None, directory: Path) -> None:
    """Put a copy of the package, broken by ``mutant``, into ``directory``.

    Raises:
        ValueError: the text that is to be replaced does not occur exactly once.
    """
    shutil.copytree(ROOT / "localspec", directory / "localspec", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "models.toml", directory)
    if mutant is None:
        return
    path = directory / "localspec" / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"mutant {mutant.name!r}: {mutant.file} has {text.count(mutant.old)} places that read {mutant.old!r};"
            " it must have exactly one. The source has changed: change the mutant too"
        )
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def failed_parts(mutant: Mutant | None, arguments: Sequence[str], *, budget: str | None = None) -> list[str]:
    """Return which parts of a check fail under ``mutant``; "crash" where it did not come to a report."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        broken_copy(mutant, directory)
        chosen = budget or (mutant.budget if mutant else BUDGET)
        command = [
            sys.executable,
            "-m",
            "localspec",
            "check",
            "--json",
            "--ctx",
            "512",
            "--budget",
            chosen,
            *arguments,
        ]
        environment = {**os.environ, "PYTHONPATH": name, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=name, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout.strip():
        print(done.stderr.strip(), file=sys.stderr)
        return ["crash"]
    report = json.loads(done.stdout)
    failed = [finding["part"] for finding in report["findings"] if not finding["passed"]]
    assert (done.returncode == 0) == (not failed), "the exit code and the report disagree"
    return failed


def keep(path: Path, pair: str, results: Mapping[str, Sequence[str]]) -> None:
    """Put results into the record of a pair, which has the mutants of today in their order."""
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = {**(record["failed"] if record.get("pair") == pair else {}), **results}
    names = [UNBROKEN, *(mutant.name for mutant in MUTANTS)]
    record = {"pair": pair, "failed": {name: found[name] for name in names if name in found}}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these mutants (a part of their name)")
    parser.add_argument("--pair", default=PAIR)
    parser.add_argument("--budget", help="of each check; default what the mutant takes")
    options = parser.parse_args()
    arguments = ["--pair", options.pair]
    chosen = [m for m in MUTANTS if not options.names or any(name in m.name for name in options.names)]
    missed: list[str] = []
    if not options.names or UNBROKEN in options.names:
        failed = failed_parts(None, arguments, budget=options.budget)
        keep(RECORD, options.pair, {UNBROKEN: failed})
        missed += [UNBROKEN] if failed else []
        print(f"{UNBROKEN:<64} {'FAILS: ' + ', '.join(failed) if failed else 'passes'}", flush=True)
    for mutant in chosen:
        failed = failed_parts(mutant, arguments, budget=options.budget)
        keep(RECORD, options.pair, {mutant.name: failed})
        caught = bool(set(failed) & set(mutant.caught_by))
        missed += [] if caught else [mutant.name]
        print(f"{mutant.name:<64} {', '.join(failed) or 'passes'}{'' if caught else '   MISSED'}", flush=True)
    if missed:
        print(f"missed, or not caught where they should be: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
