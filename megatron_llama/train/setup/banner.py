"""The lines of a run about itself before its first step."""

from __future__ import annotations

from megatron_llama.data.stream_places import text_streams
from megatron_llama.errors import counted
from megatron_llama.train.setup.description import (
    describe_config,
    name_data,
    name_precision,
    name_weights,
)
from megatron_llama.train.setup.inputs import Ready, passes_over
from megatron_llama.train.setup.start import begins_anew


def describe_run(inputs: Ready, world_size: int, device: str = "") -> dict[str, str]:
    """Return the description of a run by subject, from its options, its samples, its position and
    the name of its device."""
    training = inputs.config.training
    done = inputs.state.iteration
    known = {
        "data": _data(inputs),
        "validation": _validation(inputs),
        "iterations": f"{done + 1:,} to {training.train_iters:,}"
        if done < training.train_iters
        else f"none: {done:,} of {training.train_iters:,} are done",
        "start": _start(inputs),
    }
    if device:
        known["precision"] = name_precision(inputs.config, device)
    return describe_config(inputs.config, world_size, known)


def already_finished(inputs: Ready) -> str:
    """Return the line of a run that resumes from the checkpoint of its last iteration."""
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
    named = f"{name_data(inputs.config)}: " if data.data_path else ""
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
    if start is None:
        return name_weights(inputs.config)
    if begins_anew(options, start):
        return f"the weights of {start.path}"
    return f"resumes from {start.path}{'' if options.load_optim else ', with a fresh optimizer'}"
