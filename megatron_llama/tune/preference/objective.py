"""The objective of preference tuning. The weight of each token's gradient follows from the
log-probabilities of whole completions, which are known once the losses of all tokens are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_llama.engine.comm.collectives import all_reduce
from megatron_llama.engine.mesh import Mesh
from megatron_llama.model.nn.context import local_sequence
from megatron_llama.model.nn.loss import TokenWeights
from megatron_llama.pipeline.microbatch import Microbatch
from megatron_llama.pipeline.objective import MicrobatchLoss, Objective, StepLoss
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.tune.preference.align_config import AlignConfig
from megatron_llama.tune.preference.methods import CHOSEN, OF_PAIRS, Completions, Judged, kto

_LOSS = 0
_NAMES = (
    "loss",
    "chosen",
    "rejected",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
    "kl",
    "nll_loss",
    "nll_tokens",
    "log_odds_ratio",
    "log_odds_chosen",
)
"""The sums over a global batch, in this order. ``chosen`` and ``rejected`` are counts, by which the
others are divided."""


class Preferences:
    """The mean loss of a method over the pairs of the global batch, or over its completions for
    kto, and the numbers that people watch beside it."""

    length = len(_NAMES)

    def __init__(self, options: AlignConfig) -> None:
        self.options = options
        self.likelihood_weight = 1.0 if options.method == "orpo" else options.sft_loss_weight
        """The weight of the mean negative log-likelihood of the tokens in ``loss_mask``."""

    def preliminary(
        self, batches: Sequence[Microbatch]
    ) -> tuple[Sequence[Microbatch], Objective] | None:
        """Return the mismatched completions, from which kto estimates the divergence."""
        if self.options.method != "kto":
            return None
        mismatched = [batch.mismatched for batch in batches if batch.mismatched is not None]
        assert len(mismatched) == len(batches), "samples for kto have mismatched completions"
        return mismatched, _Divergence()

    def begin(self, batches: Sequence[Microbatch], mesh: Mesh, known: Tensor | None) -> StepLoss:
        """Count the pairs of the global batch, and the tokens of its likelihood term. Collective
        over dp."""
        counts = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        for batch in batches:
            kinds = _given(batch.completion_kinds)
            counted = kinds > 0 if self.options.method == "kto" else kinds == CHOSEN
            counts[0] += counted.sum().to(mesh.device, non_blocking=True)
            if batch.loss_mask is not None:
                counts[1] += batch.loss_mask.sum().to(mesh.device, non_blocking=True)
        # The sum includes all ranks that share a sequence, each of which counts all of it.
        counts /= mesh.cp.size
        all_reduce(counts, mesh.dp, async_op=False).wait()
        divergence = None if known is None else (known[1] / known[2].clamp(min=1.0)).clamp(min=0.0)
        return _PreferenceLoss(self, mesh, counts.clamp_(min=1.0), divergence)

    def means(self, sums: Tensor) -> Mapping[str, Tensor]:
        """Return the numbers of the log, under TRL's names."""
        by_name = dict(zip(_NAMES, sums, strict=True))
        chosen = by_name["chosen"]
        rejected = by_name["rejected"]
        means = {
            "rewards/chosen": by_name["rewards/chosen"] / chosen,
            "rewards/rejected": by_name["rewards/rejected"] / rejected,
        }
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        if self.options.method != "kto":
            means["rewards/accuracies"] = by_name["rewards/accuracies"] / chosen
        if self.options.method != "reward":
            means["logps/chosen"] = by_name["logps/chosen"] / chosen
            means["logps/rejected"] = by_name["logps/rejected"] / rejected
        if self.options.method == "kto":
            means["kl"] = by_name["kl"] / (chosen + rejected)
        if self.likelihood_weight:
            means["nll_loss"] = by_name["nll_loss"] / by_name["nll_tokens"]
        if self.options.method == "orpo":
            means["log_odds_ratio"] = by_name["log_odds_ratio"] / chosen
            means["log_odds_chosen"] = by_name["log_odds_chosen"] / chosen
        return means


class _PreferenceLoss:
    def __init__(
        self, objective: Preferences, mesh: Mesh, counts: Tensor, divergence: Tensor | None
    ) -> None:
        self.objective = objective
        self.mesh = mesh
        self.weight, self.likelihood_tokens = counts.unbind()
        self.divergence = divergence

    def microbatch(self, batch: Microbatch) -> MicrobatchLoss:
        return _PreferenceShare(self, batch)


