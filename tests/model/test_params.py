"""The parameter table: equal to the modules that are built, and to HuggingFace's tensors element by element."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from megatron_llama.config.schema import Config, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.engine.plan.specs import HFSlice, ParamSpec, UnitSpec, rectangles
from megatron_llama.model.llama import Stage, StageOptions
from megatron_llama.model.plan.chunks import Granularity
from megatron_llama.model.plan.lora import adapter_shapes, projections
from megatron_llama.model.plan.params import (
    Partition,
    hf_shapes,
    kv_copies,
    padded_vocab_size,
    parameter_count,
    partition_of,
    split_layers,
    stage_units,
)
from megatron_llama.model.plan.run_params import rank_units, trained_units
from torch import Tensor

from tests.over_cases import over_cases

GQA = ModelConfig(
    vocab_size=301, hidden_size=24, intermediate_size=40, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
    head_dim=6, make_vocab_size_divisible_by=16,
)  # fmt: skip
TIED = ModelConfig(**(vars(GQA) | {"tie_word_embeddings": True, "num_key_value_heads": 8, "vocab_size": 320}))
ONE_KV_HEAD = replace(GQA, num_key_value_heads=1)
GRIDS = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4)]
models = pytest.mark.parametrize("model", [GQA, TIED, ONE_KV_HEAD], ids=["gqa", "tied", "one kv head"])
FAMILIES = {
    "gqa": GQA,
    "all biases": replace(GQA, attention_bias=True, mlp_bias=True),
    "qwen2": replace(GQA, model_type="qwen2", add_qkv_bias=True),
    "qwen3": replace(GQA, model_type="qwen3", qk_norm="head"),
    "phi3": replace(GQA, model_type="phi3"),
    "gemma3": replace(GQA, model_type="gemma3_text", qk_norm="head", norm_position="both"),
    "olmo2": replace(GQA, model_type="olmo2", qk_norm="projection", norm_position="after"),
    "mixtral": replace(GQA, model_type="mixtral", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=20),
    "llama4": replace(
        GQA, model_type="llama4_text", qk_norm="l2", attention_bias=True, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=20,
        moe_shared_expert_intermediate_size=20, attention_chunk_size=8, decoder_sparse_step=2,
    ),
}  # fmt: skip
FAMILIES |= {f"{name}, one kv head": replace(model, num_key_value_heads=1) for name, model in FAMILIES.items()}
FAMILIES["tied"] = TIED
families = pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES.keys())


def even(layers: int, stages: int) -> Partition:
    """Equal shares, a rank for every stage."""
    return Partition(split_layers(layers, stages), tuple(range(stages)))


def around(layers: int, ranks: int) -> Partition:
    """Down the ranks and back up: both ends are on rank 0."""
    return Partition(split_layers(layers, 2 * ranks), (*range(ranks), *reversed(range(ranks))))


def specs_of(units: tuple[UnitSpec, ...]) -> list[ParamSpec]:
    return [spec for unit in units for spec in unit.params]


def paper_mesh(tp: int, tp_rank: int, stages: int, stage: int) -> Mesh:
    """A place in a grid without processes: enough to build modules on the meta device."""
    recorder = Recorder()

    def axis(name: str, rank: int, size: int) -> Axis:
        return Axis(name, rank, tuple(range(size)), None, recorder)

    pipe = axis("pp", stage, stages)
    return replace(Mesh.single(), tp=axis("tp", tp_rank, tp), pp=pipe, pp_backward=pipe)


def paper_stage(
    model: ModelConfig, partition: Partition, index: int, *, tp: int = 1, tp_rank: int = 0, recompute: Granularity = "none"
) -> Stage:
    """The modules of a stage, without weights."""
    mesh = paper_mesh(tp, tp_rank, max(partition.placement) + 1, partition.placement[index])
    return Stage(model, mesh, StageOptions(recompute=recompute), partition=partition, index=index)


@pytest.mark.parametrize(("tp", "pp"), GRIDS)
@models
def test_stage_parameters_are_those_of_the_modules(model: ModelConfig, tp: int, pp: int) -> None:
    for partition in (even(4, pp), around(4, pp)) if pp < 4 else (even(4, pp),):
        for tp_rank, stage in itertools.product(range(tp), range(partition.stages)):
            specs = specs_of(stage_units(model, partition, stage, tp=tp, tp_rank=tp_rank))
            module = paper_stage(model, partition, stage, tp=tp, tp_rank=tp_rank)
            planned = {spec.name: spec.shape for spec in specs}
            assert planned == {name: tuple(p.shape) for name, p in module.named_parameters()}
            assert len(planned) == len(specs), "a parameter is listed twice"
            assert all(spec.decay == (len(spec.shape) > 1) and spec.stage == stage for spec in specs)
            assert module.units == len(stage_units(model, partition, stage, tp=tp, tp_rank=tp_rank))


def hf_tensors(model: ModelConfig) -> dict[str, Tensor]:
    """HuggingFace's tensors, in which every element has a number of its own."""
    tensors, at = {}, 0
    for name, shape in hf_shapes(model).items():
        numel = torch.Size(shape).numel()
        tensors[name] = torch.arange(at, at + numel).view(shape)
        at += numel
    return tensors


