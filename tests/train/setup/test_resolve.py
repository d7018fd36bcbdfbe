import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.parse import flag, options_of, parse
from megatron_llama.config.schema import Config, LoraConfig
from megatron_llama.config.sections import config_sections
from megatron_llama.errors import CheckpointError, ConfigError
from megatron_llama.model.hf import hf_config_from_model
from megatron_llama.model.presets import PRESETS
from megatron_llama.train.setup.resolve import assemble, check, problems, resolve

from tests.over_cases import over_cases

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 100}


INTERLEAVED = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "interleaved", "global_batch_size": 2}
ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}


def config_of(**given: Any) -> Config:
    """A small model that can run, with fields of any section changed."""
    values = SMALL | {"train_iters": 10} | given
    config = Config()
    for section in fields(Config):
        part = getattr(config, section.name)
        own = {field.name: values.pop(field.name) for field in fields(part) if field.name in values}
        config = replace(config, **{section.name: replace(part, **own)})
    assert not values, values
    return config


def assembled(*argv: str) -> Config:
    return assemble(parse(argv, config_sections(), aliases=MEGATRON))


def hf_folder(folder: Path, name: str = "llama3.2-1b") -> str:
    (folder / "config.json").write_text(json.dumps(hf_config_from_model(PRESETS[name], dtype="bfloat16")))
    return str(folder)


def test_a_small_model_runs_as_it_is() -> None:
    resolved = check(config_of(), 1)
    assert resolved.warnings == ()
    assert resolved.notes == ("--global-batch-size 1: micro_batch_size 1 x dp 1",)


def test_derived_values() -> None:
    given = config_of(micro_batch_size=2, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True)
    resolved = check(given, 16).config
    model = resolved.model
    assert (model.num_key_value_heads, model.head_dim, model.max_position_embeddings) == (8, 8, 2048)
    assert resolved.training.global_batch_size == 2 * 4
    assert resolved.optimizer.lr_decay_iters == 10
    assert resolved.parallel.sequence_parallel
    assert resolve(resolved, 16) == resolved
    assert check(resolved, 16).notes == ()


def test_notes() -> None:
    resolved = check(config_of(sequence_parallel=True, eval_interval=5, split="100,0,0", global_batch_size=1), 1)
    assert not resolved.config.parallel.sequence_parallel
    assert resolved.config.training.eval_interval == 0
    assert resolved.notes == ("--sequence-parallel is ignored: it needs --tensor-model-parallel-size 2 or more",)
    assert resolved.warnings == ("--eval-interval is ignored: --split 100,0,0 leaves nothing for validation",)
    [note] = check(config_of(tp_comm_overlap="4", global_batch_size=1), 1).notes
    assert note == "--tp-comm-overlap is ignored: it needs --tensor-model-parallel-size 2 or more"
    assert check(config_of(tp_comm_overlap="4", tensor_model_parallel_size=2, sequence_parallel=True, global_batch_size=1), 2).notes == ()


def test_a_sequence_beyond_the_model_is_a_warning() -> None:
    [warning] = check(config_of(seq_length=64, max_position_embeddings=32), 1).warnings
    assert warning.startswith("--seq-length 64 is beyond max_position_embeddings 32: ")
    for scaling, said in (
        ({"rope_type": "dynamic", "factor": 1.5}, "max_position_embeddings 32 times rope_scaling.factor 1.5: "),
        (
            {"rope_type": "yarn", "factor": 3, "original_max_position_embeddings": 16},
            "original_max_position_embeddings 16 times rope_scaling.factor 3: ",
        ),
        ({"rope_type": "yarn", "factor": 3, "original_max_position_embeddings": 8}, "max_position_embeddings 32: "),
        ({"rope_type": "linear", "factor": 3}, "max_position_embeddings 32: "),
    ):
        [warning] = check(config_of(seq_length=64, max_position_embeddings=32, rope_scaling=scaling), 1).warnings
        assert warning.startswith(f"--seq-length 64 is beyond {said}")


