"""Options of ``align``."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from megatron_llama.option import Check, left_out, option, section

Method = Literal["dpo", "ipo", "orpo", "simpo", "kto", "reward"]
PairFormat = Literal[
    "auto", "trl", "openai", "alpaca", "sharegpt", "ultrafeedback", "completion_label"
]

BETAS = MappingProxyType({"dpo": 0.1, "ipo": 0.1, "orpo": 0.1, "simpo": 2.0, "kto": 0.1})
"""The default ``beta`` of each method that has one."""
WITH_REFERENCE = ("dpo", "ipo", "kto")
"""The methods that compare the model with a reference."""


@section(small=left_out("prove runs pretrain and sft"))
@dataclass(frozen=True)
class AlignConfig:
    """The method of preference tuning, and what it compares with."""

    method: Method = "dpo"
    """`dpo` (Rafailov et al., 2023), `ipo` (Azar et al., 2023), `orpo` (Hong et al., 2024), `simpo`
    (Meng et al., 2024), `kto` (Ethayarajh et al., 2024; single answers that are good or bad), or
    `reward`: a reward model (Bradley-Terry)."""
    beta: float | None = None
    """How strongly the model is held to the reference (dpo, kto), the paper's tau (ipo), the weight
    of the odds ratio, lambda (orpo), or the scale of the rewards (simpo). Default: 0.1, for simpo
    2."""
    label_smoothing: float = option(
        0.0,
        check=Check(
            lambda value: 0 <= value < 0.5,
            "0 or more, and less than 0.5",
            "give the share of pairs that are taken to be swapped: of one half nothing is left",
        ),
    )
    """dpo: the share of pairs whose labels are taken to be swapped (conservative DPO). Below 0.5.
    """
    length_normalization: bool = False
    """dpo: compare means over the tokens of an answer rather than sums. ipo, orpo and simpo always
    do."""
    sft_loss_weight: float = 0.0
    """dpo, ipo, simpo: add so many times the mean negative log-likelihood of the chosen answers'
    tokens (RPO)."""
    simpo_gamma: float = 0.5
    """simpo: the margin by which the reward of a chosen answer is to exceed that of the rejected
    one."""
    desirable_weight: float = 1.0
    """kto: the weight of good answers."""
    undesirable_weight: float = 1.0
    """kto: the weight of bad answers. Their ratio is to make up for unequal numbers."""
    center_rewards_coefficient: float = 0.0
    """reward: the weight of the squared sum of both scores of a pair, which keeps scores near zero
    (Eisenstein et al., 2023)."""
    preference_format: PairFormat = "auto"
    """Format of the examples: `trl` (`prompt`, `chosen`, `rejected`), `openai` (`input`,
    `preferred_output`, `non_preferred_output`), `alpaca` (`instruction`, `input`, `chosen`,
    `rejected`), `sharegpt` (`conversations`, `chosen`, `rejected`), `ultrafeedback` (whole
    conversations as `chosen` and `rejected`), `completion_label` (kto: `prompt`, `completion`,
    `label`). `auto`: that of the first example of each file."""
    reference_scores: str | None = None
    """File of the reference's log-probabilities: read if it is there, else written; that of the
    validation samples has `.validation` before its ending. Default: beside the first file of the
    examples, named after it and after what the scores belong to."""
    only_reference_scores: bool = False
    """Write the reference's log-probabilities and end."""