def local_parameter(name: str, hf: dict[str, Tensor], model: ModelConfig, tp: int, rank: int) -> Tensor:
    """A rank's parameter by the definition of tensor parallelism, -1 for padding."""

    def rows(weight: Tensor) -> Tensor:
        return weight.chunk(tp)[rank]

    heads = model.num_key_value_heads
    if ".qkv_proj." in name:
        return torch.cat([rows(hf[name.replace("qkv_proj", part)]) for part in ("q_proj", "k_proj", "v_proj")])
    if ".kv_proj." in name:
        return torch.cat([hf[name.replace("kv_proj", part)].chunk(heads)[rank * heads // tp] for part in ("k_proj", "v_proj")])
    if ".q_proj." in name or (".q_norm." in name and model.qk_norm == "projection"):
        return rows(hf[name])
    if ".k_norm." in name and model.qk_norm == "projection":
        return hf[name].chunk(min(tp, heads))[rank * min(tp, heads) // tp]
    if ".shared_expert." in name:  # whole on every rank
        parts = ("gate_proj", "up_proj") if ".gate_up_proj." in name else ("down_proj",)
        return torch.cat([hf[name.replace("gate_up_proj", part)] for part in parts])
    if ".gate_up_proj." in name:
        return torch.cat([rows(hf[name.replace("gate_up_proj", part)]) for part in ("gate_proj", "up_proj")])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return hf[name].chunk(tp, dim=1)[rank]
    if name in ("lm_head.weight", "model.embed_tokens.weight"):
        weight = hf["model.embed_tokens.weight" if model.tie_word_embeddings else name]
        padding = padded_vocab_size(model, tp) - model.vocab_size
        return rows(torch.nn.functional.pad(weight, (0, 0, 0, padding), value=-1))
    if ".experts." in name:
        theirs = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "llama4_text": ("mlp", "gate_proj", "up_proj", "down_proj")}
        module, *names = theirs[model.model_type]
        owner, _, matrix = name.replace("mlp", module).rpartition(".")
        matrices = names[:2] if matrix == "gate_up_proj" else names[2:]
        # All of them on every rank: of each expert the gate, then up.
        return torch.cat([hf[f"{owner}.{expert}.{short}.weight"] for expert in range(model.num_experts) for short in matrices])
    return hf[name.replace("mlp.gate.", "mlp.router." if model.model_type == "llama4_text" else "block_sparse_moe.gate.")]


def by_our_names(hf: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a family by LLaMA's names, those that it stores as one apart."""
    behind = {"post_attention": "post_self_attn", "pre_feedforward": "post_attention", "post_feedforward": "post_mlp"}
    query, key_value = (heads * model.head_dim for heads in (model.num_attention_heads, model.num_key_value_heads))
    found = {}
    for name, tensor in hf.items():
        _, _, module = name.removesuffix(".weight").rpartition(".")
        if module == "qkv_proj":
            parts = dict(zip(("q_proj", "k_proj", "v_proj"), tensor.split([query, key_value, key_value]), strict=True))
        elif module == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True))
        elif model.norm_position != "before":
            first = module.removesuffix("_layernorm")
            parts = {module.replace(first, behind.get(first, first)): tensor}
        else:
            parts = {module: tensor}
        found |= {name.replace("feed_forward", "mlp").replace(module, part): values for part, values in parts.items()}
    return found


@pytest.mark.few(4)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (4, 1), (8, 1), (1, 4)])
@families
def test_tensors_of_every_family(model: ModelConfig, tp: int, pp: int) -> None:
    hf = hf_tensors(model)
    ours = by_our_names(hf, model)
    seen: set[int] = set()
    for rank, stage in itertools.product(range(tp), range(pp)):
        for spec in specs_of(stage_units(model, even(4, pp), stage, tp=tp, tp_rank=rank)):
            rebuilt = torch.full((spec.numel,), -1)
            # Uneven cuts: the pieces start and end inside rows.
            cuts = sorted({0, 1, spec.numel // 3, spec.numel // 2 + 1, spec.numel})
            for low, high in itertools.pairwise(cuts):
                pieces = list(rectangles(spec, low, high))
                assert len(pieces) <= 3 * len(spec.slices)
                for piece in pieces:
                    tensor = hf[piece.name]
                    assert piece.shape == tuple(tensor.shape) and low <= piece.start and piece.start + piece.numel <= high
                    window = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.size, strict=True))
                    rebuilt[piece.start : piece.start + piece.numel] = tensor[window].flatten()
            assert torch.equal(rebuilt.view(spec.shape), local_parameter(spec.name, ours, model, tp, rank)), spec.name
            assert spec.decay == (len(spec.shape) > 1) == (not spec.resident)
            seen |= set(rebuilt.tolist())
    assert seen - {-1} == set(range(parameter_count(model)))


