"""Ten steps of every method equal TRL's trainers on the same pairs, one to a sample and packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.data.loader import BatchLoader
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.engine.pieces import shard_pieces
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.llama import build_stages
from megatron_llama.model.nn.lora import additions_off
from megatron_llama.pipeline.build import build_optimizer, compute_dtype
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.tune.preference.align_config import WITH_REFERENCE, AlignConfig
from megatron_llama.tune.preference.dataset import PairSamples, likelihood_of, read_pairs
from megatron_llama.tune.preference.methods import beta_of
from megatron_llama.tune.preference.objective import Preferences, completion_logps
from megatron_llama.tune.preference.reference import reference_scores
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.sft_config import SFTConfig

from tests.harness import Cluster
from tests.parallel.cases import AdaptedWeights, Layout, Piece, deviation, merged
from tests.parallel.cases import Record as Trained
from tests.tune.preference.trl_twin import (
    OPTIMIZER,
    Case,
    Record,
    model_of,
    train_with_trl,
    weights_of,
    write_judged,
    write_models,
    write_pairs,
)

STEPS, EXAMPLES = 10, 120
SAMPLES = {False: 8, True: 4}
"""In a step, by whether examples are packed."""
LORA = 4
CHUNK = 50_000
"""Logits that exist at once in a run by chunks: those of 50 tokens."""
LOSS_BOUND, GRADIENT_BOUND, WEIGHT_BOUND = 1e-6, 2e-5, 2e-5
"""The first two are relative, the last one is a fiftieth of what Adam's first step adds to an element."""
ONE = Layout()
METHODS: Mapping[str, AlignConfig] = {
    "dpo": AlignConfig("dpo"),
    "dpo smoothed": AlignConfig("dpo", label_smoothing=0.1),
    "dpo normalized": AlignConfig("dpo", beta=1.0, length_normalization=True),
    "dpo with sft": AlignConfig("dpo", sft_loss_weight=0.5),
    "ipo": AlignConfig("ipo", beta=0.5),
    "orpo": AlignConfig("orpo", beta=0.5),
    "simpo": AlignConfig("simpo", simpo_gamma=1.0),
    "simpo with sft": AlignConfig("simpo", sft_loss_weight=0.2),
    "kto": AlignConfig("kto", desirable_weight=1.2, undesirable_weight=1.5),
    "reward": AlignConfig("reward"),
    "reward centered": AlignConfig("reward", center_rewards_coefficient=0.05),
}
RENAMED = {"accuracy": "rewards/accuracies", "margin": "rewards/margins"}
"""Numbers of TRL's reward trainer, which has names of its own for what all others have, too."""
COMPARED = ("rewards/", "logps/", "kl", "nll_loss", "log_odds")


@dataclass(frozen=True)
class Run:
    """A training, of ours in this layout and of TRL's."""

    method: str
    packed: bool = False
    layout: Layout = ONE
    chunked: bool = False
    """Logits of a few tokens at a time."""

    @property
    def length(self) -> int:
        """Tokens of a sample: an example has 45 to 125, and one of kto about half of that."""
        return 256 if self.packed and METHODS[self.method].method != "kto" else 128

    @property
    def alone(self) -> Run:
        """What TRL trains."""
        return Run(self.method, self.packed, Layout(lora=self.layout.lora))


def samples_of(run: Run, folder: Path) -> PairSamples:
    """What the product makes of the file."""
    align = METHODS[run.method]
    tokenizer = ChatTokenizer(load_tokenizer(folder / "hf"))
    pairs = read_pairs([file_of(align.method, folder)], tokenizer, SFTConfig(), align, run.length)
    assert len(pairs) == EXAMPLES and not pairs.truncated
    return PairSamples(pairs, range(EXAMPLES), run.length, packing=run.packed, method=align.method, likelihood=likelihood_of(align))


def file_of(method: str, folder: Path) -> Path:
    return folder / ("judged.jsonl" if method == "kto" else "pairs.jsonl")


