"""Which files of published models are read, and which fields of others are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.cli import main
from megatron_llama.errors import CheckpointError
from megatron_llama.model.hf import model_config_from_hf, read_hf_config
from megatron_llama.model.hf_fields import FIXED, HARMLESS, NEUTRAL
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-5}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True}
SMALL: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
V4 = {"torch_dtype": "bfloat16", "transformers_version": "4.43.0", "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False}
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-1": {"architectures": ["LLaMAForCausalLM"], "max_sequence_length": 2048, "pad_token_id": -1, "transformers_version": "4.27.0.dev0"},
    "llama-2": {"_name_or_path": "meta-llama/Llama-2-7b-hf", "pretraining_tp": 1, "rope_scaling": None, "tie_word_embeddings": False},
    "llama-3.1": V4 | {"eos_token_id": [128001, 128008, 128009], "rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "llama-3.2": V4 | {"head_dim": 8, "tie_word_embeddings": True, "_attn_implementation_autoset": True, "unsloth_fixed": True, "unsloth_version": "2024.9"},
    "smollm2": V4 | {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    "yi": {"pad_token_id": 0, "auto_map": {"AutoConfig": "configuration_yi.YiConfig"}, "rope_theta": 5e6},
    "vicuna": {"max_length": 16384, "rope_scaling": {"factor": 4.0, "type": "linear"}, "pad_token_id": 0, "tokenizer_class": "LlamaTokenizer"},
    "mistral as llama": V4 | {"sliding_window": None, "num_key_value_heads": 2, "unk_token_id": 0, "model_max_length": 4096},
    "qwen as llama": V4 | {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28, "head_dim": 16},
    "internlm as llama": {"bias": False, "attn_implementation": "eager", "rope_scaling": None},
    "falcon3": V4 | {"activation": "swiglu", "head_dim": 16},
    "transformers 5": {
        "dtype": "bfloat16", "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "layer_types": ["full_attention"] * 2,
        "chunk_size_feed_forward": 0, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1},
        "is_encoder_decoder": False, "problem_type": None, "return_dict": True, "output_hidden_states": False,
    },
    "leftovers of generate()": {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "repetition_penalty": 1.1, "bad_words_ids": [[3]], "pruned_heads": {}},
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "a window": {"sliding_window": 8},
    "a window, switched on": {"sliding_window": 8, "use_sliding_window": True},
    "granite": {"attention_multiplier": 0.015, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
    "gemma": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256},
    "layers without positions": {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2},
    "layers of two kinds": {"layer_types": ["full_attention", "sliding_attention"]},
    "layers of their own": {"per_layer_config": {"1": {"intermediate_size": 32}}},
    "clipped": {"clip_qkv": 8.0},
    "normalized": {"qk_norm": True},
    "interleaved": {"rope_interleaved": True},
    "experts": {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01},
    "quantized by mlx": {"quantization": {"group_size": 64, "bits": 4}},
    "dropout": {"attention_dropout": 0.1},
    "positions kept elsewhere": {"original_max_position_embeddings": 64},
    "pictures": {"mm_vision_tower": "openai/clip-vit-large-patch14-336"},
}


def read(fields: dict[str, Any], ignored: tuple[str, ...] = ()) -> object:
    return model_config_from_hf(SMALL | fields, where="m/config.json", ignored=ignored)


def test_files_of_published_models_are_read() -> None:
    for fields in PUBLISHED.values():
        read(fields)


@pytest.mark.tries("ignore_hf_config_fields")
@pytest.mark.parametrize("fields", OTHERS.values(), ids=OTHERS.keys())
def test_unknown_fields_are_refused_together_unless_each_is_named(fields: dict[str, Any]) -> None:
    refused = {name for name in fields if fields[name] is not False}
    with pytest.raises(CheckpointError) as error:
        read(fields)
    [_, problem] = str(error.value).splitlines()
    expected, _, remedy = problem.partition("; ")
    for name in refused:
        assert f"{name} {fields[name]!r}" in expected and name in remedy
    with pytest.raises(CheckpointError, match=refused.pop()):
        read(fields, tuple(refused))
    assert read(fields, tuple(fields)) == read({})


MEANT = {"is_causal": False, "partial_rotary_factor": 0.5, "is_encoder_decoder": True, "pruned_heads": {"0": [1]}, "rope_theta": 5e5}


def test_fields_that_make_another_model_cannot_be_ignored() -> None:
    for name, value in MEANT.items():
        with pytest.raises(CheckpointError, match=f"--ignore-hf-config-fields {name}: got a field that says what the model computes"):
            read({name: value}, (name,))


def test_each_field_is_in_one_group() -> None:
    groups = (HARMLESS, frozenset(FIXED), frozenset(NEUTRAL))
    assert len(frozenset().union(*groups)) == sum(map(len, groups))


def test_accepted_values_do_not_change_what_transformers_computes(tmp_path: Path) -> None:
    """Logits, and texts that are generated with its cache, which looks at fields of its own."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, max_position_embeddings=64)
    config.initializer_range = 0.2
    plain = LlamaForCausalLM(config).eval()
    plain.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    tokens = torch.arange(3, 43)[None]
    accepted = {name: values[0] for name, values in {**FIXED, **NEUTRAL}.items() if values}
    accepted |= {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 1]}
    leftovers = {"pretraining_tp": 2, "chunk_size_feed_forward": 4, "use_cache": False}
    leftovers |= {"pad_token_id": 5, "max_window_layers": 1, "is_decoder": True}
    with torch.no_grad():
        expected = plain(tokens).logits
        text = plain.generate(tokens, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
        for fields in (accepted, leftovers):
            path.write_text(json.dumps(written | fields))
            changed = LlamaForCausalLM.from_pretrained(tmp_path).eval()
            assert torch.equal(changed(tokens).logits, expected)
            assert torch.equal(changed.generate(tokens, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0), text)
            read = read_hf_config(tmp_path)
            assert read == model_config_from_hf(written | {"pad_token_id": read.pad_token_id}, where="")
        # The same comparison sees a window: so it proves something.
        path.write_text(json.dumps(written | {"sliding_window": 8}))
        windowed = LlamaForCausalLM.from_pretrained(tmp_path).eval()
        assert not torch.equal(windowed.generate(tokens, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0), text)
        with pytest.raises(CheckpointError, match="sliding_window 8"):
            read_hf_config(tmp_path)


COMMANDS = {
    "pretrain": ["pretrain", "--init-from-hf", "M", "--data-path", "d"],
    "pretrain --load": ["pretrain", "--load", "M", "--data-path", "d"],
    "dry run": ["pretrain", "--init-from-hf", "M", "--data-path", "d", "--dry-run"],
    "sft": ["sft", "--init-from-hf", "M", "--train-data", "d.jsonl"],
    "evaluate": ["evaluate", "--load", "M", "--data-path", "d"],
    "evaluate --text": ["evaluate", "--init-from-hf", "M", "--text", "t"],
    "generate": ["generate", "--load", "M"],
    "chat": ["chat", "--load", "M"],
    "convert": ["convert", "M", "OUT", "--to", "native"],
    "verify": ["verify", "M", "M"],
    "merge": ["merge", "M", "OUT", "--adapter", "a"],
    "inspect": ["inspect", "config", "M/config.json"],
    "plan": ["plan", "--init-from-hf", "M", "--gpus", "8", "--global-batch-size", "8"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_every_command_refuses_them(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "M")
    path = tmp_path / "M" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"logits_scaling": 8.0, "clip_qkv": 4}))
    words = [str(tmp_path / word) if word in ("M", "OUT", "M/config.json") else word for word in command]
    assert main(words) in (1, 2)
    error = capsys.readouterr().err
    assert "got logits_scaling 8.0, clip_qkv 4, expected only fields and values that are known" in error
    assert not (tmp_path / "OUT").exists()
    if command[0] == "inspect":
        return
    main([*words, "--ignore-hf-config-fields", "clip_qkv", "logits_scaling"])
    assert "clip_qkv" not in capsys.readouterr().err
