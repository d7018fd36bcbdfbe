"""``pretrain`` and ``evaluate``: from a command line to a running mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from megatron_llama.commands.common.auto_parallel import chosen, wanted
from megatron_llama.commands.common.configs import AutoParallelConfig, DryRunConfig
from megatron_llama.config.help import config_sections
from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import CheckpointConfig, Config, LogConfig, LoraConfig
from megatron_llama.errors import ClusterError, ConfigError, describe

if TYPE_CHECKING:
    from megatron_llama.data.vocabulary import Vocabulary
    from megatron_llama.distributed.mesh import Mesh, Place
    from megatron_llama.distributed.recorder import Recorder

SECTIONS = (*config_sections(), AutoParallelConfig, DryRunConfig)


def pretrain(parsed: Parsed) -> None:
    """Train from random weights, a HuggingFace folder or a checkpoint."""
    if parsed.get(DryRunConfig).dry_run != "no":
        from megatron_llama.commands.common.dry_run import dry_run

        dry_run(parsed)
        return
    from megatron_llama.checkpoint.background import in_background
    from megatron_llama.distributed.mesh import place_from_environment

    options = parsed.get(CheckpointConfig)
    # --async-save forks a process here, before the process group and its threads exist: a fork
    # copies no thread, and locks that one holds would stay locked.
    saving = in_background(
        place_from_environment(), wanted=options.async_save and options.save is not None
    )
    with saving as background, prepared(parsed) as (config, mesh, vocabulary):
        from megatron_llama.loop.build import stream_samples
        from megatron_llama.train import train

        train(
            config,
            mesh,
            partial(stream_samples, eod=vocabulary.eod),
            tokenizer=vocabulary.tokenizer,
            background=background,
        )


def evaluate(parsed: Parsed) -> None:
    """Measure loss and perplexity on the validation split of a dataset."""
    with prepared(_for_evaluation(parsed)) as (config, mesh, vocabulary):
        from megatron_llama.loop.build import stream_samples
        from megatron_llama.train import evaluate_only

        if config.training.eval_interval == 0:  # `check` switched it off
            expected = "a share of documents for validation"
            do = "give --split 0,100,0 to evaluate on all of them"
            raise ConfigError(describe("--split", got=config.data.split, expected=expected, do=do))
        evaluate_only(config, mesh, partial(stream_samples, eod=vocabulary.eod))


def _for_evaluation(parsed: Parsed) -> Parsed:
    """Change a command line of training so that nothing is saved and all of the validation split
    counts, unless --eval-iters says otherwise."""
    config = Config(
        **{
            name: parsed.get(section)
            for name, section in zip(Config.__dataclass_fields__, config_sections(), strict=True)
        }
    )
    training = replace(config.training, train_iters=1, train_samples=0, epochs=0.0, eval_interval=1)
    if "eval_iters" not in parsed.explicit:
        training = replace(training, eval_iters=0)
    changed = {
        type(training): training,
        type(config.checkpoint): replace(config.checkpoint, save=None, save_interval=0),
    }
    changed[LoraConfig] = LoraConfig()  # additions are read as part of the weights
    return replace(parsed, instances={**parsed.instances, **changed})


@contextmanager
def prepared(
    parsed: Parsed, *, needs_data: bool = True
) -> Iterator[tuple[Config, Mesh, Vocabulary]]:
    """Resolve and check the configuration, join the other processes, and print what was decided on
    the way. Inside the context the death of a rank becomes an error that names it.

    ``needs_data``: the command reads --data-path."""
    from megatron_llama.commands.common.loaded import loaded_model
    from megatron_llama.data.vocabulary import find_vocabulary, with_vocabulary
    from megatron_llama.distributed.comm.object_collectives import raise_on_all_ranks
    from megatron_llama.distributed.mesh import (
        init_mesh,
        place_from_environment,
        placement_warnings,
    )
    from megatron_llama.engine.build import compute_dtype
    from megatron_llama.loop.start import compare, find_start
    from megatron_llama.metrics.tensorboard import require_tensorboard
    from megatron_llama.metrics.wandb import require_wandb
    from megatron_llama.nn.attention import attention_warnings
    from megatron_llama.plans.auto import decide
    from megatron_llama.plans.resolve import assemble, check

    place = place_from_environment()
    options = parsed.get(CheckpointConfig)
    require_tensorboard(parsed.get(LogConfig))
    require_wandb(parsed.get(LogConfig))
    # The checkpoint is looked for before the model fields: if it is missing, that is the error to
    # show, not the absence of the fields that it would have given.
    start = find_start(options) if options.load is not None else None
    trained = loaded_model(parsed, start)
    config = assemble(parsed, trained=trained)
    layout: tuple[str, ...] = ()
    if wanted(parsed):
        choice = chosen(parsed, config, place, start)
        config = choice.config
        layout = choice.notes
    resolved = check(config, place.world_size, needs_data=needs_data)
    mesh = init_mesh(resolved.config, place)
    with raise_on_all_ranks(mesh.world):
        vocabulary = find_vocabulary(resolved.config)
        config = with_vocabulary(resolved.config, vocabulary)
        changes = (
            compare(options, start, trained, config.model)
            if start is not None and trained is not None
            else []
        )
    # What only some ranks can see (a tokenizer, a dataset) has raised on all of them by now.
    config, decided = decide(config, place.world_size, agreed_memory(mesh, place))
    if mesh.rank == 0:
        m = config.model
        placed = placement_warnings(config.parallel, place.local_world_size)
        slow = attention_warnings(
            mesh.device,
            compute_dtype(config),
            m.num_attention_heads,
            m.num_key_value_heads,
            m.head_dim,
        )
        warnings = (*resolved.warnings, *changes, *placed, *slow)
        for line in (
            *parsed.notes,
            *layout,
            *resolved.notes,
            *decided,
            *(f"warning: {text}" for text in warnings),
        ):
            print(f" {line}", flush=True)
    with watched(place, mesh.recorder, 60 * config.parallel.distributed_timeout_minutes):
        yield config, mesh, vocabulary


def agreed_memory(mesh: Mesh, place: Place) -> int:
    """Bytes of memory that every process has: the minimum over all ranks, so that all decide alike.
    Collective."""
    import torch
    import torch.distributed as dist

    from megatron_llama.distributed import device as devices
    from megatron_llama.distributed.comm.collectives import all_reduce

    sharing = (place.local_world_size or place.world_size) if devices.is_host(mesh.device) else 1
    memory = torch.tensor(devices.memory_bytes(mesh.device) // sharing, device=mesh.device)
    all_reduce(memory, mesh.world, dist.ReduceOp.MIN).wait()
    return int(memory)


@contextmanager
def watched(place: Place, recorder: Recorder, timeout: float = inf) -> Iterator[None]:
    """Turn the death of a rank, and a wait of more than ``timeout`` seconds, into an error that
    names the rank to blame, on every other rank. Raises ClusterError, or ends the process where
    that is not possible."""
    from megatron_llama.distributed.comm.watch import Watch

    if place.world_size == 1:
        yield
        return
    watch = Watch(place, recorder, timeout)
    try:
        yield
    except RuntimeError as error:
        found = watch.diagnose()
        expected = "all ranks at work"
        if found.silent:
            do = (
                "look at what that rank printed last and at its machine; resume with "
                f"--load{found.places}"
            )
            where = ", ".join(map(str, found.silent))
            raise ClusterError(
                describe(f"rank {where}", got="no answer", expected=expected, do=do)
            ) from error
        if found.stuck:
            do = f"look at what the ranks that stopped were doing; resume with --load{found.places}"
            got = f"no progress for {timeout:g} s (--distributed-timeout-minutes): {found.reason}"
            raise ClusterError(describe("the run", got=got, expected=expected, do=do)) from error
        raise
    finally:
        watch.stop()
