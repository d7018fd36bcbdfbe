import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron_llama.config.schema import ModelConfig
from megatron_llama.errors import CheckpointError
from megatron_llama.model.hf import carried_config, hf_config_from_model, model_config_from_hf, read_hf_config
from megatron_llama.model.presets import PRESETS
from transformers import AutoConfig

from tests.over_cases import over_cases

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(**changes: Any) -> ModelConfig:
    return model_config_from_hf(SMALL | changes, where="m/config.json")


def refusal(config_json: dict[str, Any]) -> list[str]:
    with pytest.raises(CheckpointError) as error:
        model_config_from_hf(config_json, where="m/config.json")
    title, *problems = str(error.value).splitlines()
    assert title.startswith("m/config.json")
    return [problem.removeprefix("  - ") for problem in problems]


def test_absent_special_tokens_stay_absent(tmp_path: Path) -> None:
    model = replace(PRESETS["llama3.2-1b"], bos_token_id=None, eos_token_id=None)
    (tmp_path / "config.json").write_text(json.dumps(hf_config_from_model(model, dtype="bfloat16")))
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.bos_token_id, config.eos_token_id, str(config.dtype)) == (None, None, "torch.bfloat16")
    config.save_pretrained(tmp_path / "again")
    assert read_hf_config(tmp_path) == read_hf_config(tmp_path / "again") == model


def test_what_is_carried_has_the_kind_that_transformers_checks(tmp_path: Path) -> None:
    """LLaMA 4 was published with 4 for a switch; files of transformers 4 have null and whole numbers. transformers 5 refuses them all."""
    for preset, fields in {
        "llama4-scout": {"attn_temperature_tuning": (4, True), "head_dim": (None, 128), "eos_token_id": ([7, 8], [7, 8])},
        "mixtral-8x7b": {"router_jitter_noise": (0, 0.0), "router_aux_loss_coef": (0, 0.0), "output_router_logits": (None, False)},
        "qwen3-30b-a3b": {"use_sliding_window": (None, False), "attention_bias": (None, False), "router_aux_loss_coef": (2, 2.0)},
    }.items():
        original = hf_config_from_model(PRESETS[preset], dtype="bfloat16") | {name: value for name, (value, _) in fields.items()}
        model = model_config_from_hf(original, where="m/config.json")
        (tmp_path / "config.json").write_text(json.dumps(carried_config(model, original, dtype="bfloat16")))
        assert read_hf_config(tmp_path) == model
        config = AutoConfig.from_pretrained(tmp_path)
        for name, (_, expected) in fields.items():
            assert (getattr(config, name), type(getattr(config, name))) == (expected, type(expected)), name


def test_explicit_fields() -> None:
    model = read(num_key_value_heads=2, head_dim=16, eos_token_id=[7, 8], bos_token_id=3, tie_word_embeddings=True)
    assert (model.num_key_value_heads, model.head_dim, model.eos_token_id, model.bos_token_id) == (2, 16, 7, 3)
    assert model.tie_word_embeddings
    assert read(head_dim=None, num_key_value_heads=None) == read()
    assert read(architectures=["LLaMAForCausalLM"]) == read()
    assert read(pretraining_tp=8, transformers_version="4.40.0") == read()


LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 4096}


@over_cases
@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 10000.0, LINEAR),
        ({"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}}, 10000.0, LINEAR),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 5e5, {"rope_type": "llama3", **LLAMA3}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 1.0}}, 5e5, None),
        ({"rope_parameters": {**LINEAR, "rope_theta": 5e5}}, 5e5, LINEAR),
        ({"rope_parameters": {**LINEAR, "rope_theta": 5e5}, "rope_theta": 5e5, "rope_scaling": LINEAR}, 5e5, LINEAR),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5}, 5e5, {"rope_type": "llama3", **LLAMA3}),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, 10000.0, {"rope_type": "dynamic", "factor": 2.0}),
        ({"rope_scaling": YARN | {"mscale": 1, "truncate": False, "beta_fast": None}}, 1e4, YARN | {"mscale": 1.0, "truncate": False}),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, 1e4, YARN | {"original_max_position_embeddings": 2048}),
        ({"rope_scaling": YARN | {"mscale_all_dim": 0, "finetuned": None}}, 1e4, YARN | {"mscale_all_dim": 0.0}),
        ({"rope_scaling": YARN | {"finetuned": True}}, 1e4, YARN | {"finetuned": True}),
        ({"rope_scaling": LONG, "original_max_position_embeddings": 4096}, 1e4, LONG),
        ({"rope_parameters": LONG | {"factor": 8, "rope_theta": 5e5}}, 5e5, LONG | {"factor": 8.0}),
    ],
)
def test_spellings_of_rotary_embeddings(fields: dict[str, Any], theta: float, scaling: dict[str, Any] | None) -> None:
    model = read(**fields)
    assert (model.rope_theta, model.rope_scaling) == (theta, scaling)


