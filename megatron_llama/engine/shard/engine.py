"""ModuleEngine: the result of ``shard``."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from megatron_llama.engine.comm.object_collectives import raise_on_all_ranks
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer, StepResult
from megatron_llama.engine.shard.accesses import PassError
from megatron_llama.engine.shard.data_mesh import close_data_mesh
from megatron_llama.engine.shard.intercept import intercept_states
from megatron_llama.engine.shard.linear import AttachedLinears
from megatron_llama.engine.shard.marks import Marks
from megatron_llama.engine.shard.optimizer import ParameterGroup
from megatron_llama.engine.shard.order import (
    END_OF_GATHERED,
    GATHERED,
    INITIALIZE,
    LOADING,
    MODEL_STATE,
    OPTIMIZER_STATE,
)
from megatron_llama.engine.shard.passes import Passes
from megatron_llama.engine.shard.placeholders import Placeholder
from megatron_llama.engine.shard.specs import ModuleUnit
from megatron_llama.engine.shard.state import (
    MODEL,
    OPTIMIZER,
    StateLayout,
    hook_state_dict,
    incompatible_keys,
    model_state,
    require_savable,
)
from megatron_llama.engine.shard.torch_optimizer import EngineOptimizer
from megatron_llama.engine.shard.values import ModuleValues
from megatron_llama.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from megatron_llama.engine.shard.gathered import Only
    from megatron_llama.engine.shard.masters import Masters

LOSS_SCALE = "loss_scale"
"""The part of a state that an engine in fp16 has beside the others: scale, steps without overflow,
overflows in a row."""


class ModuleEngine:
    """The engine around one module: its shards, their optimizer, and the messages between ranks.

    The model is called as before. Every ``microbatches`` backward passes are followed by ``step``.
    ``close`` ends it; as a context manager it closes itself. ``shard`` makes it."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ModuleUnit],
        engine: OverlappedDistributedOptimizer,
        values: ModuleValues,
        passes: Passes,
        groups: Sequence[ParameterGroup],
        layout: StateLayout,
        placeholders: Mapping[str, nn.Parameter],
        *,
        clip: float,
        linears: AttachedLinears,
        marks: Marks,
    ) -> None:
        """``placeholders`` stand in the module for its parameters, by name."""
        self.model = model
        """The module that was given to ``shard``."""
        self.clip = clip
        """The largest global L2 norm of the gradient; 0: no clipping. May be changed between
        steps."""
        self._units = [unit.module for unit in units]
        self._engine = engine
        self._values = values
        self._passes = passes
        self._linears = linears
        self._marks = marks
        self._layout = layout
        self._unhook = hook_state_dict(values, layout, partial(passes.meet, MODEL_STATE))
        intercept_states(
            model,
            load_state=self._load_model_state,
            require_savable=partial(require_savable, values, layout),
        )
        self._closed = False
        self.optimizer = EngineOptimizer(
            groups,
            # A reader of the groups finds shapes, and no values.
            placeholders,
            {name: values.state_names(name) for group in groups for name in group.names},
            step=self.step,
            require_no_gradient=passes.require_no_gradient,
            state_dict=self._optimizer_state,
            load_state_dict=lambda state: self.load_state_dict({OPTIMIZER: state}),
        )
        """This engine as a torch.optim.Optimizer, for schedulers of the learning rate."""
        self._options = self.optimizer.update_options()
        self.result: StepResult | None = None
        """The result of the last step, for callers of ``optimizer.step()``."""
        # The gathers of a script's last step are still under way when it ends, and a thread that is
        # inside of an operator when the interpreter ends aborts the process.
        atexit.register(_close, WeakMethod(self.close))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups as torch.optim has them: ``lr``, the other options of the optimizer, and
        ``param_names``. All but the last may be changed between steps."""
        return self.optimizer.param_groups

    @property
    def mesh(self) -> Mesh:
        """The ranks that hold the model, and how they share it."""
        return self._engine.mesh

    @property
    def microbatches(self) -> int:
        """The backward passes of a step. May be set between steps."""
        return self._passes.microbatches

    @microbatches.setter
    def microbatches(self, count: int) -> None:
        """Set the number. Raises ConfigError for less than 1, PassError within a step."""
        if not isinstance(count, int) or count < 1:
            raise ConfigError(
                "engine.microbatches", got=count, expected="1 or more", do="give a number"
            )
        self._require_between_steps("engine.microbatches = ...")
        self._passes.microbatches = count

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the factor by which gradients in torch.float16 do not vanish, which
        the next ``step`` takes out of them again; of other models the loss itself. The factor
        follows overflows between steps, and is ``result.loss_scale``."""
        return self._passes.scale(loss)

    def backward(self, loss: Tensor) -> None:
        """Run a backward pass from the scaled loss: ``engine.scale(loss).backward()``. Models in
        torch.float16 need it, and all others may use it."""
        self.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, lr: float | None = None, *, fewer: bool = False) -> StepResult:
        """Update the parameters with the gradient of the last ``microbatches`` backward passes.

        ``lr`` is the learning rate of all groups; None: each group's own. With ``fewer`` the step
        may end after fewer backward passes, as the last one of an epoch does; all ranks call it
        after as many, and what is left to be reduced is not hidden. Returns ``grad_norm``
        (over all ranks, after their mean or sum, before clipping) and ``skipped`` as 0-dim tensors
        on the device, which the host does not wait for. A gradient that is not finite changes
        nothing, and ``skipped`` is 1. Raises PassError if there were more or fewer backward
        passes, RuntimeError with the names of trainable parameters that got no gradient, and
        ConfigError for numbers of ``param_groups`` that are none, or that ZenFlow cannot change."""
        rates = self.optimizer.learning_rates() if lr is None else lr
        given = rates if isinstance(rates, list) else [rates]
        for name, numbers in (("clip", [self.clip]), ("lr", given)):
            # A NaN here would make every weight NaN, and count as no skipped step.
            if not all(0.0 <= number < inf for number in numbers):
                raise ConfigError(
                    f"engine.step(): {name}",
                    got=", ".join(map(str, numbers)),
                    expected="finite numbers from 0",
                    do=f"look at where {name} was set",
                )
        options = self.optimizer.update_options()
        if options != self._options:
            self._require_changeable()

        def update() -> StepResult:
            if options != self._options:
                self._engine.change_options(options)
                self._options = options
            return self._engine.step(rates, clip=self.clip)

        result = self._passes.end_step(update, fewer=fewer)
        if self._values.layouts and self.result is None:
            from megatron_llama.engine.shard.tensor_parallel import require_same_gradients

            require_same_gradients(self._values)
        if self.result is None:
            self._linears.end_first_step()
        self.result = result
        # A scheduler of torch warns if it is stepped before its optimizer, and asks this.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return result

    def _require_changeable(self) -> None:
        fixed = [rule for rule in self._engine.rules.distinct if not rule.takes_options]
        if fixed:
            raise ConfigError(
                "engine.optimizer.param_groups",
                got=f"other options (betas, eps, weight decay) than in shard(), "
                f"where {type(fixed[0]).__name__} updates",
                expected="the same: of this rule only lr may change",
                do="choose a scheduler that leaves them alone (cycle_momentum=False), or another "
                "optimizer_offload",
            )

    def discard(self) -> None:
        """Throw away the forward and backward passes since the last ``step``, and their gradients.
        Collective: all ranks call it at the same point of the program, or wait for each other.

        It is for a loss that is not finite, an error in forward that the script catches (on all
        ranks, or with a strategy that keeps parameters whole), and gradients that another model's
        backward pass has left here, as a GAN's generator does in its discriminator. The next step
        is that of an engine which has never seen these passes; buffers that they have changed
        (batch norm's) stay. Raises PassError inside of a pass, and where backward passes have ended
        with errors at different places on the ranks."""
        self._passes.discard()

    @contextmanager
    def gathered(
        self,
        *,
        modify: bool = False,
        only: Only | None = None,
        to: torch.device | str | None = None,
        rank0: bool = False,
    ) -> Iterator[None]:
        """Have parameters whole in the module between two steps. Collective: all ranks enter it
        together, with the same arguments.

        All of them are whole, on every rank and on the engine's device, unless the arguments say
        less. ``only`` is a name or a pattern of names such as ``"*.bias"``, a module, or several of
        them: other parameters stay placeholders, and in memory are the chosen ones and one bucket.
        ``to="cpu"`` puts the copies into the host's memory. With ``rank0`` rank 0 alone gets them,
        and placeholders of other ranks say so.

        They are copies. With ``modify`` rank 0's become those of all ranks at the end, and so do
        the chosen buffers; without it a change is an error. ``copy.deepcopy(model)`` and
        ``torch.save(model)`` give the plain model where all parameters are whole, of its own
        classes and with nothing of the engine; parameters require no gradient."""
        # What training itself does not need is imported where it is asked for.
        from megatron_llama.engine.shard.gathered import gathered

        self._require_between_steps("engine.gathered()")
        self._passes.meet(GATHERED)
        self._passes.suspended = True
        self._passes.shows_masters = modify
        self._linears.detach()
        self._marks.detach()
        try:
            with gathered(self._values, modify=modify, only=only, to=to, rank0=rank0):
                yield
                # Not after an error: then other ranks hear of it here.
                self._passes.meet(END_OF_GATHERED)
        finally:
            self._linears.attach()
            self._marks.attach()
            self._passes.suspended = False
            self._passes.shows_masters = False
            if modify:
                self._passes.values_changed()

    def masters(self, *, modify: bool = False) -> Masters:
        """Return this rank's pieces of the masters between two steps, by the parameter's name:
        ``values``, a flat tensor that is live, and ``place``, the slice of the flattened parameter
        that it is.

        Masters are in fp32, or fp64 where the parameters are; frozen parameters are in the dtype
        that computes. Nothing is sent or copied, except that updates which zenflow puts off are
        made first: with it all ranks call this. Pieces may be read until the next forward pass. To
        write them, all ranks use ``with engine.masters(modify=True) as masters``: the change
        reaches the weights at the end of the block, which is collective. Where several ranks hold
        the same piece (``no_shard``, hybrid sharding), the first one's counts. Raises TrainingError
        where something has no values, and in the next forward pass where pieces have been written
        otherwise."""
        from megatron_llama.engine.shard.masters import Masters

        self._require_between_steps("engine.masters()")
        self._values.require_initialized()
        if not modify and self._values.require_unwritten is not None:
            self._values.require_unwritten()
        self._engine.settle()
        return Masters(self._values, self._publish_masters if modify else None)

    def _publish_masters(self) -> None:
        from megatron_llama.engine.shard.masters import publish_masters

        publish_masters(self._values)
        self._passes.values_changed()

    def initialize(self, fn: Callable[[nn.Module], object] | None = None) -> None:
        """Give values to the parameters and buffers that were on the meta device, unit by unit:
        ``fn(module)`` is called for every module while its unit is whole, by default its own
        ``reset_parameters``, or ``_init_weights`` of a model of transformers. The values of rank 0
        count. Collective."""
        from megatron_llama.engine.shard.initialize import initialize

        self._require_between_steps("engine.initialize()")
        self._passes.meet(INITIALIZE)
        self._passes.suspended = True
        self._passes.shows_masters = True
        self._linears.detach()
        try:
            initialize(self._values, self._units, fn)
        finally:
            self._linears.attach()
            self._passes.suspended = False
            self._passes.shows_masters = False
            self._passes.values_changed()

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"model": {name: value}, "optimizer": {"state": ..., "param_groups": ...}}``
        between two steps, as torch.distributed.checkpoint.state_dict has it: DTensors that are cut
        along the first dim, in the dtype of the masters, and plain buffers. In one process all
        tensors are plain. Collective.

        All of it are copies. They are made bucket by bucket: beside them a rank holds one whole
        bucket. ``model.state_dict()`` is its first part."""
        self._require_between_steps("engine.state_dict()")
        state: dict[str, Any] = {
            MODEL: model_state(self._values),
            OPTIMIZER: self._optimizer_state(),
        }
        if self._engine.loss_scale.dynamic:
            state[LOSS_SCALE] = torch.tensor(self._engine.loss_scale.state(), dtype=torch.float64)
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Take over a state of the form of ``state_dict``, or its ``model`` or ``optimizer`` alone:
        DTensors of any mesh and placements, of FSDP2 or another number of ranks, or plain tensors,
        which every rank then has whole. Collective.

        Raises CheckpointError on all ranks with everything that is missing, unexpected or of
        another shape, before anything is changed; without ``strict`` the first two are allowed."""
        from megatron_llama.engine.shard.optimizer_states import load_state_dict

        self._require_between_steps("engine.load_state_dict()")
        self._passes.meet(LOADING)
        numbers = None
        if isinstance(state, Mapping) and LOSS_SCALE in state:
            numbers = self._loss_scale_of(state[LOSS_SCALE], strict=strict)
            state = {name: value for name, value in state.items() if name != LOSS_SCALE}
        optimizer = self.optimizer
        load_state_dict(self._values, optimizer.made, optimizer.param_groups, state, strict=strict)
        if numbers is not None:
            self._engine.loss_scale.load(numbers)
        self._passes.values_changed()

    def _loss_scale_of(self, value: Any, *, strict: bool) -> list[float] | None:
        """Return the loss scale of a state; None where this engine has none. Raises CheckpointError
        on all ranks, before anything is changed."""
        numbers = value.tolist() if isinstance(value, Tensor) and value.shape == (3,) else []
        valid = len(numbers) == 3 and numbers[0] > 0 and all(0 <= n < inf for n in numbers)
        dynamic = self._engine.loss_scale.dynamic
        with raise_on_all_ranks(self.mesh.world):
            if (dynamic and not valid) or (strict and not dynamic):
                raise CheckpointError(
                    f"engine.load_state_dict: {LOSS_SCALE}",
                    got=value,
                    expected="the scale and two counts" if dynamic else "nothing without fp16",
                    do="load the state of an engine like this, or take it out",
                )
        return numbers if dynamic else None

    def _load_model_state(self, state: Mapping[str, Any], *, strict: bool) -> Any:
        """Serve ``model.load_state_dict``. Returns None where the parameters are whole."""
        if self._values.are_whole:
            return None
        # torch.distributed.checkpoint puts what is there where a state has nothing.
        given = {name: v for name, v in state.items() if not isinstance(v, Placeholder)}
        self.load_state_dict({MODEL: given}, strict=strict)
        return incompatible_keys(self._values, given)

    def _optimizer_state(self) -> dict[str, Any]:
        from megatron_llama.engine.shard.optimizer_states import optimizer_state

        self._require_between_steps("engine.optimizer.state_dict()")
        self._passes.meet(OPTIMIZER_STATE)
        optimizer = self.optimizer
        return optimizer_state(self._values, self._layout, optimizer.made, optimizer.param_groups)

    def close(self) -> None:
        """End the engine's threads and communicators. The module keeps placeholders: take its
        values before, with ``gathered``. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._passes.close()
        self._linears.detach()
        self._marks.detach()
        self._unhook()
        self._engine.close()
        close_data_mesh(self.mesh)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Peers in a planned step would wait for this rank until their timeout.
        if error is not None:
            self._passes.tell_peers(error)
        self.close()

    def _require_between_steps(self, what: str) -> None:
        """Raise PassError within a step, or where the engine has ended."""
        self._passes.require_usable()
        if not self._passes.between_steps:
            raise PassError(
                what,
                got="a step whose passes have begun",
                expected="a call between two steps",
                do="call engine.step() first, or engine.discard()",
            )


def _close(close: WeakMethod[Callable[[], None]]) -> None:
    """Close an engine that still exists."""
    close_engine = close()
    if close_engine is not None:
        close_engine()