def test_rope_scaling_is_brought_into_one_form() -> None:
    assert check(config_of(rope_scaling={"factor": 2, "rope_type": "linear"}), 1).config.model.rope_scaling == {
        "rope_type": "linear",
        "factor": 2.0,
    }
    assert check(config_of(rope_scaling={"rope_type": "default"}), 1).config.model.rope_scaling is None


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs(name: str) -> None:
    split = ["--sequence-parallel"] if PRESETS[name].num_experts else []
    config = assembled("--model", name, "--train-iters", "1", "--tensor-model-parallel-size", "2", *split)
    resolved = check(config, 2)
    assert resolved.config.model == replace(PRESETS[name], preset=name)
    assert resolved.warnings == ()


PAIRS: dict[str, Any] = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)}


@pytest.mark.parametrize(
    ("given", "world_size"),
    [
        ({"tensor_model_parallel_size": 4, "num_key_value_heads": 2}, 4),
        ({"freeze": ("model.embed_tokens.*", "model.layers.?.self_attn.*", "*.mlp.*")}, 1),
        ({"freeze": ("model.layers.*", "model.norm.weight", "lm_head.weight")}, 2),
        ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "adam_beta2": 0.95}, 1),
        ({"exp_avg_dtype": "8bit", "exp_avg_sq_dtype": "8bit", "intermediate_size": 256}, 1),
        ({"optimizer": "schedule_free_adamw", "lr_decay_style": "constant"}, 1),
        ({"param_group": ("embed*: lr=1, weight_decay=0", "layers.*: lr_mult=0.5", "mlp.*: weight_decay=0")}, 1),
        ({"tensor_model_parallel_size": 8, "num_key_value_heads": 1}, 8),
        ({"pipeline_model_parallel_size": 2, "pipeline_layer_split": (1, 3)}, 2),
        ({"pipeline_model_parallel_size": 3, "account_for_embedding_in_pipeline_split": True, "num_hidden_layers": 5}, 3),
        ({"pipeline_model_parallel_size": 4, "num_hidden_layers": 14} | ENDS, 4),
        ({"num_hidden_layers": 3} | ENDS, 1),
        ({"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"}, 2),
        ({"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v", "virtual_pipeline_model_parallel_size": 2}, 2),
        (INTERLEAVED | {"virtual_pipeline_model_parallel_size": 2, "global_batch_size": 4, "pipeline_layer_split": (1, 1, 1, 1)}, 2),
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True, "seq_length": 24}, 8),
        ({"fp16": True, "grad_reduce_in_bf16": True}, 2),
        ({"context_parallel_size": 4, "cp_comm_type": "a2a", "num_key_value_heads": 2}, 4),
        ({"context_parallel_size": 8, **PAIRS, "hierarchical_context_parallel_sizes": (4, 2), "tensor_model_parallel_size": 2}, 16),
        ({"cp_comm_type": "a2a"}, 2),
    ],
)
def test_what_fits_is_accepted(given: dict[str, Any], world_size: int) -> None:
    assert problems(config_of(**given), world_size) == []


