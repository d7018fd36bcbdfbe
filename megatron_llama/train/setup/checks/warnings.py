"""Options that can run but are probably not meant."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import Config, LoraConfig
from megatron_llama.engine.offload_options import ZenFlowConfig
from megatron_llama.model.plan.param_groups import INIT_STD, read_group
from megatron_llama.model.rope import longest_sequence, longest_sequence_name
from megatron_llama.pipeline.plan.run_engine import by_unit
from megatron_llama.train.setup.checks.offload import offload_warnings


def warnings_of(config: Config) -> Iterator[str]:
    """Yield one line for each option of a resolved configuration with no effect, or a surprising
    one."""
    length = config.training.seq_length
    positions = (config.model.rope_scaling, config.model.max_position_embeddings)
    if length > longest_sequence(*positions):
        yield (
            f"--seq-length {length} is beyond {longest_sequence_name(*positions)}: the exported "
            "model will claim the shorter one"
        )
    model = config.model
    padding = model.pad_token_id
    if model.num_labels and padding is not None and padding == model.eos_token_id:
        yield (
            f"--pad-token-id {padding} is the end token: HuggingFace reads a score at the last "
            "token that is no padding, which is then the one in front of it"
        )
    if (
        config.parallel.recompute_num_layers != "all"
        and config.parallel.recompute_granularity == "none"
    ):
        wanted = config.parallel.recompute_num_layers
        yield (
            f"--recompute-num-layers {wanted} without --recompute-granularity selective or "
            "full: nothing is recomputed"
        )
    parallel = config.parallel
    if parallel.param_slots != "default" and not by_unit(parallel):
        strategy = parallel.data_parallel_sharding_strategy
        yield (
            f"--param-slots {parallel.param_slots} has no effect under {strategy}: parameters "
            "stay whole"
        )
    if config.checkpoint.load is None and (
        config.checkpoint.finetune or not config.checkpoint.load_optim
    ):
        yield "--finetune and --no-load-optim have no effect without --load"
    if config.checkpoint.init_from_hf is not None:
        drawn = [
            text for text in config.optimizer.param_group if INIT_STD in read_group(text).values
        ]
        if drawn:
            yield (
                f"--param-group {drawn[0]}: {INIT_STD} has no effect with --init-from-hf, whose "
                "weights are taken"
            )
    if config.log.tensorboard_dir is None:
        chosen = (
            "log_timers_to_tensorboard",
            "log_batch_size_to_tensorboard",
            "log_validation_ppl_to_tensorboard",
        )
        without_effect = " ".join(flag(name) for name in chosen if getattr(config.log, name))
        if without_effect:
            yield f"{without_effect} without --tensorboard-dir: nothing is written"
    if config.log.mlflow_experiment is None and config.log.mlflow_tracking_uri is not None:
        yield "--mlflow-tracking-uri without --mlflow-experiment: nothing is written"
    yield from offload_warnings(config)
    if config.offload.optimizer_offload == "zenflow" or config.zenflow != ZenFlowConfig():
        from megatron_llama.train.setup.checks.zenflow import zenflow_warnings  # of few runs

        yield from zenflow_warnings(config)
    if config.lora.lora_rank == 0 and config.lora != LoraConfig():
        yield (
            "options of --lora without --lora-rank: there are no additions, the model itself "
            "is trained"
        )
    if config.lora.lora_rank and config.model.num_experts:
        yield (
            "--lora-rank in a model with experts: attention alone gets additions, neither experts "
            "nor the MLPs of dense blocks beside them do"
        )
    if config.log.sample_prompt and config.log.sample_interval == 0:
        yield "--sample-prompt without --sample-interval: nothing is written"
    if config.checkpoint.steal_save and config.checkpoint.save is None:
        yield "--steal-save without --save: there is nothing to take over"
    if config.checkpoint.save_interval > 0 and config.checkpoint.save is None:
        yield (
            f"--save-interval {config.checkpoint.save_interval} without --save: nothing will "
            "be saved"
        )
