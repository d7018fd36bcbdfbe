"""Small configurations have the structure of the large ones that they stand for: relations between sizes, not sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.config.batch_ramp import BatchSizes
from megatron_llama.config.parse import Parsed, flag
from megatron_llama.config.schema import Config, LaunchConfig
from megatron_llama.engine.plan.buckets import strategy_named
from megatron_llama.errors import ConfigError
from megatron_llama.model.families import FAMILIES
from megatron_llama.model.nn.rotary import rope_frequencies, rotary_width
from megatron_llama.model.plan.freeze import is_frozen
from megatron_llama.model.plan.params import hf_shapes, partition_of
from megatron_llama.model.presets import PRESETS
from megatron_llama.model.windows import layer_windows
from megatron_llama.pipeline.plan.run_engine import parameter_slots, rank_bucket_plan
from megatron_llama.prove.case import STEPS, Case
from megatron_llama.prove.draw import draw, refusal
from megatron_llama.prove.given import LEFT_OUT, SECTIONS, SMALL
from megatron_llama.prove.shrink import shrink
from megatron_llama.prove.world import World, worlds
from megatron_llama.train.api.common.options import read_options
from megatron_llama.train.setup.resolve import assemble, check

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = 8
RUN = {"train_iters": 10_000, "seq_length": 4096, "global_batch_size": 512, "bf16": True, "lr_warmup_iters": 100}
TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP, STRATEGY = "virtual_pipeline_model_parallel_size", "data_parallel_sharding_strategy"
MORE = {
    "only the middle stages are larger": 2, "three of each": 2, "a ring beside two axes": 2, "a long pipeline beside two axes": 2,
    "heads exchanged in a ring": 2,
}
"""How many cases show a configuration of which one cannot."""
OF_MORE_RANKS = {"passed on", "a ring of groups", "between two pipeline ranks", "microbatches", "uneven"}
"""Relations for which an axis needs more ranks than there are for it beside the others."""
SAVED = {"save": "runs/large", "save_interval": 500, "log_interval": 10}
"""Options that every user gives, and that no case has."""
ONE_OF_EACH = [list(family.presets)[-1] for family in FAMILIES.values()]
UNEVEN = [1, *[2] * 13, 3, 2]
SAMPLES = {"train_samples": 10**8, "train_iters": 0, "lr_warmup_iters": 0, "lr_warmup_samples": 10**5, "lr_decay_samples": 9 * 10**7}
STEPPED = {"zenflow_select_strategy": "step", "zenflow_select_interval": "500", "zenflow_update_interval": "4", "zenflow_full_warm_up_rounds": 20}
THREES = {"num_attention_heads": 24, "hidden_size": 3072, "num_key_value_heads": 6, "head_dim": 128, "intermediate_size": 12288, "num_hidden_layers": 33}
EXCHANGED = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [8, 2]}
LARGE: Mapping[str, tuple[int, dict[str, Any]]] = {
    **{f"preset {name}": (16, {"preset": name, TP: 2, "sequence_parallel": bool(PRESETS[name].num_experts)}) for name in ONE_OF_EACH},
    "a block of its own kind": (64, {"preset": "llama3-8b", "freeze": ["model.layers.3.*"]}),
    "copies of key/value heads": (64, {"preset": "llama3-70b", TP: 16, PP: 2, "sequence_parallel": True}),
    "one key/value head": (64, {"preset": "gemma3-1b", TP: 4}),
    "interleaved, uneven": (128, {"preset": "llama3-8b", PP: 4, VPP: 4, "pipeline_schedule": "interleaved", "pipeline_layer_split": UNEVEN}),
    "zb-v": (64, {"preset": "llama3-8b", PP: 8, "pipeline_schedule": "zb-v", "global_batch_size": 64}),
    "zb-h1, fewer microbatches than ranks": (64, {"preset": "llama3-8b", PP: 8, "pipeline_schedule": "zb-h1", "global_batch_size": 40}),
    "microbatches that are no multiple": (64, {"preset": "llama3-8b", PP: 8, "global_batch_size": 8 * 21}),
    "as many microbatches as ranks": (64, {"preset": "llama3-8b", PP: 8, "global_batch_size": 64}),
    "only the middle stages are larger": (64, {"preset": "llama3-8b", PP: 4, "pipeline_layer_split": [7, 9, 9, 7], TP: 2}),
    "slots": (64, {"preset": "llama3-8b", STRATEGY: "optim_grads_params", "param_slots": "5", "grad_slots": 3, "prefetch_bytes": 10**9}),
    "slots for all blocks": (64, {"preset": "llama3-8b", STRATEGY: "optim_grads_params", "param_slots": "40"}),
    "slots in a pipeline": (64, {"preset": "llama3-8b", PP: 4, STRATEGY: "optim_grads_params", "param_slots": "2", "global_batch_size": 64}),
    "hybrid shards": (64, {"preset": "llama2-7b", "data_parallel_shard_size": 8, TP: 2}),
    "hybrid shards over cp": (64, {"preset": "llama2-7b", "data_parallel_shard_size": 4, CP: 2}),
    "a shard for each rank": (64, {"preset": "llama2-7b", "data_parallel_shard_size": 1}),
    "ring": (64, {"preset": "llama3.1-8b", CP: 16, "cp_comm_type": "ring", "seq_length": 131072, "global_batch_size": 64}),
    "heads exchanged": (64, {"preset": "llama3-8b", CP: 8, "cp_comm_type": "a2a", "seq_length": 32768, "global_batch_size": 64}),
    "heads of one group exchanged": (64, {"preset": "gemma3-1b", CP: 4, "cp_comm_type": "a2a", "seq_length": 8192, "global_batch_size": 64}),
    "heads exchanged in a ring": (64, {"preset": "llama3-8b", TP: 2, CP: 16, **EXCHANGED, "seq_length": 32768, "global_batch_size": 64}),
    "windows over cp": (64, {"preset": "gemma3-4b-text", CP: 8, "seq_length": 32768, "global_batch_size": 64}),
    "a window beyond the sequence": (64, {"preset": "gemma2-9b", TP: 2, "seq_length": 2048}),
    "some blocks recompute": (64, {"preset": "llama3-8b", PP: 2, "recompute_granularity": "full", "recompute_num_layers": "5"}),
    "experts that ranks divide": (64, {"preset": "qwen3-30b-a3b", "expert_model_parallel_size": 8, STRATEGY: "optim_grads"}),
    "experts that each rank has alone": (16, {"preset": "mixtral-8x7b", TP: 2, "sequence_parallel": True, "expert_model_parallel_size": 8}),
    "one bucket": (64, {"preset": "llama3-8b", "reduce_bucket_size": 10**11}),
    "a batch that grows": (64, {"preset": "llama3-8b", PP: 4, "rampup_batch_size": [64, 64, 1_000_000], "global_batch_size": 512}),
    "a batch that grows in samples": (64, {"preset": "llama3-8b", **SAMPLES, "rampup_batch_size": [64, 64, 1_000_000]}),
    "WSD": (64, {"preset": "llama3-8b", "lr_decay_style": "WSD", "lr_wsd_decay_iters": 1000, "lr_decay_iters": 8000}),
    "frozen blocks": (64, {"preset": "llama3-8b", PP: 2, "freeze": ["model.embed_tokens.*", "model.layers.1?.*", "*.mlp.*"]}),
    "frozen by pattern": (64, {"preset": "llama3-8b", "freeze": ["*.mlp.*", "model.norm.weight"]}),
    "low-rank, few heads": (32, {"preset": "llama3-70b", TP: 16, "lora_rank": 64, "lora_alpha": 32, "lora_target_modules": ["q_proj"]}),
    "zenflow": (32, {"preset": "llama3-8b", "optimizer_offload": "zenflow", **STEPPED}),
    "speculative": (32, {"preset": "llama2-70b", "optimizer_offload": "exact", "offload_speculative": True, "speculation_bytes": 10**9}),
    "examples, packed": (32, {"preset": "llama3-8b", TP: 4, "packing": True, "loss_on": "last", "epochs": 2, "train_iters": 0}),
    "documents of a blend": (32, {"preset": "qwen3-8b", "reset_attention_mask": True, "data_path": ["0.7", "web", "0.3", "code"]}),
    "a window over chunks": (64, {"preset": "mistral-7b-v0.1", CP: 8, "seq_length": 8192, "sliding_window": 768, "global_batch_size": 64}),
    "a window that leaves one chunk out": (64, {"preset": "mistral-7b-v0.1", CP: 2, "seq_length": 8192, "sliding_window": 4097}),
    "a ring beside two axes": (64, {"preset": "llama3.1-8b", TP: 2, CP: 8, "cp_comm_type": "ring", "seq_length": 8192, "global_batch_size": 64}),
    "a long pipeline beside two axes": (128, {"preset": "llama3-8b", TP: 2, PP: 16, "global_batch_size": 16}),
    "evaluated": (32, {"preset": "llama3-8b", "eval_interval": 1000, "eval_iters": 50, "split": "99,1,0"}),
    "left to memory": (32, {"preset": "llama3-8b", STRATEGY: "auto", "param_slots": "auto", "recompute_num_layers": "auto"}),
    "three of each": (27, {"preset": "llama3-8b", **THREES, TP: 3, PP: 3, "global_batch_size": 9}),
}  # fmt: skip


def parsed(options: Mapping[str, Any]) -> Parsed:
    return read_options(None, options, SECTIONS)


def of(case: Case) -> Config:
    """The resolved configuration of a case, by the product's own check."""
    length = {} if {"train_samples", "epochs"} & case.options.keys() else {"train_iters": STEPS}
    config = assemble(parsed({**length, "save": "runs", "save_interval": 1, **case.options}))
    return check(config, case.world_size).config