def test_many_microbatches_are_checked_without_their_schedule() -> None:
    """Building it would take seconds and hundreds of megabytes."""
    given = {"num_hidden_layers": 8, "pipeline_model_parallel_size": 4, "global_batch_size": 1 << 14}
    assert problems(config_of(**given), 4) == []
    odd = problems(
        config_of(**given | {"global_batch_size": (1 << 13) + 1, "pipeline_schedule": "interleaved", "virtual_pipeline_model_parallel_size": 2}),
        4,
    )
    assert len(odd) == 1 and "a multiple of --pipeline-model-parallel-size 4" in odd[0]


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@over_cases
@pytest.mark.parametrize(
    ("given", "world_size", "message"),
    [
        ({"tensor_model_parallel_size": 3, "intermediate_size": 99, "num_key_value_heads": 0, "num_attention_heads": 8}, 3, None),
        ({"tensor_model_parallel_size": 4, "num_attention_heads": 12, "hidden_size": 96, "head_dim": 8, "num_key_value_heads": 6}, 4, "choose 3 or 6"),
        ({"tensor_model_parallel_size": 6, "num_attention_heads": 12, "hidden_size": 96, "head_dim": 8, "num_key_value_heads": 4}, 6, "choose 4 or 8"),
        ({"tensor_model_parallel_size": 4, "intermediate_size": 98}, 4, "--tensor-model-parallel-size: got 4 ... choose 2 or 7"),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True, "seq_length": 33}, 2, "--seq-length: got 33 ... choose 32 or 34"),
        ({"context_parallel_size": 2, "seq_length": 2046}, 2, "--seq-length: got 2046, expected a multiple of 2 x cp 2 = 4; choose 2044 or 2048"),
        (
            {"context_parallel_size": 16, "cp_comm_type": "a2a", "seq_length": 64},
            16,
            "--cp-comm-type: got a2a over 16 ranks, expected a divisor of the 8 query heads of a tensor-parallel rank ... give "
            "--hierarchical-context-parallel-sizes 8 2 with --cp-comm-type a2a+p2p or --cp-comm-type p2p",
        ),
        (
            {"context_parallel_size": 4, "cp_comm_type": "a2a", "tensor_model_parallel_size": 4},
            16,
            "a2a over 4 ranks, expected a divisor of the 2 query heads ... give --hierarchical-context-parallel-sizes 2 2 with --cp-comm-type a2a+p2p",
        ),
        (
            {"context_parallel_size": 4, **PAIRS, "tensor_model_parallel_size": 8},
            32,
            "a2a+p2p over 2 ranks, expected a divisor of the 1 query heads ... give --cp-comm-type p2p",
        ),
        (
            {"context_parallel_size": 8, **PAIRS},
            8,
            "--hierarchical-context-parallel-sizes: got 2 2 ... whose product is --context-parallel-size 8; give "
            "--hierarchical-context-parallel-sizes 4 2 with --cp-comm-type a2a+p2p or --cp-comm-type a2a or --cp-comm-type p2p",
        ),
        ({"context_parallel_size": 4, "cp_comm_type": "a2a+p2p"}, 4, "--hierarchical-context-parallel-sizes: got none, expected the ranks of a group"),
        ({"context_parallel_size": 4, **PAIRS, "hierarchical_context_parallel_sizes": (4, 1)}, 4, "--hierarchical-context-parallel-sizes: got 4 1"),
        ({"context_parallel_size": 4, **PAIRS, "cp_comm_type": "a2a"}, 4, "--hierarchical-context-parallel-sizes: got --cp-comm-type a2a, expected"),
        ({"context_parallel_size": 3, "tensor_model_parallel_size": 2, "sequence_parallel": True, "seq_length": 128}, 6, "choose 120 or 132"),
        ({"pipeline_model_parallel_size": 3, "num_hidden_layers": 32}, 3, "got 3 stages ... choose 2 or 4 stages, or give"),
        (INTERLEAVED | {"virtual_pipeline_model_parallel_size": 3, "num_hidden_layers": 8}, 2, "got 6 stages ... choose 4 or 8 stages"),
        ({"pipeline_model_parallel_size": 4, "num_hidden_layers": 8, "account_for_embedding_in_pipeline_split": True}, 4, "choose 3 or 9 stages"),
        ({"pipeline_model_parallel_size": 4, "num_hidden_layers": 8} | ENDS, 4, "got 4 stages ... choose 2 or 5 stages"),
        ({"pipeline_model_parallel_size": 3, "num_hidden_layers": 4, "pipeline_layer_split": (2, 2)}, 3, "got 2 2 (sum 4), expected 3 numbers"),
        ({"pipeline_model_parallel_size": 2, "num_hidden_layers": 4, "pipeline_layer_split": (2, 3)}, 2, "got 2 3 (sum 5), expected 2 numbers"),
        ({"pipeline_model_parallel_size": 3, "num_hidden_layers": 4, "pipeline_layer_split": (2, 0, 2)}, 3, "got 2 0 2 (sum 4), expected 3 numbers"),
        ({"pipeline_model_parallel_size": 2, "pipeline_layer_split": (5, -1)}, 2, "--pipeline-layer-split: got 5 -1 (sum 4), expected 2 numbers"),
        (INTERLEAVED | {"virtual_pipeline_model_parallel_size": 2, "pipeline_layer_split": (2, 2)}, 2, "got 2 2 (sum 4), expected 4 numbers"),
        ({"ddp_reduce_scatter_with_fp32_accumulation": True}, 2, "got no --grad-reduce-in-bf16"),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, 2, "--virtual-pipeline-model-parallel-size: got 2"),
        (INTERLEAVED, 2, "--virtual-pipeline-model-parallel-size: got 1, expected 2 or more chunks per rank"),
        (INTERLEAVED | {"virtual_pipeline_model_parallel_size": 2, "global_batch_size": 3}, 2, "x dp): got 3, expected a multiple"),
        ({"tensor_model_parallel_size": 2}, 3, "processes: got 3 ... start 2 or 4 processes, or change"),
        ({}, 0, "processes: got 0"),
        ({"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v", "virtual_pipeline_model_parallel_size": 3}, 2, "got 3, expected 2"),
        ({"recompute_granularity": "full", "recompute_num_layers": "some"}, 1, "--recompute-num-layers: got some, expected all, auto, or a "),
        ({"recompute_granularity": "full", "recompute_num_layers": "5"}, 1, "--recompute-num-layers: got 5, expected all, auto, or a "),
        ({"global_batch_size": 10, "micro_batch_size": 2}, 2, "--global-batch-size: got 10 ... choose 8 or 12"),
        ({"global_batch_size": 3}, 4, "--global-batch-size: got 3, expected a multiple of micro_batch_size 1 x dp 4 = 4; choose 4"),
        ({"hidden_size": 60}, 1, "--hidden-size: got 60, expected a multiple of num_attention_heads 8; change one of them or give --head-dim"),
        ({"hidden_size": 60, "head_dim": 8}, 1, "--hidden-size: got 60 ... choose 56 or 64, or give another --model-type"),
        ({"hidden_size": 72}, 1, "--head-dim: got 9, expected an even number"),
        ({"head_dim": 5}, 1, "--head-dim: got 5, expected an even number"),
        ({"num_key_value_heads": 3}, 1, "--num-key-value-heads: got 3, expected a divisor of num_attention_heads 8; choose 2 or 4"),
        ({"qk_norm": "head"}, 1, "--qk-norm: got head, expected none, as in the config.json of a LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, 1, "--hidden-act: got gelu, expected one of silu, gelu_pytorch_tanh"),
        ({"model_type": "gpt2"}, 1, "--model-type: got gpt2, expected one of llama, mistral, qwen2"),
        ({"layer_types": ("sliding_attention",) * 4, "model_type": "gemma3_text"}, 1, "sliding_attention, expected a window for the layers"),
        ({"layer_types": ("full",) * 2, "sliding_window": 4}, 1, "--layer-types: got full full, expected full_attention or sliding"),
        ({"partial_rotary_factor": 0.7}, 1, "--partial-rotary-factor: got 0.7, 5 dims, expected an even number of dims up to head_dim 8"),
        ({"eos_token_id": 100}, 1, "--eos-token-id: got 100, expected an id below vocab_size 100"),
        ({"bos_token_id": -1}, 1, "--bos-token-id: got -1, expected 0 or more"),
        ({"rope_scaling": {"rope_type": "su"}}, 1, "rope_scaling.rope_type: got 'su', expected one of default, linear, dynamic, llama3"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, 1, "rope_scaling.rope_type: got ['linear']"),
        ({"rope_scaling": {"factor": 2.0}}, 1, "rope_scaling.factor: got 2.0, expected no such field with rope_type default"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, 1, "rope_scaling.factor: got 0, expected a positive number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, 1, "rope_scaling.factor: got '2', expected a positive number"),
        ({"rope_scaling": LLAMA3}, 1, "rope_scaling.original_max_position_embeddings: got nothing"),
        ({"context_parallel_size": 2}, 3, "processes: got 3, expected a multiple of tp 1 x cp 2 x pp 1 = 2; start 2 or 4 processes"),
        ({"global_batch_size": 4, "context_parallel_size": 2}, 6, "expected a multiple of micro_batch_size 1 x dp 3 = 3; choose 3 or 6"),
        ({"bf16": True, "fp64": True}, 1, "--bf16 --fp64: got 2 precisions, expected at most one; leave the others out"),
        ({"bf16": True, "fp16": True, "fp64": True}, 1, "--bf16 --fp16 --fp64: got 3 precisions"),
        ({"initial_loss_scale": 0.0}, 1, "--initial-loss-scale: got 0.0, expected a positive number"),
        ({"min_loss_scale": -1.0}, 1, "--min-loss-scale: got -1.0, expected a positive number"),
        ({"loss_scale_window": 0}, 1, "--loss-scale-window: got 0, expected a positive number"),
        ({"hysteresis": 0}, 1, "--hysteresis: got 0, expected a positive number"),
        ({"min_loss_scale": 8.0, "initial_loss_scale": 4.0}, 1, "--min-loss-scale: got 8.0, expected at most initial_loss_scale 4.0"),
        ({"context_parallel_size": 0}, 1, "--context-parallel-size: got 0, expected a positive number"),
        ({"virtual_pipeline_model_parallel_size": 0}, 1, "--virtual-pipeline-model-parallel-size: got 0, expected a positive number"),
        ({"train_iters": 0}, 1, "--train-iters: got 0, expected a positive number; give --train-iters N, --train-samples N or --epochs N"),
        ({"micro_batch_size": 0}, 1, "--micro-batch-size: got 0"),
        ({"micro_batch_size": -1}, 1, "--micro-batch-size: got -1"),
        ({"global_batch_size": -4}, 1, "--global-batch-size: got -4, expected 0 or more"),
        ({"tensor_model_parallel_size": 0}, 1, "--tensor-model-parallel-size: got 0, expected a positive number"),
        ({"pipeline_model_parallel_size": -2}, 1, "--pipeline-model-parallel-size: got -2, expected a positive number"),
        ({"num_hidden_layers": -1}, 1, "--num-hidden-layers: got -1, expected 0 or more"),
        ({"seq_length": 0}, 1, "--seq-length: got 0"),
        ({"rms_norm_eps": 0.0}, 1, "--rms-norm-eps: got 0.0"),
        ({"log_interval": 0}, 1, "--log-interval: got 0"),
        ({"reduce_bucket_size": -1}, 1, "--reduce-bucket-size: got -1"),
        ({"distributed_timeout_minutes": 0.0}, 1, "--distributed-timeout-minutes: got 0.0"),
        ({"lr": -1.0}, 1, "--lr: got -1.0, expected 0 or more"),
        ({"clip_grad": -1.0}, 1, "--clip-grad: got -1.0, expected 0 or more"),
        ({"adam_beta1": 1.0}, 1, "--adam-beta1: got 1.0, expected a number in [0, 1)"),
        ({"adam_beta2": -0.1}, 1, "--adam-beta2: got -0.1, expected a number in [0, 1)"),
        ({"min_lr": 1.0}, 1, "--min-lr: got 1.0, expected at most lr 0.0003"),
        ({"lr_warmup_iters": 10}, 1, "--lr-warmup-iters: got 10, expected less than lr_decay_iters 10"),
        ({"freeze": ("model.layer.0.mlp.*", "model.norm.weight")}, 1, "--freeze: got model.layer.0.mlp.* ... did you mean model.layers.0.mlp."),
        ({"freeze": ("lm_head.*",), "tie_word_embeddings": True}, 1, "did you mean model.embed_tokens.weight?"),
        ({"freeze": ("*norm*,*mlp*",)}, 1, "; separate patterns by spaces: --freeze '*norm*' '*mlp*'"),
        ({"freeze": ("zzz",)}, 1, "; give names as lm_head.weight, or parts of them as '*.mlp.*'"),
        ({"lora_rank": 4, "lora_target_modules": ("q_proj,v_proj",)}, 1, "; separate them by spaces: q_proj v_proj"),
        ({"freeze": ("model.*", "lm_head.*")}, 1, "--freeze: got all 39 parameters, expected one or more that are trained; leave out"),
        ({"freeze": ("model.layers.1.*.q_proj.*",), "tensor_model_parallel_size": 8, "num_key_value_heads": 1}, 8, "v_proj.weight, which are stored"),
        ({"freeze": ("*.k_proj.*", "*.v_proj.*", "*.up_proj.*")}, 1, "expected also model.layers.0.self_attn.q_proj ... and 4 more, which"),
        ({"freeze": ("model.*",), "make_vocab_size_divisible_by": 0}, 1, "--make-vocab-size-divisible-by: got 0"),
        ({"exp_avg_sq_dtype": "bf16"}, 1, "--exp-avg-sq-dtype bf16: got --adam-beta2 0.999, expected at most 0.996: a step that takes less"),
        ({"exp_avg_dtype": "bf16", "optimizer_offload": "exact"}, 1, "--exp-avg-dtype bf16: got --optimizer-offload exact, expected none: the"),
        ({"exp_avg_dtype": "bf16", "optimizer": "muon"}, 1, "--exp-avg-dtype bf16: got --optimizer muon ... leave one"),
        ({"exp_avg_dtype": "bf16", "fp64": True}, 1, "--exp-avg-dtype bf16: got --fp64, expected training in fp32, bf16 or fp16; leave one"),
        ({"exp_avg_sq_dtype": "8bit", "lora_rank": 4}, 1, "--exp-avg-sq-dtype 8bit: got --lora-rank 4 ... leave one"),
        ({"exp_avg_dtype": "8bit", "intermediate_size": 160}, 1, "moments in 8 bits: got 160 elements in a row of ... down_proj.weight (and 3 more)"),
        ({"exp_avg_dtype": "8bit", "tensor_model_parallel_size": 2}, 2, "moments in 8 bits: got 32 elements in a row of model.layers.0.self_attn"),
        ({"optimizer": "schedule_free_adamw"}, 1, "--optimizer schedule_free_adamw: got --lr-decay-style linear"),
        ({"optimizer": "schedule_free_adamw", "lr_decay_style": "constant", "optimizer_offload": "exact"}, 1, "got --optimizer-offload exact"),
        ({"optimizer": "schedule_free_adamw", "lr_decay_style": "constant", "exp_avg_dtype": "bf16"}, 1, "got --optimizer schedule_free_adamw"),
        ({"param_group": ("*",)}, 1, "--param-group: got *, expected PATTERN: key=value, key=value; write it as 'embed*: lr=1e-3, weight"),
        ({"param_group": ("mlp.*: rate=1",)}, 1, "got rate=1 in mlp.*: rate=1, expected lr, lr_mult, min_lr, weight_decay or init_std, each"),
        ({"param_group": ("mlp.*: lr=1, lr=1",)}, 1, "--param-group: got lr twice in mlp.*: lr=1, lr=1, expected it once"),
        ({"param_group": ("mlp.*: lr=-1",)}, 1, "--param-group: got lr=-1 in mlp.*: lr=-1, expected a number from 0; correct the value"),
        ({"param_group": ("mlp.*: lr=nan",)}, 1, "--param-group: got lr=nan in mlp.*: lr=nan, expected a number from 0"),
        ({"param_group": ("mlp.*: lr=1, lr_mult=2",)}, 1, "--param-group: got lr and lr_mult in mlp.*: lr=1, lr_mult=2, expected one of"),
        ({"param_group": ("embed_token: lr=1",)}, 1, "--param-group: got embed_token, expected a pattern of the model's parameters; "),
        ({"param_group": ("zzz: lr=1",)}, 1, "; some are model.embed_tokens.weight, model.layers.0.input_layernorm.weight, model.layers.0."),
        ({"param_group": ("lm_head*: lr=1",), "tie_word_embeddings": True}, 1, "did you mean model.embed_tokens.weight?"),
        ({"param_group": ("layers.*: lr=1", "*.mlp.*: lr_mult=2")}, 1, "--param-group: got two values of lr for ... gate_proj.weight: layers"),
        ({"param_group": ("q_proj*: lr=1",)}, 1, "--param-group: got other values for model.layers.0.self_attn.q_proj.weight than for ... v_proj"),
        ({"param_group": ("mlp.*: lr=1",), "freeze": ("*.mlp.*",)}, 1, "--param-group: got mlp.*, whose parameters are all frozen"),
        ({"param_group": ("*norm.weight: init_std=1",)}, 1, "--param-group: got init_std for model.layers.0.input_layernorm.weight, which"),
        ({"param_group": ("mlp.*: lr=1e-3, min_lr=1",)}, 1, "--param-group: got min_lr 1 for model.layers.0.mlp.gate_proj.weight, expected at"),
        ({"split": "100,0"}, 1, "--split: got 100,0, expected three shares"),
        ({"split": "1,-1,1"}, 1, "--split: got 1,-1,1, expected three shares"),
        ({"split": "0,0,0"}, 1, "--split: got 0,0,0, expected three shares"),
        ({"split": "a,b,c"}, 1, "--split: got a,b,c, expected three shares"),
    ],
)
def test_each_problem_is_named_alone(given: dict[str, Any], world_size: int, message: str | None) -> None:
    found = problems(config_of(**given), world_size)
    if message is None:  # heads and groups alike are not divisible
        wanted = [problem.split("; ")[0].split("expected ")[1] for problem in found]
        assert wanted == ["a divisor of num_attention_heads 8", "a divisor or a multiple of num_key_value_heads 8"]
    else:
        assert len(found) == 1, found
        assert all(part in found[0] for part in message.split(" ... "))


