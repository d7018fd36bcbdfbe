"""``verify`` finds what is different, says where, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.checkpoint.model_folders.hf.reader import HFWeights
from megatron_llama.checkpoint.model_folders.hf.writer import export_hf
from megatron_llama.cli import main
from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.converter.verify.logits import StreamedModel
from megatron_llama.data.tokenizer.spm import train_tokenizer
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.pipeline.build import build_optimizer
from safetensors.torch import load_file, save_file
from torch import Tensor

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
MODEL = ModelConfig(
    vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=256, rope_theta=500_000.0, rope_scaling=LLAMA3,
)


class Weights(InitialWeights):
    """As trained ones, in which no two norms are alike. The usual std: the one at which a wrong scaling hides."""

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        super().__call__(rectangle, out)
        if len(rectangle.shape) == 1:
            out.normal_(1.0, 0.1, generator=torch.Generator().manual_seed(sum(rectangle.name.encode())))


def written(folder: Path, dtype: str = "float32", **fields: Any) -> Path:
    return export_hf(folder, replace(MODEL, **fields), Weights(1, 0.02), dtype)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("original") / "hf")


class Printed:
    """What a comparison said."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *argv: object) -> None:
        self.code = main(["verify", *map(str, argv)])
        captured = capsys.readouterr()
        self.err, self.lines = captured.err, captured.out.splitlines()

    @property
    def verdict(self) -> str:
        return self.lines[-1]

    def line(self, start: str) -> str:
        [found] = [line for line in self.lines if line.startswith(start)]
        return found


