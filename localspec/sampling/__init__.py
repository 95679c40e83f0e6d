"""Laws, verification rules and noise: pure numpy, no model, no input or output."""

from localspec.sampling.chain import RecentTokens, law, make_law
from localspec.sampling.kept import KeptIds
from localspec.sampling.laws import DenseLaw, Ids, Law, SparseLaw, residual
from localspec.sampling.noise import PositionNoise, StepNoise, Stream, Uniforms, check_seed, fresh_seed, record_seed
from localspec.sampling.params import (
    LLAMACPP_DEFAULTS,
    Rule,
    SamplerOrder,
    SamplingParams,
    check_rule,
    draft_params,
    is_number,
)
from localspec.sampling.rules import Verification, verification_law, verify, verify_coupled, verify_laws

__all__ = [
    "LLAMACPP_DEFAULTS",
    "DenseLaw",
    "Ids",
    "KeptIds",
    "Law",
    "PositionNoise",
    "RecentTokens",
    "Rule",
    "SamplerOrder",
    "SamplingParams",
    "SparseLaw",
    "StepNoise",
    "Stream",
    "Uniforms",
    "Verification",
    "check_rule",
    "check_seed",
    "draft_params",
    "fresh_seed",
    "is_number",
    "law",
    "make_law",
    "record_seed",
    "residual",
    "verification_law",
    "verify",
    "verify_coupled",
    "verify_laws",
]