def test_a_constant_rate_may_warm_up_throughout() -> None:
    assert problems(config_of(lr_decay_style="constant", lr_warmup_iters=10), 1) == []


def test_nothing_given() -> None:
    assert problems(Config(), 1) == [
        "--train-iters: got 0, expected a positive number; give --train-iters N, --train-samples N or --epochs N",
        "model: got no hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, vocab_size, expected the shape of a model; "
        "give --model NAME (such as llama-7b), --init-from-hf FOLDER, or --hidden-size --intermediate-size --num-hidden-layers "
        "--num-attention-heads --vocab-size",
    ]


@pytest.mark.parametrize("source", ["tokenizer_model", "data_path"])
def test_the_vocabulary_may_come_from_the_tokenizer(source: str) -> None:
    assert problems(config_of(**{"vocab_size": 0, source: "x", "eos_token_id": 5}), 1) == []


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        check(config_of(hidden_act="gelu", split="1", adam_beta1=2.0, pipeline_model_parallel_size=3), 4, needs_data=True)
    title, *lines = str(error.value).splitlines()
    assert title == "This configuration cannot run on 4 processes:"
    for line, name in zip(lines, ["adam-beta1", "hidden-act", "processes", "pipeline", "split", "data-path"], strict=True):
        assert name in line


