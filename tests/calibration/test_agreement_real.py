"""Agreement of a real pair: SmolLM2 and its own Q4_0 quantisation."""

import numpy as np
import pytest

from localspec.backend import Span
from localspec.calibration.agreement import AgreementPlan, best_draft_temperatures, observe, summarise
from localspec.calibration.confidence import fit_confidence
from localspec.calibration.prompts import built_in_prompts, take_turns
from localspec.sampling import SamplingParams
from localspec.session import load_pair

pytestmark = pytest.mark.model


def test_a_pair_and_its_greedy_agreement(smollm2_path, smollm2_q4_0_path):
    prompts = take_turns(built_in_prompts())[:4]
    plan = AgreementPlan(params=SamplingParams(top_p=0.95), temperatures=(0.0, 0.7), tokens_per_prompt=16)
    with load_pair(target=smollm2_path, draft=smollm2_q4_0_path, context=512, template="chatml") as session:
        target, draft = session.pair.target, session.pair.draft
        found = list(
            observe(
                target,
                draft,
                prompts,
                plan,
                encode=session.encode,
                ends_generation=session.vocabulary.ends_generation,
            )
        )
        assert target.length(0) == draft.length(0) == 0
        agreed, near_ties = [], 0
        for observation in (o for o in found if o.temperature == 0):
            # The draft's choices once more, one token at a time, as it would draft them.
            path, prompt = [], session.encode(prompts[observation.prompt].content)
            agreed.append(0)
            for overlap in observation.overlap:
                rows = [c.decode([Span(0, [*prompt, *path][c.length(0) :], 1)])[0].copy() for c in (target, draft)]
                choices = [int(row.argmax()) for row in rows]
                # Kernels for other sizes of a pass round differently, and a near-tie may flip.
                top_two = [np.sort(row)[-2:] for row in rows]
                near_ties += overlap != (choices[0] == choices[1]) and min(b - a for a, b in top_two) < 0.5
                agreed[-1] += choices[0] == choices[1]
                path.append(choices[0])
            for context in (target, draft):
                context.truncate(0, 0)
    summaries = summarise(found, max_draft_tokens=4)
    assert {(s.kind, s.temperature) for s in summaries} == {
        (kind, temperature) for kind in ("code", "editing", "prose", "questions", "all") for temperature in (0, 0.7)
    }
    greedy, sampled = summaries[-2:]
    assert abs(greedy.acceptance_rate * greedy.num_tokens - sum(agreed)) <= near_ties
    for summary in summaries:
        assert 0 < summary.acceptance_rate <= 1
        for rule in (summary.token, summary.block):
            assert all(1 <= value <= gamma + 1 for gamma, value in enumerate(rule.tokens_per_step))
    assert greedy.token.tokens_per_step == pytest.approx(greedy.block.tokens_per_step)
    assert sampled.block.tokens_per_step[4] >= sampled.token.tokens_per_step[4]
    assert all(d.temperature == 0.7 for d in best_draft_temperatures(found))
    hot = [o for o in found if o.temperature == 0.7]
    model = fit_confidence(*(np.concatenate([getattr(o, name) for o in hot]) for name in ("confidence", "overlap")))
    assert model.predict(0.2) <= model.predict(0.99)
