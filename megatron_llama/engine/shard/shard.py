"""``shard``: the engine around any module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron_llama.engine.build import build_engine
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.options import LossScaling
from megatron_llama.engine.plan.buckets import strategy_named
from megatron_llama.engine.shard.data_mesh import add_shard_axes, close_data_mesh, data_mesh
from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.engine.shard.holders import Holders
from megatron_llama.engine.shard.ignored import OWN, RANK0, Ignored, IgnoredParameters
from megatron_llama.engine.shard.initial import (
    first_values,
    require_same_model,
    require_same_options,
)
from megatron_llama.engine.shard.linear import AttachedLinears
from megatron_llama.engine.shard.marks import Marks
from megatron_llama.engine.shard.model_checks import model_device, model_problems, usual_dtype
from megatron_llama.engine.shard.module_buckets import module_bucket_plan
from megatron_llama.engine.shard.names import ParameterNames, parameter_names
from megatron_llama.engine.shard.optimizer import (
    AdamW,
    Optimizer,
    ParameterGroup,
    parameter_groups,
    torch_optimizers,
)
from megatron_llama.engine.shard.order import AccessOrder
from megatron_llama.engine.shard.passes import Passes
from megatron_llama.engine.shard.peers import Peers
from megatron_llama.engine.shard.shard_options import FP8, NO_FP8, SKIP, ShardOptions
from megatron_llama.engine.shard.snapshot import Snapshot
from megatron_llama.engine.shard.specs import (
    ModuleUnit,
    kept_parameters,
    module_units,
    own_dtypes,
    own_reduce_dtypes,
    unit_specs,
)
from megatron_llama.engine.shard.state import StateLayout, state_layout
from megatron_llama.engine.shard.tensor_layouts import ALL_PLAIN, TensorLayouts
from megatron_llama.engine.shard.unit_policies import DTYPE_NAMES, UnitPolicy, unit_policies
from megatron_llama.engine.shard.values import named
from megatron_llama.errors import ConfigError, describe, listing

if TYPE_CHECKING:
    from megatron_llama.engine.shard.alternatives import ByUnit
    from megatron_llama.engine.shard.fp8 import Except, FP8Layers

TORCHS_DEFAULTS = AdamW()


def shard(
    model: nn.Module,
    *,
    units: Iterable[type[nn.Module] | UnitPolicy] | Callable[[nn.Module], bool] = (),
    strategy: str = "optim_grads_params",
    optimizer: Optimizer = TORCHS_DEFAULTS,
    clip: float = 0.0,
    microbatches: int = 1,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    param_slots: int | str = 2,
    grad_slots: int = 2,
    shard_size: int = 0,
    bucket_size: int = 0,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    optimizer_offload: str = "none",
    reduction: str = "mean",
    static_order: bool = True,
    find_unused: bool = False,
    unused: str | None = None,
    ignored: Ignored = (),
    ignored_values: str = RANK0,
    buffers: str = OWN,
    loss_scaling: LossScaling | None = None,
    fp8: str = NO_FP8,
    fp8_except: Except = (),
    **offload_options: Any,
) -> ModuleEngine:
    """Shard a module over data-parallel ranks, and return the engine that trains it. Collective.

    The module is called as before, and holds placeholders for its parameters while nothing runs.
    Every ``microbatches`` backward passes are a step:

    ```python
    # torchrun --nproc-per-node 2 shard.py
    import megatron_llama as ml
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    text = torch.tensor(list(open("data/docs.jsonl", "rb").read()))
    block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    blocks = nn.TransformerEncoder(block, 2)
    model = nn.Sequential(nn.Embedding(256, 32), blocks, nn.Linear(32, 256))
    engine = ml.shard(
        model,
        units=[nn.TransformerEncoderLayer],
        optimizer=ml.AdamW(lr=3e-3, groups=[ml.group("*.bias", lr=1e-3)]),
        clip=1.0,
        microbatches=2,
    )
    first = 8192 * torch.distributed.get_rank()  # each rank has samples of its own
    with engine:
        for step in range(4):
            for start in (first + 2048 * step, first + 2048 * step + 1024):
                words = text[start : start + 1025]
                logits = model(words[:-1].view(16, 64))
                (cross_entropy(logits.flatten(0, 1), words[1:]) / 2).backward()
            result = engine.step()
        print(float(result.grad_norm), float(result.skipped))
        with engine.gathered():
            print(model[2].weight.norm())
    ```

    ``units`` are module classes and what ``ml.unit`` returns, or a predicate of a module. The
    parameters of a unit are gathered together, others by themselves. ``strategy`` is what each rank
    has a share of: ``no_shard`` (nothing, as DDP), ``optim`` (optimizer state; ZeRO-1),
    ``optim_grads`` (gradients as well; ZeRO-2), ``optim_grads_params`` (parameters as well; ZeRO-3,
    FSDP).
    ``optimizer`` is ``ml.AdamW`` or another of the engine's (``ml.Muon``,
    ``ml.ScheduleFreeAdamW``), an elementwise optimizer of torch.optim of the model's parameters
    (AdamW, SGD, Adam, RMSprop and others), one that ``ml.elementwise`` says is, or torch.optim.Muon
    in a list with AdamW. ``clip`` is the largest global L2 norm of the gradient; 0: no clipping.
    ``mesh`` is a DeviceMesh (with two dims: replicas and shards), a process group, or None: all
    processes, as torchrun has started them, or this one alone. DTensor parameters (those of torch's
    ``parallelize_module``) are sharded by this rank's part, over ``mesh["dp"]`` of their mesh.
    ``param_slots`` and ``grad_slots`` are the numbers of units whose whole parameters and gradients
    a rank holds at a time; ``param_slots="all"`` gathers each unit once in a step.
    ``shard_size`` shards within so many neighbours and repeats the shards across (hybrid sharding).
    ``bucket_size`` is the number of elements of one message where messages are not made by unit; 0:
    40 million, or a million for each rank that shares a copy of the model, whichever is more.
    ``dtype`` is that of parameters and computation, by default the parameters' own; with bf16
    masters are fp32. Floating inputs of the model and its units are cast to it, as FSDP2 does.
    With ``torch.float16`` call ``engine.backward(loss)``: the engine scales the loss, by the rule
    of ``loss_scaling``, and skips steps that overflow.
    ``reduce_dtype=torch.bfloat16`` halves the bytes of gradients on the wire (``ml.unit`` says it
    for some units).
    ``optimizer_offload`` keeps optimizer state and masters in the host's memory: ``exact``, or
    ``zenflow`` (an approximation); further keywords are the offload options of docs/options.md.
    ``reduction`` says what the gradient of several ranks is: their ``mean`` as in DDP, or ``sum``.
    ``static_order=False`` is for a model that uses its units in another order each time: ranks then
    agree before each unit, and less is prefetched.
    ``unused`` says what becomes of parameters that no rank has used in a step, which are an error
    without it. ``"skip"`` leaves them as they are, with moments and count of steps, as DDP and
    torch.optim do; ``"zero"`` trains them with a gradient of zero, so that weight decay and moments
    go on. ``find_unused=True`` is ``"zero"``. With either ranks may use different parameters, and
    gradients are reduced at the end of the step. Experts in a list inside of a unit (modules of one
    class with parameters of the same shapes) need neither: each pass may use some of them, and what
    no rank has used in a step is left as with ``"skip"``.
    ``ignored`` are parameters that stay as and where they are, whole on every rank: names or
    patterns of names, modules, parameters. The engine does not move, cast, gather, reduce or update
    them; if they require gradients, their ``.grad`` is this rank's, and yours to reduce and use.
    State dicts have them as they are. ``ignored_values="own"`` leaves each rank its own values, of
    its own parameters (experts that the ranks share out); a state dict has those of its rank.

    ``buffers="own"`` lets each rank keep the buffers that its passes change (batch norm's running
    statistics), as FSDP2 does; with ``"rank0"`` a training pass begins with rank 0's, as in DDP,
    and sharded state dicts have these.

    ``fp8`` lets each nn.Linear in a unit that computes in bf16 multiply in FP8, forward and for the
    gradient of its input (docs/fp8.md): ``"blockwise"`` with a scale for 128 numbers of a row, and
    for 128 x 128 of a weight, ``"tensorwise"`` with one for a tensor. ``fp8_except`` are modules
    that stay as they are, with all in them: names, patterns of names, modules. A warning names
    whatever else has a matrix and stays. Weight gradients, masters, messages and state dicts are as
    without. Codes of a weight are made once for each update, or whenever it is gathered.

    Rank 0's first values of parameters and buffers count. Raises ConfigError with all that is
    wrong."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard(model): got {type(model).__name__}, expected a torch.nn.Module")
    # What training itself does not need is imported where it is asked for.
    from megatron_llama.engine.shard.unit_checks import (
        policy_problems,
        sharing_problems,
        unit_problems,
    )

    policies = unit_policies(units)
    all_names = parameter_names(model)
    left_out = IgnoredParameters(ignored, all_names, own_values=ignored_values == OWN)
    names = left_out.without(all_names)
    in_fp8: FP8Layers | None = None
    if fp8 != NO_FP8 and fp8 in FP8:
        from megatron_llama.engine.shard.fp8 import FP8Layers

        in_fp8 = FP8Layers(model, fp8, fp8_except)
    options = ShardOptions(
        strategy=strategy,
        clip=clip,
        microbatches=microbatches,
        param_slots=param_slots,
        grad_slots=grad_slots,
        shard_size=shard_size,
        bucket_size=bucket_size,
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        optimizer_offload=optimizer_offload,
        reduction=reduction,
        static_order=static_order,
        find_unused=find_unused or unused is not None,
        unused=unused,
        ignored_values=ignored_values,
        buffers=buffers,
        loss_scaling=loss_scaling,
        offload_options=offload_options,
        fp8=fp8,
        fp8_except=in_fp8.excepted if in_fp8 else (),
    )
    device = model_device(names.keys(), mesh)
    # All problems at once: a job of many processes takes minutes to start again.
    all_units = module_units(model, names, policies)
    problems = [
        *options.problems(),
        *model_problems(model, names, dtype, own_dtypes(all_units), device, mesh),
    ]
    if not problems and policies:
        problems += unit_problems(model, all_units)
    by_name = {unit.name: unit.module for unit in all_units if not unit.is_root_part}
    compute_dtype = dtype or usual_dtype(names, own_dtypes(all_units))
    problems += policy_problems(policies, by_name, compute_dtype, optimizer_offload)
    problems += sharing_problems(all_units)
    shares = any(isinstance(parameter, DTensor) for parameter in names)
    if shares:
        from megatron_llama.engine.shard.tensor_parallel import (
            add_tensor_axis,
            joint_state_layout,
            require_by_parts,
            tensor_parallel_problems,
            with_local_parts,
        )

        problems += tensor_parallel_problems(model, names)
    problems += left_out.problems(optimizer)
    if in_fp8 is not None:
        problems += in_fp8.choose(all_units, names, compute_dtype)
    elif fp8 == NO_FP8 and fp8_except != ():
        expected = "fp8 as well"
        problems.append(describe("fp8_except", got="no fp8", expected=expected, do="leave it out"))
    half = torch.float16 in (compute_dtype, *own_dtypes(all_units).values())
    if half and optimizer_offload != "none":
        problems.append(
            describe(
                "optimizer_offload",
                got=f"{optimizer_offload!r} for a model in torch.float16",
                expected='"none": an overflow skips a step at its end',
                do="compute in torch.bfloat16, or leave optimizer_offload out",
            )
        )
    if problems:
        raise ConfigError(listing("shard:", problems))
    _warn_of_rounding(names, dtype, own_dtypes(all_units))
    left_out.warn_of_gradients()
    assert compute_dtype is not None
    groups = parameter_groups(optimizer, names, all_units)
    if optimizer is not TORCHS_DEFAULTS:
        from megatron_llama.engine.shard.more_optimizers import require_updatable

        require_updatable(groups, optimizer_offload, compute_dtype)
    if unused == SKIP:
        from megatron_llama.engine.shard.unused import require_skippable

        require_skippable(groups, optimizer_offload)
    if shares:
        require_by_parts(groups, optimizer_offload)
    described = [
        f"{unit.name} {unit.policy.options or ''}".strip()
        for unit in all_units
        if not unit.is_root_part
    ]
    before = Snapshot(model)
    data = data_mesh(mesh, device)
    layouts = ALL_PLAIN
    try:
        if shares:
            data, layouts = add_tensor_axis(data, names)
        # First: ranks with other options would make other groups, and wait for each other.
        apart = left_out.parameters if left_out.own_values else {}
        common = [name for name in left_out.parameters if name not in apart]
        require_same_model(model, data.world, apart.values())
        require_same_options(options.agreed(described, groups, common), data.world)
        if in_fp8 is not None:
            in_fp8.require_device(data.device)
        data = add_shard_axes(data, mesh, shard_size if strategy_named(strategy).sharded else 1)
        layout = state_layout(data, mesh)
        own_names = names
        if shares:
            layout = joint_state_layout(layout, layouts, data)
            own_names = with_local_parts(model, names)
        engine = _build(
            options,
            model,
            own_names,
            all_units,
            groups,
            data,
            layout,
            compute_dtype,
            left_out,
            layouts,
            in_fp8,
        )
        engine.optimizer.take_over(torch_optimizers(optimizer), names)
        return engine
    except BaseException:
        # Its weights are all that a script may have left of a long load.
        before.restore()
        close_data_mesh(data)
        raise


