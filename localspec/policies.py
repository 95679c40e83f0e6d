"""Which policy decides how much to draft, for a pair and the settings in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from localspec.adaptive import AdaptivePolicy
from localspec.errors import InvalidOptionError, ProfileError
from localspec.policy import FixedPolicy, Policy, check_num_draft_tokens
from localspec.profile import Profile
from localspec.sampling import SamplingParams
from localspec.tuning import DrafterName, PolicyName, ProfileLookup, RoughProfile, policy_for
from localspec.wording import counted

__all__ = ["PolicyChooser"]


class PolicyChooser:
    """Chooses policies for a pair, and keeps them: what one learned of text and machine holds for the next answer.

    Args:
        lookup: the pair's profile, or why there is none.
        has_draft: whether there is a draft model.
    """

    def __init__(self, lookup: ProfileLookup, *, has_draft: bool) -> None:
        self._lookup = lookup
        self._has_draft = has_draft
        self._measured: Profile | RoughProfile | None = lookup.profile
        self._policies: dict[tuple[PolicyName, DrafterName, float], Policy] = {}

    def choose(
        self,
        num_draft_tokens: int | None,
        name: PolicyName,
        params: SamplingParams,
        drafter: DrafterName,
        *,
        measure: Callable[[], RoughProfile],
    ) -> Policy:
        """Return what decides; arguments as ``Session.stream``.

        Args:
            num_draft_tokens: γ, if it is set.
            name: how it is decided otherwise.
            params: sampling settings.
            drafter: where drafts come from.
            measure: returns the costs that a draft model needs where there is no profile; asked once.

        Raises:
            InvalidOptionError: there is nothing to draft with, or no such policy or drafter.
            ProfileError: "calibrated" is asked for and there is no profile.
        """
        source = self._source(num_draft_tokens, drafter)
        if num_draft_tokens is not None:
            return FixedPolicy(0, num_draft_tokens) if source == "lookup" else FixedPolicy(num_draft_tokens)
        _check_name(name)
        if name == "calibrated" and drafter == "lookup":
            raise InvalidOptionError("the policy calibrated is for draft models; use adaptive with lookup")
        if not self._has_draft and (source == "model" or name == "calibrated"):
            return FixedPolicy(0)
        key = (name, source, params.temperature)
        if key not in self._policies:
            measured = self._costs(name, source, measure)
            self._policies[key] = policy_for(measured, params, name=name, drafter=source)
        policy = self._policies[key]
        if isinstance(policy, AdaptivePolicy):
            policy.renew()
        return policy

    def check(self, num_draft_tokens: int | None, name: PolicyName) -> None:
        """Refuse what ``choose`` would refuse to a batch, which drafts by a model or not at all."""
        _check_name(name)
        if num_draft_tokens is not None:
            check_num_draft_tokens(num_draft_tokens)
            if num_draft_tokens and not self._has_draft:
                raise _no_draft(num_draft_tokens)
        elif self._has_draft and name == "calibrated" and self._lookup.profile is None:
            raise self._no_profile()

    def _source(self, num_draft_tokens: int | None, drafter: DrafterName) -> DrafterName:
        """Return where drafts come from here and now."""
        if drafter not in get_args(DrafterName):
            raise InvalidOptionError(f"drafter is {drafter!r}; use one of {', '.join(get_args(DrafterName))}")
        if drafter == "model" and not self._has_draft and num_draft_tokens:
            raise _no_draft(num_draft_tokens, "draft by lookup (--drafter lookup), ")
        if drafter != "auto":
            return drafter
        if not self._has_draft:
            return "lookup"
        return "auto" if num_draft_tokens is None else "model"

    def _costs(
        self, name: PolicyName, source: DrafterName, measure: Callable[[], RoughProfile]
    ) -> Profile | RoughProfile | None:
        """Return what is known of costs, measured if a draft model needs it and it is not known."""
        if self._measured is None:
            if name == "calibrated":
                raise self._no_profile()
            if self._has_draft and source != "lookup":
                self._measured = measure()
        return self._measured

    def _no_profile(self) -> ProfileError:
        return ProfileError(f"{self._lookup.problem}, or leave out --policy calibrated")


def _check_name(name: PolicyName) -> None:
    if name not in get_args(PolicyName):
        raise InvalidOptionError(f"policy is {name!r}; use one of {', '.join(get_args(PolicyName))}")


def _no_draft(num_draft_tokens: int, remedy: str = "") -> InvalidOptionError:
    need = "needs" if num_draft_tokens == 1 else "need"
    return InvalidOptionError(
        f"{counted(num_draft_tokens, 'draft token')} {need} a draft model; name one with --draft, {remedy}or use"
        " --gamma 0"
    )
