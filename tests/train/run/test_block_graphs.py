"""Blocks that run as graphs train what blocks train that do not, to the bit; and what cannot run so is refused by name.

On hosts a replay runs the pass again (``rerun_graphs.py``). That a device can capture the passes is what ``tools/stream_check`` shows.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.parse import parse
from megatron_llama.config.sections import config_sections
from megatron_llama.data.loader import Batch
from megatron_llama.engine.offload_options import OffloadConfig
from megatron_llama.engine.plan.buckets import OWN_SLOT_POOL
from megatron_llama.errors import ConfigError
from megatron_llama.launch.launcher import Place
from megatron_llama.model.plan.params import partition_of
from megatron_llama.pipeline.plan.run_engine import rank_bucket_plan
from megatron_llama.schedule import schedule_named
from megatron_llama.train.run.block_graphs import BlockGraphs
from megatron_llama.train.setup.checks.graphs import graph_problems
from megatron_llama.train.setup.memory import peak_of
from megatron_llama.train.setup.resolve import problems
from megatron_llama.tune.sft.option_problems import data_problems
from megatron_llama.tune.sft.sft_config import SFTConfig

from tests.harness import Cluster
from tests.parallel.cases import STRATEGIES, Layout, Record, Trainer, record, trainer
from tests.refused import refused
from tests.train.run.rerun_graphs import rerunning
from tests.train.setup.test_resolve import assembled

STEPS = 4
Counts = dict[tuple[str, str], dict[str, int]]


def moved(batches: list[Batch]) -> list[Batch]:
    """The same with positions that begin elsewhere in each microbatch."""
    places = torch.arange(len(batches[0].tokens)).unsqueeze(1)
    return [replace(batch, position_ids=(places + 3 * number) % len(places) + 0 * batch.tokens) for number, batch in enumerate(batches)]


def unequal(batches: list[Batch]) -> list[Batch]:
    """The same, the last microbatch with half of its samples, as where a pass over the samples ends."""
    half = batches[-1].tokens.shape[1] // 2
    return [*batches[:-1], replace(batches[-1], tokens=batches[-1].tokens[:, :half], labels=batches[-1].labels[:, :half])]


def step(run: Trainer, batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    loss = run.runtime.step(batches)
    return loss, run.optimizer.step(1e-3, clip=run.layout.clip).grad_norm


def train(place: Place, layout: Layout, replayed: bool, moves: bool = False) -> tuple[Record, Counts, int, int, int]:
    """Steps, with graphs from the second one on, and an evaluation between them: the record, the messages, and the numbers of buffers,
    captures and replays. ``moves``: each microbatch has positions of its own."""
    with rerunning() as told:
        run = trainer(place, replace(layout, graphs=replayed))
        graphs = BlockGraphs(run.stages, run.optimizer, run.mesh) if replayed else None
        steps = []
        for index in range(STEPS):
            steps.append(step(run, moved(run.batches(index))) if moves else run.step(index))
            if graphs is not None:
                graphs.begin()
        run.runtime.evaluate(run.batches(STEPS))
        steps.append(step(run, moved(run.batches(STEPS))) if moves else run.step(STEPS))
        counted = len(told)
        if layout.pp == 1:
            steps += [step(run, unequal(run.batches(STEPS))), step(run, moved(run.batches(STEPS)))]
        recorded = record(run, steps)  # nothing is under way any more
        counts = {key: asdict(traffic) for key, traffic in run.mesh.recorder.traffic.items()}
        captures = sum(what.startswith("capture") for what in told[:counted])
        return recorded, counts, 0 if graphs is None else graphs.buffers, captures, counted - captures


LAYOUTS = (
    Layout(microbatches=4),
    Layout(bf16=True, microbatches=2, recompute="selective"),
    Layout(microbatches=2, recompute="full"),
    Layout(tp=2, sp=True, microbatches=2, tied=True),
    Layout(tp=2, kv_heads=1, microbatches=2, recompute="full"),
    Layout(tp=2, sp=True, tp_comm="2", microbatches=2, recompute="full"),
    Layout(fp16=True, loss_scale=2.0**14, microbatches=2),
    *(Layout(dp=2, strategy=strategy, microbatches=2, bucket=100_000) for strategy in STRATEGIES),
    *(Layout(dp=2, strategy="optim_grads", microbatches=2, grad_slots=slots, bucket=bucket) for slots, bucket in ((1, 20_000), (2, 5_000), (3, 1))),
    Layout(dp=2, strategy="optim_grads_params", slots="1", grad_slots=1, microbatches=2, early=True, clip=0.0),
    Layout(dp=2, microbatches=2, bf16=True, offload=OffloadConfig(optimizer_offload="exact")),
    Layout(pp=4, microbatches=8),
    Layout(pp=2, microbatches=4, schedule="gpipe", tied=True),
    Layout(pp=2, virtual=2, dp=2, microbatches=4, schedule="interleaved", strategy="optim_grads"),
    Layout(pp=2, layers=4, split=(4, 0), microbatches=2),
    Layout(tp=2, pp=2, dp=2, sp=True, strategy="optim_grads_params", microbatches=4),
)


def in_flight(layout: Layout, rank: int) -> int:
    """Microbatches that a pipeline rank holds at most, counted for each stage with blocks."""
    partition = partition_of(layout.config())
    schedule = schedule_named(layout.schedule, ranks=layout.pp, microbatches=layout.microbatches, virtual=layout.virtual)
    stages = [stage for stage in partition.stages_of(rank) if partition.layers[stage]]
    ones = [[int(stage == other) for other in range(partition.stages)] for stage in stages]
    return sum(peak_of(schedule.ranks[rank], one, one) for one in ones)


def test_each_microbatch_has_its_positions(cluster: Cluster) -> None:
    layout = Layout(pp=2, microbatches=4)
    plain, replayed, others = (cluster.run(2, train, layout, graphs, moves) for graphs, moves in ((False, True), (True, True), (True, False)))
    assert replayed[0][0].losses == plain[0][0].losses != others[0][0].losses
    assert replayed[0][4] == others[0][4] > 0 and replayed[1][0].parameters == plain[1][0].parameters


@pytest.mark.few(3, all=10)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_graphs_change_no_bit(cluster: Cluster, layout: Layout) -> None:
    """Neither weights nor messages, with microbatches in flight, shapes that change, and an evaluation in between; and a pass is captured
    once for each microbatch in flight, and replayed from then on."""
    plain = cluster.run(layout.world_size, train, layout, False)
    replayed = cluster.run(layout.world_size, train, layout, True)
    partition = partition_of(layout.config())
    factors = 1 if layout.strategy in ("optim_grads", "optim_grads_params") else 2
    for rank, ((expected, sent, *_), (found, sent_by_graphs, buffers, captures, replays)) in enumerate(zip(plain, replayed, strict=True)):
        assert found.losses == expected.losses and found.norms == expected.norms
        assert found.parameters == expected.parameters
        for piece, other in zip(found.pieces, expected.pieces, strict=True):
            assert torch.equal(piece.master, other.master), piece.rectangle
        assert sent_by_graphs == sent
        place = rank // (layout.world_size // layout.pp)
        blocks = [len(partition.layers[stage]) for stage in partition.stages_of(place)]
        assert buffers == in_flight(layout, place)
        assert captures == buffers * max(blocks) * (1 + factors)
        assert replays == STEPS * layout.microbatches * sum(blocks) * 2


def test_a_pass_that_finds_other_gradients_than_it_was_captured_with_ends_the_run(cluster: Cluster) -> None:
    [said] = cluster.run(1, _train_with_moved_gradients)
    assert said.startswith("layers.3: gradients of one pass have moved")


def _train_with_moved_gradients(place: Place) -> str:
    with rerunning():
        run = trainer(place, Layout(graphs=True))
        graphs = BlockGraphs(run.stages, run.optimizer, run.mesh)
        run.step(0)
        graphs.begin()
        run.step(1)
        views = run.optimizer.gradients._views
        name = next(name for name in views if "layers.3" in name)
        views[name] = views[name].clone()
        with pytest.raises(RuntimeError) as error:
            run.step(2)
        return str(error.value)


EXCLUDED = (
    "--pipeline-schedule zb-h1", "--pipeline-schedule zb-v", "--context-parallel-size 2", "--tp-comm-overlap symm_mem", "--reset-attention-mask", "--lora-rank 4",
    "--freeze *embed_tokens*", "--compile", "--record-timeline spans.json",
)


@pytest.mark.parametrize("words", EXCLUDED)
def test_what_launches_other_kernels_each_time_is_refused(words: str) -> None:
    [problem] = graph_problems(assembled("--cuda-graph-scope", "block", *words.split()))
    assert refused(problem).where == "--cuda-graph-scope block" and words.startswith(str(refused(problem).got))
    assert not any("graph" in problem for problem in problems(assembled(*words.split()), 2))


def test_commands_for_examples_refuse_graphs() -> None:
    sections = (*config_sections(), SFTConfig)
    parsed = parse(["--cuda-graph-scope", "block"], sections, aliases=MEGATRON)
    sentence = refused("\n".join(data_problems(parsed, "align")))
    assert (sentence.where, sentence.got) == ("--cuda-graph-scope block", "align")
    assert list(data_problems(parse([], sections, aliases=MEGATRON), "align")) == []


@pytest.mark.parametrize("words", ["--enable-cuda-graph", "--external-cuda-graph", "--cuda-graph-impl transformer_engine", "--cuda-graph-scope full"])
def test_other_graphs_of_megatron_are_refused_with_ours(words: str) -> None:
    with pytest.raises(ConfigError) as error:
        assembled(*words.split())
    assert "--cuda-graph-scope" in str(error.value)
    assert assembled("--cuda-graph-impl", "local", "--cuda-graph-scope", "block").training.cuda_graph_scope == "block"


@pytest.mark.parametrize("slots", [1, 2])
def test_a_block_may_have_more_buckets_than_gradient_slots(cluster: Cluster, slots: int) -> None:
    """Its graph writes the gradients of all of them, where a block without graphs sends one before it opens another. Sizes as the GPU's test
    has them."""
    layout = Layout(strategy="optim_grads", bf16=True, microbatches=2, grad_slots=slots)
    plan = rank_bucket_plan(layout.config(), dp=1)
    [block] = [buckets for name, buckets in zip(plan.unit_names, plan.unit_buckets, strict=True) if name == "layers.3"]
    assert len({plan.gradient_slots[bucket] for bucket in block}) < len(block)
    [(expected, sent, *_)], [(found, sent_by_graphs, _, captures, replays)] = (cluster.run(1, train, layout, graphs) for graphs in (False, True))
    assert found.losses == expected.losses and found.norms == expected.norms and found.parameters == expected.parameters
    assert sent_by_graphs == sent and captures == 4 * 2 and replays == STEPS * layout.microbatches * 4 * 2


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("bucket", [1, 5_000, 20_000, 50_000, 100_000, 10**9])
def test_so_many_blocks_as_gradient_slots_have_room_at_once(bucket: int, slots: int) -> None:
    """And no more than that is taken; where slots are not shared by size, or nothing runs as a graph, they are what they were."""
    layout = Layout(dp=2, strategy="optim_grads", bucket=bucket, grad_slots=slots)
    for pp, rank in ((1, 0), (2, 0), (2, 1)):
        spread = replace(layout, pp=pp, virtual=pp, microbatches=pp, schedule="1f1b" if pp == 1 else "interleaved")
        plain, graphs = (rank_bucket_plan(replace(spread, graphs=wanted).config(), dp=2, rank=rank) for wanted in (False, True))
        assert graphs.buckets == plain.buckets and graphs.parameter_slots == plain.parameter_slots
        blocks = [set(buckets) for name, buckets in zip(graphs.unit_names, graphs.unit_buckets, strict=True) if name.startswith("layers.")]
        widest = 0
        for first in range(len(blocks)):
            row = [graphs.gradient_slots[b] for b in set[int]().union(*blocks[first : first + slots])]
            assert len(set(row)) == len(row)
            widest = max(widest, sum(pool != OWN_SLOT_POOL for pool, _ in row))
        shared = {slot for slot in graphs.gradient_slots if slot[0] != OWN_SLOT_POOL}
        users = sum(pool != OWN_SLOT_POOL for pool, _ in graphs.gradient_slots)
        assert len(shared) == min(users, max(slots, widest))
    for strategy in ("no_shard", "optim", "optim_grads_params"):
        other = replace(layout, strategy=strategy)
        assert rank_bucket_plan(replace(other, graphs=True).config(), dp=2) == rank_bucket_plan(other.config(), dp=2)