@over_cases
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 4, 8])
@families
def test_what_several_ranks_hold(model: ModelConfig, tp: int, sequence_parallel: bool) -> None:
    """Vectors by what each rank applies them to: all of them to their own heads, or to their part of the sequence. Of matrices those of key
    and value heads that neighbours share."""
    shared = kv_copies(model, tp)
    for spec in specs_of(stage_units(model, even(4, 1), 0, tp=tp, sequence_parallel=sequence_parallel)):
        _, _, module = spec.name.removesuffix(".bias").removesuffix(".weight").rpartition(".")
        whole = {"q_norm": tp > 1, "k_norm": tp > 1}
        if ".experts." in spec.name or ".shared_expert." in spec.name or module == "gate":
            assert (spec.copies, spec.partial_grad) == (tp, sequence_parallel and tp > 1), spec.name
            continue
        split = {"qkv_proj": (1, False), "q_proj": (1, False), "gate_up_proj": (1, False), "kv_proj": (shared, shared > 1)}
        if model.qk_norm == "projection":
            split |= {"q_norm": (1, False), "k_norm": (shared, shared > 1)}
        if len(spec.shape) == 1:
            expected = split.get(module, (tp, whole.get(module, sequence_parallel and tp > 1)))
            assert (spec.copies, spec.partial_grad) == expected, spec.name
        else:
            assert (spec.copies, spec.partial_grad) == split.get(module, (1, False)), spec.name