class _PreferenceShare:
    """The share of one microbatch. Its losses are seen once: ``weights`` and ``sums`` use the same
    sums over completions."""

    def __init__(self, step: _PreferenceLoss, batch: Microbatch) -> None:
        self._step = step
        self._batch = batch
        self._ids = local_sequence(_given(batch.completion_ids), step.mesh.cp)
        self._mask = (
            None if batch.loss_mask is None else local_sequence(batch.loss_mask, step.mesh.cp)
        )
        self._logps: Tensor | None = None

    def weights(self, scale: Tensor) -> TokenWeights:
        step = self._step
        likelihood_weight = step.objective.likelihood_weight

        def of(losses: Tensor) -> Tensor:
            with torch.enable_grad():
                logps = self._completion_logps(losses).requires_grad_()
                total = self._judged(logps)[1].sum() / step.weight
            (by_completion,) = torch.autograd.grad(total, logps)
            # The row of zeros is for tokens of no completion, which have the number 0.
            padded = torch.cat((torch.zeros_like(by_completion[:1]), by_completion))
            # The loss of a token is its negative log-probability.
            weights = -padded.gather(0, self._ids.long())
            if self._mask is not None and likelihood_weight:
                weights += self._mask * (likelihood_weight / step.likelihood_tokens)
            return (weights * scale).to(scale.dtype)

        return of

    def sums(self, losses: Tensor) -> Tensor:
        step = self._step
        objective = step.objective
        logps = self._completion_logps(losses)
        judged, pair_losses, chosen, rejected = self._judged(logps)
        zero = logps.new_zeros(())

        def total(values: Tensor, where: Tensor) -> Tensor:
            return torch.where(where, values, 0.0).sum()

        # Each rank that shares the samples (cp) has all completions, and gives its part of the
        # sums.
        cp = step.mesh.cp.size
        sums = {
            "chosen": chosen.sum(dtype=torch.float64),
            "rejected": rejected.sum(dtype=torch.float64),
            "rewards/chosen": total(judged.rewards[0], chosen),
            "rewards/rejected": total(judged.rewards[1], rejected),
            "rewards/accuracies": zero,
            "logps/chosen": total(judged.logps[0], chosen),
            "logps/rejected": total(judged.logps[1], rejected),
            "kl": zero,
            **{name: total(values, chosen) for name, values in judged.extra.items()},
        }
        if step.divergence is None:
            accurate = (judged.rewards[0] > judged.rewards[1]).to(torch.float64)
            sums["rewards/accuracies"] = total(accurate, chosen)
        else:
            sums["kl"] = step.divergence * (sums["chosen"] + sums["rejected"])
        sums = {name: value / cp for name, value in sums.items()}
        loss = pair_losses.sum() / step.weight / cp
        if self._mask is not None:
            sums["nll_loss"] = (losses * self._mask).sum(dtype=torch.float64)
            sums["nll_tokens"] = self._mask.sum(dtype=torch.float64)
            likelihood = sums["nll_loss"] / step.likelihood_tokens
            loss = loss + objective.likelihood_weight * likelihood
        return torch.stack([{**sums, "loss": loss}.get(name, zero) for name in _NAMES])

    def _completion_logps(self, losses: Tensor) -> Tensor:
        if self._logps is None:
            completions = _given(self._batch.completion_kinds).shape[0]
            self._logps = _sums_of_completions(losses, self._ids, completions, self._step.mesh)
        return self._logps.detach()

    def _judged(self, logps: Tensor) -> tuple[Judged, Tensor, Tensor, Tensor]:
        """Return the method's results for completions with these log-probabilities [c, b], the
        losses with 0 for absent ones, and the masks of chosen and of rejected ones."""
        options = self._step.objective.options
        kinds = _given(self._batch.completion_kinds)
        ids = _given(self._batch.completion_ids)
        lengths = torch.stack(
            [(ids == number + 1).sum(0, dtype=torch.float64) for number in range(len(kinds))]
        ).clamp_(min=1.0)
        reference = self._batch.reference_logps
        if reference is None:
            reference = torch.zeros_like(logps)
        completions = Completions(logps, lengths, reference)
        if options.method == "kto":
            good = kinds == CHOSEN
            judged = kto(options, completions, good, _given(self._step.divergence))
            present = kinds > 0
            losses = torch.where(present, judged.losses, 0.0)
            return judged, losses, good, present & ~good
        present = kinds[0::2] == CHOSEN
        chosen, rejected = (
            Completions(logps[half::2], lengths[half::2], reference[half::2]) for half in (0, 1)
        )
        judged = OF_PAIRS[options.method](options, chosen, rejected)
        return judged, torch.where(present, judged.losses, 0.0), present, present