@over_cases
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "falcon"}, "m/config.json model_type: got 'falcon', expected 'llama' or 'mistral'"),
        ({"model_type": "gemma3"}, "save its text model alone, with Gemma3ForCausalLM"),
        # Nothing is said of the fields of a family that nobody knows, least of all that they may be ignored.
        ({"model_type": "qwen2_moe", "num_experts_per_tok": 8, "hidden_size": None}, "model_type: got 'qwen2_moe', expected 'llama' or"),
        ({"model_type": "mistral", "num_key_value_heads": 4}, "architectures: got ['LlamaForCausalLM'], expected ['MistralForCausalLM']"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "num_labels: got 2 labels, expected 1 label"),
        ({"architectures": ["LlamaForSequenceClassification"], "num_labels": 10**12}, "num_labels: got 1000000000000 labels, expected 1 label"),
        ({"attention_bias": "yes"}, "attention_bias: got 'yes', expected true or false"),
        ({"mlp_bias": 1}, "mlp_bias: got 1"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected 'silu' or 'swish' or 'gelu_pytorch_tanh'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: got {'bits': 4}"),
        ({"hidden_size": 0}, "hidden_size: got 0, expected a positive integer"),
        ({"hidden_size": True}, "hidden_size: got True"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers: got '2'"),
        ({"hidden_size": 36}, "head_dim: got 9, expected an even number; rotary embeddings turn pairs"),
        ({"hidden_size": 30}, "hidden_size: got 30, expected a multiple of num_attention_heads 4"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: got 0, expected a positive number"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id: got ['</s>'], expected a token id"),
        ({"rope_scaling": {"type": "proportional", "factor": 2.0}}, "rope_type: got 'proportional', expected one of default, linear"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling.factor: got nothing, expected a positive number"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters.factor: got nothing"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "rope_scaling.truncate: got 1, expected true or false"),
        # Absent it is true, and transformers takes null for false.
        ({"rope_scaling": YARN | {"truncate": None}}, "rope_scaling.truncate: got nothing, expected true or false"),
        ({"rope_scaling": YARN | {"mscale_all_dim": -1}}, "rope_scaling.mscale_all_dim: got -1, expected a positive number"),
        ({"rope_scaling": YARN | {"mscale": False}}, "rope_scaling.mscale: got False, expected a positive number"),
        ({"rope_scaling": YARN | {"finetuned": 1}}, "rope_scaling.finetuned: got 1, expected true or false"),
        ({"rope_scaling": YARN | {"beta_slow": 40, "beta_fast": 32}}, "got 40 and 32, expected beta_slow < beta_fast"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 64}, "got 4096, expected original_max_position_embeddings 64"),
        ({"rope_scaling": LONG | {"short_factor": [1.0] * 3}}, "short_factor: got [1.0, 1.0, 1.0], expected 4 positive numbers"),
        ({"rope_scaling": LONG | {"long_factor": 2.0}}, "long_factor: got 2.0, expected 4 positive numbers"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention: got"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor: got 0.5"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor: got nothing, expected a positive number"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 0.5}},
            "got 1.0 and 0.5, expected low_freq_factor < high_freq_factor",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling: got 'linear', expected a mapping"),
        ({"rope_theta": -1.0}, "rope_scaling.rope_theta: got -1.0"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "got 500000.0, expected rope_theta 10000.0"),
        ({"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 4.0}}, "expected the same rotary embedding"),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    [problem] = refusal(SMALL | fields)
    assert message in problem


def test_all_problems_come_at_once() -> None:
    problems = refusal({"model_type": "llama", "mlp_bias": 2, "rope_scaling": {"rope_type": "su"}})
    missing = ["hidden_size", "num_attention_heads", "vocab_size", "intermediate_size", "num_hidden_layers"]
    assert len(problems) == 2 + len(missing)
    for name in missing:
        assert any(f"{name}: got nothing" in problem for problem in problems)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: got No such file"):
        read_hf_config(tmp_path)
    for content, said in ((b'{\n"a": 1,\n', r"config\.json:3: got"), (b"\xff", "expected valid JSON"), (b"[1]", "got a JSON list")):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=said):
            read_hf_config(str(tmp_path))