@cache
def large(name: str) -> tuple[Config, tuple[Case, ...]]:
    """Your resolved configuration, and its cases."""
    world, options = LARGE[name]
    given = parsed({**RUN, **options})
    return check(assemble(given), world).config, shrink(given, world, RANKS)


def sign(a: float, b: float) -> int:
    return (a > b) - (a < b)


def structure(config: Config, world: World) -> dict[str, object]:
    """What decides which code runs, each entry a relation that a rule in the package asks for."""
    model, parallel, training = config.model, config.parallel, config.training
    heads, groups, tp, pp, cp = model.num_attention_heads, model.num_key_value_heads, world.tp, world.pp, world.cp
    counts = [len(layers) for layers in partition_of(config).layers]
    blocks = sum(counts) // pp
    microbatches = training.global_batch_size // (training.micro_batch_size * world.dp)
    strategy = strategy_named(parallel.data_parallel_sharding_strategy)
    slots = parameter_slots(parallel)
    plan = rank_bucket_plan(config, dp=world.replicas)
    windows = layer_windows(model)
    chunk = training.seq_length // (2 * cp)
    # The chunks that hold what the first token of the last chunk but one sees, or of the last one.
    seen = {at // chunk for at in range(max(0, training.seq_length - chunk - model.sliding_window + 1), training.seq_length - chunk + 1)}
    patterns = config.optimizer.freeze
    units = {name.split(".")[3] if ".layers." in name else name for name in hf_shapes(model) if is_frozen(name, patterns)}
    kinds = {
        (is_frozen(f"model.layers.{n}.mlp.up_proj.weight", patterns), is_frozen(f"model.layers.{n}.input_layernorm.weight", patterns))
        for n in range(model.num_hidden_layers)
    }
    return {
        "axes": world.above_one,
        "copies": sign(groups, tp) if tp > 1 else None,
        "one key/value head": groups == 1 if groups >= tp else None,
        "grouped": heads > groups,
        "several heads": heads > tp,
        "width of heads": sign(heads * model.head_dim, model.hidden_size),
        "partly rotated": rotary_width(model) < model.head_dim,
        "padded": model.vocab_size % (model.make_vocab_size_divisible_by * tp) != 0,
        "scaling": model.rope_scaling and model.rope_scaling["rope_type"],
        "beyond the first training": sign(training.seq_length, (model.rope_scaling or {}).get("original_max_position_embeddings", 0)),
        "kinds of layers": {window > 0 for window in windows},
        "window": (model.sliding_window >= training.seq_length, len(seen) if cp > 1 else 0) if model.sliding_window else None,
        "passed on": cp > 2 and parallel.cp_comm_type == "ring",
        "heads exchanged": parallel.head_ranks > 0,
        "a ring of groups": 0 < parallel.head_ranks < cp,
        "between two pipeline ranks": pp > 2,
        "uneven": len(set(counts)) > 1,
        "given": bool(parallel.pipeline_layer_split),
        "several in a stage": max(counts) > 1,
        "virtual": sign(parallel.virtual_pipeline_model_parallel_size, 1),
        "accumulation": microbatches > 1,
        "microbatches": (sign(microbatches, pp) if pp > 1 else None, microbatches % pp == 0),
        "several samples": training.micro_batch_size > 1,
        "ramp": bool(training.rampup_batch_size),
        "slots": slots is not None and slots < blocks,
        "gradient slots": strategy.reduce_every_microbatch and parallel.grad_slots < blocks,
        "buckets": len(plan.buckets) > 2,
        "shards": (plan.shards > 1, plan.shards < world.replicas),
        "experts": (sign(parallel.expert_model_parallel_size, 1), sign(parallel.expert_model_parallel_size, world.dp)) if model.num_experts else None,
        "recompute": None if parallel.recompute_num_layers == "all" else sign(int(parallel.recompute_num_layers), max(counts)),
        "warm-up": bool(config.optimizer.lr_warmup_iters or config.optimizer.lr_warmup_samples or config.optimizer.lr_warmup_fraction),
        "decay": sign(config.optimizer.lr_decay_iters, training.train_iters),
        "evaluated": training.eval_interval > 0,
        "low rank": config.lora.lora_rank > 0,
        "frozen": (units, kinds),
        "datasets": len(config.data.data_path) > 1,
    }


@pytest.mark.few(6)
@pytest.mark.parametrize("name", LARGE)
def test_the_structure_stays(name: str) -> None:
    options = dict(LARGE[name][1])
    if name == "left to memory":
        options |= {STRATEGY: "optim_grads_params", "param_slots": "2", "recompute_num_layers": "1"}
    if options.get("epochs"):
        options |= {"epochs": 0, "train_iters": 1000}
    world = LARGE[name][0]
    given, cases = large(name)
    yours = check(assemble(parsed({**RUN, **options})), world).config
    expected = structure(yours, World.of(yours, world))
    found = []
    for case in cases:
        here = of(case)
        ours = World.of(here, case.world_size)
        found.append(structure(here, ours))
        assert case.world_size <= RANKS and max(ours.sizes.values()) <= 4
        assert case.sft == bool(options.get("packing"))
        for section in fields(Config):
            for option in fields(getattr(here, section.name)):
                values = [getattr(getattr(config, section.name), option.name) for config in (given, here)]
                assert SMALL[option.name].fate != "kept" or values[0] == values[1], option.name
        assert not case.options.keys() & LEFT_OUT
        told = {note.option for note in case.notes if note.yours != note.here}
        assert told >= {"--seq-length", "--vocab-size", "--hidden-size"}
        assert all(note.why for note in case.notes if note.yours != note.here)
        (again,) = shrink(parsed(case.options), case.world_size, RANKS)
        assert (again.options, again.world_size, again.sft) == (case.options, case.world_size, case.sft), "shrinking twice is shrinking once"
    assert len(cases) == MORE.get(name, 1)
    for relation, value in expected.items():
        assert any(one[relation] == value for one in found), relation
    # What one case has beside all axes is not left to the others.
    assert {relation for relation, value in expected.items() if found[0][relation] != value} <= OF_MORE_RANKS


BLENDS: Mapping[str, tuple[list[str], tuple[str, ...], str]] = {
    "one": (["web"], (), "web: left out"),
    "five": (["web", "code", "books", "wiki", "mail"], ("a", "b", "c", "d", "e"), ""),
    "weights": (["0.1", "x", "0.25", "y", "0.65", "z", "1", "v"], ("2", "a", "5", "b", "13", "c", "20", "d"), ""),
    "one twice": (["3", "web", "1", "code", "0.5", "web"], ("6", "a", "2", "b", "1", "a"), ""),
    "twelve": ([f"part-{number}" for number in range(12)], tuple("abcdefgh"), "12 datasets: 8 datasets"),
}


@pytest.mark.parametrize(("given", "here", "told"), BLENDS.values(), ids=BLENDS)
def test_no_dataset_of_a_blend_is_left_out_in_silence(given: list[str], here: tuple[str, ...], told: str) -> None:
    options = {**RUN, "preset": "llama3-8b", "data_path": given}
    (case,) = shrink(parsed(options), 2, RANKS)
    assert case.options.get("data_path", ()) == here
    said = [f"{note.yours}: {note.here}" for note in case.notes if note.option == "--data-path" and note.yours != note.here]
    assert said == ([told] if told else [])
    (again,) = shrink(parsed(case.options), 2, RANKS)
    assert again.options.get("data_path", ()) == here


@pytest.mark.parametrize(("given", "here"), [(0.0, None), (0.2, 0.5), (1.0, 1.0), (1.5, 1.6), (3.0, 1.6)])
def test_a_run_of_passes_stays_one(given: float, here: float | None) -> None:
    length = {"epochs": given, "train_iters": 0} if given else {}
    (case,) = shrink(parsed({**RUN, "preset": "llama3-8b", "packing": True, "lr_warmup_iters": 0, **length}), 2, RANKS)
    assert case.options.get("epochs") == here


@pytest.mark.parametrize("path", [path for path in sorted(EXAMPLES.glob("*.yaml")) if "align" not in path.stem], ids=lambda path: path.stem)
def test_every_example_shrinks(path: Path) -> None:
    given = read_options(str(path), {}, SECTIONS)
    launch = given.get(LaunchConfig)
    for case in shrink(given, launch.nodes * launch.gpus_per_node or 1, RANKS):
        here = of(case)
        tokens = here.training.global_batch_size * here.training.seq_length
        assert here.model.hidden_size <= 256 and tokens <= 4096
        assert case.sft == ("sft" in path.stem or "lora" in path.stem)
        if path.stem == "guide":
            assert any(note.option == "--vocab-size" and note.yours == "not known" for note in case.notes) and here.model.vocab_size > 256


@pytest.mark.parametrize("name", {model.rope_scaling["rope_type"]: name for name, model in PRESETS.items() if model.rope_scaling}.values())
def test_a_rotary_scaling_changes_the_short_sequence(name: str) -> None:
    """Its frequencies are others than without it, at the length that is run."""
    given = parsed({**RUN, "preset": name, "seq_length": 131072, CP: 2, "global_batch_size": 16})
    (case,) = shrink(given, 16, RANKS)
    here = of(case)
    lengths = torch.tensor([here.training.seq_length])

    def frequencies(scaling: Mapping[str, Any] | None) -> torch.Tensor:
        width, theta = rotary_width(here.model), here.model.rope_theta
        positions = here.model.max_position_embeddings
        device = torch.device("cpu")
        return rope_frequencies(width, theta, scaling, device, lengths=lengths, max_position_embeddings=positions)

    scaled, plain = frequencies(here.model.rope_scaling), frequencies(None)
    assert not torch.equal(scaled.flatten(), plain.flatten())


def test_axes_that_do_not_fit_together_are_shown_in_turn() -> None:
    given = parsed({**RUN, "preset": "llama3-8b", TP: 4, PP: 4, CP: 2, "global_batch_size": 128})
    *cases, between = shrink(given, 64, RANKS)
    seen = [set(World.of(of(case), case.world_size).above_one) for case in cases]
    assert sorted(map(sorted, seen)) == [["cp", "dp", "pp"], ["cp", "dp", "tp"], ["cp", "pp", "tp"], ["dp", "pp", "tp"]]
    assert between.name == "cp 2 pp 4"
    for case in (*cases, between):
        assert why(case, "axes seen together").endswith("--ranks 24 shows all together")
    (whole,) = shrink(given, 64, 24)
    assert World.of(of(whole), 24) == World(2, 2, 3, 2) and not any(note.option == "axes seen together" for note in whole.notes)


def why(case: Case, option: str) -> str:
    """The reason that is told of an option."""
    (note,) = (note for note in case.notes if note.option == option)
    return note.why


def test_what_two_ranks_do_not_show_is_shown_by_another_case_or_said() -> None:
    ring = {**RUN, **LARGE["a ring beside two axes"][1]}
    cases = shrink(parsed(ring), 64, RANKS)
    assert [case.name for case in cases] == ["tp 2 cp 2 dp 2", "cp 4 dp 2"]
    assert "a ring of two; another case has one that passes on" in why(cases[0], "--context-parallel-size")
    assert why(cases[1], "--context-parallel-size").startswith("every rank of the ring passes on")
    assert why(cases[1], "--tensor-model-parallel-size") == "another case has it"
    exchanged = shrink(parsed({**RUN, **LARGE["heads exchanged in a ring"][1]}), 64, RANKS)
    assert [case.name for case in exchanged] == ["tp 2 cp 2 dp 2", "cp 4 dp 2"]
    assert [of(case).parallel.hierarchical_context_parallel_sizes for case in exchanged] == [(), (2, 2)]
    group = "the ranks of a group exchange heads; another case has a ring of groups"
    copied = "; key/value heads are copied for several ranks in yours only"
    whole = "groups exchange heads, and keys and values go around a ring of groups, as yours"
    assert [why(case, "--context-parallel-size") for case in exchanged] == [group + copied, whole + copied]
    pair = shrink(parsed({**RUN, "preset": "llama3.1-8b", CP: 8, "cp_comm_type": "ring"}), 8, 2)
    assert "--ranks 3 has one that passes on" in why(pair[0], "--context-parallel-size")
    long = shrink(parsed({**RUN, **LARGE["a long pipeline beside two axes"][1]}), 128, RANKS)
    assert [case.name for case in long] == ["tp 2 pp 2 dp 2", "pp 4 dp 2"]
    assert [of(case).training.global_batch_size for case in long] == [4, 6]
    fewer = "fewer microbatches in a step than pipeline ranks, as yours"
    assert [why(case, "--global-batch-size") for case in long] == [f"several microbatches in a step; another case has {fewer}", fewer]
    # No case has as many chunks as this window spans.
    far = {"preset": "mistral-7b-v0.1", CP: 16, "seq_length": 32768, "sliding_window": 10_000, "global_batch_size": 64}
    (case,) = shrink(parsed({**RUN, **far}), 16, RANKS)
    assert why(case, "--sliding-window") == "into 6 chunks before a token's own, where yours reaches into 10"
    hybrid = {"preset": "llama2-7b", "data_parallel_shard_size": 8, TP: 2, PP: 2, "global_batch_size": 64}
    whole, replicas = shrink(parsed({**RUN, **hybrid}), 64, RANKS)
    assert why(whole, "--data-parallel-shard-size") == "one shard for each rank; another case has replicas of shards"
    assert why(replicas, "--data-parallel-shard-size") == "shards, and replicas of them, as yours"


def test_what_is_left_out_or_does_nothing_here_is_said() -> None:
    given = {**RUN, "preset": "llama3-8b", PP: 2, "pipeline_schedule": "zb-h1", TP: 2, CP: 2, "global_batch_size": 64, "compile": True}
    given |= {"save": "runs/large", "async_save": True, "resize_embeddings": True, "init_from_hf": "nowhere", "nccl_pp_max_ctas": 8}
    given |= {"loss_spike_factor": 3.0, "max_bad_steps": 7, "chat_template": "ours.jinja"}
    cases = shrink(parsed(given), 16, RANKS)
    flat = next(case for case in cases if "pp" not in case.name)
    assert [(note.yours, note.here) for note in flat.notes if note.option == "--pipeline-schedule"] == [("zb-h1", "1f1b")]
    for case in cases:
        assert sum(note.option == "--chat-template" and note.is_scaled for note in case.notes) == 1
        left_out = {note.option: note.yours for note in case.notes if note.is_left_out}
        assert left_out.items() >= {"--compile": "yes", "--save": "runs/large", "--async-save": "yes", "--init-from-hf": "nowhere"}.items()
        assert left_out.keys() >= {"--preset", "--train-iters", "--resize-embeddings"}
        assert all(note.why for note in case.notes if note.yours != note.here)
        for option in ("--nccl-pp-max-ctas", "--loss-spike-factor", "--max-bad-steps"):
            assert why(case, option), option


def test_no_value_changes_in_silence() -> None:
    """Whatever is given: its value is that of the case, or a note says what became of it."""
    large = [replace(case, options={**case.options, "hidden_size": 1536, **SAVED}) for case in draw(5, 24)]
    given = [case for case in large if refusal(case) is None]
    assert len(given) > 12
    for yours in given:
        for case in shrink(parsed(yours.options), yours.world_size, RANKS):
            sections = [getattr(of(case), item.name) for item in fields(Config)]
            told = {note.option for note in case.notes}
            for name, value in parsed(yours.options).differences().items():
                if name == "sequence_parallel" and yours.options.get("tensor_model_parallel_size", 1) == 1:
                    continue  # it says nothing then, and each run warns of it
                here = [getattr(section, name) for section in sections if hasattr(section, name)]
                assert here == [value] or flag(name) in told, name


def test_processes() -> None:
    yours = World(tp=8, cp=1, pp=16, dp=4)
    assert worlds(yours, 8, {}) == (World(2, 1, 2, 2),)
    assert worlds(yours, 16, {}) == (World(2, 1, 4, 2),)
    assert worlds(yours, 8, {"pp": 3}) == (World(2, 1, 2, 2), World(1, 1, 4, 2))
    assert worlds(yours, 12, {"pp": 3}) == (World(2, 1, 3, 2),)
    assert worlds(World(1, 8, 8, 1), 8, {"pp": 3, "cp": 3}) == (World(1, 2, 4, 1), World(1, 4, 2, 1))
    assert worlds(World(1, 8, 1, 1), 3, {"cp": 4}) == (World(1, 3, 1, 1),)
    assert {str(one) for one in worlds(yours, 4, {})} == {"tp 2 pp 2", "tp 2 dp 2", "pp 2 dp 2"}
    assert worlds(World(1, 1, 3, 8), 8, {}) == (World(1, 1, 3, 2),)
    assert worlds(World(2, 1, 2, 16), 8, {"dp": 4}) == (World(2, 1, 2, 2), World(1, 1, 2, 4))
    assert worlds(World(1, 1, 1, 1), 1, {}) == (World(1, 1, 1, 1),)
    with pytest.raises(ConfigError, match=r"--ranks: got 1, expected 2 or more"):
        worlds(yours, 1, {})


def test_what_cannot_be_proven_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--auto-parallel: got true"):
        shrink(parsed({**RUN, "preset": "llama3-8b", "auto_parallel": True}), 8, RANKS)
    with pytest.raises(ConfigError, match=r"--seq-length"):
        shrink(parsed({**RUN, "preset": "llama3-8b", CP: 3, "seq_length": 1000}), 9, RANKS)


def test_a_batch_grows_within_the_steps_that_are_run() -> None:
    for name in ("a batch that grows", "a batch that grows in samples"):
        _, (case,) = large(name)
        training = of(case).training
        sizes = BatchSizes(training.global_batch_size, training.rampup_batch_size)
        assert sizes.at(0) < sizes.full and sizes.at(sizes.samples(STEPS - 1)) == sizes.full


def test_frozen_blocks_are_among_those_that_are_left() -> None:
    _, (case,) = large("frozen blocks")
    here = of(case)
    frozen = [name for name in hf_shapes(here.model) if is_frozen(name, here.optimizer.freeze)]
    whole = {name.split(".")[2] for name in frozen if name.endswith("q_proj.weight")}
    assert 0 < len(whole) < here.model.num_hidden_layers and "model.embed_tokens.weight" in frozen
    assert all(f"model.layers.{layer}.mlp.up_proj.weight" in frozen for layer in range(here.model.num_hidden_layers))
    kept = large("frozen by pattern")[1][0]
    assert kept.options["freeze"] == ("*.mlp.*", "model.norm.weight")