def _warn_of_rounding(
    names: ParameterNames, dtype: torch.dtype | None, own: Mapping[str, torch.dtype]
) -> None:
    """Warn of frozen parameters that lose bits: masters in fp32 exist for what is trained."""
    rounded = {}
    for parameter, (name, *_) in names.items():
        kept_in = own.get(name, dtype)
        if kept_in is None or parameter.requires_grad:
            continue
        if torch.promote_types(parameter.dtype, kept_in) != kept_in:
            rounded[name] = kept_in
    if rounded:
        warnings.warn(
            describe(
                f"shard: {named(rounded)}",
                got=f"values of more bits in frozen parameters, which are kept in "
                f"{' or '.join(dict.fromkeys(map(str, rounded.values())))}",
                expected="to be told: state dicts have the rounded values",
                do="convert them before shard(), which ends this warning, or save them from the "
                "file that they came from",
            ),
            stacklevel=3,
        )


def _build(
    options: ShardOptions,
    model: nn.Module,
    names: ParameterNames,
    units: list[ModuleUnit],
    groups: Sequence[ParameterGroup],
    mesh: Mesh,
    layout: StateLayout,
    compute_dtype: torch.dtype,
    ignored: IgnoredParameters,
    layouts: TensorLayouts,
    in_fp8: FP8Layers | None,
) -> ModuleEngine:
    """Build the engine, and let the module hold placeholders."""
    trained = any(parameter.requires_grad for parameter in names)
    scales = trained and torch.float16 in (compute_dtype, *own_dtypes(units).values())
    engine_options = options.for_engine(compute_dtype, groups, ranks=mesh.dp.size, scales=scales)
    dtypes = {
        name: DTYPE_NAMES[own] for name, own in own_dtypes(units).items() if own != compute_dtype
    }
    in_bf16 = engine_options.reduces_in_bf16
    reduce_dtypes = {
        name: DTYPE_NAMES[own]
        for name, own in own_reduce_dtypes(units).items()
        if (own == torch.bfloat16) != in_bf16
    }
    specs = unit_specs(names, units, groups, dtypes, reduce_dtypes)
    if layouts:
        from megatron_llama.engine.shard.tensor_parallel import counted_once, require_same_values

        specs = counted_once(specs, layouts, mesh.tp.size)
    alternatives: ByUnit = {}
    if not options.find_unused:
        from megatron_llama.engine.shard.alternatives import alternatives_in_units

        alternatives = alternatives_in_units(units, names, groups, options.optimizer_offload)
    bucket_plan = module_bucket_plan(
        specs,
        engine_options,
        shards=mesh.dp_shard.size,
        kept=kept_parameters(units),
        alternatives={name for own in alternatives.values() for name in own},
    )
    # Parameters get their handles while the engine is built, and these say why a wait ended.
    peers = Peers(mesh)
    holders = Holders(model, names, peers.explained, layouts)
    engine = build_engine(engine_options, bucket_plan, mesh, attach=holders.attach)
    try:
        values = first_values(engine, model, names, holders)
        if layouts:
            require_same_values(values)
        values.ignored = dict(ignored.aliases())
        ignored.share(values)
        # Before the classes of modules change: it looks for what is exactly an nn.Linear.
        linears = AttachedLinears(model) if in_fp8 is None else in_fp8.attach(model)
        if in_fp8 is not None and mesh.world.rank == 0:
            in_fp8.warn(mesh.device)
        by_unit = strategy_named(options.strategy).by_unit
        marks = Marks(model, marked=by_unit and mesh.dp_gather.size > 1)
        order = AccessOrder(
            [unit.name for unit in units],
            [bucket_plan.label(bucket.index) for bucket in bucket_plan.buckets],
            peers,
            static=options.static_order,
            finds_unused=options.find_unused,
        )
        passes = Passes(
            model,
            units,
            engine,
            holders,
            order,
            peers,
            microbatches=options.microbatches,
            cast_to=options.dtype,
            find_unused=options.find_unused,
            skips_unused=options.unused == SKIP,
            alternatives=alternatives,
            ignored=ignored.parameters.values(),
            shares_buffers=options.buffers == RANK0,
            require_values=values.require_usable,
        )
        # Last: everything before reads the values of the module's own parameters.
        holders.uninstall()
        return ModuleEngine(
            model,
            units,
            engine,
            values,
            passes,
            groups,
            layout,
            holders.placeholders,
            clip=options.clip,
            linears=linears,
            marks=marks,
        )
    except BaseException:
        # Its threads would go on to hold the model's memory, and a process that ends with them
        # inside of an operator aborts.
        peers.close()
        engine.close()
        raise