def test_precedence_of_preset_yaml_and_flags(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: llama3-8b\nnum_layers: 8\nrope_theta: 7\nseq_length: 128\n")
    config = assembled("--config", str(path), "--rope-theta", "9")
    assert config.model == replace(PRESETS["llama3-8b"], preset="llama3-8b", num_hidden_layers=8, rope_theta=9.0)
    assert config.training.seq_length == 128


def test_a_flag_that_restates_a_default_wins_over_the_preset() -> None:
    assert assembled("--model", "llama-7b", "--rms-norm-eps", "1e-5").model.rms_norm_eps == 1e-5
    assert assembled("--model", "llama3.2-1b", "--no-tie-word-embeddings").model.tie_word_embeddings is False
    assert assembled("--model", "llama3.2-1b", "--rope-scaling", "null").model.rope_scaling is None
    assert assembled("--model", "gemma3-1b", "--hidden-size", "64").model.embedding_multiplier == 8.0
    assert assembled("--model", "gemma3-1b", "--hidden-size", "64", "--embedding-multiplier", "2").model.embedding_multiplier == 2.0
    assert assembled("--model", "gemma3-1b").model == replace(PRESETS["gemma3-1b"], preset="gemma3-1b")


def test_unknown_presets() -> None:
    with pytest.raises(ConfigError, match=r"--model: got llama-3-8b, expected one of llama-7b, .*; did you mean llama3-8b\?"):
        assembled("--model", "llama-3-8b")
    with pytest.raises(ConfigError, match="give one of these"):
        assembled("--model", "x")


def test_another_vocabulary_has_its_own_special_tokens() -> None:
    model = assembled("--model", "llama3-8b", "--vocab-size", "1000").model
    assert (model.bos_token_id, model.eos_token_id) == (None, None)
    assert assembled("--model", "llama3-8b", "--vocab-size", "1000", "--eos-token-id", "5").model.eos_token_id == 5
    assert assembled("--model", "llama3-8b", "--vocab-size", "128256").model.eos_token_id == 128001


def test_a_huggingface_folder_gives_the_model(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path)
    assert assembled("--init-from-hf", folder).model == PRESETS["llama3.2-1b"]
    # Fields that change no shape may be changed.
    model = assembled("--init-from-hf", folder, "--max-position-embeddings", "64", "--num-layers", "16").model
    assert model == replace(PRESETS["llama3.2-1b"], max_position_embeddings=64)
    assert assembled("--init-from-hf", folder, "--model", "llama3.2-1b").model == replace(PRESETS["llama3.2-1b"], preset="llama3.2-1b")


def test_other_shapes_than_the_folder_has_are_refused(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path)
    with pytest.raises(ConfigError) as error:
        assembled("--init-from-hf", folder, "--num-layers", "4", "--untie-embeddings-and-output-weights")
    assert f"--num-hidden-layers: got 4, expected 16 as in {folder}/config.json; leave num_hidden_layers out" in str(error.value)
    assert f"--tie-word-embeddings: got False, expected True as in {folder}/config.json" in str(error.value)
    with pytest.raises(ConfigError, match="--hidden-size: got 3072, expected 2048"):
        assembled("--init-from-hf", folder, "--model", "llama3.2-3b")
    with pytest.raises(CheckpointError, match="No such file"):
        assembled("--init-from-hf", str(tmp_path / "none"))


def test_additions_leave_experts_out_and_say_so() -> None:
    """Named or not: by default they go to all linear layers of a dense block."""
    sizes = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "qk_norm": "head"}
    for given in ({}, {"lora_target_modules": LoraConfig().lora_target_modules}, {"lora_target_modules": ("q_proj", "v_proj")}):
        [warning] = check(config_of(**sizes, lora_rank=4, **given), 1).warnings
        assert warning.startswith("--lora-rank in a model with experts: attention alone gets additions")
    assert check(config_of(**sizes), 1).warnings == ()


def test_an_interval_without_a_folder_is_a_warning() -> None:
    assert check(config_of(save_interval=5), 1).warnings == ("--save-interval 5 without --save: nothing will be saved",)


@over_cases
@pytest.mark.parametrize("name", [name for name, option in options_of(config_sections()).items() if option.kind in (int, float)])
def test_a_negative_number_is_named_once_where_it_is_wrong(name: str) -> None:
    named = [line for line in problems(config_of(**{name: -1}), 1) if line.startswith(f"{flag(name)}: ")]
    assert len(named) == (name not in ("profile_step_end",))  # nothing is traced


def test_initial_sizes_of_weights_that_are_taken_are_a_warning() -> None:
    groups = ("mlp.*: lr_mult=2", "embed*: init_std=1")
    assert check(config_of(param_group=groups), 1).warnings == ()
    [warning] = check(config_of(param_group=groups, init_from_hf="hf"), 1).warnings
    assert warning == "--param-group embed*: init_std=1: init_std has no effect with --init-from-hf, whose weights are taken"
