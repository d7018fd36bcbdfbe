"""Families: their presets, their config.json in both directions, and what they refuse."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.checkpoint.model_folders.model_fields import LLAMA_KIND
from megatron_llama.config.schema import ModelConfig
from megatron_llama.errors import CheckpointError
from megatron_llama.model.families import FAMILIES
from megatron_llama.model.families.family import Family
from megatron_llama.model.hf import hf_config_from_model, model_config_from_hf, unheld_fields
from megatron_llama.model.plan.params import hf_shapes, parameter_count
from megatron_llama.model.presets import PRESETS
from megatron_llama.model.windows import FULL, SLIDING, layer_windows
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from tests.over_cases import over_cases
from tests.torch_twin import stacked_experts

# Parameters of the published weights (tied heads counted once; of models that see pictures the text model).
TOTALS = {
    "llama-7b": 6_738_415_616, "llama-13b": 13_015_864_320, "llama-30b": 32_528_943_616, "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192, "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496, "llama3.1-8b": 8_030_261_248, "llama3.1-70b": 70_553_706_496, "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824, "llama3.3-70b": 70_553_706_496, "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552, "mistral-nemo-12b": 12_247_782_400, "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760, "gemma2-2b": 2_614_341_888, "gemma2-9b": 9_241_705_984, "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952, "gemma3-4b-text": 3_880_263_168, "gemma3-12b-text": 11_766_034_176, "gemma3-27b-text": 27_009_346_304,
    "olmo2-7b": 7_298_617_344, "olmo2-13b": 13_716_198_400, "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560, "llama4-scout": 107_769_861_120, "llama4-maverick": 400_711_848_960,
}  # fmt: skip
SIZES = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}


def file_of(kind: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [FAMILIES[kind].architecture], "model_type": kind, **SIZES, **changes}


def read(kind: str, **changes: Any) -> ModelConfig:
    return model_config_from_hf(file_of(kind, **changes), where="m/config.json")


def transformers_config(fields: dict[str, Any]) -> PreTrainedConfig:
    copied = json.loads(json.dumps(fields))
    return AutoConfig.for_model(copied.pop("model_type"), **copied)


def tensors_of(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_every_preset_has_the_published_number_of_parameters() -> None:
    assert {name: parameter_count(model) for name, model in PRESETS.items()} == TOTALS


@pytest.mark.parametrize("name", TOTALS)
def test_transformers_makes_the_model_of_what_we_write(name: str) -> None:
    """One of its layers stands for all: the others differ in nothing that has a shape."""
    model = PRESETS[name]
    written = hf_config_from_model(model, dtype="bfloat16")
    config = transformers_config(written)
    assert model_config_from_hf(written, where="ours") == model
    assert model_config_from_hf(config.to_dict(), where="theirs") == model
    assert config.architectures == [FAMILIES[model.model_type].architecture]
    assert config.num_hidden_layers == model.num_hidden_layers and config.head_dim == model.head_dim
    assert unheld_fields(model) == {}
    few = replace(model, num_hidden_layers=2, layer_types=model.layer_types[4:6])
    found = tensors_of(transformers_config(hf_config_from_model(few, dtype="bfloat16")))
    if model.tie_word_embeddings:
        assert found.pop("lm_head.weight") == found["model.embed_tokens.weight"]
    ours = {name: torch.empty(shape, device="meta") for name, shape in hf_shapes(few).items()}
    assert found == {name: tuple(tensor.shape) for name, tensor in stacked_experts(few, ours).items()}


@pytest.mark.parametrize("kind", FAMILIES)
def test_transformers_makes_a_model_with_a_small_vocabulary_of_what_we_write(kind: str) -> None:
    """Its class has a pad_token_id for a file without one, and refuses one that the embedding does not have."""
    model = read(kind)
    written = hf_config_from_model(model, dtype="float32")
    assert tensors_of(transformers_config(written))["model.embed_tokens.weight"] == (100, 32)
    assert model_config_from_hf(written, where="ours") == model


@over_cases
@pytest.mark.parametrize("name", TOTALS)
def test_transformers_computes_the_rotary_embedding_and_the_windows_of_the_preset(name: str) -> None:
    model = PRESETS[name]
    config = transformers_config(hf_config_from_model(model, dtype="float32"))
    both = config.rope_parameters
    whole = both.get(FULL, both)
    assert whole["rope_theta"] == model.rope_theta
    assert whole["rope_type"] == (model.rope_scaling or {"rope_type": "default"})["rope_type"]
    assert whole.get("partial_rotary_factor", 1.0) == model.partial_rotary_factor
    assert {field: whole[field] for field in model.rope_scaling or {}} == (model.rope_scaling or {})
    if model.rope_local_base_freq:
        assert both[SLIDING] == {"rope_type": "default", "rope_theta": model.rope_local_base_freq}
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or [SLIDING if window else FULL] * model.num_hidden_layers
    assert tuple(window if kind == SLIDING else 0 for kind in types) == layer_windows(model)


@pytest.mark.parametrize("kind", FAMILIES)
def test_absent_fields_are_those_of_transformers(kind: str) -> None:
    theirs = transformers_config({"model_type": kind, "architectures": [FAMILIES[kind].architecture], **SIZES}).to_dict()
    tokens = {"bos_token_id": None, "eos_token_id": None}
    # A padding token that the small vocabulary does not have is none.
    tokens |= {"pad_token_id": None} if (theirs["pad_token_id"] or 0) >= SIZES["vocab_size"] else {}
    assert model_config_from_hf({**theirs, **tokens}, where="theirs") == read(kind)


PUBLISHED: dict[str, dict[str, Any]] = {
    "mistral-7b-v0.1": {"sliding_window": 4096, "rope_theta": 10000.0, "transformers_version": "4.34.0.dev0", "attention_dropout": 0.0},
    "mistral-nemo-12b": {"sliding_window": None, "rope_theta": 1000000.0, "head_dim": 128},
    "qwen2.5-0.5b": {"rope_theta": 1e6, "sliding_window": 32768, "max_window_layers": 24, "use_mrope": False, "use_sliding_window": False},
    "qwen3-8b": {"attention_bias": False, "head_dim": 128, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "max_window_layers": 36, "use_sliding_window": False},
    "phi-4": {"attention_bias": False, "auto_map": {}, "embd_pdrop": 0.0, "original_max_position_embeddings": 16384, "pad_token_id": 100257, "resid_pdrop": 0.0, "rope_scaling": None, "rope_theta": 250000, "sliding_window": None},
    "phi-4-mini": {"attention_bias": False, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rope_theta": 10000.0, "sliding_window": 262144},
    "mixtral-8x7b": {"attention_dropout": 0.0, "num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None, "transformers_version": "4.36.0.dev0"},
    "qwen3-30b-a3b": {"attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1, "head_dim": 128, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False},
    "llama4-scout": {"attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0, "attn_scale": 0.1, "attn_temperature_tuning": 4, "cache_implementation": "hybrid", "eos_token_id": [200001, 200007, 200008], "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 128, "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "moe_layers": [*range(48)], "no_rope_layers": [1, 1, 1, 0] * 12, "num_experts_per_tok": 1, "num_local_experts": 16, "output_router_logits": False, "pad_token_id": 200018, "rope_theta": 500000.0, "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "use_qk_norm": True},
    "llama4-maverick": {"attn_temperature_tuning": 4, "head_dim": 128, "interleave_moe_layer_step": 2, "intermediate_size": 8192, "moe_layers": [*range(1, 48, 2)], "no_rope_layers": [], "num_local_experts": 128, "pad_token_id": 200018, "rope_theta": 500000.0, "use_qk_norm": False},
    "gemma2-9b": {"attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096, "pad_token_id": 0},
    "gemma3-1b": {"attention_bias": False, "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "pad_token_id": 0},
    "olmo2-7b": {"attention_bias": False, "attention_dropout": 0.0, "pad_token_id": 100277, "rope_scaling": None, "rope_theta": 500000, "transformers_version": "4.47.0.dev0", "use_cache": False},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_the_presets(name: str) -> None:
    """In the spelling of transformers 4, with the fields that those files have beside the sizes."""
    model = PRESETS[name]
    sizes = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    common = "max_position_embeddings rms_norm_eps tie_word_embeddings initializer_range bos_token_id eos_token_id"
    fields = {field: getattr(model, field) for field in f"{sizes} {common}".split()} | PUBLISHED[name]
    if not model.model_type.startswith("gemma"):
        fields["hidden_act"] = "silu"
    if name == "phi-4-mini":
        assert model.rope_scaling is not None
        fields["rope_scaling"] = {"type": "longrope", **{key: model.rope_scaling[key] for key in ("short_factor", "long_factor")}}
    # Presets have no padding token: all rows of an embedding that begins at random are trained.
    padding = fields.pop("pad_token_id", None)
    assert model_config_from_hf(file_of(model.model_type, **fields, pad_token_id=padding), where="published").pad_token_id == padding
    fields["pad_token_id"] = None
    assert model_config_from_hf(file_of(model.model_type, **fields), where="published") == model
    if name == "phi-4-mini":  # as Phi-3 called it
        fields["rope_scaling"]["type"] = "su"
        assert model_config_from_hf(file_of("phi3", **fields), where="published") == model


def test_both_spellings_are_written() -> None:
    """transformers 4 has everything at the top, and Phi-3 wants three fields in rope_scaling; transformers 5 has one mapping."""
    llama = hf_config_from_model(PRESETS["llama3.1-8b"], dtype="float32")
    assert llama["rope_scaling"] == PRESETS["llama3.1-8b"].rope_scaling and llama["torch_dtype"] == llama["dtype"] == "float32"
    assert llama["rope_parameters"] == {**llama["rope_scaling"], "rope_theta": llama["rope_theta"]}
    mini = hf_config_from_model(PRESETS["phi-4-mini"], dtype="float32")
    assert mini["partial_rotary_factor"] == mini["rope_parameters"]["partial_rotary_factor"] == 0.75
    assert mini["original_max_position_embeddings"] == mini["rope_parameters"]["original_max_position_embeddings"] == 4096
    assert mini["rope_scaling"].keys() == {"type", "short_factor", "long_factor"}
    gemma = hf_config_from_model(PRESETS["gemma3-4b-text"], dtype="float32")
    linear = {"rope_type": "linear", "factor": 8.0}
    assert (gemma["rope_theta"], gemma["rope_local_base_freq"], gemma["rope_scaling"]) == (1e6, 1e4, linear)
    assert gemma["rope_parameters"] == {FULL: {**linear, "rope_theta": 1e6}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}


MIXED = [FULL, SLIDING, SLIDING]


@over_cases
@pytest.mark.parametrize(
    ("kind", "fields", "windows"),
    [
        ("mistral", {}, (4096,) * 3),
        ("mistral", {"sliding_window": None}, (0,) * 3),
        ("mistral", {"sliding_window": 7, "layer_types": [SLIDING] * 3}, (7,) * 3),
        ("phi3", {}, (0,) * 3),
        ("phi3", {"sliding_window": 5}, (5,) * 3),
        ("qwen2", {"sliding_window": 5}, (0,) * 3),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 5}, (0, 5, 5)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 5}, (5,) * 3),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 5}, (0,) * 3),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED}, (0, 5, 5)),
        ("mixtral", {}, (0,) * 3),
        ("mixtral", {"sliding_window": 5}, (5,) * 3),
        ("qwen3_moe", {}, (0,) * 3),
        ("qwen3_moe", {"sliding_window": 5}, (0,) * 3),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}, (5,) * 3),
        ("gemma2", {"sliding_window": 5}, (5, 0, 5)),
        ("gemma3_text", {"sliding_window": 5}, (5,) * 3),
        ("gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 2}, (5, 0, 5)),
        ("gemma3_text", {"sliding_window": 5, "layer_types": [FULL] * 3}, (0,) * 3),
        ("gemma3_text", {"sliding_window": 5, "layer_types": MIXED}, (0, 5, 5)),
        ("gemma3_text", {"sliding_window": 5, "layer_types": MIXED, "_sliding_window_pattern": 2}, (0, 5, 5)),
        ("gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 2, "_sliding_window_pattern": 2}, (5, 0, 5)),
    ],
)
def test_windows(kind: str, fields: dict[str, Any], windows: tuple[int, ...]) -> None:
    """As transformers has them, in the one form of a ModelConfig, which what we write gives again."""
    model = read(kind, **fields)
    assert layer_windows(model) == windows
    assert bool(model.layer_types) == (len(set(windows)) > 1) and (model.sliding_window > 0) == any(windows)
    theirs = transformers_config(file_of(kind, **fields))
    types = getattr(theirs, "layer_types", None) or [SLIDING] * 3
    assert tuple(theirs.sliding_window or 0 if kind == SLIDING else 0 for kind in types) == windows
    assert model_config_from_hf(hf_config_from_model(model, dtype="float32"), where="ours") == model


LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
BOTH = {FULL: {"rope_type": "default", "rope_theta": 1e6}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {"attention_bias": True}, "attention_bias: got True, expected False"),
    ("mistral", {"use_sliding_window": False}, "use_sliding_window: got false with sliding_window 4096, expected the same of both"),
    ("mistral", {"layer_types": MIXED}, "layer_types: got ['full_attention', 'sliding_attention', 'sliding_attention'], expected"),
    ("mistral", {"sliding_window": 0}, "sliding_window: got 0, expected a positive integer"),
    ("mistral", {"sliding_window": "all"}, "sliding_window: got 'all'"),
    ("mistral", {"sliding_window": 10**30}, "expected at most 2,147,483,647"),
    ("mistral", {"num_key_value_heads": 8}, "num_key_value_heads: got 8, expected a divisor of num_attention_heads 4"),
    ("mistral", {"head_dim": 15}, "head_dim: got 15, expected an even number; rotary embeddings turn pairs"),
    ("mistral", {"architectures": 3}, "architectures: got 3, expected ['MistralForCausalLM']"),
    ("mistral", {"query_pre_attn_scalar": 256}, "got query_pre_attn_scalar 256, expected only fields and values that are known"),
    ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window: got 'yes', expected true or false"),
    ("qwen2", {"layer_types": MIXED}, "since no window is switched on"),
    ("qwen2", {"layer_types": [FULL]}, "layer_types: got ['full_attention'], expected 3 of full_attention and sliding_attention"),
    ("qwen2", {"layer_types": [FULL, FULL, "chunked"]}, "layer_types: got"),
    ("qwen2", {"max_window_layers": -1}, "max_window_layers: got -1, expected an integer of at least 0"),
    ("qwen2", {"mlp_bias": True}, "mlp_bias: got True, expected False"),
    ("qwen2", {"qk_norm": True}, "got qk_norm True"),
    ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, expected 1.0; Qwen3ForCausalLM rotates whole heads"),
    ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "got 'yarn', expected one of default, longrope; Phi3ForCausalLM has"),
    ("phi3", {"rope_scaling": LONG | {"short_factor": [1.0]}}, "short_factor: got [1.0], expected 4 positive numbers, one for each"),
    ("phi3", {"rope_scaling": LONG | {"original_max_position_embeddings": 64}}, "got 64, expected original_max_position_embeddings 4096"),
    ("phi3", {"partial_rotary_factor": -1}, "partial_rotary_factor: got -1, expected a positive number"),
    ("phi3", {"partial_rotary_factor": 2.0}, "got 2.0, 16 dims, expected an even number of dims up to head_dim 8"),
    ("phi3", {"partial_rotary_factor": 0.4}, "got 0.4, 3 dims"),
    ("phi3", {"partial_rotary_factor": 0.1}, "got 0.1, 0 dims"),
    # transformers derives the layers from neither: with 3, every third layer would be another one here than there.
    ("gemma2", {"sliding_window_pattern": 3}, "got sliding_window_pattern 3, expected only fields and values that are known"),
    ("gemma3_text", {"_sliding_window_pattern": 3}, "_sliding_window_pattern: got 3, expected sliding_window_pattern 6, or layer_types"),
    ("phi3", {"embd_pdrop": 0.1}, "got embd_pdrop 0.1"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "got use_bidirectional_attention True"),
    ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: got 0, expected a positive number"),
    ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation: got 'gelu', expected 'silu' or 'swish' or 'gelu_pytorch_tanh'"),
    ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "expected a mapping with full_attention and sliding_attention"),
    ("gemma3_text", {"rope_parameters": BOTH, "rope_local_base_freq": 5e4}, "got 10000.0, expected rope_local_base_freq 50000"),
    ("gemma3_text", {"rope_parameters": BOTH, "rope_theta": 5e4}, "rope_theta: got 1000000.0, expected rope_theta 50000.0"),
    ("gemma3_text", {"rope_parameters": BOTH | {SLIDING: {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}}, "expected rope_theta alone"),
    ("olmo2", {"mlp_bias": True}, "mlp_bias: got True, expected False"),
    ("mixtral", {"router_jitter_noise": 0.1}, "got router_jitter_noise 0.1, expected only fields and values that are known"),
    ("mixtral", {"output_router_logits": True}, "got output_router_logits True, expected only fields and values that are known"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok: got 9, expected at most the 8 experts"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts: got 0, expected a positive integer"),
    ("mixtral", {"router_aux_loss_coef": "much"}, "router_aux_loss_coef: got 'much', expected a finite number"),
    ("mixtral", {"norm_topk_prob": False}, "got norm_topk_prob False"),
    ("mixtral", {"num_experts": 4}, "got num_experts 4"),
    ("llama4_text", {"router_jitter_noise": 0.1}, "got router_jitter_noise 0.1, expected only fields and values that are known"),
    ("llama4_text", {"attention_chunk_size": None}, "attention_chunk_size: got nothing, expected a positive integer"),
    ("llama4_text", {"num_experts_per_tok": 17}, "num_experts_per_tok: got 17, expected at most the 16 experts"),
    ("llama4_text", {"moe_layers": [0, 3]}, "moe_layers: got [0, 3], expected numbers of layers, from 0 to 2"),
    ("llama4_text", {"no_rope_layers": [1, 0]}, "no_rope_layers: got 2 layers, expected at least 3 of them, one for each layer"),
    ("llama4_text", {"no_rope_layers": [1, 0, 2]}, "no_rope_layers: got [1, 0, 2], expected 1, with rotary positions, or 0 for each layer"),
    ("llama4_text", {"no_rope_layers": [0, 0, 0]}, "no_rope_layers: got 0 alone, expected a layer with rotary positions"),
    ("llama4_text", {"layer_types": ["full_attention"] * 3}, "expected chunked_attention for the layers with rotary positions, full_attention for the others"),
    ("llama4_text", {"attn_temperature_tuning": "often"}, "attn_temperature_tuning: got 'often', expected true or false"),
    ("llama4_text", {"sliding_window": 5}, "got sliding_window 5"),
    ("qwen3_moe", {"num_experts": 4096}, "num_experts: got 4096, expected at most 1,024"),
    ("qwen3_moe", {"num_experts": 8, "num_local_experts": 16}, "num_local_experts: got 16, expected num_experts 8, as in the same file"),
    ("qwen3_moe", {"mlp_only_layers": [0, 3]}, "mlp_only_layers: got [0, 3], expected numbers of layers, from 0 to 2"),
    ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers: got 1, expected numbers of layers, from 0 to 2"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: got 0, expected a positive integer"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "got shared_expert_intermediate_size 64"),
    ("llama", {"num_experts": 8}, "got num_experts 8"),
    ("qwen3", {"num_local_experts": 8}, "got num_local_experts 8"),
    ("olmo2", {"clip_qkv": 8.0}, "got clip_qkv 8.0, expected only fields and values that are known"),
    ("olmo2", {"sliding_window": 8}, "sliding_window"),
    ("olmo2", {"architectures": ["OlmoForCausalLM"]}, "architectures: got ['OlmoForCausalLM'], expected ['Olmo2ForCausalLM']"),
]  # fmt: skip


@over_cases
@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED)
def test_what_a_family_does_not_compute_is_refused_by_name(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read(kind, **fields)
    [_, problem] = str(error.value).splitlines()
    assert message in problem


@over_cases
@pytest.mark.parametrize(
    ("model", "lost"),
    [
        (read("llama"), {}),
        (replace(read("llama"), attention_bias=True, mlp_bias=True), {}),
        (replace(read("llama"), qk_norm="head"), {"qk_norm": "none"}),
        (replace(read("llama"), sliding_window=8, partial_rotary_factor=0.5), {"sliding_window": 0, "partial_rotary_factor": 1.0}),
        (replace(read("mistral"), layer_types=(FULL, SLIDING, FULL)), {"layer_types": ()}),
        (replace(read("qwen2"), add_qkv_bias=False, attention_bias=True), {"add_qkv_bias": True, "attention_bias": False}),
        (replace(read("qwen3"), norm_position="both"), {"norm_position": "before"}),
        (replace(read("qwen3"), sliding_window=8, layer_types=(SLIDING, FULL, SLIDING)), {}),
        (replace(read("phi3"), rope_local_base_freq=1e4), {"rope_local_base_freq": 0.0}),
        (replace(read("gemma3_text"), embedding_multiplier=1.0), {"embedding_multiplier": 32**0.5}),
        (replace(read("gemma2"), final_logit_softcapping=3.0, attn_logit_softcapping=5.0), {}),
        (replace(read("gemma3_text"), attn_logit_softcapping=50.0), {"attn_logit_softcapping": 0.0}),
        (replace(read("gemma3_text"), query_pre_attn_scalar=0.0), {"query_pre_attn_scalar": "a positive number"}),
        (replace(read("gemma3_text"), query_pre_attn_scalar=100.5), {"query_pre_attn_scalar": 100.0}),
        (replace(read("olmo2"), norm_position="both"), {"norm_position": "after"}),
        (replace(read("mixtral"), moe_intermediate_size=65), {"moe_intermediate_size": 64}),
        (replace(read("mixtral"), norm_topk_prob=False, mlp_only_layers=(1,)), {"norm_topk_prob": True, "mlp_only_layers": ()}),
        (replace(read("mixtral"), num_experts=0), {"num_experts": "a positive number"}),
        (replace(read("qwen3_moe"), mlp_only_layers=(2,), decoder_sparse_step=2, norm_topk_prob=True), {}),
        (replace(read("qwen3"), num_experts=8), {"num_experts": 0}),
        # Its file would have an entry for each.
        (replace(read("llama"), num_labels=10**12), {"num_labels": "at most 1"}),
        (replace(read("qwen2"), num_hidden_layers=10**12), {"num_hidden_layers": "at most 2,048"}),
    ],
)
def test_what_a_family_cannot_hold(model: ModelConfig, lost: dict[str, Any]) -> None:
    assert unheld_fields(model) == lost


def test_the_page_names_all_that_a_family_can_say() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "add-a-family.md").read_text()
    assert [field.name for field in fields(Family) if f"`{field.name}`" not in page] == []
    everything = replace(read("llama"), qk_norm="head", norm_position="both")
    modules = {name.removeprefix("model.layers.0.").removesuffix(".weight") for name in hf_shapes(everything) if ".layers.0." in name}
    assert [name for name in sorted(modules) if f"`{name}`" not in page] == []
    assert [name for name in LLAMA_KIND if f"`{name}" not in page] == []
