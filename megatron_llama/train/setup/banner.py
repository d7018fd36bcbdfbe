"""What a run says of itself before its first step."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_llama.config.blend import read_blend
from megatron_llama.config.schema import CheckpointConfig, Config
from megatron_llama.data.stream_places import text_streams
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.mesh import Mesh
from megatron_llama.errors import counted
from megatron_llama.model.plan.freeze import is_frozen
from megatron_llama.model.plan.lora import adapter_shapes, trained_beside_adapters
from megatron_llama.model.plan.params import hf_shapes, parameter_count
from megatron_llama.model.plan.run_params import trains_embedding
from megatron_llama.pipeline.build import compute_dtype
from megatron_llama.train.setup.inputs import Ready, passes_over
from megatron_llama.train.setup.start import begins_anew


def banner(inputs: Ready, mesh: Mesh) -> Iterator[str]:
    """Yield one line for each thing that is easily not what was meant: the model, its layout, the
    data, the start, and what will be kept."""
    config = inputs.config
    training = config.training
    parallel = config.parallel
    options = config.checkpoint
    for name, value in (
        ("model", _model(config)),
        ("pad token", _pad_token(config)),
        (
            "layout",
            f"{mesh.world.size} process{'es' * (mesh.world.size > 1)} = tp {mesh.tp.size} x "
            f"cp {mesh.cp.size} x pp {mesh.pp.size} x dp {mesh.data_size}; "
            f"pipeline {parallel.pipeline_schedule}, "
            f"sharding {parallel.data_parallel_sharding_strategy}",
        ),
        ("device", f"{devices.name(mesh.device)}, {str(compute_dtype(config)).split('.')[1]}"),
        ("data", _data(inputs)),
        ("validation", _validation(inputs)),
        (
            "batch",
            f"{training.global_batch_size:,} samples of {training.seq_length:,} tokens, "
            f"{training.micro_batch_size} at a time on each of {mesh.data_size} replicas",
        ),
        (
            "iterations",
            f"{inputs.state.iteration + 1:,} to {training.train_iters:,}"
            if inputs.state.iteration < training.train_iters
            else f"none: {inputs.state.iteration:,} of {training.train_iters:,} are done",
        ),
        ("start", _start(inputs)),
        ("saves", _saves(options)),
        ("exports", f"{options.export_hf}, after the last iteration" if options.export_hf else ""),
        ("log", _log(config)),
    ):
        if value:
            yield f"{name:<11} {value}"


def already_finished(inputs: Ready) -> str:
    """What a run says that resumes from the checkpoint of its last iteration."""
    training = inputs.config.training
    assert inputs.start is not None  # a run that begins has iterations left
    length = "--epochs" if training.epochs else "--train-iters"
    length = "--train-samples" if training.train_samples and not training.epochs else length
    export = inputs.config.checkpoint.export_hf
    left = f"only --export-hf {export} is left" if export is not None else "nothing to do"
    return (
        f"already finished: iteration {inputs.state.iteration:,} of {training.train_iters:,} in "
        f"{inputs.start.path}; {left} (give a larger {length} to go on)"
    )


def _model(config: Config) -> str:
    model = config.model
    shapes = hf_shapes(model)
    trained = {
        name: shape
        for name, shape in shapes.items()
        if not is_frozen(name, config.optimizer.freeze)
    }
    if config.lora.lora_rank:
        trained = adapter_shapes(model, config.lora) | trained_beside_adapters(model)
    count = sum(math.prod(shape) for shape in trained.values())
    share = "all trained" if trained == shapes else f"{count:,} trained"
    name = f"{model.preset}: " if model.preset is not None else ""
    return (
        f"{name}{parameter_count(model):,} parameters, {share}; {model.num_hidden_layers} layers, "
        f"hidden size {model.hidden_size:,}, vocabulary {model.vocab_size:,}"
    )


def _pad_token(config: Config) -> str:
    """Whether lookups train the row of pad_token_id. Empty where there is none, or no row is
    trained."""
    padding = config.model.pad_token_id
    if padding is None or not trains_embedding(config):
        return ""
    if config.optimizer.train_pad_embedding:
        return f"{padding}: its embedding is trained as any other (--train-pad-embedding)"
    return (
        f"{padding}: lookups do not train its embedding, as in transformers "
        "(--train-pad-embedding trains it)"
    )


def _data(inputs: Ready) -> str:
    data = inputs.config.data
    length = inputs.config.training.seq_length
    streams = text_streams(inputs.training)
    if streams:
        named = ", ".join(
            f"{stream.name} ({counted(stream.num_files, 'file')}, {stream.num_bytes:,} bytes, "
            f"{counted(stream.lanes, 'lane')})"
            for stream in streams
        )
        return f"{named}: tokenized while the run trains on it, {data.data_order}"
    samples = len(inputs.training)
    passes = passes_over(inputs.config.training, samples)
    order = "in Megatron's order" if data.megatron_data_order else data.data_order
    named = ""
    if data.data_path:
        named = f"{', '.join(read_blend(data.data_path).prefixes)} (--split {data.split}): "
    return (
        f"{named}{samples:,} samples for training ({samples * length:,} tokens), read "
        f"{passes:.3g} times, {order}"
    )


def _validation(inputs: Ready) -> str:
    if inputs.validation is None:
        return "none"
    training = inputs.config.training
    some = f", {training.eval_iters} batches of them" if training.eval_iters else ", all of them"
    return f"{len(inputs.validation):,} samples{some}, every {training.eval_interval:,} iterations"


def _start(inputs: Ready) -> str:
    options = inputs.config.checkpoint
    start = inputs.start
    if start is not None and not begins_anew(options, start):
        optimizer = "" if options.load_optim else ", with a fresh optimizer"
        return f"resumes from {start.path}{optimizer}"
    if start is not None:
        return f"the weights of {start.path}"
    if options.init_from_hf is not None:
        return f"the weights of {options.init_from_hf}"
    return f"random weights (--seed {inputs.config.training.seed})"


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
