"""Twenty steps of every method of preference tuning under any layout, and the plain torch that they must equal."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Batch
from megatron_llama.launch.launcher import Place
from megatron_llama.pipeline.build import compute_dtype, runtime_class
from megatron_llama.tune.preference.align_config import AlignConfig
from megatron_llama.tune.preference.objective import Preferences
from torch import Tensor

from tests import torch_twin
from tests.parallel.cases import GLOBAL_BATCH_SIZE, OPTIMIZER, SEQ_LENGTH, Layout, Record, Trainer, record, token_ids, trainer
from tests.torch_twin import adamw, hf_model

PAIRS_OF_A_SAMPLE = 2
CASES = {
    "dpo": AlignConfig("dpo", beta=0.3),
    "dpo smoothed": AlignConfig("dpo", label_smoothing=0.2, sft_loss_weight=0.5),
    "dpo normalized": AlignConfig("dpo", beta=2.0, length_normalization=True),
    "ipo": AlignConfig("ipo"),
    "orpo": AlignConfig("orpo", beta=0.5),
    "simpo": AlignConfig("simpo", simpo_gamma=1.0, sft_loss_weight=0.1),
    "kto": AlignConfig("kto", desirable_weight=1.5, undesirable_weight=0.5),
    "reward": AlignConfig("reward", center_rewards_coefficient=0.1),
}
CHUNK = 500
"""Logits that exist at once where the head goes by chunks: less than those of two rows."""


@dataclass(frozen=True)
class RewardLayout(Layout):
    """The same model with a score in the place of its head."""

    def config(self) -> Config:
        config = super().config()
        return replace(config, model=replace(config.model, num_labels=1, pad_token_id=0))


def layout_for(layout: Layout, options: AlignConfig) -> Layout:
    """The layout with the model of a method."""
    return RewardLayout(**vars(layout)) if options.method == "reward" else layout


@dataclass(frozen=True)
class Half:
    """A prompt with a completion."""

    ids: tuple[int, ...]
    prompt: int
    """Ids of the prompt."""
    reference: float
    good: bool

    @property
    def length(self) -> int:
        return len(self.ids) - self.prompt


def halves(sample: int, *, mismatched: bool = False) -> list[Half]:
    """The completions of one sample: of real text, of many lengths; the last pair of every third sample is missing."""
    draw = random.Random(sample)
    text = token_ids(200_000)
    found = []
    for pair in range(PAIRS_OF_A_SAMPLE if sample % 3 else 1):
        prompt = draw.randint(1, 3)
        start = draw.randrange(150_000)
        for half in range(2):
            length = draw.randint(1, 4)
            begin = start + 50 * half + 7 * mismatched
            ids = (*text[start : start + prompt].tolist(), *text[begin + 100 : begin + 100 + length].tolist())
            # About what random weights give.
            reference = -5.7 * length + draw.uniform(-1, 1)
            found.append(Half(ids, prompt, reference, good=bool(draw.getrandbits(1)) if pair else not half))
    return found


def sample_tensors(parts: Sequence[Half], options: AlignConfig, sample: int) -> dict[str, Tensor]:
    """One column of a batch: the halves as documents one behind the other, then padding."""
    columns: dict[str, list[Any]] = {
        name: [] for name in ("tokens", "labels", "loss_mask", "position_ids", "document_ids", "completion_ids")
    }
    for number, half in enumerate(parts):
        scored = options.method == "reward"
        places = range(len(half.ids) - (not scored))
        answers = [place == places[-1] if scored else place + 1 >= half.prompt for place in places]
        chosen = number % 2 == 0
        likely = [chosen and (answer or options.method == "orpo") for answer in answers]
        columns["tokens"] += half.ids[: len(places)]
        columns["labels"] += (*half.ids, 0)[1 : len(places) + 1]
        columns["loss_mask"] += map(float, likely)
        columns["position_ids"] += places
        columns["document_ids"] += [number] * len(places)
        columns["completion_ids"] += [number + 1 if answer else 0 for answer in answers]
    rest = SEQ_LENGTH - len(columns["tokens"])
    for name, column in columns.items():
        column += range(rest) if name == "position_ids" else [len(parts) if name == "document_ids" else 0] * rest
    is_chosen = [half.good if options.method == "kto" else number % 2 == 0 for number, half in enumerate(parts)]
    missing = 2 * PAIRS_OF_A_SAMPLE - len(parts)
    columns["completion_kinds"] = [1 if chosen else 2 for chosen in is_chosen] + [0] * missing
    columns["reference_logps"] = [half.reference for half in parts] + [0.0] * missing
    dtypes = {"loss_mask": torch.float32, "document_ids": torch.int32, "completion_ids": torch.int32, "completion_kinds": torch.int8}
    dtypes["reference_logps"] = torch.float64
    return {name: torch.tensor(column, dtype=dtypes.get(name, torch.int64)) for name, column in columns.items()}


def batch(positions: range, options: AlignConfig, *, mismatched: bool = False) -> Batch:
    columns = [sample_tensors(halves(sample, mismatched=mismatched), options, sample) for sample in positions]
    tensors: dict[str, Any] = {name: torch.stack([column[name] for column in columns], dim=1) for name in columns[0]}
    if options.method != "orpo" and not options.sft_loss_weight:
        del tensors["loss_mask"]
    if options.method in ("orpo", "simpo", "reward"):
        del tensors["reference_logps"]
    inner = batch(positions, options, mismatched=True) if options.method == "kto" and not mismatched else None
    return Batch(**tensors, mismatched=inner)


@dataclass(frozen=True)
class Aligner(Trainer):
    """A trainer whose objective is a method."""

    options: AlignConfig

    def batches(self, index: int) -> list[Batch]:
        size = GLOBAL_BATCH_SIZE // (self.layout.dp * self.layout.microbatches)
        starts = (index * GLOBAL_BATCH_SIZE + (m * self.layout.dp + self.mesh.data_rank) * size for m in range(self.layout.microbatches))
        return [batch(range(start, start + size), self.options) for start in starts]


def aligner(place: Place, layout: Layout, options: AlignConfig, *, chunked: bool = False) -> Aligner:
    """Build everything."""
    layout = layout_for(layout, options)
    run = trainer(place, layout)
    if chunked:
        for stage in run.stages.values():
            stage.options = replace(stage.options, head_chunk=CHUNK)
    config = layout.config()
    runtime = runtime_class(config)(run.stages, run.optimizer, run.mesh, config, dtype=compute_dtype(config), objective=Preferences(options))
    return Aligner(layout, run.mesh, run.stages, run.optimizer, runtime, options)


def align(place: Place, layout: Layout, options: AlignConfig, chunked: bool = False) -> tuple[Record, dict[str, list[float]]]:
    """Run all steps: what is left of them, and the numbers of each."""
    run = aligner(place, layout, options, chunked=chunked)
    numbers: dict[str, list[float]] = {}
    steps = []
    for index in range(layout.steps):
        steps.append(run.step(index))
        for name, value in run.runtime.numbers.items():
            numbers.setdefault(name, []).append(float(value))
    return record(run, steps), numbers


def align_twin(layout: Layout, options: AlignConfig) -> tuple[Record, dict[str, list[float]]]:
    """The same steps with transformers and torch.optim.AdamW, each half a row of its own."""
    layout = layout_for(layout, options)
    model = hf_model(layout.config().model, torch.float64 if layout.fp64 else torch.float32)
    numbers: dict[str, list[float]] = {}

    def losses_of(index: int) -> Iterator[Tensor]:
        places = range(index * GLOBAL_BATCH_SIZE, (index + 1) * GLOBAL_BATCH_SIZE)
        parts = [half for sample in places for half in halves(sample)]
        kl = 0.0
        if options.method == "kto":
            others = [half for sample in places for half in halves(sample, mismatched=True)]
            with torch.no_grad():
                kl = max(0.0, sum(float(sum_of_tokens(model, half)) - half.reference for half in others) / len(others))
        loss, found = plain_loss(model, parts, options, kl)
        for name, value in found.items():
            numbers.setdefault(name, []).append(float(value))
        yield loss

    losses, norms = torch_twin.train(model, adamw(model.parameters(), OPTIMIZER), losses_of, layout.steps, layout.clip)
    return Record(tuple(losses), tuple(norms)), numbers


def tokens_of(model: torch.nn.Module, half: Half) -> Tensor:
    """The log-probability of every id but the first; of a reward model the score of the last, as if it were that of the completion."""
    ids = torch.tensor(half.ids)
    if hasattr(model, "score"):
        score: Tensor = model(ids[None]).logits[0, 0]
        return torch.cat((torch.zeros(half.prompt - 1), score[None]))
    logps = model(ids[None, :-1]).logits[0].log_softmax(-1)
    found: Tensor = logps[torch.arange(len(ids) - 1), ids[1:]]
    return found


def sum_of_tokens(model: torch.nn.Module, half: Half) -> Tensor:
    return tokens_of(model, half)[half.prompt - 1 :].sum()


def plain_loss(model: torch.nn.Module, parts: Sequence[Half], options: AlignConfig, kl: float) -> tuple[Tensor, dict[str, Any]]:
    """A method's loss as its paper writes it, pair by pair."""
    every = [tokens_of(model, half) for half in parts]
    sums = [tokens[half.prompt - 1 :].sum() for tokens, half in zip(every, parts, strict=True)]
    ratios = [value - half.reference for value, half in zip(sums, parts, strict=True)]
    means = [value / half.length for value, half in zip(sums, parts, strict=True)]
    beta = options.beta or {"simpo": 2.0}.get(options.method, 0.1)
    if options.method == "kto":
        terms = [
            options.desirable_weight * (1 - torch.sigmoid(beta * (ratio - kl)))
            if half.good
            else options.undesirable_weight * (1 - torch.sigmoid(beta * (kl - ratio)))
            for ratio, half in zip(ratios, parts, strict=True)
        ]
        good = [beta * float(r.detach()) for r, half in zip(ratios, parts, strict=True) if half.good]
        bad = [beta * float(r.detach()) for r, half in zip(ratios, parts, strict=True) if not half.good]
        numbers = {"kl": kl, "rewards/chosen": sum(good) / len(good), "rewards/rejected": sum(bad) / len(bad)}
        return torch.stack(terms).mean(), numbers
    terms = []
    rewards = []
    for chosen in range(0, len(parts), 2):
        rejected = chosen + 1
        margin = ratios[chosen] - ratios[rejected]
        averaged = ratios[chosen] / parts[chosen].length - ratios[rejected] / parts[rejected].length
        rewards.append((beta * float(ratios[chosen].detach()), beta * float(ratios[rejected].detach())))
        if options.method == "reward":
            scores = (sums[chosen], sums[rejected])
            centered = options.center_rewards_coefficient * (scores[0] + scores[1]) ** 2
            terms.append(-F.logsigmoid(scores[0] - scores[1]) + centered)
            rewards[-1] = (float(scores[0].detach()), float(scores[1].detach()))
        elif options.method == "dpo":
            margin = averaged if options.length_normalization else margin
            e = options.label_smoothing
            terms.append(-(1 - e) * F.logsigmoid(beta * margin) - e * F.logsigmoid(-beta * margin))
        elif options.method == "ipo":
            terms.append((averaged - 1 / (2 * beta)) ** 2)
        elif options.method == "simpo":
            terms.append(-F.logsigmoid(beta * (means[chosen] - means[rejected]) - options.simpo_gamma))
        else:
            odds = [means[at] - torch.log(1 - torch.exp(means[at])) for at in (chosen, rejected)]
            terms.append(-beta * F.logsigmoid(odds[0] - odds[1]))
        if options.method in ("orpo", "simpo"):
            rewards[-1] = (beta * float(means[chosen].detach()), beta * float(means[rejected].detach()))
    loss = torch.stack(terms).mean()
    pairs = len(rewards)
    numbers = {
        "rewards/chosen": sum(one for one, _ in rewards) / pairs,
        "rewards/rejected": sum(other for _, other in rewards) / pairs,
        "rewards/margins": sum(one - other for one, other in rewards) / pairs,
        "rewards/accuracies": sum(one > other for one, other in rewards) / pairs,
    }
    weight = 1.0 if options.method == "orpo" else options.sft_loss_weight
    if weight:
        likely = [every[at] if options.method == "orpo" else every[at][parts[at].prompt - 1 :] for at in range(0, len(parts), 2)]
        nll = -torch.cat(likely).mean()
        loss = loss + weight * nll
        numbers["nll_loss"] = float(nll.detach())
    return loss, numbers
