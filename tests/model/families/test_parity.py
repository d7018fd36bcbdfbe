"""Each family computes transformers' logits, and trains in every layout what one process trains and what transformers trains with torch's
own AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from megatron_llama.config.schema import Config, ParallelConfig
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.llama import build_stages
from megatron_llama.model.load import load_stages, rank_specs
from torch import Tensor

from tests.harness import Cluster
from tests.model.families.twins import DRAWN, FIXED, SIZES, TWINS, DrawnWeights, FamilyLayout, family_layouts, reference
from tests.parallel.cases import LOSS_BOUND, NORM_BOUND, Record, Reference, deviation, merged, record, token_ids, train, trainer
from tests.parallel.test_head import with_chunks
from tests.parallel.test_lora import train_peft
from tests.torch_twin import drawn

References = Callable[[FamilyLayout], Reference]
LENGTH, BATCH = 160, 2
STEPS = 6
"""Twenty: ``tools/parity.py --families``."""
PROMPT = token_ids(LENGTH * BATCH).view(BATCH, LENGTH)
"""[b, s] ids of English text."""
CHUNK = 300
"""Logits at once, far fewer than those of a microbatch."""
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""Phi-3's projections: each has one addition, whatever it stacks."""


def logits_of(place: Place, family: str, sequence_parallel: bool) -> Tensor:
    """[s, b, padded_vocab / tp] of a one-stage model."""
    parallel = ParallelConfig(tensor_model_parallel_size=place.world_size, sequence_parallel=sequence_parallel)
    config = Config(model=TWINS[family].ours, parallel=parallel)
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    [stage] = build_stages(config, mesh).values()
    load_stages([stage], rank_specs(config, mesh), DrawnWeights(config.model), dtype=torch.float32, device=mesh.device)
    with torch.no_grad():
        return stage(PROMPT.t(), stage.positions(LENGTH, mesh.device))


@pytest.mark.few(2)
@pytest.mark.parametrize("family", TWINS)
def test_logits_are_those_of_transformers(cluster: Cluster, family: str) -> None:
    with torch.no_grad():
        expected = TWINS[family].hf_model()(PROMPT).logits.transpose(0, 1)
    assert expected.std() > 0.3, "logits that are all alike would prove nothing"
    for tp, sequence_parallel in ((1, False), (2, True), (4, False)):
        found = torch.cat(cluster.run(tp, logits_of, family, sequence_parallel), dim=-1)[..., : SIZES["vocab_size"]]
        assert float((found - expected).abs().max()) < 1e-4, (tp, sequence_parallel)


@pytest.fixture(scope="module")
def references(cluster: Cluster) -> References:
    """Each once."""
    known: dict[FamilyLayout, Reference] = {}

    def look_up(layout: FamilyLayout) -> Reference:
        if layout.reference not in known:
            known[layout.reference] = reference(cluster, layout)
        return known[layout.reference]

    return look_up


def some_layouts() -> list[FamilyLayout]:
    """Of each family tensor, sequence and data parallelism with all that is sharded, virtual stages that go there and back, and one more,
    which for each family is another one. All of them: ``tools/parity.py --families``."""
    chosen = []
    for number, family in enumerate(TWINS):
        own = family_layouts(family)
        chosen += [own[3], own[5], own[len(FIXED) + number % DRAWN]]
    return chosen


WINDOWED = [
    FamilyLayout(family="gemma3", documents=True, tp=2, cp=2, sp=True),
    FamilyLayout(family="mistral", documents=True, cp=4),
    FamilyLayout(family="phi3", documents=True, cp=2, pp=2, microbatches=2),
    FamilyLayout(family="llama4", documents=True, cp=2, tp=2, sp=True),
    FamilyLayout(family="llama4", documents=True, cp=4, cp_comm="a2a"),
]
"""Documents in windows and chunks, with positions of their own."""


SPREAD_EXPERTS = [
    FamilyLayout(family="mixtral", dp=4, ep=2, exchange=True, strategy="no_shard"),
    FamilyLayout(family="mixtral", dp=2, cp=2, ep=2, microbatches=2, strategy="optim_grads_params"),
    FamilyLayout(family="qwen3_moe", dp=2, pp=2, tp=2, sp=True, ep=2, microbatches=4, strategy="no_shard", recompute="selective"),
    FamilyLayout(family="llama4", dp=2, tp=2, sp=True, ep=2, exchange=True, strategy="optim_grads", recompute="selective"),
]
"""The first in every run of the tests. All layouts of experts that ranks divide: ``tools/parity.py --families``."""


