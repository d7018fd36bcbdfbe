"""Models of every family through the formats: bit for bit, in transformers' and NVIDIA's own classes, or refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron_llama.checkpoint.meta import model_changes, model_differences
from megatron_llama.checkpoint.model_folders.hf.stacked_experts import StackedExperts
from megatron_llama.checkpoint.native import read_meta
from megatron_llama.cli import main
from megatron_llama.converter.verify.fields import field_differences
from megatron_llama.model.hf import model_config_from_hf, read_hf_config
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.checkpoint.model_folders.test_hf import tensors, through_a_checkpoint
from tests.converter.converting import assert_same_model, convert, loaded, rank_file, refusal, rewrite
from tests.converter.test_convert_foreign import logits_of_megatron_core
from tests.harness import Cluster
from tests.torch_twin import drawn

Capture = pytest.CaptureFixture[str]
SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
SCALED = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0], "original_max_position_embeddings": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 6},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED},
    "phi3": {"model_type": "phi3", "partial_rotary_factor": 0.5, "original_max_position_embeddings": 16, "pad_token_id": 0},
    "phi3, long": {"model_type": "phi3", "original_max_position_embeddings": 16, "pad_token_id": 0},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 5, "layer_types": MIXED, "final_logit_softcapping": 30.0},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 5, "layer_types": MIXED, "query_pre_attn_scalar": 20},
    "olmo2": {"model_type": "olmo2", "head_dim": 16, "attention_bias": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": 6, "router_aux_loss_coef": 0.02},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
}
MODELS["llama4"] = {"model_type": "llama4_text", "head_dim": 16, "intermediate_size_mlp": 80, "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS["llama4"] |= {"moe_layers": [0, 1, 3], "no_rope_layers": [1, 0, 1, 1], "attention_chunk_size": 7, "floor_scale": 5, "attention_bias": True}
MODELS["qwen3_moe"] |= {"mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": True}
MODELS["phi3, long"]["rope_parameters"] = {**SCALED, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MEGATRON = ("llama with biases", "mistral", "qwen2", "qwen3", "phi3")


def fields_of(name: str) -> dict[str, Any]:
    return SIZES | MODELS[name]


def saved(fields: dict[str, Any], folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A small model as transformers saves it, no two of its numbers alike in any vector."""
    torch.manual_seed(0)
    others = {name: value for name, value in fields.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields["model_type"], **others))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    model.to(dtype).save_pretrained(folder, max_shard_size="100KB")
    return folder


def folder_of(name: str, folder: Path) -> Path:
    return saved(fields_of(name), folder)


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    """What transformers saved comes back bit for bit, as a model that computes the same bits."""
    original = folder_of(name, tmp_path / "original")
    native = convert(original, tmp_path / "native", "--to", "native")
    back = convert(native, tmp_path / "back", "--to", "hf")
    assert_same_model(back, original)
    ids = torch.arange(40).view(1, 40) * 7 % 300
    with torch.no_grad():
        found, expected = (AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (back, original))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_stacked_experts_are_read(name: str, tmp_path: Path, capsys: Capture) -> None:
    """As transformers 5 has them in memory; and two spellings of one matrix are not taken for one."""
    original = folder_of(name, tmp_path / "original")
    stacked = tmp_path / "stacked"
    AutoModelForCausalLM.from_pretrained(original).save_pretrained(stacked, save_original_format=False)
    file = stacked / "model.safetensors"
    kept = load_file(file)
    assert len([tensor for tensor in kept if tensor.endswith(".mlp.experts.gate_up_proj")]) == (4 if name == "mixtral" else 2)
    assert_same_model(convert(stacked, tmp_path / "back", "--to", "hf"), original)
    through_a_checkpoint(stacked, tmp_path / "run", bf16=False)
    [saved] = sorted((tmp_path / "run").glob("iter_*"))
    assert_same_model(convert(saved, tmp_path / "trained", "--to", "hf"), original)
    assert main(["verify", str(original), str(stacked)]) == 0
    capsys.readouterr()
    last = "model.layers.3.mlp.experts.down_proj"
    save_file(kept | {last: kept[last][:, :-1].contiguous()}, file)
    assert "3.down_proj.weight: got shape (4, 63, " in refusal(capsys, stacked, tmp_path / "out", "--to", "hf").replace("w2", "down_proj")
    save_file({tensor: values for tensor, values in kept.items() if tensor != last}, file)
    assert "got no such tensor, expected shape (64, " in refusal(capsys, stacked, tmp_path / "out", "--to", "hf")
    split = {tensor: values for tensor, values in tensors(original).items() if ".layers.3." in tensor}
    [matrix] = (tensor for tensor in split if tensor.endswith((".experts.2.down_proj.weight", ".experts.2.w2.weight")))
    for beside in (split, {matrix: split[matrix]}):
        save_file(kept | beside, file)
        assert f"{last}: got a tensor, expected none of this name" in refusal(capsys, stacked, tmp_path / "out", "--to", "hf")


