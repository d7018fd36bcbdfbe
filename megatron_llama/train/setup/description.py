"""The description of a run by its options, which the run, its dry run, its plan and its page
share."""

from __future__ import annotations

import math

from megatron_llama.config.blend import read_blend
from megatron_llama.config.schema import CheckpointConfig, Config, TrainingConfig
from megatron_llama.config.world import dp_size
from megatron_llama.errors import counted
from megatron_llama.model.plan.freeze import is_frozen
from megatron_llama.model.plan.lora import adapter_shapes, trained_beside_adapters
from megatron_llama.model.plan.params import hf_shapes, padded_vocab_size
from megatron_llama.model.plan.run_params import trains_embedding
from megatron_llama.pipeline.plan.run_engine import compute_dtype_name


def describe_config(
    config: Config, world_size: int, known: dict[str, str] | None = None
) -> dict[str, str]:
    """Return the meaning of a resolved configuration on so many processes, by subject, for all that
    is easily misunderstood. The ``known`` facts replace its words."""
    training = config.training
    optimizer = config.optimizer
    options = config.checkpoint
    dp = dp_size(config, world_size)
    interval = training.eval_interval
    epochs = training.epochs
    subjects = {
        "model": _model(config),
        "pad token": _pad_token(config),
        "layout": _layout(config, world_size, dp),
        "precision": name_precision(config),
        "optimizer": f"{optimizer.optimizer}, lr {optimizer.lr:g}, {optimizer.lr_decay_style}",
        "routers": _routers(training),
        "data": name_data(config),
        "validation": f"every {interval:,} iterations" if interval else "none",
        "batch": _batch(training, dp),
        "ramp-up": _ramp_up(training),
        "iterations": f"{epochs:g} epochs" if epochs else f"{training.train_iters:,}",
        "start": f"--load {options.load}" if options.load else name_weights(config),
        "saves": _saves(options),
        "exports": f"{options.export_hf}, after the last iteration" if options.export_hf else "",
        "log": _log(config),
    }
    return {subject: words for subject, words in (subjects | (known or {})).items() if words}


def _routers(training: TrainingConfig) -> str:
    kind = training.moe_router_load_balancing_type
    words = [f"{kind} x {training.moe_aux_loss_coeff:g}"] if kind != "none" else []
    words += ["a forward pass more for each step"] if training.counts_experts_first else []
    words += [f"z-loss x {training.moe_z_loss_coeff:g}"] if training.moe_z_loss_coeff else []
    return ", ".join(words)


def name_weights(config: Config) -> str:
    """Return words on the first weights of a run that loads nothing."""
    folder = config.checkpoint.init_from_hf
    seed = config.training.seed
    return f"the weights of {folder}" if folder else f"random weights (--seed {seed})"


def name_data(config: Config) -> str:
    """Return the names of a run's datasets; empty without --data-path."""
    words = config.data.data_path
    prefixes = ", ".join(read_blend(words).prefixes) if words else ""
    return f"{prefixes} (--split {config.data.split})" if words else ""


def _model(config: Config) -> str:
    model = config.model
    shapes = hf_shapes(model)
    freeze = config.optimizer.freeze
    trained = {name: shape for name, shape in shapes.items() if not is_frozen(name, freeze)}
    rank = config.lora.lora_rank
    additions = ""
    if rank:
        whole = trained_beside_adapters(model)
        trained = adapter_shapes(model, config.lora) | whole
        additions = f" ({', and '.join((f'low-rank additions, rank {rank}', *whole))})"
    share = "all trained"
    if trained != shapes:
        count = sum(map(math.prod, trained.values()))
        share = f"{count:,} trained in {len(trained)} tensors{additions}"
    name = f"{model.preset}: " if model.preset is not None else ""
    padded = padded_vocab_size(model, config.parallel.tensor_model_parallel_size)
    return (
        f"{name}{sum(map(math.prod, shapes.values())):,} parameters in {len(shapes)} tensors, "
        f"{share}; {model.num_hidden_layers} layers, hidden size {model.hidden_size:,}, "
        f"vocabulary {model.vocab_size:,}, padded to {padded:,}"
    )