def changed_weights(original: Path, folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    shutil.copytree(original, folder, ignore=shutil.ignore_patterns("SHA256SUMS"))  # another model, and no damaged one
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def changed_config(original: Path, folder: Path, **fields: Any) -> Path:
    shutil.copytree(original, folder, ignore=shutil.ignore_patterns("SHA256SUMS"))  # another model, and no damaged one
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_copy_is_equal(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(original, tmp_path / "copy")
    printed = Printed(capsys, original, tmp_path / "copy")
    assert (printed.code, printed.err, printed.verdict) == (0, "", "verdict: equal")
    assert printed.lines[:2] == [f"A: hf {original} (float32)", f"B: hf {tmp_path / 'copy'} (float32)"]
    assert printed.line("weights") == "weights: equal bit for bit: 21 tensors, 100,160 elements of float32"
    assert printed.line("config") == "config: equal"
    assert printed.line("logits: ").startswith("logits: of 128 tokens (the bytes of a text, for want of a tokenizer), in fp32")
    assert printed.line("logits on random weights (std 0.1): equal, largest deviation 0.00e+00 over 128 tokens")
    assert printed.line("logits on these weights: equal, largest deviation 0.00e+00 over 128 tokens")
    for side in "AB":
        for weights in ("these weights", "random weights (std 0.1)"):
            assert printed.line(f"logits of {side} in transformers on {weights}: equal, largest deviation ")
    assert float(printed.line("logits on random").split("spread ")[1].rstrip(")")) > 0.3, "logits that are all alike would prove nothing"


def flip(tensor: Tensor, *index: int) -> None:
    """The lowest bit of the significand."""
    tensor.view(torch.int32)[index] ^= 1


def test_one_flipped_bit(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    other = changed_weights(original, tmp_path / "hf", lambda weights: flip(weights[name], 95, 63))
    printed = Printed(capsys, original, other)
    before, after = (load_file(folder / "model.safetensors")[name][95, 63].item() for folder in (original, other))
    expected = f"weights {name}: 1 of 6,144 elements, the first at [95, 63]: {before:.9g} in A, {after:.9g} in B"
    assert printed.line("weights ") == f"{expected}; largest deviation {abs(after - before):.3g}"
    assert (printed.code, printed.verdict) == (1, "verdict: different: weights")
    assert printed.line("logits on these weights: equal") and before != after


def swapped(weights: dict[str, Tensor]) -> None:
    """Layers 0 and 1, as a converter that numbers them wrongly would leave them."""
    for name in [name for name in weights if name.startswith("model.layers.0.")]:
        other = name.replace(".0.", ".1.", 1)
        weights[name], weights[other] = weights[other], weights[name]


def interleaved(weights: dict[str, Tensor]) -> None:
    """Rotary halves interleaved, as in Meta's own files, which a converter may forget to undo."""
    for name in ("q_proj", "k_proj"):
        key = f"model.layers.0.self_attn.{name}.weight"
        heads = weights[key].view(-1, 2, 8, 64)
        weights[key] = heads.transpose(1, 2).reshape(weights[key].shape).contiguous()


@pytest.mark.parametrize(
    ("change", "tensors"),
    [(swapped, 18), (interleaved, 2), (lambda weights: weights["lm_head.weight"][:2].copy_(weights["lm_head.weight"][:2].flip(0)), 1)],
    ids=["swapped layers", "interleaved q and k", "two rows"],
)
def test_weights_in_the_wrong_place(
    change: Callable[[dict[str, Tensor]], object], tensors: int, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = Printed(capsys, original, changed_weights(original, tmp_path / "hf", change))
    assert (printed.code, printed.verdict) == (1, "verdict: different: weights, logits")
    listed = [line for line in printed.lines if line.startswith("weights model") or line.startswith("weights lm_head")]
    assert len(listed) == min(tensors, 10)
    assert ("weights of 8 more tensors differ" in printed.lines) is (tensors == 18)
    assert printed.line("config") == "config: equal"
    assert printed.line("logits on random weights (std 0.1): equal, largest deviation 0.00e+00")
    assert printed.line("logits on these weights: different")
    assert printed.line("logits of B in transformers on these weights: equal")


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no scaling": ({"rope_scaling": None, "rope_parameters": None}, "rope_scaling"),
    "another factor": ({"rope_scaling": LLAMA3 | {"factor": 4.0}, "rope_parameters": None}, "rope_scaling"),
    "theta": ({"rope_theta": 10_000.0, "rope_parameters": None}, "rope_theta"),
    "eps": ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_fields_of_the_config(name: str, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields, named = CONFIGS[name]
    printed = Printed(capsys, original, changed_config(original, tmp_path / "hf", **fields))
    assert (printed.code, printed.verdict) == (1, f"verdict: different: config {named}, logits")
    assert printed.line("config ").startswith(f"config {named}: ")
    assert printed.line("weights: equal bit for bit")
    assert printed.line("logits on random weights (std 0.1): different")
    assert printed.line("logits of B in transformers on random weights (std 0.1): equal"), "the folder is right, though another one"


def largest(line: str) -> float:
    return float(line.split("largest deviation ")[1].split()[0])


def test_a_dropped_scaling_hides_in_small_weights_and_short_prompts(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Why there are random weights and a long prompt."""
    other = changed_config(original, tmp_path / "hf", rope_scaling=None, rope_parameters=None)
    long, short = (Printed(capsys, original, other), Printed(capsys, original, other, "--prompt-tokens", 2))
    assert largest(long.line("logits on random")) > 100 * largest(long.line("logits on these"))
    assert largest(long.line("logits on random")) > 10 * largest(short.line("logits on random"))
    assert (
        "note: a wrong rotary scaling or window may stay unseen: the prompt is no longer than 64, up to where they change nothing"
        in short.lines
    )
    assert not any("unseen" in line for line in long.lines)
    assert short.line("logits: of 2 tokens") and short.verdict.startswith("verdict: different: config rope_scaling")


def test_fields_that_change_nothing_are_notes(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = Printed(capsys, original, changed_config(original, tmp_path / "hf", max_position_embeddings=64, eos_token_id=7))
    assert (printed.code, printed.verdict) == (0, "verdict: equal")
    assert printed.line("note: config max_position_embeddings: 256 in A, 64 in B: computes the same")
    assert printed.line("note: config eos_token_id: None in A, 7 in B: computes the same")


def test_tied_and_untied(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An untied head that is a copy of the embedding computes the same; the model is another one all the same."""
    tied = written(tmp_path / "tied", tie_word_embeddings=True)
    copied = changed_weights(
        original, tmp_path / "copied", lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    )
    printed = Printed(capsys, tied, copied)
    assert printed.line("weights lm_head.weight: only in B")
    assert printed.line("config tie_word_embeddings: True in A, False in B")
    assert printed.line("logits on these weights: equal") and printed.line("logits on random weights (std 0.1): different")
    assert (printed.code, printed.verdict) == (1, "verdict: different: weights, config tie_word_embeddings, logits")


def test_other_shapes(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = Printed(capsys, original, written(tmp_path / "hf", vocab_size=320))
    assert printed.line("weights model.embed_tokens.weight: shape (300, 64) in A, (320, 64) in B")
    assert printed.line("logits: not compared, the vocabularies have different sizes")
    assert printed.verdict == "verdict: different: weights, config vocab_size"


def native_checkpoint(folder: Path, source: Path) -> Path:
    """What a run that starts from a HuggingFace folder saves."""
    weights = HFWeights(source)
    config, mesh = Config(model=weights.model), Mesh.single()
    with closing(build_optimizer(config, build_stages(config, mesh).values(), mesh)) as engine:
        engine.load_weights(weights)
        return native.save(folder, engine, mesh, TrainState(0, 0), config)


def test_native_against_huggingface(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found by content, read in chunks, and compared in the narrower of two dtypes."""
    checkpoint = native_checkpoint(tmp_path / "save", original)
    printed = Printed(capsys, checkpoint, original)
    assert (printed.code, printed.err, printed.verdict) == (0, "", "verdict: equal")
    assert printed.lines[0] == f"A: native {checkpoint} (float32)"
    assert not any(line.startswith("logits of A in transformers") for line in printed.lines)
    half = export_hf(tmp_path / "half", HFWeights(original).model, HFWeights(original), "bfloat16")
    rounded = Printed(capsys, checkpoint, half, "--from-a", "native", "--from-b", "hf")
    assert "note: weights are float32 in A, bfloat16 in B: compared after rounding to bfloat16" in rounded.lines
    assert rounded.line("logits on these weights: equal, largest deviation 0.00e+00") and rounded.verdict == "verdict: equal"
    off = changed_weights(half, tmp_path / "off", lambda weights: weights["model.norm.weight"].view(torch.int16)[3:4].add_(1))
    assert Printed(capsys, off, checkpoint).line("weights model.norm.weight: 1 of 64 elements, the first at [3]: ")


@pytest.mark.parametrize("kind", ["meta", "megatron", "megatron-llama", "native"])
def test_every_format(kind: str, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A conversion, whatever its names, layout and order of rows, holds the same model; what the format cannot say is given."""
    split = ("--tensor-model-parallel-size", "2") if kind != "native" else ()
    assert main(["convert", str(original), str(tmp_path / "other"), "--to", kind, *split]) == 0
    capsys.readouterr()
    printed = Printed(capsys, tmp_path / "other", original, "--vocab-size", 300)
    assert (printed.err, printed.verdict) == ("", "verdict: equal") and printed.lines[0].startswith(f"A: {kind} {tmp_path / 'other'}")


def test_a_configuration_can_be_given(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = changed_config(original, tmp_path / "other", rms_norm_eps=1e-6) / "config.json"
    for side, values in (("a", "1e-06 in A, 1e-05 in B"), ("b", "1e-05 in A, 1e-06 in B")):
        printed = Printed(capsys, original, original, f"--hf-config-{side}", other)
        assert printed.line("config ") == f"config rms_norm_eps: {values}"


def test_bits_count(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A zero of another sign is a difference; so is a NaN, and no comparison of logits calls it within rounding."""
    zero, minus, broken = (
        changed_weights(original, tmp_path / name, lambda weights, value=value: weights["model.norm.weight"][5:6].fill_(value))
        for name, value in (("zero", 0.0), ("minus", -0.0), ("broken", torch.nan))
    )
    assert Printed(capsys, zero, minus).verdict == "verdict: different: weights"
    printed = Printed(capsys, zero, broken)
    assert "0 in A, nan in B; largest deviation nan" in printed.line("weights model.norm.weight")
    assert printed.verdict == "verdict: different: weights, logits"
    assert printed.line("logits on these weights: different, largest deviation nan")


def test_prompt_of_real_text(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    letters = "".join(filter(set("abcdefghijklmnopqrstuvwxyz ").__contains__, topics["assert"]))
    train_tokenizer([letters], 290, tmp_path / "tokenizer.model").save_hf(tmp_path / "with")
    for path in original.iterdir():
        shutil.copy(path, tmp_path / "with")
    printed = Printed(capsys, original, tmp_path / "with")
    assert printed.line("logits: of 128 tokens (text), in fp32") and printed.verdict == "verdict: equal"


def test_one_layer_at_a_time(original: Path) -> None:
    """The streamed logits are those of the whole model, and at no time is more asked for than one layer or one block."""
    source = HFWeights(original)
    tokens = torch.arange(96) * 7 % 300
    asked: list[str] = []

    def watched(rectangle: Rectangle, out: Tensor) -> None:
        asked.append(rectangle.name)
        source(rectangle, out)

    streamed = StreamedModel(source.model, watched, tokens)
    config, mesh = Config(model=source.model), Mesh.single()
    [stage] = build_stages(config, mesh).values()
    load_stages([stage], rank_specs(config, mesh), source, dtype=torch.float32, device=mesh.device)
    with torch.no_grad():
        whole = stage(tokens.unsqueeze(-1), stage.positions(len(tokens), mesh.device))[:, 0, :300]
        logits = torch.cat([streamed.hidden @ streamed.head(start, start + 100).T for start in (0, 100, 200)], dim=-1)
    assert (logits - whole).abs().max() < 1e-6 < whole.std()
    layers = [int(name.split(".")[2]) for name in asked if ".layers." in name]
    assert layers == [0] * 9 + [1] * 9 and (asked[0], asked[-1]) == ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "--a: got nothing, expected text"),
        (("one",), 2, "--b: got nothing, expected text"),
        (("one", "two", "three"), 2, "three"),
        (("missing", "missing"), 1, "error: missing: got no such folder, expected a model folder; check the path"),
        (("one", "two", "--prompt-tokens", "-1"), 2, "--prompt-tokens: got -1, expected 0 or more; correct it"),
        (("one", "two", "--from-a", "gguf"), 2, "--from-a: got gguf, expected one of hf, native, megatron, megatron-llama, meta"),
    ],
)
def test_refusals(words: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = Printed(capsys, *words)
    assert printed.code == code and message in printed.err and printed.lines == []