def test_a_fused_tensor_of_huggingface_has_one_addition() -> None:
    lora = LoraConfig(lora_rank=2, lora_target_modules=("qkv_proj", "gate_up_proj"))
    model = FAMILIES["phi3"]
    outputs = (8 + 2 * 4) * model.head_dim
    assert projections(model) == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    assert projections(GQA) == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    shapes = adapter_shapes(model, lora)
    assert len(shapes) == 4 * model.num_hidden_layers
    assert shapes["model.layers.0.self_attn.qkv_proj.lora_B.weight"] == (outputs, 2)
    specs = {spec.name: spec for spec in specs_of(trained_units(stage_units(model, even(4, 1), 0, tp=2, tp_rank=1), lora=lora, tp=2))}
    second = specs["model.layers.0.self_attn.qkv_proj.adapters.qkv_proj.lora_B.weight"]
    assert second.shape == (outputs // 2, 2)
    # The second half of the queries, of the keys and of the values.
    assert [(part.row, part.rows, part.hf_row) for part in second.slices] == [(0, 24, 24), (24, 12, 60), (36, 12, 84)]


@pytest.mark.parametrize(
    ("layers", "stages", "options", "counts"),
    [
        (12, 3, {}, [4, 4, 4]),
        (7, 3, {"explicit": (1, 4, 2)}, [1, 4, 2]),
        (7, 4, {"first": 1}, [1, 2, 2, 2]),
        (7, 4, {"last": 1}, [2, 2, 2, 1]),
        (14, 4, {"first": 1, "last": 1}, [3, 4, 4, 3]),
        (126, 16, {"first": 1, "last": 1}, [7, *[8] * 14, 7]),  # Llama 3.1 405B (Dubey et al., 2024, section 3.3.2)
        (5, 1, {"first": 1, "last": 1}, [5]),
    ],
)
def test_shares_of_layers(layers: int, stages: int, options: dict[str, object], counts: list[int]) -> None:
    ranges = split_layers(layers, stages, **options)
    assert [len(part) for part in ranges] == counts
    assert [layer for part in ranges for layer in part] == list(range(layers))


VIRTUAL = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}