def test_the_text_model_of_one_that_sees_pictures(tmp_path: Path, capsys: Capture) -> None:
    """As Scout and Maverick are published: fields in text_config, names with a prefix, a vision tower."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vision_output_dim": 16}
    small |= {"image_size": 28, "patch_size": 14, "projector_input_dim": 16, "projector_output_dim": 16}
    text = {name: value for name, value in fields_of("llama4").items() if name != "model_type"}
    torch.manual_seed(0)
    both = transformers.Llama4ForConditionalGeneration(transformers.Llama4Config(text_config=text, vision_config=small))
    both.save_pretrained(tmp_path / "both", max_shard_size="100KB")
    capsys.readouterr()
    back = convert(tmp_path / "both", tmp_path / "back", "--to", "hf")
    assert "the text model is read, without what sees pictures" in "".join(capsys.readouterr())
    found = AutoModelForCausalLM.from_pretrained(back).state_dict()
    expected = both.language_model.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    file = tmp_path / "both" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"text_config": None}))
    assert "text_config: got None, expected the fields of the text model" in refusal(capsys, tmp_path / "both", tmp_path / "out", "--to", "hf")


@pytest.mark.few(4)
@pytest.mark.parametrize("layout", ["transformer_engine", "local"])
@pytest.mark.parametrize("name", MEGATRON)
def test_there_and_back_through_megatron_lm(name: str, layout: str, tmp_path: Path) -> None:
    original = folder_of(name, tmp_path / "original")
    words = ("--to", "megatron", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--megatron-layout", layout)
    run = convert(original, tmp_path / "run", *words)
    assert_same_model(convert(run, tmp_path / "back", "--to", "hf"), original)


@pytest.mark.parametrize("name", [*MEGATRON, "mixtral", "qwen3_moe"])
def test_there_and_back_through_torch_dist(name: str, tmp_path: Path) -> None:
    """Biases and norms of heads are stacked over layers too, and experts in a dimension of their own."""
    original = folder_of(name, tmp_path / "original")
    run = convert(original, tmp_path / "run", "--to", "torch_dist", "--tensor-model-parallel-size", "2")
    assert_same_model(convert(run, tmp_path / "back", "--to", "hf"), original)


ARGS = {
    "llama with biases": {"add_bias_linear": True, "add_qkv_bias": False, "qk_layernorm": False, "window_size": None},
    "mistral": {"add_bias_linear": False, "window_size": (5, 0), "window_attn_skip_freq": None},
    "qwen2": {"add_bias_linear": False, "add_qkv_bias": True, "rotary_percent": 1.0},
    "qwen3": {"qk_layernorm": True, "window_size": (4, 0), "window_attn_skip_freq": [0, 1, 1, 0]},
    "phi3": {"rotary_percent": 0.5, "window_size": None},
}


@pytest.mark.parametrize("name", MEGATRON)
def test_the_arguments_of_megatron_lm_are_enough(name: str, tmp_path: Path) -> None:
    """A file without our extra argument, as Megatron-LM saves it: its own say which family can hold the model."""
    original = folder_of(name, tmp_path / "original")
    run = convert(original, tmp_path / "run", "--to", "megatron")
    content = loaded(rank_file(run))
    assert {field: getattr(content["args"], field) for field in ARGS[name]} == ARGS[name]
    rewrite(rank_file(run), lambda content: delattr(content["args"], "hf_config"))
    back = convert(run, tmp_path / "back", "--to", "hf", "--vocab-size", "300")
    assert_same_model(back, original, but=("bos_token_id", "eos_token_id", "pad_token_id"))


def test_more_layers_than_there_may_be_are_not_listed(tmp_path: Path, capsys: Capture) -> None:
    """Of a file that says with one number which layers have a window."""
    run = convert(folder_of("qwen3", tmp_path / "original"), tmp_path / "run", "--to", "megatron")

    def many(content: Any) -> None:
        del content["args"].hf_config
        content["args"].num_layers, content["args"].window_attn_skip_freq = 2**31 - 1, 2

    rewrite(rank_file(run), many)
    assert "num_hidden_layers: got 2147483647, expected at most 2,048" in refusal(capsys, run, tmp_path / "out", "--to", "hf")


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "phi3"])
def test_megatron_core_computes_the_same_logits(name: str, cluster: Cluster, tmp_path: Path) -> None:
    original = folder_of(name, tmp_path / "original")
    run = convert(original, tmp_path / "run", "--to", "megatron", "--megatron-layout", "local")
    ids = torch.arange(40).view(1, 40) * 7 % 300
    [found] = cluster.run(1, logits_of_megatron_core, rank_file(run), ids)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(original)(ids).logits
    torch.testing.assert_close(found[:, :, :300], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        (
            "qwen2",
            ("meta",),
            "meta add_qkv_bias: got True, expected False, as in LLaMA; take another format: hf and native hold every model",
        ),
        ("mistral", ("meta",), "meta sliding_window: got 6, expected 0, as in LLaMA"),
        ("qwen3", ("megatron-llama",), "megatron-llama (legacy) qk_norm: got head, expected none"),
        ("phi3", ("megatron", "--megatron-layout", "legacy"), "megatron (legacy) partial_rotary_factor: got 0.5, expected 1.0"),
        ("gemma3", ("megatron",), "megatron norm_position: got both, expected before, as in LLaMA"),
        ("olmo2", ("megatron",), "megatron qk_norm: got projection, expected"),
        ("olmo2", ("megatron",), "megatron norm_position: got after, expected before, as in LLaMA"),
        ("gemma3", ("megatron",), "megatron final_logit_softcapping: got 30.0, expected 0.0, as in LLaMA"),
        (
            "mixtral", ("meta",),
            "meta num_experts: got 4, expected 0, as in LLaMA; take another format: hf and native hold every model, "
            "torch_dist those of Mixtral and Qwen3-MoE",
        ),
        ("mixtral", ("megatron",), "megatron num_experts: got 4, expected 0, as in LLaMA"),
        ("llama4", ("torch_dist",), "megatron model_type: got llama4_text, expected mixtral or qwen3_moe: of others it is not known"),
        ("mixtral", ("megatron-llama",), "num_experts: got 4, expected 0, as in LLaMA"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_by_name(
    name: str, words: tuple[str, ...], says: str, tmp_path: Path, capsys: Capture
) -> None:
    original = folder_of(name, tmp_path / "original")
    assert says in refusal(capsys, original, tmp_path / "out", "--to", *words, status=2)


@pytest.mark.parametrize(
    ("name", "field", "value", "says"),
    [
        ("qwen2", "add_qkv_bias", False, "args add_qkv_bias: got False, expected True, by the config of a qwen2"),
        ("mistral", "window_size", (6, 0), "args window_size: got (6, 0), expected (5, 0), by the config of a mistral"),
        ("qwen3", "window_attn_skip_freq", 2, "args window_attn_skip_freq: got 2, expected [0, 1, 1, 0], by the config of a qwen3"),
        ("phi3", "rotary_percent", 1.0, "args rotary_percent: got 1.0, expected 0.5, by the config of a phi3"),
    ],
)
def test_arguments_that_contradict_the_config(name: str, field: str, value: Any, says: str, tmp_path: Path, capsys: Capture) -> None:
    run = convert(folder_of(name, tmp_path / "original"), tmp_path / "run", "--to", "megatron")
    rewrite(rank_file(run), lambda content: setattr(content["args"], field, value))
    assert says in refusal(capsys, run, tmp_path / "out", "--to", "hf")


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("phi3", ["qkv_proj", "gate_up_proj", "o_proj"]),
        ("gemma3", ["q_proj", "v_proj", "down_proj"]),
        ("olmo2", ["k_proj", "o_proj", "up_proj"]),
    ],
)
def test_an_adapter_of_peft_is_merged(name: str, targets: list[str], tmp_path: Path, capsys: Capture) -> None:
    """Its targets are the names of the family: Phi-3's q, k and v have one addition."""
    from peft import LoraConfig, PeftModel, get_peft_model

    original = folder_of(name, tmp_path / "original")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(original), LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    torch.manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    adapted.save_pretrained(tmp_path / "adapter")
    assert main(["merge", str(original), str(tmp_path / "merged"), "--adapter", str(tmp_path / "adapter")]) == 0
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(original), tmp_path / "adapter").merge_and_unload().state_dict()
    before = tensors(original)
    changed = set()
    for tensor, values in tensors(tmp_path / "merged").items():
        torch.testing.assert_close(values, theirs[tensor], rtol=0, atol=1e-6)
        changed |= set() if torch.equal(values, before[tensor]) else {tensor.split(".")[-2]}
    assert changed == set(targets)
    other = folder_of("qwen2", tmp_path / "other")
    assert main(["merge", str(other), str(tmp_path / "out"), "--adapter", str(tmp_path / "adapter")]) == 1
    assert str(tmp_path / "adapter") in capsys.readouterr().err


