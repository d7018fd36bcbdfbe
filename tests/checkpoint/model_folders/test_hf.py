"""HuggingFace folders: what transformers writes goes through the engine and a checkpoint, and comes out bit for bit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import safetensors.torch
import torch
from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.model_folders.hf.reader import HFWeights
from megatron_llama.checkpoint.model_folders.hf.writer import export_hf
from megatron_llama.checkpoint.model_folders.safetensors_file import BLOCK_ELEMENTS, row_blocks
from megatron_llama.config.schema import Config, ModelConfig, ParallelConfig, TrainingConfig
from megatron_llama.data.tokenizer.spm import SentencePieceTokenizer, train_tokenizer
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import CheckpointError
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.hf import model_config_from_hf, read_hf_config
from megatron_llama.model.llama import build_stages
from megatron_llama.model.plan.params import hf_shapes
from megatron_llama.pipeline.build import build_optimizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.checkpoint.cases import full_disk, state_at
from tests.harness import Cluster

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "multi-head": {"num_key_value_heads": 4},
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
    "wide heads": {"head_dim": 32, "rms_norm_eps": 1e-5, "eos_token_id": [2, 7]},
    "even vocabulary": {"vocab_size": 256},
}
"""All but the last have a vocabulary that the embedding pads."""


def hf_model(dtype: torch.dtype = torch.float32, **fields: Any) -> LlamaForCausalLM:
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    # With the usual 0.02 a dropped rope scaling would change the logits by less than rounding does.
    config = LlamaConfig(**{**sizes, "num_key_value_heads": 2, "initializer_range": 0.1, "max_position_embeddings": 64, **fields})
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    return model


def written(folder: Path, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB", **fields: Any) -> Path:
    hf_model(dtype, **fields).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    equal = (found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]) for name in expected)
    return found.keys() == expected.keys() and all(equal)


def save_imported(mesh: Mesh, config: Config, folder: Path, save: Path) -> Path:
    """Read a folder into an engine and save its checkpoint."""
    engine = build_optimizer(config, build_stages(config, mesh).values(), mesh)
    engine.load_weights(HFWeights(folder))
    return native.save(save, engine, mesh, state_at(0), config)


def through_a_checkpoint(folder: Path, save: Path, *, bf16: bool) -> native.NativeWeights:
    config = Config(model=read_hf_config(folder), training=TrainingConfig(bf16=bf16))
    return native.open_weights(save_imported(Mesh.single(), config, folder, save))


def save_spread(place: Place, cases: dict[str, ParallelConfig], folder: Path) -> None:
    for name, parallel in cases.items():
        config = Config(model=read_hf_config(folder / name), parallel=parallel)
        mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
        save_imported(mesh, config, folder / name, folder / f"{name}, saved")


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    original = written(tmp_path / "original", dtype, max_shard_size="60KB", **MODELS[name])
    weights = through_a_checkpoint(original, tmp_path / "save", bf16=dtype == torch.bfloat16)
    out = export_hf(tmp_path / "out", weights.model, weights, str(dtype).removeprefix("torch."))
    assert same(tensors(out), tensors(original))
    assert read_hf_config(out) == read_hf_config(original)
    first, second = (LlamaForCausalLM.from_pretrained(folder, dtype=dtype) for folder in (original, out))
    fields = ("rope_parameters", "rms_norm_eps", "head_dim", "tie_word_embeddings", "vocab_size", "max_position_embeddings", "hidden_act")
    assert {field: getattr(second.config, field) for field in fields} == {field: getattr(first.config, field) for field in fields}
    assert second.dtype == dtype
    # Longer than original_max_position_embeddings.
    prompt = torch.arange(48).view(1, 48) * 5 % 251
    assert torch.equal(first(prompt).logits, second(prompt).logits)


SPREAD = {
    "two kv heads over four": (4, ParallelConfig(tensor_model_parallel_size=4), {}),
    "one kv head over four": (4, ParallelConfig(tensor_model_parallel_size=4, sequence_parallel=True), {"num_key_value_heads": 1}),
    "one kv head over two, replicated": (
        4,
        ParallelConfig(tensor_model_parallel_size=2, data_parallel_sharding_strategy="no_shard"),
        {"num_key_value_heads": 1},
    ),
    "context": (4, ParallelConfig(context_parallel_size=2, reduce_bucket_size=5_000), {}),
    "listed split, tied": (2, ParallelConfig(pipeline_model_parallel_size=2, pipeline_layer_split=(1, 2)), {"tie_word_embeddings": True}),
    "both ends on one rank, tied": (
        2,
        ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, pipeline_schedule="zb-v"),
        {"tie_word_embeddings": True, "num_hidden_layers": 4},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 4])
def test_round_trip_through_many_processes(cluster: Cluster, tmp_path: Path, processes: int) -> None:
    """Copies of shared heads, of replicas and of tied weights are written once, and padding never."""
    cases = {name: case for name, case in SPREAD.items() if case[0] == processes}
    for name, (_, _, fields) in cases.items():
        written(tmp_path / name, **{"num_hidden_layers": 3, **fields})
    cluster.run(processes, save_spread, {name: parallel for name, (_, parallel, _) in cases.items()}, tmp_path)
    for name in cases:
        weights = native.open_weights(tmp_path / f"{name}, saved")
        out = export_hf(tmp_path / f"{name}, exported", weights.model, weights, "float32")
        assert same(tensors(out), tensors(tmp_path / name)), name
        assert read_hf_config(out) == read_hf_config(tmp_path / name), name


def test_half_precision_is_read_and_written(tmp_path: Path) -> None:
    original = HFWeights(written(tmp_path / "original", torch.float16))
    assert same(tensors(export_hf(tmp_path / "out", original.model, original, "float16")), tensors(tmp_path / "original"))
    wide = tensors(export_hf(tmp_path / "wide", original.model, original, "float32"))
    assert same(wide, {name: tensor.float() for name, tensor in tensors(tmp_path / "original").items()})


def test_only_the_rectangle_is_read(tmp_path: Path) -> None:
    source = HFWeights(written(tmp_path / "hf", torch.bfloat16))
    name = "model.layers.1.mlp.down_proj.weight"
    out = torch.empty(3, 11)
    source(Rectangle(name, (64, 96), (50, 20), (3, 11), 0), out)
    assert torch.equal(out, tensors(tmp_path / "hf")[name][50:53, 20:31].float())


def test_files_of_an_export(tmp_path: Path) -> None:
    source = HFWeights(written(tmp_path / "hf"))
    out = export_hf(tmp_path / "new" / "out", source.model, source, "float32", max_shard_bytes=100_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)] and len(files) > 3
    homes = {}
    for file in files:
        with safe_open(out / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt", "exported_by": "megatron_llama"}
            names = list(opened.keys())
            sizes = {name: math.prod(opened.get_slice(name).get_shape()) * 4 for name in names}
        assert sum(sizes.values()) <= 100_000 or len(sizes) == 1
        homes |= dict.fromkeys(sizes, file)
    assert index["weight_map"] == homes and index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(out).values())
    assert json.loads((out / "generation_config.json").read_text()) == {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2}
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_an_earlier_export_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    source = HFWeights(written(tmp_path / "hf"))
    (tmp_path / "out").mkdir()
    for bytes_ in (100_000, 5_000_000_000):
        out = export_hf(tmp_path / "out", source.model, source, "float32", max_shard_bytes=bytes_)
    assert sorted(path.name for path in out.iterdir()) == ["SHA256SUMS", "config.json", "generation_config.json", "model.safetensors"]
    (out / "README.md").write_text("mine")
    with pytest.raises(CheckpointError, match=r"out: got a folder with README\.md, expected no folder, an empty one or an earlier export"):
        export_hf(out, source.model, source, "float32")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"got a folder with tokenizer\.json"):
        export_hf(tmp_path / "other", source.model, source, "float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "other", "out"]


def test_only_files_that_are_all_marked_are_an_earlier_export(tmp_path: Path) -> None:
    source = HFWeights(written(tmp_path / "hf"))
    out = export_hf(tmp_path / "out", source.model, source, "float32", max_shard_bytes=100_000)
    shard = sorted(out.glob("*.safetensors"))[1]
    for content in (safetensors.torch.save(load_file(shard), {"format": "pt"}), b"", None):
        if content is not None:
            shard.write_bytes(content)
        else:  # a configuration without any weights
            for path in out.glob("*.safetensors"):
                path.unlink()
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        with pytest.raises(CheckpointError, match=r"out: got a model that no export of this program has written, .*; give another folder"):
            export_hf(out, source.model, source, "float32")
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_full_disk_leaves_the_earlier_export(tmp_path: Path) -> None:
    source = HFWeights(written(tmp_path / "hf"))
    out = export_hf(tmp_path / "out", source.model, source, "bfloat16")
    before = tensors(out)
    with full_disk(300_000), pytest.raises(CheckpointError, match=r"out: got File too large, expected to write it; free space"):
        export_hf(out, source.model, source, "float32")
    assert same(tensors(out), before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_values_that_are_not_finite_are_not_exported(tmp_path: Path) -> None:
    folder = written(tmp_path / "hf")
    weights = tensors(folder)
    weights["lm_head.weight"][7, 3] = 1e5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    source = HFWeights(folder)
    export_hf(tmp_path / "out", source.model, source, "bfloat16")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: got values beyond torch\.float16, .*; export as bfloat16 or float32"):
        export_hf(tmp_path / "half", source.model, source, "float16")
    assert not (tmp_path / "half").exists()


def test_export_streams_in_blocks() -> None:
    shape = (128_256, 8_192)
    blocks = list(row_blocks("lm_head.weight", shape))
    assert [block.offset for block in blocks] == [(row, 0) for row in range(0, shape[0], BLOCK_ELEMENTS // shape[1])]
    assert sum(block.numel for block in blocks) == math.prod(shape) and max(block.numel for block in blocks) <= BLOCK_ELEMENTS


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    return train_tokenizer([topics[name] for name in sorted(topics)], 1000, tmp_path_factory.mktemp("spm") / "tokenizer.model")


def test_the_tokenizer_goes_along(tmp_path: Path, tokenizer: SentencePieceTokenizer) -> None:
    source = HFWeights(written(tmp_path / "hf", vocab_size=1000))
    model = replace(source.model, bos_token_id=None, eos_token_id=None)
    for _ in range(2):
        out = export_hf(tmp_path / "out", model, source, "float32", tokenizer)
    text = topics["assert"][:300]
    assert AutoTokenizer.from_pretrained(out)(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    written_config = json.loads((out / "config.json").read_text())
    assert (written_config["bos_token_id"], written_config["eos_token_id"]) == (tokenizer.bos_id, tokenizer.eos_id) != (None, None)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, tokenizer: SentencePieceTokenizer) -> None:
    source = HFWeights(written(tmp_path / "hf"))
    with pytest.raises(CheckpointError, match="tokenizer: got 1000 tokens, expected at most the model's vocab_size 300"):
        export_hf(tmp_path / "out", source.model, source, "float32", tokenizer)
    assert not (tmp_path / "out").exists()


def rewrite(folder: Path, change: Any) -> None:
    weights = tensors(folder)
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_every_wrong_tensor_is_listed(tmp_path: Path) -> None:
    folder = written(tmp_path / "hf")

    def spoil(weights: dict[str, Tensor]) -> None:
        del weights["model.layers.0.mlp.up_proj.weight"], weights["lm_head.weight"]
        weights["model.norm.weight"] = torch.ones(65)
        weights["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(64, 64, dtype=torch.int8)
        weights["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(64)

    rewrite(folder, spoil)
    with pytest.raises(CheckpointError) as caught:
        HFWeights(folder)
    lines = str(caught.value).split("\n")
    assert lines[0] == f"{folder} does not hold the model:" and len(lines) == 6
    for line in (
        "model.layers.0.mlp.up_proj.weight: got no such tensor, expected shape (96, 64);",
        "lm_head.weight: got no such tensor, expected shape (300, 64);",
        "model.norm.weight: got shape (65,), expected (64,);",
        "model.layers.1.self_attn.q_proj.weight: got I8, expected F32 or F16 or BF16;",
        "model.layers.1.self_attn.q_proj.bias: got a tensor, expected none of this name;",
    ):
        assert sum(line in found for found in lines) == 1, line


def test_harmless_tensors_are_ignored(tmp_path: Path) -> None:
    folder = written(tmp_path / "hf", tie_word_embeddings=True)
    assert "lm_head.weight" not in tensors(folder)
    copy = tensors(folder)["model.embed_tokens.weight"].clone()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": copy}
    rewrite(folder, lambda weights: weights.update(extra))
    assert not HFWeights(folder).model.rope_scaling
    assert "lm_head.weight" not in hf_shapes(HFWeights(folder).model)


def test_another_model_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "hf")
    own = read_hf_config(folder)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight: got shape \(300, 64\), expected \(320, 64\)"):
        HFWeights(folder, replace(own, vocab_size=320))
    with pytest.raises(CheckpointError, match="tie_word_embeddings: got false, expected true, as in the run: its head would be lost"):
        HFWeights(folder, replace(own, tie_word_embeddings=True))
    longer: ModelConfig = replace(own, rope_theta=1e6)
    assert HFWeights(folder, longer).model == longer


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"config\.json: got No such file"),
        (lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(), r"model-00002-of-00002\.safetensors: got no such file"),
        (
            lambda folder: cut(folder / "model-00001-of-00002.safetensors"),
            r"model-00001-of-00002\.safetensors: got .*; copy the file again",
        ),
        (
            lambda folder: cut(folder / "model.safetensors.index.json"),
            r"index\.json:\d+: got .*, expected valid JSON; copy the file again",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").unlink(),
            r"hf: got no weights, expected model\.safetensors or model\.saf",
        ),
    ],
    ids=["config", "shard", "cut", "index", "weights"],
)
def test_damaged_folders(tmp_path: Path, damage: Any, message: str) -> None:
    folder = written(tmp_path / "hf", max_shard_size="300KB")
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        HFWeights(folder)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_an_export_reads_back_as_the_same_model(tmp_path: Path) -> None:
    """Every field of the model survives, also under the eyes of transformers, which rewrites config.json."""
    for number, fields in enumerate(MODELS.values()):
        source = HFWeights(written(tmp_path / f"{number}", **fields))
        out = export_hf(tmp_path / f"out {number}", source.model, source, "float32")
        rewritten = LlamaForCausalLM.from_pretrained(out).config.to_dict()
        assert model_config_from_hf(rewritten, where="rewritten") == source.model == read_hf_config(out)