class _Divergence:
    """The sum of R over completions of other prompts. kto takes their mean as its estimate of the
    divergence (Ethayarajh et al., 2024, section 4.1)."""

    length = 3

    def preliminary(self, batches: Sequence[Microbatch]) -> None:
        return None

    def begin(self, batches: Sequence[Microbatch], mesh: Mesh, known: Tensor | None) -> StepLoss:
        return _DivergenceSums(mesh)

    def means(self, sums: Tensor) -> Mapping[str, Tensor]:
        return {}


class _DivergenceSums:
    def __init__(self, mesh: Mesh) -> None:
        self.weight = torch.ones((), dtype=torch.float64, device=mesh.device)
        self._mesh = mesh

    def microbatch(self, batch: Microbatch) -> MicrobatchLoss:
        return _CompletionShare(batch, self._mesh)


class _CompletionShare:
    """A reader of the log-probabilities of completions, without a loss."""

    def __init__(self, batch: Microbatch, mesh: Mesh, found: list[Tensor] | None = None) -> None:
        """``found`` gets the log-probabilities, [c, b] fp64, on every rank that shares the
        samples."""
        self._batch = batch
        self._mesh = mesh
        self._found = found

    def weights(self, scale: Tensor) -> Tensor:
        raise RuntimeError("these completions are not trained on")

    def sums(self, losses: Tensor) -> Tensor:
        ids = local_sequence(_given(self._batch.completion_ids), self._mesh.cp)
        kinds = _given(self._batch.completion_kinds)
        logps = _sums_of_completions(losses, ids, len(kinds), self._mesh)
        if self._found is not None:
            self._found.append(logps)
        reference = self._batch.reference_logps
        ratios = logps if reference is None else logps - reference
        present = kinds > 0
        total = torch.where(present, ratios, 0.0).sum()
        return torch.stack((torch.zeros_like(total), total, present.sum())) / self._mesh.cp.size


class _CompletionReader(_Divergence):
    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def begin(self, batches: Sequence[Microbatch], mesh: Mesh, known: Tensor | None) -> StepLoss:
        return _CompletionReading(mesh, self.found)


class _CompletionReading(_DivergenceSums):
    def __init__(self, mesh: Mesh, found: list[Tensor]) -> None:
        super().__init__(mesh)
        self._found = found

    def microbatch(self, batch: Microbatch) -> MicrobatchLoss:
        return _CompletionShare(batch, self._mesh, self._found)


def completion_logps(runtime: PipelineRuntime, batches: Sequence[Microbatch]) -> Tensor:
    """Return the log-probability of every completion of some microbatches, fp64 [m, c, b], on all
    ranks that share the samples. Forward only. Collective: all ranks give as many microbatches."""
    mesh = runtime.mesh
    reader = _CompletionReader()
    runtime.evaluate(batches, reader)
    if reader.found:
        # The last stage runs its microbatches in their order, in every schedule.
        logps = torch.stack(reader.found)
    else:
        shape = (len(batches), *_given(batches[0].completion_kinds).shape)
        logps = torch.zeros(shape, dtype=torch.float64, device=mesh.device)
    all_reduce(logps, mesh.pp, async_op=False).wait()
    return logps


def _sums_of_completions(losses: Tensor, ids: Tensor, completions: int, mesh: Mesh) -> Tensor:
    """Return the log-probability of each completion [c, b], fp64, from the negative ones of the
    tokens [s, b] of this rank's part of the sequence. Collective over cp."""
    # Each completion has its own sum: a scattered addition has no fixed order on a GPU.
    sums = torch.stack(
        [
            torch.where(ids == number + 1, losses, 0.0).sum(0, dtype=torch.float64)
            for number in range(completions)
        ]
    ).neg_()
    all_reduce(sums, mesh.cp, async_op=False).wait()
    return sums


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "samples to compare have completions"
    return tensor