@pytest.mark.parametrize(
    ("options", "layers", "held"),
    [
        ({"pipeline_model_parallel_size": 2}, 4, [[0, 1], [2, 3]]),
        ({"pipeline_model_parallel_size": 2, "pipeline_layer_split": (3, 1)}, 4, [[0, 1, 2], [3]]),
        ({**VIRTUAL, "pipeline_schedule": "interleaved"}, 8, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ({**VIRTUAL, "pipeline_schedule": "interleaved", **ENDS}, 6, [[0, 3, 4], [1, 2, 5]]),
        ({**VIRTUAL, "pipeline_schedule": "zb-v"}, 4, [[0, 3], [1, 2]]),
    ],
    ids=["equal", "listed", "interleaved", "interleaved, ends counted", "zb-v"],
)
def test_a_rank_holds_the_blocks_of_all_its_stages(options: dict[str, object], layers: int, held: list[list[int]]) -> None:
    config = Config(model=replace(TIED, num_hidden_layers=layers), parallel=ParallelConfig(**options))
    for rank, blocks in enumerate(held):
        names = [unit.name for units in rank_units(config, rank=rank) for unit in units]
        assert [name for name in names if name.startswith("layers")] == [f"layers.{block}" for block in blocks]
    partition = partition_of(config)
    assert sorted(stage for rank in range(2) for stage in partition.stages_of(rank)) == list(range(partition.stages))
    assert partition.first_and_last_share_rank == (options.get("pipeline_schedule") == "zb-v")


def frozen_of(model: ModelConfig, partition: Partition, tp: int, freeze: tuple[str, ...]) -> set[str]:
    """The HuggingFace names of what is not trained, over all ranks. A name is either frozen everywhere or nowhere."""
    places = itertools.product(range(tp), range(partition.stages))
    stages = [stage_units(model, partition, stage, tp=tp, tp_rank=rank) for rank, stage in places]
    specs = [spec for units in stages for spec in specs_of(trained_units(units, freeze=freeze))]
    frozen, trained = ({part.name for s in specs if s.trainable is wanted for part in s.slices} for wanted in (False, True))
    assert not frozen & trained and frozen | trained == set(hf_shapes(model))
    return frozen


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("stages", [1, 2, 4])
@models
def test_patterns_freeze_the_same_tensors_in_every_layout(model: ModelConfig, stages: int, tp: int) -> None:
    names, partition = set(hf_shapes(model)), even(4, stages)
    assert frozen_of(model, partition, tp, ()) == set()
    first = {name for name in names if name.startswith(("model.layers.0.", "model.embed_tokens."))}
    assert frozen_of(model, partition, tp, ("model.embed_tokens.*", "model.layers.0.*")) == first
    assert frozen_of(model, partition, tp, ("model.layers.?.*norm.weight",)) == {name for name in names if "layernorm" in name}
    assert frozen_of(model, partition, tp, ("*",)) == names
    assert frozen_of(model, partition, tp, ("layers.0.*", "MODEL.*")) == set(), "whole names, as they are written"


def test_the_embedding_decides_for_a_tied_head() -> None:
    for partition, places in (
        (even(4, 1), [(0, "model.embed_tokens.weight")]),
        (even(4, 4), [(0, "model.embed_tokens.weight"), (3, "lm_head.weight")]),
    ):
        for stage, name in places:
            [spec] = [s for s in specs_of(trained_units(stage_units(TIED, partition, stage), freeze=("model.embed_tokens.*",))) if s.name == name]
            assert not spec.trainable
            assert all(s.trainable for s in specs_of(trained_units(stage_units(TIED, partition, stage), freeze=("lm_head.*",))))


def test_a_part_of_a_fused_weight_freezes_nothing() -> None:
    specs = specs_of(trained_units(stage_units(GQA, even(4, 1), 0), freeze=("*.q_proj.*", "*.up_proj.*")))
    assert all(spec.trainable for spec in specs)


def test_a_rank_reads_the_patterns_of_its_configuration() -> None:
    parallel, optimizer = ParallelConfig(pipeline_model_parallel_size=2), OptimizerConfig(freeze=("model.layers.2.*",))
    config = Config(model=GQA, parallel=parallel, optimizer=optimizer)
    units = [[unit for stage in rank_units(config, rank=rank) for unit in stage] for rank in (0, 1)]
    trained = [[any(spec.trainable for spec in unit.params) for unit in held] for held in units]
    assert trained == [[True, True, True], [False, True, True]]


def test_tied_embedding_is_one_parameter_on_one_rank_and_two_copies_on_several() -> None:
    for partition in (even(4, 1), around(4, 2), around(4, 1)):
        alone = [spec for stage in range(partition.stages) for spec in specs_of(stage_units(TIED, partition, stage))]
        assert [spec.contributions for spec in alone if spec.name == "model.embed_tokens.weight"] == [2]
        assert not any(spec.tied or spec.name == "lm_head.weight" for spec in alone)
    ends = [stage_units(TIED, even(4, 4), stage) for stage in range(4)]
    tied = [[spec for spec in specs_of(units) if spec.tied] for units in ends]
    assert [[spec.name for spec in specs] for specs in tied] == [["model.embed_tokens.weight"], [], [], ["lm_head.weight"]]
    assert tied[0][0].slices == tied[3][0].slices and tied[0][0].contributions == tied[3][0].contributions == 1


SHAPES = [(), (1,), (7,), (3, 5), (1, 1), (4, 1, 3), (2, 3, 4), (5, 4, 3, 3), (2, 1, 2, 1, 3), (0,), (3, 0, 2)]


@pytest.mark.few(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rectangles_of_any_rank_are_contiguous_ranges(shape: tuple[int, ...]) -> None:
    """Every range of the elements, as torch sees the blocks: in order, without a gap, and few of them."""
    spec = ParamSpec("w", shape, (HFSlice("w", shape, 0, shape[0] if shape else 1),), decay=len(shape) > 1)
    whole = torch.arange(spec.numel).view(shape)
    for low in range(spec.numel + 1):
        for high in range(low, spec.numel + 1):
            pieces = list(rectangles(spec, low, high))
            elements = []
            for piece in pieces:
                assert piece.shape == shape and len(piece.offset) == len(piece.size) == len(shape)
                block = whole[tuple(slice(at, at + size) for at, size in zip(piece.offset, piece.size, strict=True))]
                assert tuple(block.shape) == piece.size and piece.start == low + len(elements)
                elements += block.flatten().tolist()
            assert elements == list(range(low, high))
            assert len(pieces) <= max(1, 2 * len(shape) - 1)