def case_of(run: Run, samples: PairSamples) -> Case:
    """The same training with TRL: each step is one batch, with the examples of its samples."""
    usual = AlignConfig()
    options = {name: value for name, value in vars(METHODS[run.method]).items() if value != getattr(usual, name)}
    each = 1 if METHODS[run.method].method == "kto" else 2
    size = SAMPLES[run.packed]
    steps = []
    for start in range(0, STEPS * size, size):
        numbers = [number for sample in range(start, start + size) for number in samples.numbers(sample)]
        steps.append((tuple(number // each for number in numbers[::each]),))
    mismatched = tuple((number - samples.shift) % EXAMPLES for number in range(EXAMPLES)) if samples.shift else ()
    return Case(options.pop("method", "dpo"), tuple(steps), options, mismatched, run.layout.lora)


def train(place: Place, run: Run, folder: Path) -> tuple[Trained, Trained, dict[str, list[float]]]:
    """Run all steps: what is left of them, the averages of gradients after the first one, and the numbers of each."""
    align, layout = METHODS[run.method], run.layout
    config: Config = replace(layout.config(), model=model_of(align.method), optimizer=OPTIMIZER)
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    stages = build_stages(config, mesh)
    if run.chunked:
        for stage in stages.values():
            stage.options = replace(stage.options, head_chunk=CHUNK)
    optimizer = build_optimizer(config, stages.values(), mesh)
    drawn, adapters = weights_of(config.model), AdaptedWeights()
    optimizer.load_weights(lambda rectangle, out: (adapters if "lora_" in rectangle.name else drawn)(rectangle, out))
    runtime = PipelineRuntime(stages, optimizer, mesh, config, dtype=compute_dtype(config), objective=Preferences(align))
    samples = samples_of(run, folder)
    micro = SAMPLES[run.packed] // (layout.dp * layout.microbatches)
    if align.method in WITH_REFERENCE:
        with additions_off(stages.values()):
            score = partial(completion_logps, runtime)
            found = reference_scores(score, samples, mesh, micro_batch_size=micro, microbatches=layout.microbatches)
        samples = samples.with_references(found.logps, found.mismatched)
    sizes = {"micro_batch_size": micro, "global_batch_size": SAMPLES[run.packed]}
    loader = BatchLoader(samples, shuffled=False, seed=1, dp_rank=mesh.data_rank, dp_size=mesh.data_size, **sizes)
    numbers: dict[str, list[float]] = {}
    losses, norms = [], []
    first: tuple[Piece, ...] = ()
    for step in range(STEPS):
        losses.append(float(runtime.step(loader.microbatches(step * SAMPLES[run.packed]))))
        norms.append(float(optimizer.step(OPTIMIZER.lr, clip=OPTIMIZER.clip_grad).grad_norm))
        for name, value in runtime.numbers.items():
            numbers.setdefault(name, []).append(float(value))
        if not step:
            first = trained_pieces(optimizer, "exp_avg")
    return Trained(tuple(losses), tuple(norms), trained_pieces(optimizer, "master")), Trained((), (), first), numbers


def trained_pieces(optimizer: Any, name: str) -> tuple[Piece, ...]:
    """One tensor of the state of everything that is trained."""
    optimizer.settle()
    return tuple(Piece(p.rectangle, p.tensors[name].clone(), p.primary) for p in shard_pieces(optimizer) if "exp_avg" in p.tensors)


class Twins:
    """What TRL makes of the runs of a test file, once for each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: dict[Run, Record] = {}
        self.samples: dict[Run, PairSamples] = {}

    def of(self, run: Run, others: Sequence[Run] = ()) -> Record:
        """The record of a run. Those of ``others`` are made with it, so that TRL is imported once."""
        if run.alone not in self.records:
            missing = list(dict.fromkeys(one.alone for one in (run, *others) if one.alone not in self.records))
            self.samples |= {one: samples_of(one, self.folder) for one in missing}
            cases = [case_of(one, self.samples[one]) for one in missing]
            data = {method: file_of(method, self.folder) for method in ("kto", "pairs")}
            self.records |= zip(missing, train_with_trl(self.folder / "hf", data, cases, self.folder / "out"), strict=True)
        return self.records[run.alone]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    """In a folder with models and examples."""
    folder = tmp_path_factory.mktemp("trl")
    write_models(folder / "hf", lora=LORA)
    write_pairs(folder / "pairs.jsonl", EXAMPLES)
    write_judged(folder / "judged.jsonl", EXAMPLES)
    return Twins(folder)


def assert_equal(cluster: Cluster, run: Run, twins: Twins, others: Sequence[Run]) -> None:
    """Every rank's losses, numbers and norms, the gradients of the first step, and the weights after the last one."""
    twin = twins.of(run, others)
    ranks = cluster.run(run.layout.world_size, train, run, twins.folder)
    near = [deviation(found.losses, twin.numbers["loss"]) < LOSS_BOUND for found, _, _ in ranks]
    near += [deviation(found.norms, twin.numbers["grad_norm"]) < GRADIENT_BOUND for found, _, _ in ranks]
    if not all(near):
        # Both round in fp32. On some processors they come almost as far from each other as may be, and a layout a little further: then
        # in fp64 ours is TRL's, and in fp32 its own.
        single, _, _ = cluster.run(1, train, run.alone, twins.folder)[0]
        exact, _, _ = cluster.run(1, train, replace(run.alone, layout=replace(run.alone.layout, fp64=True)), twins.folder)[0]
        for one, losses, norms in (
            (exact, twin.numbers["loss"], twin.numbers["grad_norm"]),
            (single, exact.losses, exact.norms),
            *((f, single.losses, single.norms) for f, _, _ in ranks),
        ):
            assert deviation(one.losses, losses) < LOSS_BOUND
            assert deviation(one.norms, norms) < GRADIENT_BOUND
    for _, _, numbers in ranks:
        assert_same_numbers(METHODS[run.method], numbers, twin.numbers)
    # Adam's first average is the gradient as it was clipped, times 1 - beta1.
    share = (1 - OPTIMIZER.adam_beta1) * min(1.0, OPTIMIZER.clip_grad / (twin.numbers["grad_norm"][0] + 1e-6))
    averages = merged([first for _, first, _ in ranks])
    assert averages.keys() == twin.gradients.keys()
    for name, gradient in twin.gradients.items():
        assert float((averages[name] / share - gradient).norm()) <= GRADIENT_BOUND * float(gradient.norm()), name
    weights = merged([found for found, _, _ in ranks])
    assert weights.keys() == twin.weights.keys()
    for name, weight in twin.weights.items():
        assert float((weights[name] - weight).abs().max()) <= WEIGHT_BOUND, name


def assert_same_numbers(options: AlignConfig, ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]) -> None:
    """All that both log, step by step. A reward is a difference of two log-probabilities: what these are rounded to is its error."""
    known = {RENAMED.get(name, name): values for name, values in theirs.items()}
    logged = {name for name in known if name.startswith(COMPARED)}
    # TRL's DPO trainer does not log its SFT term; its CPO trainer logs one that has no weight.
    assert logged ^ ours.keys() <= {"nll_loss"}
    logps = max(map(abs, known.get("logps/chosen", (1.0,))))
    size = logps * (beta_of(options) if options.method in WITH_REFERENCE else 1.0)
    # Nothing but rounding says what both scores of a pair have in common, unless they are centered.
    floats = options.method == "reward" and not options.center_rewards_coefficient
    for name in logged & ours.keys():
        # What is a difference of larger numbers: rewards of two models, margins and odds of two halves, and the divergence.
        is_difference = name.startswith(("rewards/", "log_odds", "kl"))
        error = LOSS_BOUND * (logps if name == "kl" else size) if is_difference else 0.0
        error *= 20 if floats and name in ("rewards/chosen", "rewards/rejected") else 1
        for step, (found, expected) in enumerate(zip(ours[name], known[name], strict=True)):
            if name == "rewards/accuracies" and options.method in WITH_REFERENCE and not step:
                continue  # both are the same model: which reward is the larger one is rounding
            assert found == pytest.approx(expected, rel=LOSS_BOUND, abs=error), (name, step)


ALONE = [Run(name) for name in METHODS]


@pytest.mark.few(3, all=6)
@pytest.mark.long
@pytest.mark.parametrize("run", ALONE, ids=lambda run: run.method)
def test_one_process_trains_as_trl_does(cluster: Cluster, twins: Twins, run: Run) -> None:
    assert_equal(cluster, run, twins, ALONE)


@pytest.mark.long
@pytest.mark.parametrize("method", ["dpo", "kto", "reward", "orpo"])
def test_its_tokens_are_ours(twins: Twins, method: str) -> None:
    """The prompt and the completions of every example, with the mismatched ones of kto."""
    record = twins.of(Run(method), ALONE)
    pairs = twins.samples[Run(method)]._pairs
    for example, columns in enumerate(record.examples):
        ids = [pairs.ids[number].tolist() for number in pairs.texts_of(example)]
        prompts = [pairs.prompts[number] for number in pairs.texts_of(example)]
        if method == "kto":
            assert [list(columns["prompt_ids"] + columns["completion_ids"])] == ids and [len(columns["prompt_ids"])] == prompts
            other = record.examples[(example - twins.samples[Run(method)].shift) % EXAMPLES]
            assert columns["KL_completion_ids"] == other["completion_ids"]
        elif method == "orpo":
            assert [list(columns[f"{half}_input_ids"]) for half in ("chosen", "rejected")] == ids
            assert [columns[f"{half}_labels"].count(-100) for half in ("chosen", "rejected")] == prompts
        elif method == "reward":
            assert [list(columns[f"{half}_ids"]) for half in ("chosen", "rejected")] == ids
        else:
            assert [list(columns["prompt_ids"] + columns[f"{half}_ids"]) for half in ("chosen", "rejected")] == ids
            assert [len(columns["prompt_ids"])] * 2 == prompts


PACKED = [
    Run("kto", packed=True, layout=Layout(pp=2, microbatches=2, lora=LORA)),
    Run("reward centered", packed=True, layout=Layout(dp=2, strategy="optim_grads_params", microbatches=2, lora=LORA)),
    Run("dpo smoothed", packed=True, layout=Layout(tp=2, sp=True, dp=2, strategy="optim_grads_params", recompute="full", lora=LORA)),
    Run("orpo", packed=True, layout=Layout(cp=2, cp_comm="ring"), chunked=True),
]


@pytest.mark.long
@pytest.mark.parametrize("run", PACKED, ids=lambda run: f"{run.method} {run.layout.name}")
def test_packed_samples_in_layouts_train_as_trl_does(cluster: Cluster, twins: Twins, run: Run) -> None:
    """With low-rank additions, and in one with all weights and few logits at a time. What layouts do to whole samples: test_parity.py."""
    assert_equal(cluster, run, twins, PACKED)
