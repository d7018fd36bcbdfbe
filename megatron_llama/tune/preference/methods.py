"""The methods of preference tuning, as functions of the log-probabilities of completions.

L is the log-probability of a completion y after its prompt x, the sum over the tokens of y; |y| is
their number, and R = L - L_reference. The loss of a method is a mean over the pairs of the global
batch (for kto over its completions), and may have a term that is the mean over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.tune.preference.align_config import BETAS, AlignConfig

CHOSEN = 1
"""The kind of a chosen or desirable completion."""
REJECTED = 2
"""The kind of a rejected or undesirable completion."""


@dataclass(frozen=True)
class Completions:
    """The completions of some samples, each tensor fp64 and of the same shape."""

    logps: Tensor
    """L; for a reward model the score."""
    lengths: Tensor
    """|y|, at least 1."""
    reference: Tensor
    """L of the reference; 0 for a method that has none."""

    @property
    def averages(self) -> Tensor:
        """L / |y|."""
        return self.logps / self.lengths

    @property
    def ratios(self) -> Tensor:
        """R."""
        return self.logps - self.reference


@dataclass(frozen=True)
class Judged:
    """The results of a method for each completion or pair."""

    losses: Tensor
    """The loss of each pair, or of each completion for kto."""
    rewards: tuple[Tensor, Tensor]
    """Rewards of the chosen and the rejected completions; for kto both are those of all
    completions."""
    logps: tuple[Tensor, Tensor]
    """Log-probabilities as in the log: sums, for orpo and simpo averages."""
    extra: Mapping[str, Tensor]
    """More numbers of each pair, by the names of the log."""


def beta_of(options: AlignConfig) -> float:
    """Return --beta, or the default of the method."""
    return BETAS.get(options.method, 0.0) if options.beta is None else options.beta


def dpo(options: AlignConfig, chosen: Completions, rejected: Completions) -> Judged:
    """Direct preference optimization (Rafailov et al., 2023, equation 7), with label smoothing as
    conservative DPO (Mitchell, 2023), and with lengths normalized as in Tulu 3 (Lambert et al.,
    2024, section 5.1)."""
    beta = beta_of(options)
    if options.length_normalization:
        margins = chosen.ratios / chosen.lengths - rejected.ratios / rejected.lengths
    else:
        margins = chosen.ratios - rejected.ratios
    losses = _smoothed(beta * margins, options.label_smoothing)
    rewards = (beta * chosen.ratios, beta * rejected.ratios)
    return Judged(losses, rewards, (chosen.logps, rejected.logps), {})


def ipo(options: AlignConfig, chosen: Completions, rejected: Completions) -> Judged:
    """Identity preference optimization (Azar et al., 2023, equation 17), with ``beta`` as tau, on
    averages over tokens, as its authors recommend and TRL does."""
    beta = beta_of(options)
    margins = chosen.ratios / chosen.lengths - rejected.ratios / rejected.lengths
    losses = (margins - 1 / (2 * beta)).square()
    rewards = (beta * chosen.ratios, beta * rejected.ratios)
    return Judged(losses, rewards, (chosen.logps, rejected.logps), {})


def orpo(options: AlignConfig, chosen: Completions, rejected: Completions) -> Judged:
    """Odds ratio preference optimization (Hong et al., 2024, equations 6 and 7) without its
    likelihood term, which is a mean over tokens."""
    beta = beta_of(options)
    odds = _log_odds(chosen.averages) - _log_odds(rejected.averages)
    ratio = F.logsigmoid(odds)
    rewards = (beta * chosen.averages, beta * rejected.averages)
    extra = {"log_odds_ratio": ratio, "log_odds_chosen": odds}
    return Judged(-beta * ratio, rewards, (chosen.averages, rejected.averages), extra)


def simpo(options: AlignConfig, chosen: Completions, rejected: Completions) -> Judged:
    """Simple preference optimization (Meng et al., 2024, equation 6)."""
    beta = beta_of(options)
    rewards = (beta * chosen.averages, beta * rejected.averages)
    losses = -F.logsigmoid(rewards[0] - rewards[1] - options.simpo_gamma)
    return Judged(losses, rewards, (chosen.averages, rejected.averages), {})


def reward(options: AlignConfig, chosen: Completions, rejected: Completions) -> Judged:
    """Likelihood of the preferences under Bradley and Terry's model (Ouyang et al., 2022, equation
    1), with scores held near zero (Eisenstein et al., 2023)."""
    scores = (chosen.logps, rejected.logps)
    losses = -F.logsigmoid(scores[0] - scores[1])
    if options.center_rewards_coefficient:
        losses = losses + options.center_rewards_coefficient * (scores[0] + scores[1]).square()
    return Judged(losses, scores, scores, {})


OF_PAIRS: Mapping[str, Callable[[AlignConfig, Completions, Completions], Judged]] = (
    MappingProxyType({"dpo": dpo, "ipo": ipo, "orpo": orpo, "simpo": simpo, "reward": reward})
)
"""The methods that compare the two completions of a pair."""


def kto(options: AlignConfig, each: Completions, good: Tensor, divergence: Tensor) -> Judged:
    """Kahneman-Tversky optimization (Ethayarajh et al., 2024, equation 8), less the constant
    lambda_y of its loss. ``good`` says which completions are desirable; ``divergence``, 0-dim, is
    the estimate z_0 of the divergence from the reference, at least 0."""
    beta = beta_of(options)
    rewards = beta * each.ratios
    gains = torch.where(good, rewards - beta * divergence, beta * divergence - rewards)
    weights = torch.where(good, options.desirable_weight, options.undesirable_weight)
    losses = weights.to(gains.dtype) * (1 - torch.sigmoid(gains))
    return Judged(losses, (rewards, rewards), (each.logps, each.logps), {})


def _smoothed(margins: Tensor, smoothing: float) -> Tensor:
    """Return the negative log-likelihood of preferences, a share of which is assumed wrong."""
    losses = -F.logsigmoid(margins)
    if not smoothing:
        return losses
    return (1 - smoothing) * losses - smoothing * F.logsigmoid(-margins)


def _log_odds(averages: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of p = exp(averages), without cancellation where p is near 0 or
    1."""
    # p is never 1: a likelihood of exactly 1 would have infinite odds, and no gradient.
    negative = averages.clamp(max=-torch.finfo(averages.dtype).tiny)
    return averages - torch.log(-torch.expm1(negative))