@pytest.mark.few(4)
@pytest.mark.parametrize("name", MODELS)
def test_a_trainer_imports_and_saves_it(name: str, tmp_path: Path) -> None:
    """From the folder into the engine's shards, into a native checkpoint, and out again, with two tensors where HuggingFace has one."""
    original = folder_of(name, tmp_path / "original")
    weights = through_a_checkpoint(original, tmp_path / "run", bf16=False)
    [saved] = sorted((tmp_path / "run").glob("iter_*"))
    assert read_meta(saved).model == read_hf_config(original)
    source = StackedExperts(weights, weights.model) if name == "llama4" else weights
    for tensor, expected in tensors(original).items():
        assert torch.equal(drawn(source, tensor, tuple(expected.shape), expected.dtype), expected), tensor
    assert_same_model(convert(saved, tmp_path / "back", "--to", "hf"), original)


def test_the_fields_that_a_resumed_run_shares() -> None:
    """All that change what is computed; with a rotary scaling that reads it, the longest position too."""
    model = model_config_from_hf(fields_of("phi3, long"), where="phi3")
    longer = replace(model, max_position_embeddings=128)
    [problem] = model_differences("run", model, longer)
    assert problem.startswith("run max_position_embeddings: got 64, expected 128")
    plain = replace(model, rope_scaling=None)
    assert model_differences("run", plain, replace(plain, max_position_embeddings=128)) == []
    other = replace(plain, sliding_window=5, partial_rotary_factor=0.25, hidden_act="gelu_pytorch_tanh", model_type="llama")
    named = [line.split()[1].rstrip(":") for line in model_differences("run", plain, other)]
    assert named == ["model_type", "hidden_act", "sliding_window", "partial_rotary_factor"]
    # Who begins anew with the weights may change what has no weights, and is told.
    assert len(model_differences("run", plain, other, resumes=False)) == 1
    told = "\n".join(model_changes("run", plain, other))
    assert all(flag in told for flag in ("--hidden-act gelu_pytorch_tanh", "--sliding-window 5", "--partial-rotary-factor 0.25"))
    [difference] = field_differences(model, longer)
    assert difference.matters and not field_differences(plain, replace(plain, max_position_embeddings=128))[0].matters


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODELS)
def test_verify_tells_fields_and_weights_apart(name: str, tmp_path: Path, capsys: Capture) -> None:
    original = folder_of(name, tmp_path / "original")
    copy = convert(original, tmp_path / "native", "--to", "native")
    assert main(["verify", str(original), str(copy)]) == 0
    capsys.readouterr()
    content = json.loads((original / "config.json").read_text())
    window = 9 if content.get("sliding_window") else None
    (original / "config.json").write_text(json.dumps(content | ({"sliding_window": window} if window else {"rms_norm_eps": 1e-4})))
    assert main(["verify", str(original), str(copy)]) == 1
    said = capsys.readouterr().out
    assert f"sliding_window: {window} in A" in said if window else "rms_norm_eps: 0.0001 in A" in said
