"""Plans for models with experts: their work, memory and messages are those that runs have, and no layout that is refused is proposed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_llama.cli import main
from megatron_llama.errors import ConfigError
from megatron_llama.metrics.flops import flops_per_token
from megatron_llama.model.plan.dispatch import dispatch_messages
from megatron_llama.model.plan.fp8 import code_bytes
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.choice import choose
from megatron_llama.planner.expert_work import expert_work
from megatron_llama.planner.fitted import FITTED
from megatron_llama.planner.hardware import CPU
from megatron_llama.planner.inputs import layout_named
from megatron_llama.planner.kernels import Kernels
from megatron_llama.planner.links import rank_groups
from megatron_llama.planner.report import COMPUTED, command, details, label, table
from megatron_llama.planner.search import candidates, memory_estimate, search
from megatron_llama.planner.steps import block_time, estimate, expert_sums
from megatron_llama.planner.training_job import job_of
from megatron_llama.train.setup.memory import MemoryPlan
from megatron_llama.train.setup.resolve import problems, resolve

from tests.oracle.flops import planned_flops
from tests.oracle.messages import step_messages
from tests.planner.test_plan import config, machine

BY_UNIT = {"data_parallel_sharding_strategy": "optim_grads_params"}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 4, "pipeline_schedule": "interleaved", "virtual_pipeline_model_parallel_size": 2}
LAYOUTS = {
    "mixtral": ("mixtral-8x7b", 64, 64, {**PIPELINE, "expert_model_parallel_size": 8, "recompute_granularity": "selective"}),
    "qwen": ("qwen3-30b-a3b", 16, 64, {**BY_UNIT, "expert_model_parallel_size": 4, "recompute_granularity": "full"}),
    "qwen in tp and cp": ("qwen3-30b-a3b", 64, 64, {**TP2, "context_parallel_size": 2, "expert_model_parallel_size": 2}),
    "scout": ("llama4-scout", 64, 128, {**BY_UNIT, "recompute_granularity": "full"}),
    "maverick": ("llama4-maverick", 256, 256, {**TP2, **BY_UNIT, "pipeline_model_parallel_size": 2}),
}


def planned(name: str) -> Candidate:
    model, gpus, batch, parallel = LAYOUTS[name]
    chosen = config(model, batch, **parallel)
    assert problems(chosen, gpus) == []
    return Candidate(resolve(chosen, gpus), machine(gpus), FITTED)


@pytest.mark.parametrize("name", LAYOUTS)
def test_work_and_memory_are_those_of_a_run(name: str) -> None:
    """FLOPs of the experts that a token meets; bytes of the dry run; elements of the buckets."""
    plan = planned(name)
    job, model, gpus = plan.job, plan.config.model, plan.machine.gpus
    scores = replace(model, attention_chunk_size=0, layer_types=())
    assert planned_flops(plan) == pytest.approx(flops_per_token(scores, job.seq, causal=False), rel=1e-9)
    granularity = plan.config.parallel.recompute_granularity
    whole = MemoryPlan(plan.config, gpus)
    assert plan.needed == whole.needed(granularity, whole.recompute_layers() if granularity != "none" else 0)
    # The estimate that rules layouts out may not rule out one that fits.
    assert memory_estimate(plan) < plan.needed
    layout = plan.short.bucket_plans[0]
    assert job.rank_numel == pytest.approx(layout.numel, rel=1e-3)
    if job.ep > 1:
        assert job.rank_expert_numel == pytest.approx(sum(bucket.numel for bucket in layout.buckets if bucket.kind.ep > 1), rel=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen", "qwen in tp and cp"])
def test_tokens_and_gradients_take_the_time_of_their_bytes(name: str) -> None:
    """As ``tests/oracle/messages.py`` counts them beside real runs."""
    plan = planned(name)
    plan = replace(plan, fit=replace(FITTED, latency=0.0, latency_across=0.0, hop=0.0, hop_inside=0.0))
    messages = step_messages(plan.config, plan.machine.gpus, 0)
    sent = sum(size for (axis, _), (_, size) in messages.items() if axis == "ep")
    groups, ep = plan.groups, plan.job.ep
    assert plan.step_time.expert == pytest.approx(sent * (ep - 1) / ep / groups.ep.rate)
    assert groups.ep.outside == 0 and groups.expert_shards.size * ep == plan.job.dp * plan.job.cp
    traffic = [traffic for group, traffic in plan._traffic_by_group(0) if group is groups.expert_shards]
    reduced = messages["expert_dp", "reduce_scatter"][1] * plan.few.training.global_batch_size / plan.config.training.global_batch_size
    per_microbatch = plan.config.parallel.data_parallel_sharding_strategy == "optim_grads_params"
    assert [part.reduction_bytes for part in traffic] == [reduced if per_microbatch else messages["expert_dp", "reduce_scatter"][1]]


def test_gradients_of_whole_experts_are_added_up_over_tp() -> None:
    """Once a step, the shard of each rank in fp32."""
    plan = planned("qwen in tp and cp")
    plan = replace(plan, fit=replace(FITTED, latency=0.0, latency_across=0.0, hop=0.0, hop_inside=0.0))
    layout = plan.short.bucket_plans[0]
    partial = [bucket.index for bucket in layout.buckets if bucket.kind.partial_grad and not bucket.kind.resident]
    # Of two ranks each sends half of a message in each of two ways.
    sent = sum(map(layout.shard_numel, partial)) * 4
    assert expert_sums(plan.job, plan.groups) * plan.groups.tp.rate == pytest.approx(sent, rel=0.01)
    assert expert_sums(job_of(resolve(config("llama2-7b", 64), 8), machine(8)), plan.groups) == 0


@pytest.mark.parametrize("name", ["mixtral", "qwen"])
def test_the_simulated_step_is_near_the_closed_form(name: str) -> None:
    """Where work hides messages of parameters: the closed form is above where they take as long, in dense models too."""
    plan = planned(name)
    if name == "qwen":
        plan = replace(plan, config=replace(plan.config, training=replace(plan.config.training, micro_batch_size=4)))
    assert plan.seconds == pytest.approx(estimate(plan.job, FITTED).seconds, rel=0.05)


def test_fewer_rows_of_an_expert_take_longer() -> None:
    """Two ranks that divide experts have twice the rows of half of them: as many FLOPs, and half of the bytes of weights."""
    one, two = (
        Candidate(resolve(config("qwen3-30b-a3b", 64, **BY_UNIT, expert_model_parallel_size=ep), 16), machine(16), FITTED) for ep in (1, 2)
    )
    works = [plan.job.experts for plan in (one, two)]
    rows, flops = zip(*((work.grouped[0].m, work.count * work.grouped[0].flops) for work in works if work is not None), strict=True)
    assert rows[1] == 2 * rows[0] == 2 * 4096 * 8 // 128 and flops[0] == flops[1]
    seconds = [sum(map(Kernels(plan.job, FITTED).grouped, plan.job.experts.grouped)) for plan in (one, two) if plan.job.experts]
    assert seconds[0] > seconds[1] > 0.5 * seconds[0]


def test_a_block_without_experts_is_as_in_a_dense_model() -> None:
    """Of Maverick every second block is dense: the mean of both kinds, and each stage has those of its own."""
    plan = planned("maverick")
    job, groups = plan.job, plan.groups
    dense = replace(job, sparse=0.0, experts=None, model=replace(job.model, num_experts=0))
    times = [block_time(one, groups, Kernels(one, FITTED), FITTED).forward for one in (dense, job, replace(job, sparse=1.0))]
    assert (job.sparse, job.narrow_experts) == (0.5, 1.0)
    assert times[1].parts == pytest.approx([(first + last) / 2 for first, last in zip(times[0].parts, times[2].parts, strict=True)])
    assert groups == rank_groups(dense, FITTED) and times[2].tensor == pytest.approx(times[0].tensor / 2) and times[2].expert == 0
    odd = config("llama4-maverick", 256, **TP2, **BY_UNIT, pipeline_model_parallel_size=2, pipeline_layer_split=(23, 25))
    uneven = Candidate(resolve(odd, 256), machine(256), FITTED)
    assert [uneven._sparse(layers) for layers in (range(23), range(23, 48))] == [(11 / 23, 1.0), (13 / 25, 1.0)]


def test_the_search_divides_experts_where_that_is_written() -> None:
    def sizes(model: str, gpus: int = 16, **pinned: object) -> set[tuple[int, int]]:
        whole = resolve(config(model, 64), 1)
        tried = [*candidates(whole, machine(gpus), {"pipeline_model_parallel_size": 1, "recompute_granularity": "full", **pinned})]
        assert [problem for one in tried[::25] for problem in problems(one, gpus)] == []
        return {(one.parallel.tensor_model_parallel_size, one.parallel.expert_model_parallel_size) for one in tried}

    assert {ep for tp, ep in sizes("mixtral-8x7b") if tp == 4} == {1, 2, 4}
    assert {ep for _, ep in sizes("qwen3-30b-a3b", tensor_model_parallel_size=1)} == {1, 2, 4, 8, 16}
    assert sizes("qwen3-30b-a3b", sequence_parallel=False) == {(1, ep) for ep in (1, 2, 4, 8, 16)}
    assert {ep for _, ep in sizes("llama4-scout", tensor_model_parallel_size=1)} == {1, 2, 4, 8, 16} and {ep for _, ep in sizes("llama2-7b")} == {1}
    assert {ep for _, ep in sizes("mixtral-8x7b", expert_model_parallel_size=4)} == {4}


def test_the_search_proposes_no_way_that_an_option_refuses() -> None:
    whole = config("mixtral-8x7b", 64)
    compiled = resolve(replace(whole, training=replace(whole.training, compile=True)), 1)
    grouped = resolve(config("mixtral-8x7b", 64, data_parallel_shard_size=4), 1)
    for chosen in (compiled, grouped):
        given = {"context_parallel_size": 1, "recompute_granularity": "full", "pipeline_model_parallel_size": 1, "micro_batch_size": 1}
        tried = [*candidates(chosen, machine(16), given)]
        assert [problem for one in tried for problem in problems(one, 16)] == []
        assert (chosen is compiled) == all(one.parallel.moe_token_dispatcher_type == "allgather" for one in tried)
        assert max(one.parallel.expert_model_parallel_size for one in tried) == (8 if chosen is compiled else 4)


@pytest.mark.parametrize(
    "model, options, said",
    [
        ("mixtral-8x7b", {"expert_model_parallel_size": 3}, "--expert-model-parallel-size: got 3, expected a divisor of num_experts 8"),
        ("mixtral-8x7b", {"tensor_model_parallel_size": 2, "tp_comm_overlap": "2"}, "--num-experts: got 8 with --tp-comm-overlap 2"),
        ("llama2-7b", {"expert_model_parallel_size": 2}, "--expert-model-parallel-size: got 2, expected 1 for a model without experts"),
    ],
)
def test_what_no_layout_can_have_is_named(model: str, options: dict[str, object], said: str) -> None:
    whole = resolve(config(model, 64, **options), 1)
    with pytest.raises(ConfigError, match=said):
        search(whole, machine(16), FITTED, top=1, pinned=options)


def test_tokens_that_travel_only_to_their_experts_take_less() -> None:
    """As many messages as the dry run prints, each rank to each, and rows of those tokens alone; memory for the most uneven choice."""
    gathered = planned("mixtral")
    parallel = replace(gathered.config.parallel, moe_token_dispatcher_type="alltoall")
    exchanged = replace(gathered, config=replace(gathered.config, parallel=parallel))
    word = label(exchanged)
    assert "/ep8/alltoall/mbs1/" in word and layout_named(config("mixtral-8x7b", 64), machine(64), FITTED, word).config == exchanged.config
    assert exchanged.needed == MemoryPlan(exchanged.config, 64).needed("selective", MemoryPlan(exchanged.config, 64).recompute_layers())
    # Kernels leave rows alone that nobody needs, so neither way computes more than the other.
    assert exchanged.step_time.compute == pytest.approx(gathered.step_time.compute, rel=0.01)
    assert exchanged.step_time.expert < 0.5 * gathered.step_time.expert

    tried = candidates(resolve(config("mixtral-8x7b", 64), 1), machine(16), {"pipeline_model_parallel_size": 1})
    ways = {(one.parallel.expert_model_parallel_size > 1, one.parallel.moe_token_dispatcher_type) for one in tried}
    assert ways == {(False, "allgather"), (True, "allgather"), (True, "alltoall")}
    fast = replace(exchanged, fit=replace(FITTED, latency=0.0, latency_across=0.0, hop=0.0, hop_inside=0.0))
    both = dispatch_messages(exchanged.config, recomputed=True)
    sent = (both.forward_bytes + both.backward_bytes) * 8 * 4
    assert fast.step_time.expert == pytest.approx(sent * 7 / 8 / fast.groups.ep.rate)


def test_the_plan_is_a_command_and_says_what_was_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned("mixtral")
    assert label(plan) == "tp1/pp4/cp1/dp16/ep8/mbs1/interleaved/v2/optim/recompute-selective"
    named = layout_named(config("mixtral-8x7b", 64), machine(64), FITTED, label(plan))
    assert named.config == plan.config
    text = "\n".join([*table([plan]), *details(plan)])
    assert COMPUTED in text and "   ep  layout" in text and "1 in a rank and block, each with 8,192 rows of a microbatch; over ep 7 messages" in text
    words = command(plan).split(" pretrain ")[1].replace("--train-iters N", "--train-iters 1").split()
    assert main(["pretrain", *words, "--dry-run", "--world-size", "64"]) == 0
    assert "64 processes = tp 1 x cp 1 x pp 4 x dp 16 (ep 8)" in capsys.readouterr().out
    dense = Candidate(resolve(config("llama2-7b", 64), 8), machine(8), FITTED)
    assert "ep" not in next(table([dense])).split() and COMPUTED not in "\n".join(details(dense))


def test_a_run_plans_itself() -> None:
    given = {"pipeline_model_parallel_size": 1, "context_parallel_size": 1, "micro_batch_size": 1, "recompute_granularity": "full"}
    choice = choose(config("mixtral-8x7b", 64), machine(32), FITTED, given)
    assert problems(choice.config, 32) == [] and "--expert-model-parallel-size" in choice.notes[0]
    assert any(COMPUTED in note for note in choice.notes)
    dense = choose(config("llama2-7b", 64), machine(8), FITTED, given)
    assert not any("expert" in note for note in dense.notes)


def test_frozen_experts_have_two_of_three_products() -> None:
    whole = config("mixtral-8x7b", 64, **BY_UNIT)
    frozen = replace(whole, optimizer=replace(whole.optimizer, freeze=("*experts*",)))
    jobs = [job_of(resolve(one, 64), machine(64)) for one in (whole, frozen)]
    work = jobs[1].experts
    assert work is not None
    experts = sum(work.count * product.flops for product in work.grouped)
    others = sum(product.flops for product in jobs[1].matmuls) - sum(product.flops for product in jobs[1].mlp) + work.router.flops
    assert jobs[0].trained.frozen == 0 and jobs[1].trained.frozen == pytest.approx(experts / (experts + others))
    assert jobs[1].trained.share == pytest.approx(1 - 45.1e9 / 46.7e9, rel=0.01)
    assert estimate(jobs[1], FITTED).seconds < estimate(jobs[0], FITTED).seconds


def in_fp8(name: str, recipe: str, ends: int = 1) -> Candidate:
    plan = planned(name)
    training = replace(plan.config.training, fp8=recipe, fp8_bf16_layers=ends)
    config = replace(plan.config, training=training)
    assert problems(config, plan.machine.gpus) == []
    return replace(plan, config=resolve(config, plan.machine.gpus))


@pytest.mark.parametrize(("name", "recipe"), [("mixtral", "blockwise"), ("scout", "tensorwise"), ("maverick", "blockwise")])
def test_products_of_experts_in_fp8_take_half_of_the_arithmetic(name: str, recipe: str) -> None:
    """At twice the rate of bf16 all but the router and weight gradients do, of experts, attention, dense and shared MLPs. By their bytes products of
    codes take longer than half: they write bf16."""
    plan, plain = in_fp8(name, recipe, ends=0), planned(name)
    fit = replace(FITTED, fp8=1.0, blockwise=1.0, matmul_bytes=0.0)
    narrow, wide, slow = Kernels(plan.job, fit), Kernels(plain.job, fit), Kernels(plan.job, FITTED)
    router = plan.job.sparse * narrow._router() * fit.family("torchtitan")
    assert narrow.forward().matmul - router == pytest.approx((wide.forward().matmul - router) / 2)
    assert narrow.weight_gradients() == pytest.approx(wide.weight_gradients())
    work = plan.job.experts
    assert work is not None
    for product in work.grouped:
        codes = 4 / 128 if recipe == "blockwise" else 4 / product.k
        of_weights = 4 / 128**2 if recipe == "blockwise" else 4 / product.k / product.n
        moved = product.m * product.k * (1 + codes) + product.n * product.k * (1 + of_weights) + 2 * product.m * product.n
        efficiency = 2 * (FITTED.blockwise if recipe == "blockwise" else FITTED.fp8)
        expected = product.flops / slow.base_rate / efficiency + FITTED.matmul_bytes * moved / slow.gpu.hbm
        assert slow.grouped(product) == pytest.approx(work.count * expected, rel=1e-6)


def test_rows_become_codes_in_one_pass_or_in_several() -> None:
    """A kernel of tiles reads bf16, and writes a byte and a scale for 128; torch's operators of one scale a tensor move 29 bytes for each number. Of
    all rows for which there is room: forward those of the block's width and of an expert's, backward those and both halves."""
    for recipe, moved in (("blockwise", 3 + 4 / 128), ("tensorwise", 29.0)):
        plan, plain = in_fp8("qwen", recipe), planned("qwen")
        work = plan.job.experts
        assert work is not None
        rows = 4 * 4096 * 8
        assert (work.coded, work.coded_back, work.coded_again) == tuple(rows * moved * width for width in (2048 + 768, 2048 + 2 * 768, 2048))
        found, less = Kernels(plan.job, FITTED).forward(), Kernels(plain.job, FITTED).forward()
        seconds = 46 / 48 * work.coded / Kernels(plan.job, FITTED).hbm * FITTED.family("torchtitan")
        assert found.memory - less.memory == pytest.approx(seconds)


@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_of_experts_in_fp8_is_that_of_a_run(name: str) -> None:
    """As the dry run counts it, with codes of all matrices in FP8; the estimate that rules layouts out knows of codes and is below."""
    plan, plain = in_fp8(name, "blockwise"), planned(name)
    granularity = plan.config.parallel.recompute_granularity
    whole = MemoryPlan(plan.config, plan.machine.gpus)
    assert plan.needed == whole.needed(granularity, whole.recompute_layers() if granularity != "none" else 0)
    assert memory_estimate(plain) < memory_estimate(plan) < plan.needed
    # Of narrow experts, room for rows of which a quarter is needed, and blocks that take turns in slots, codes take longer than products save.
    assert (plan.step_time.compute < plain.step_time.compute) is (name != "qwen")


def test_codes_take_turns_where_weights_do() -> None:
    """Of Maverick every second block is dense: of two slots one has all of these, and of three each has both kinds by turns, at most the codes of a
    block with experts."""
    whole = config("llama4-maverick", 256, **BY_UNIT, recompute_granularity="full")
    attention = code_bytes((40 + 2 * 8) * 128, 5120) + code_bytes(5120, 40 * 128)
    dense = attention + code_bytes(2 * 16384, 5120) + code_bytes(5120, 16384)
    sparse = attention + code_bytes(129 * 2 * 8192, 5120) + code_bytes(129 * 5120, 8192)
    for slots, expected in (("2", dense + sparse), ("3", 3 * sparse)):
        chosen = replace(whole, parallel=replace(whole.parallel, param_slots=slots), training=replace(whole.training, fp8="blockwise"))
        assert MemoryPlan(resolve(chosen, 256), 256).state_by_component(0)["weight codes in FP8"] == expected


def test_both_kinds_of_blocks_have_their_own_share_in_fp8() -> None:
    """Of Maverick's first stage 12 blocks of 24 have experts, all in FP8, and 11 dense ones are; of its second 11 and 12. Each stage takes the time
    of these blocks."""
    plan = in_fp8("maverick", "blockwise")
    assert [plan._sparse(layers) for layers in (range(24), range(24, 48))] == [(0.5, 1.0), (0.5, 11 / 12)]
    first = replace(plan.job, narrow=23 / 24, narrow_experts=1.0)
    assert (plan.job.narrow, plan.job.narrow_experts, first.narrow_dense) == (46 / 48, 23 / 24, pytest.approx(11 / 12))

    def products(sparse: float, narrow: float) -> float:
        return Kernels(replace(plan.job, sparse=sparse, narrow=narrow, narrow_experts=narrow), FITTED).forward().matmul

    expected = (12 * products(1.0, 1.0) + 11 * products(0.0, 1.0) + products(0.0, 0.0)) / 24
    assert Kernels(first, FITTED).forward().matmul == pytest.approx(expected)


def test_messages_about_scales_of_experts_take_time() -> None:
    """Over tp and cp, with one scale a tensor: four bytes of attention, and four for each expert. Behind the gather of attention's input one of
    them waits."""
    plan, plain = in_fp8("qwen in tp and cp", "tensorwise"), planned("qwen in tp and cp")
    blocks = [block_time(one.job, one.groups, Kernels(one.job, FITTED), FITTED) for one in (plan, plain)]
    share, groups = 46 / 48, plan.groups
    for axis, group in (("tensor", groups.tp), ("context", groups.cp)):
        forward, backward = (getattr(getattr(blocks[0], way), axis) - getattr(getattr(blocks[1], way), axis) for way in ("forward", "backward"))
        of_attention = 1 if axis == "tensor" else 2
        expected = share * (of_attention * group.reduce(4) + 2 * group.reduce(4 * 128))
        assert forward == pytest.approx(expected)
        assert backward == pytest.approx(expected + (share * groups.tp.gather(plan.job.stream) if axis == "tensor" else 0))
    tiles = in_fp8("qwen in tp and cp", "blockwise")
    assert block_time(tiles.job, groups, Kernels(tiles.job, FITTED), FITTED).forward.tensor == blocks[1].forward.tensor


def test_codes_of_experts_take_time_after_each_update() -> None:
    """Four bytes for each element of matrices of blocks in FP8: attention's and experts'."""
    plan, plain = in_fp8("mixtral", "blockwise"), planned("mixtral")
    elements = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    seconds = 4 * elements / Kernels(plan.job, FITTED).hbm
    assert estimate(plan.job, FITTED).update - estimate(plain.job, FITTED).update == pytest.approx(30 / 4 * seconds)


def test_a_plan_with_experts_in_fp8_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --model mixtral-8x7b --gpus 64 --global-batch-size 64 --seq-length 4096 --fp8 blockwise --explain tp1/pp4/dp16/ep8/mbs1/1f1b/optim"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "multiply in FP8 (blockwise)" in printed and "--fp8 blockwise" in printed


@pytest.mark.parametrize("name", ["mixtral", "scout"])
def test_a_host_moves_what_torchs_operators_move(name: str) -> None:
    """Far more bytes than kernels, which leave out what nobody needs. Of kernels by hand: of each row that a token needs two numbers of each
    gather, those of the activation and of its weight; and sums."""
    plan = planned(name)
    fused, host = (expert_work(plan.config, on_host=on_host) for on_host in (False, True))
    assert replace(host, moved=0, moved_back=0, moved_again=0) == replace(fused, moved=0, moved_back=0, moved_again=0)
    assert host.moved > 1.5 * fused.moved and host.moved_back > 1.2 * fused.moved_back
    tokens, model, ep = plan.job.tokens, plan.config.model, plan.job.ep
    rows, hidden, inner = tokens * model.num_experts_per_tok, model.hidden_size, model.moe_intermediate_size
    sums = (rows + ep * tokens) * hidden * 2
    shared = tokens * 3 * (hidden + model.moe_shared_expert_intermediate_size) * 2 if name == "scout" else 0
    router = tokens * (hidden * 6 + 3 * model.num_experts * 4)
    assert fused.moved == router + rows * (2 * hidden + 3 * inner) * 2 + sums + shared
    of_weights = 4 * hidden if name == "scout" else 6 * inner
    assert fused.moved_back == tokens * hidden * 12 + rows * (4 * hidden + 8 * inner + of_weights) * 2 + sums + 2 * shared
    cpu = job_of(plan.config, replace(plan.machine, gpu=CPU)).experts
    assert cpu is not None and plan.job.experts is not None
    assert (cpu.moved, plan.job.experts.moved) == (host.moved, fused.moved)
