"""Laws, verification rules and noise: pure numpy, no model, no input or output."""

from localspec.sampling.laws import DenseLaw, Law, SparseLaw, law, make_law, residual
from localspec.sampling.noise import StepNoise, Stream, Uniforms, fresh_seed
from localspec.sampling.params import LLAMACPP_DEFAULTS, Rule, SamplingParams, check_rule, is_number
from localspec.sampling.rules import Verification, verification_law, verify, verify_laws

__all__ = [
    "LLAMACPP_DEFAULTS",
    "DenseLaw",
    "Law",
    "Rule",
    "SamplingParams",
    "SparseLaw",
    "StepNoise",
    "Stream",
    "Uniforms",
    "Verification",
    "check_rule",
    "fresh_seed",
    "is_number",
    "law",
    "make_law",
    "residual",
    "verification_law",
    "verify",
    "verify_laws",
]