@pytest.mark.parametrize(
    "layout",
    [WINDOWED[0], SPREAD_EXPERTS[0], *(pytest.param(one, marks=pytest.mark.long) for one in (*some_layouts(), *SPREAD_EXPERTS[1:], *WINDOWED[1:]))],
    ids=lambda one: one.name,
)
def test_training_is_that_of_transformers(references: References, cluster: Cluster, layout: FamilyLayout) -> None:
    compare(references, cluster, replace(layout, steps=STEPS))


def compare(references: References, cluster: Cluster, layout: FamilyLayout) -> None:
    """Losses and norms with one process and with transformers, trained weights with one process."""
    records = cluster.run(layout.world_size, train, layout)
    expected = references(layout)
    row = expected.row(layout.name, records[0])
    assert row.holds, row
    assert all(one.losses == records[0].losses and one.norms == records[0].norms for one in records)
    trained, alone = merged(records), merged([expected.single])
    assert trained.keys() == alone.keys()
    for name, weight in trained.items():
        # Adam turns a gradient that is all rounding noise into full steps, so single elements may differ, tensors may not.
        assert float((weight - alone[name]).norm() / alone[name].norm()) < 1e-4, name
    for one in records:
        assert len({records[rank].parameters for rank in one.dp_line}) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        FamilyLayout(family="llama", tp=2, sp=True, pp=2, microbatches=4, schedule="zb-h1", lora=4),
        FamilyLayout(family="qwen2", tp=4, dp=2, lora=4, recompute="selective"),
        FamilyLayout(family="phi3", tp=2, sp=True, dp=2, lora=4, targets=FUSED, strategy="optim_grads_params"),
        FamilyLayout(family="llama", tp=4, sp=True, freeze=("*.weight",)),
        FamilyLayout(family="olmo2", tp=2, sp=True, cp=2, lora=4),
        FamilyLayout(family="qwen3_moe", tp=2, sp=True, pp=2, microbatches=2, schedule="zb-h1", lora=4, targets=("q_proj", "v_proj", "o_proj")),
    ],
    ids=lambda layout: layout.name,
)
def test_biases_next_to_low_rank_additions_and_alone(references: References, cluster: Cluster, layout: FamilyLayout) -> None:
    """Additions leave them frozen; and they may be all that is trained."""
    layout = replace(layout, steps=STEPS)
    compare(references, cluster, layout)
    start = layout.weights()
    changed = set()
    for name, weight in merged([references(layout).single]).items():
        changed |= set() if torch.equal(drawn(start, name, tuple(weight.shape)), weight) else {name}
    assert {name for name in changed if ("lora_" if layout.lora else ".bias") not in name} == set() != changed


@pytest.mark.parametrize(
    ("family", "targets"), [("phi3", FUSED), ("olmo2", ("q_proj", "v_proj", "up_proj")), ("mixtral", ("q_proj", "k_proj", "v_proj", "o_proj"))]
)
def test_additions_train_as_with_peft(references: References, family: str, targets: tuple[str, ...]) -> None:
    """Also to projections that stack several of ours, and in front of a norm of queries."""
    layout = FamilyLayout(family=family, lora=4, targets=targets, steps=STEPS)
    theirs = train_peft(layout, TWINS[family].hf_model())
    ours = references(layout).single
    assert deviation(ours.losses, theirs.losses) < LOSS_BOUND and deviation(ours.norms, theirs.norms) < NORM_BOUND
    assert ours.losses[0] != ours.losses[-1]


def in_chunks(place: Place, layout: FamilyLayout) -> Record:
    """Training with few logits at a time."""
    run = trainer(place, layout)
    with_chunks(run, CHUNK)
    return record(run, [run.step(index) for index in range(layout.steps)])


@pytest.mark.long
def test_capped_logits_in_chunks_are_those_at_once(cluster: Cluster, references: References) -> None:
    layout = FamilyLayout(family="gemma3", tp=2, sp=True, steps=STEPS)
    [chunked, *_] = cluster.run(layout.world_size, in_chunks, layout)
    row = references(layout).row(layout.name, chunked)
    assert row.holds, row