def name_precision(config: Config, device: str = "") -> str:
    """Return words on the dtype of a run and its products; ``device``: what computes them."""
    dtype = compute_dtype_name(config.training) + (f" on {device}" if device else "")
    if config.training.fp8 == "none":
        return dtype
    from megatron_llama.model.plan.fp8 import fp8_layers

    layers = fp8_layers(config)
    between = f"layers {layers.start} to {layers.stop - 1} multiply in FP8"
    return f"{dtype}; {between} ({config.training.fp8})"


def _pad_token(config: Config) -> str:
    """Return words on whether lookups train the row of pad_token_id. Empty without that token, or
    if no row is trained."""
    padding = config.model.pad_token_id
    if padding is None or not trains_embedding(config):
        return ""
    if config.optimizer.train_pad_embedding:
        return f"{padding}: its embedding is trained as any other (--train-pad-embedding)"
    return (
        f"{padding}: lookups do not train its embedding, as in transformers "
        "(--train-pad-embedding trains it)"
    )


def _layout(config: Config, world_size: int, dp: int) -> str:
    parallel = config.parallel
    sequence = ", sequence parallel" if parallel.sequence_parallel else ""
    ep = parallel.expert_model_parallel_size
    sending = " alltoall" if parallel.exchanges_tokens else ""
    experts = f" (ep {ep}{sending})" if ep > 1 else ""
    groups = " x ".join(map(str, parallel.hierarchical_context_parallel_sizes))
    heads = f" ({' '.join(filter(None, (parallel.cp_comm_type, groups)))})"
    return (
        f"{counted(world_size, 'process', 'processes')} = "
        f"tp {parallel.tensor_model_parallel_size} x cp {parallel.context_parallel_size}"
        f"{heads if parallel.head_ranks else ''} x "
        f"pp {parallel.pipeline_model_parallel_size} x dp {dp}{experts}{sequence}; "
        f"pipeline {parallel.pipeline_schedule}, "
        f"sharding {parallel.data_parallel_sharding_strategy}"
    )


def _batch(training: TrainingConfig, dp: int) -> str:
    batch = training.global_batch_size
    length = training.seq_length
    microbatches = batch // (training.micro_batch_size * dp)
    return (
        f"{batch:,} samples = {counted(microbatches, 'microbatch', 'microbatches')} x "
        f"{training.micro_batch_size} x dp {dp}; {batch * length:,} tokens a step, "
        f"{length:,} a sample"
    )


def _ramp_up(training: TrainingConfig) -> str:
    if not training.rampup_batch_size:
        return ""
    start, increment, samples = training.rampup_batch_size
    return (
        f"{start:,} samples, {increment:,} more at a time, to {training.global_batch_size:,} over "
        f"{samples:,} samples"
    )


def _saves(options: CheckpointConfig) -> str:
    if options.save is None:
        return "nothing: --save is not given"
    often = f"every {options.save_interval:,} iterations and " if options.save_interval else ""
    kept = f"; keeps the newest {options.save_retain} and the best" if options.save_retain else ""
    return f"{options.save}, {often}at the end{kept}"


def _log(config: Config) -> str:
    log = config.log
    places = [f"{config.checkpoint.save}/log.jsonl"] * (config.checkpoint.save is not None)
    places += [f"TensorBoard {log.tensorboard_dir}"] * (log.tensorboard_dir is not None)
    places += [f"W&B {log.wandb_project}"] * (log.wandb_project is not None)
    places += [f"MLflow {log.mlflow_experiment}"] * (log.mlflow_experiment is not None)
    places += [f"Trackio {log.trackio_project}"] * (log.trackio_project is not None)
    places += [f"OpenMetrics at {log.open_metrics}"] * (log.open_metrics is not None)
    return ", ".join([f"a line every {log.log_interval:,} iterations", *places])
