"""The parameter table: equal to the modules that are built, and to HuggingFace's tensors element by element."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megatron_llama.config import ModelConfig
from megatron_llama.mesh import Axis, Mesh
from megatron_llama.model.llama import Stage
from megatron_llama.params import hf_shapes, padded_vocab_size, parameter_count, rectangles, stage_layers, stage_units
from megatron_llama.recorder import Recorder

GQA = ModelConfig(
    vocab_size=301,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=6,
    make_vocab_size_divisible_by=16,
)
TIED = ModelConfig(**(vars(GQA) | {"tie_word_embeddings": True, "num_key_value_heads": 8, "vocab_size": 320}))
GRIDS = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4)]


def paper_mesh(tp: int, tp_rank: int, stages: int, stage: int) -> Mesh:
    """A place in a grid without processes: enough to build modules on the meta device."""
    recorder = Recorder()

    def axis(name: str, rank: int, size: int) -> Axis:
        return Axis(name, rank, tuple(range(size)), None, recorder)

    alone = axis("alone", 0, 1)
    tensor, pipe = axis("tp", tp_rank, tp), axis("pp", stage, stages)
    return Mesh(alone, tensor, alone, alone, pipe, pipe, alone, torch.device("cpu"), recorder)


@pytest.mark.parametrize(("tp", "pp"), GRIDS)
@pytest.mark.parametrize("model", [GQA, TIED], ids=["gqa", "tied"])
def test_stage_parameters_are_those_of_the_modules(model: ModelConfig, tp: int, pp: int) -> None:
    for tp_rank, stage in itertools.product(range(tp), range(pp)):
        units = stage_units(model, tp=tp, tp_rank=tp_rank, stages=pp, stage=stage)
        module = Stage(model, paper_mesh(tp, tp_rank, pp, stage), sequence_parallel=False)
        planned = {spec.name: spec.shape for unit in units for spec in unit.params}
        assert planned == {name: tuple(p.shape) for name, p in module.named_parameters()}
        assert len(planned) == sum(len(unit.params) for unit in units), "a parameter is listed twice"
        assert all(spec.decay == (len(spec.shape) > 1) for unit in units for spec in unit.params)


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

    if name.endswith("qkv_proj.weight"):
        return torch.cat([rows(hf[name.replace("qkv_proj", part)]) for part in ("q_proj", "k_proj", "v_proj")])
    if name.endswith("gate_up_proj.weight"):
        return torch.cat([rows(hf[name.replace("gate_up_proj", part)]) for part in ("gate_proj", "up_proj")])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return hf[name].chunk(tp, dim=1)[rank]
    if name in ("lm_head.weight", "model.embed_tokens.weight"):
        weight = hf["model.embed_tokens.weight" if model.tie_word_embeddings else name]
        padding = padded_vocab_size(model, tp) - model.vocab_size
        return rows(torch.nn.functional.pad(weight, (0, 0, 0, padding), value=-1))
    return hf[name]


@pytest.mark.parametrize(("tp", "pp"), GRIDS)
@pytest.mark.parametrize("model", [GQA, TIED], ids=["gqa", "tied"])
def test_rectangles_point_at_the_right_elements(model: ModelConfig, tp: int, pp: int) -> None:
    hf = hf_tensors(model)
    for rank, stage in itertools.product(range(tp), range(pp)):
        for spec in (spec for unit in stage_units(model, tp=tp, tp_rank=rank, stages=pp, stage=stage) for spec in unit.params):
            rebuilt = torch.full((spec.numel,), -1)
            # Uneven cuts: the pieces start and end inside rows.
            cuts = sorted({0, 1, spec.numel // 3, spec.numel // 2 + 1, spec.numel})
            for low, high in itertools.pairwise(cuts):
                pieces = list(rectangles(spec, low, high))
                assert len(pieces) <= 3 * len(spec.slices)
                for piece in pieces:
                    assert low <= piece.start and piece.start + piece.numel <= high
                    block = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.size, strict=True))
                    rebuilt[piece.start : piece.start + piece.numel] = hf[piece.name][block].reshape(-1)
            assert torch.equal(rebuilt.view(spec.shape), local_parameter(spec.name, hf, model, tp, rank)), spec.name


def test_stages_partition_the_layers() -> None:
    for layers, stages in ((4, 1), (4, 2), (12, 3), (80, 8)):
        assert [layer for stage in range(stages) for layer in stage_layers(layers, stages, stage)] == list(range(layers))


@pytest.mark.parametrize(
    ("count", "vocab", "hidden", "inner", "layers", "heads", "kv_heads", "head_dim", "tied"),
    [
        (6_738_415_616, 32000, 4096, 11008, 32, 32, 32, 128, False),  # Llama-2 7B
        (68_976_648_192, 32000, 8192, 28672, 80, 64, 8, 128, False),  # Llama-2 70B
        (8_030_261_248, 128256, 4096, 14336, 32, 32, 8, 128, False),  # Llama-3.1 8B
        (1_235_814_400, 128256, 2048, 8192, 16, 32, 8, 64, True),  # Llama-3.2 1B
    ],
)
def test_parameter_counts_are_the_published_ones(
    count: int, vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, tied: bool
) -> None:
    model = ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
    )
    assert parameter_count(model) == count


def test_padded_vocabulary() -> None:
    assert [padded_vocab_size(GQA, tp) for tp in (1, 2, 4)] == [304, 320, 320]
    assert padded_vocab_size(TIED, 4) == 320


def test_tied_embedding_is_one_parameter_on_one_stage_and_two_copies_on_several() -> None:
    alone = [spec for unit in stage_units(TIED) for spec in unit.params]
    assert [spec.contributions for spec in alone if spec.name == "model.embed_tokens.weight"] == [2]
    assert not any(spec.tied or spec.name == "lm_head.weight" for spec in alone)
    ends = [stage_units(TIED, stages=4, stage=stage) for stage in range(4)]
    tied = [[spec for unit in units for spec in unit.params if spec.tied] for units in ends]
    assert [[spec.name for spec in specs] for specs in tied] == [["model.embed_tokens.weight"], [], [], ["lm_head.weight"]]
    assert tied[0][0].slices == tied[3][0].slices and tied[0][0].contributions == tied[3][0].contributions == 1
