"""Training, from options to the state in which the run ends."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist

from megatron_llama.api.common.configs import AutoParallelConfig
from megatron_llama.api.common.layout import Choice
from megatron_llama.api.common.options import Options, read_options
from megatron_llama.api.common.startup import OpenInputs, Ready, start_up
from megatron_llama.api.common.watched import watched
from megatron_llama.checkpoint.background import in_background
from megatron_llama.checkpoint.lease import leasing
from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import CheckpointConfig, Config, ParallelConfig, TrainingConfig
from megatron_llama.config.sections import config_sections
from megatron_llama.distributed import device as devices
from megatron_llama.distributed.axes import Axis, Mesh
from megatron_llama.distributed.comm.collectives import all_reduce
from megatron_llama.distributed.comm.watch import Watch
from megatron_llama.distributed.join import this_place
from megatron_llama.distributed.launcher import Place, fix_sums
from megatron_llama.distributed.mesh import init_mesh, placement_warnings
from megatron_llama.distributed.orphan import ending_with_launcher
from megatron_llama.errors import ConfigError
from megatron_llama.hooks import layouts
from megatron_llama.loop.inputs import Inputs, open_inputs, stream_samples
from megatron_llama.loop.start import Start
from megatron_llama.model.llama import score_rule
from megatron_llama.nn.attention import attention_warnings
from megatron_llama.nn.sliding import sliding_warnings
from megatron_llama.pipeline.build import compute_dtype
from megatron_llama.plans.checks.model import require_language_model
from megatron_llama.registry import imported
from megatron_llama.train.run.build import open_run
from megatron_llama.train.run.callbacks import Callback
from megatron_llama.train.run.loop import train as run_steps
from megatron_llama.train.run.result import TrainResult

SECTIONS = (*config_sections(), AutoParallelConfig)
"""The options of a run."""


def train(
    config: Options = None, callbacks: Sequence[Callback] = (), **options: object
) -> TrainResult:
    """Train a model on an indexed dataset, as ``python -m megatron_llama pretrain`` does: in one
    process, or in all processes that torchrun or srun has started, each of which calls this. Where
    the program has made a process group already, its processes are used and the group is left as
    it was. Collective. It may be called again in the same process.

    ``config`` is a Config, a mapping of options, or the path of a YAML file; keyword ``options``
    win over it. Names and values are those of docs/options.md, with underscores; ``model`` names a
    preset. ``callbacks`` are called on every rank, at the moments that their methods describe. Rank
    0 prints the log, and the options of section ``log`` change what it prints.

    The weights come from ``load``, from ``init_from_hf`` or from the seed. SIGTERM and SIGINT stop
    the run after the current step, with everything saved, while it runs in the main thread.

    ```python
    import megatron_llama as ml

    result = ml.train(
        data_path="data/docs",  # data/docs.bin and data/docs.idx, which preprocess has written
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        seq_length=64,
        global_batch_size=8,
        train_iters=20,
        lr=3e-3,
        save="runs/small",
    )
    print(result.loss, result.checkpoint)
    ```

    In several processes the program is the same, and every rank gets the result:

    ```python
    # torchrun --nproc-per-node 2 train.py
    import megatron_llama as ml

    options = {
        "data_path": "data/docs",
        "seq_length": 64,
        "global_batch_size": 8,
        "train_iters": 30,
        "lr": 3e-3,
        "data_parallel_sharding_strategy": "optim_grads_params",
    }
    # The model's shape is that of the checkpoint. One of another layout goes on in this one.
    result = ml.train(options, load="runs/small", save="runs/small")
    assert result.iteration == 30
    ```

    Raises ConfigError with everything that is wrong with the options, DataError, CheckpointError,
    ClusterError, and TrainingError for a run that cannot go on; all of these are UserErrors. What a
    callback raises on one rank is raised there; the other ranks raise a ClusterError."""
    parsed = read_options(config, options, SECTIONS)
    return run_and_leave(lambda: run_training(parsed, open_stream_inputs, callbacks=callbacks))


def run_and_leave(run: Callable[[], TrainResult]) -> TrainResult:
    """Return what ``run`` returns, or raise what it raises, with nothing left of its process group
    in either case: a program may go on."""
    handled = sys.exception()
    try:
        return run()
    except BaseException as error:
        # Its frames hold the groups of the run for as long as somebody keeps the error, and a group
        # of gloo has open connections, on which the other ranks would wait, until nobody holds it.
        each: BaseException | None = error
        while each is not None and each is not handled:
            traceback.clear_frames(each.__traceback__)
            each = each.__cause__ or each.__context__
        raise
    finally:
        # Reference cycles would keep what the process group held, and its threads.
        gc.collect()


def run_training(
    parsed: Parsed,
    open_inputs: OpenInputs,
    *,
    callbacks: Sequence[Callback] = (),
    needs_data: bool = True,
    place: Place | None = None,
    complete: Callable[[Inputs, Mesh], Inputs] | None = None,
) -> TrainResult:
    """Train on what ``open_inputs`` opens, and what ``complete`` adds to it, which may need a model
    for that. ``needs_data``: it reads --data-path. ``place``: which process this is, if it is not
    for the environment to say. Collective. Raises UserError."""
    if parsed.get(TrainingConfig).deterministic_mode:
        fix_sums()
    place = place or this_place()
    options = parsed.get(CheckpointConfig)
    forks = options.async_save and options.save is not None
    if forks and place.joined and place.world_size > 1:
        raise ConfigError(
            "--async-save",
            got="a process group that the program has made",
            expected="one that train() makes, whose store the writing processes can reach",
            do="leave --async-save out, or let train() make the group",
        )
    # --async-save forks a process here, before the process group and its threads exist: a fork
    # copies no thread, and locks that one holds would stay locked.
    # The lease outlives that process, which may be publishing a checkpoint.
    with (
        ending_with_launcher(place.rank) as follower,
        leasing(options.save, steal=options.steal_save) as lease,
        in_background(place, wanted=forks) as background,
    ):
        follower.begin()
        with prepared(parsed, place, needs_data=needs_data) as (ready, mesh):
            # Before it is looked up what the run goes on from: another one may have been saving.
            lease.take(mesh.world)
            for line in lease.notes:
                print(f" {line}", flush=True)
            inputs = open_inputs(parsed, ready, mesh.world)
            if complete is not None:
                inputs = complete(inputs, mesh)
            with open_run(
                inputs, mesh, background=background, lease=lease, callbacks=callbacks
            ) as built:
                return run_steps(built)


def open_stream_inputs(parsed: Parsed, ready: Ready, world: Axis) -> Inputs:
    """Open what training on --data-path reads. Collective. Raises UserError."""
    require_language_model(ready.config.model, "training on --data-path")
    vocabulary = ready.vocabulary
    return open_inputs(
        ready.config,
        world,
        partial(
            stream_samples,
            eod=vocabulary.eod,
            tokenizer=vocabulary.tokenizer,
            share=(world.rank, world.size),
        ),
        tokenizer=vocabulary.tokenizer,
    )


class Launched:
    """The ``Processes`` that a launcher has started, this one among them. ``watch`` is that of this
    one; it starts when they meet."""

    def __init__(self, place: Place, watch: Watch) -> None:
        self._place = place
        self._watch = watch
        self.mesh: Mesh | None = None
        """None until they have met."""

    @property
    def world_size(self) -> int:
        return self._place.world_size

    def on_this_machine(self) -> AbstractContextManager[None]:
        return nullcontext()

    def choose(self, parsed: Parsed, config: Config, start: Start | None) -> Choice:
        choose = imported(layouts().chosen)
        choice: Choice = choose(parsed, config, self._place, start, self._watch)
        return choice

    def meet(self, config: Config) -> Axis:
        self.mesh = init_mesh(config, self._place, self._watch)
        return self.mesh.world

    def memory(self) -> int:
        assert self.mesh is not None
        return agreed_memory(self.mesh, self._place)


@contextmanager
def prepared(
    parsed: Parsed, place: Place, *, needs_data: bool = True
) -> Iterator[tuple[Ready, Mesh]]:
    """``start_up`` with the processes of the launcher; prints what was decided on the way. Inside
    the context the death of a rank becomes an error that names it."""
    timeout = 60 * parsed.get(ParallelConfig).distributed_timeout_minutes
    fixed = parsed.get(TrainingConfig).deterministic_mode
    with devices.deterministic(wanted=fixed), watched(place, timeout) as watch:
        processes = Launched(place, watch)
        ready = start_up(parsed, processes, needs_data=needs_data)
        config = ready.config
        mesh = processes.mesh
        assert mesh is not None
        if mesh.rank == 0:
            m = config.model
            placed = placement_warnings(config.parallel, place.local_world_size)
            slow = attention_warnings(
                mesh.device,
                compute_dtype(config),
                m.num_attention_heads,
                m.num_key_value_heads,
                m.head_dim,
                config.training.attention_backend,
            )
            rules = {score_rule(m, layer) for layer in range(m.num_hidden_layers)}
            slow += sliding_warnings(mesh.device, compute_dtype(config), m.head_dim, rules)
            warnings = (*ready.warnings, *placed, *slow)
            for line in (*ready.lines, *(f"warning: {text}" for text in warnings)):
                print(f" {line}", flush=True)
        yield ready, mesh


def agreed_memory(mesh: Mesh, place: Place) -> int:
    """Bytes of memory that every process has: the minimum over all ranks, so that all decide alike.
    Collective."""
    sharing = (place.local_world_size or place.world_size) if devices.is_host(mesh.device) else 1
    memory = torch.tensor(devices.memory_bytes(mesh.device) // sharing, device=mesh.device)
    all_reduce(memory, mesh.world, dist.ReduceOp.MIN).wait()
    return int(memory)
