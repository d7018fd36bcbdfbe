"""``shard``: the engine around any module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_llama.config.offload import OffloadConfig, ZenFlowConfig
from megatron_llama.distributed import device as devices
from megatron_llama.distributed.axes import Axis, Mesh
from megatron_llama.distributed.data_mesh import close_data_mesh, data_mesh
from megatron_llama.engine.build import build_engine
from megatron_llama.errors import ConfigError, counted, describe, listing
from megatron_llama.plans.buckets import BY_TRAFFIC, NO_SHARD, strategy_named
from megatron_llama.plans.engine_options import BF16, FP32, FP64, EngineOptions, UpdateOptions
from megatron_llama.sharding.engine import ModuleEngine
from megatron_llama.sharding.holders import Holders
from megatron_llama.sharding.initial import first_values, require_same_model, require_same_options
from megatron_llama.sharding.intercept import Intercepted
from megatron_llama.sharding.linear import AttachedLinears
from megatron_llama.sharding.module_buckets import module_bucket_plan
from megatron_llama.sharding.names import ParameterNames, clean_name, parameter_names
from megatron_llama.sharding.optimizer import AdamW, parameter_groups
from megatron_llama.sharding.order import AccessOrder
from megatron_llama.sharding.passes import Passes
from megatron_llama.sharding.peers import Peers
from megatron_llama.sharding.specs import ModuleUnit, module_units, unit_predicate, unit_specs
from megatron_llama.sharding.state import StateLayout, state_layout

STRATEGIES = (NO_SHARD, *BY_TRAFFIC)
DTYPE_NAMES = MappingProxyType({torch.float32: FP32, torch.bfloat16: BF16, torch.float64: FP64})
COMPUTE_DTYPES = tuple(DTYPE_NAMES)
"""Not fp16: gradients would underflow, and the engine cannot scale a loss that it does not see."""
REDUCTIONS = ("mean", "sum")
OFFLOADS = ("none", "exact", "zenflow")
TORCHS_DEFAULTS = AdamW()


def shard(
    model: nn.Module,
    *,
    units: Iterable[type[nn.Module]] | Callable[[nn.Module], bool] = (),
    strategy: str = "optim_grads_params",
    optimizer: AdamW | torch.optim.Optimizer = TORCHS_DEFAULTS,
    clip: float = 0.0,
    microbatches: int = 1,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    param_slots: int | str = 2,
    grad_slots: int = 2,
    shard_size: int = 0,
    bucket_size: int = 40_000_000,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    optimizer_offload: str = "none",
    reduction: str = "mean",
    static_order: bool = True,
    find_unused: bool = False,
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

    ``units`` are module classes, or a predicate of a module: what is gathered together. What is in
    no unit is gathered by itself. ``strategy`` is what each rank has a share of: ``no_shard``
    (nothing, as DDP), ``optim`` (optimizer state; ZeRO-1), ``optim_grads`` (gradients as well;
    ZeRO-2), ``optim_grads_params`` (parameters as well; ZeRO-3, FSDP).
    ``optimizer`` is ``ml.AdamW``, or a torch.optim.AdamW of the model's parameters. ``clip`` is the
    largest global L2 norm of the gradient; 0: no clipping.
    ``mesh`` is a DeviceMesh (with two dims: replicas and shards), a process group, or None: all
    processes, as torchrun has started them, or this one alone.
    ``param_slots`` and ``grad_slots`` are the numbers of units whose whole parameters and gradients
    a rank holds at a time; ``param_slots="all"`` gathers each unit once in a step.
    ``shard_size`` shards within so many neighbours and repeats the shards across (hybrid sharding).
    ``bucket_size`` is the number of elements of one message where messages are not made by unit.
    ``dtype`` is that of parameters and computation, by default the parameters' own; with bf16
    masters are fp32. Floating inputs of the model and its units are cast to it, as FSDP2 does.
    ``reduce_dtype=torch.bfloat16`` halves the bytes of gradients on the wire.
    ``optimizer_offload`` keeps optimizer state and masters in the host's memory: ``exact``, or
    ``zenflow`` (an approximation); further keywords are the offload options of docs/options.md.
    ``reduction`` says what the gradient of several ranks is: their ``mean`` as in DDP, or ``sum``.
    ``static_order=False`` is for a model that uses its units in another order each time: ranks then
    agree before each unit, and less is prefetched. ``find_unused=True`` trains parameters that got
    no gradient with a gradient of zero, so that weight decay and moments go on, unlike in DDP;
    without it they are an error.

    Rank 0's values of parameters and buffers count. Raises ConfigError with all that is wrong."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard(model): got {type(model).__name__}, expected a torch.nn.Module")
    is_unit = unit_predicate(units)
    names = parameter_names(model)
    problems = [
        *_option_problems(
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
        ),
        *_offload_option_problems(offload_options),
        *_model_problems(model, names, dtype),
        *_device_problems(model, mesh),
    ]
    found = [] if problems else module_units(model, names, is_unit)
    if found and units and all(unit.is_root_part for unit in found):
        problems.append(
            describe(
                "units",
                got="no module with parameters that matches",
                expected="at least one",
                do=f"name the classes of its repeated layers (it has {_classes(model)})",
            )
        )
    if problems:
        raise ConfigError(listing("shard:", problems))
    groups = parameter_groups(optimizer, names)
    sharded = strategy_named(strategy).sharded
    options = {
        "units": [unit.name for unit in found if not unit.is_root_part],
        "strategy": strategy,
        "optimizer": groups,
        "clip": clip,
        "microbatches": microbatches,
        "param_slots": param_slots,
        "grad_slots": grad_slots,
        "shard_size": shard_size,
        "bucket_size": bucket_size,
        "dtype": dtype,
        "reduce_dtype": reduce_dtype,
        "optimizer_offload": optimizer_offload,
        "reduction": reduction,
        "static_order": static_order,
        "find_unused": find_unused,
        **offload_options,
    }
    data = data_mesh(
        mesh,
        shard_size if sharded else 1,
        _device(model, mesh),
        before_sharding=partial(_require_same, model, options),
    )
    try:
        engine_options = EngineOptions(
            strategy=strategy,
            param_slots=None if param_slots == "all" else int(param_slots),
            grad_slots=grad_slots,
            bucket_size=bucket_size,
            dtype=DTYPE_NAMES[dtype or next(model.parameters()).dtype],
            reduces_in_bf16=reduce_dtype == torch.bfloat16,
            grad_divisor=float(data.dp.size) if reduction == "mean" else 1.0,
            find_unused=find_unused,
            clip=clip,
            groups=tuple(group.update_options() for group in groups) or (UpdateOptions(),),
            offload=_chosen(
                OffloadConfig(optimizer_offload=optimizer_offload),  # type: ignore[arg-type]
                offload_options,
            ),
            zenflow=_chosen(ZenFlowConfig(), offload_options),
        )
        engine = _build(
            engine_options,
            model,
            names,
            found,
            groups,
            data,
            microbatches=microbatches,
            static_order=static_order,
            cast_to=dtype,
            layout=state_layout(data, mesh),
        )
        if isinstance(optimizer, torch.optim.Optimizer):
            engine.optimizer.take_over(optimizer)
        return engine
    except BaseException:
        close_data_mesh(data)
        raise


def _build(
    options: EngineOptions,
    model: nn.Module,
    names: ParameterNames,
    units: list[ModuleUnit],
    groups: Any,
    mesh: Mesh,
    *,
    microbatches: int,
    static_order: bool,
    cast_to: torch.dtype | None,
    layout: StateLayout,
) -> ModuleEngine:
    """Build the engine, and let the module hold placeholders."""
    bucket_plan = module_bucket_plan(
        unit_specs(model, units, groups), options, shards=mesh.dp_shard.size
    )
    peers = Peers(mesh)
    holders = Holders(model, names, peers.explained)
    engine = build_engine(options, bucket_plan, mesh, attach=holders.attach)
    values = first_values(engine, model, names)
    # Before the classes of modules change: it looks for what is exactly an nn.Linear.
    linears = AttachedLinears(model)
    order = AccessOrder(
        [unit.name for unit in units],
        [bucket_plan.label(bucket.index) for bucket in bucket_plan.buckets],
        peers,
        static=static_order,
    )
    passes = Passes(
        model,
        units,
        engine,
        holders,
        order,
        peers,
        microbatches=microbatches,
        cast_to=cast_to,
        find_unused=options.find_unused,
        require_values=values.require_initialized,
    )
    holders.uninstall()
    return ModuleEngine(
        model, units, engine, values, passes, groups, layout, clip=options.clip, linears=linears
    )


def _require_same(model: nn.Module, options: Mapping[str, object], axis: Axis) -> None:
    """Raise ConfigError on all ranks unless they shard the same model in the same way."""
    require_same_model(model, axis)
    require_same_options(options, axis)


def _device(model: nn.Module, mesh: DeviceMesh | dist.ProcessGroup | None) -> torch.device | None:
    """Return the device of the engine: that of the DeviceMesh, else that of the parameters, else
    (on the meta device) this process's accelerator."""
    if isinstance(mesh, DeviceMesh):
        return torch.device(mesh.device_type) if mesh.device_type == "cpu" else None
    found = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    on_accelerator = {device for device in found if not devices.is_host(device)}
    if on_accelerator:
        return next(iter(on_accelerator))
    return next(iter(found), None)


def _device_problems(
    model: nn.Module, mesh: DeviceMesh | dist.ProcessGroup | None
) -> Iterator[str]:
    """Yield that a model has been left on the CPU beside a process group of accelerators. A
    DeviceMesh says where the model is to be, and moves it there, as in FSDP2."""
    group = dist.group.WORLD if mesh is None else mesh
    found = _device(model, mesh)
    if not isinstance(group, dist.ProcessGroup) or found is None or not devices.is_host(found):
        return
    kinds = sorted({device.type for device in group._device_types})
    if found.type not in kinds:
        yield describe(
            "model",
            got=f"parameters on {found}",
            expected=f"{' or '.join(kinds)}, as the process group has it",
            do="move the model there before shard(), or give a DeviceMesh of the CPUs",
        )


def _option_problems(
    *,
    strategy: str,
    clip: float,
    microbatches: int,
    param_slots: int | str,
    grad_slots: int,
    shard_size: int,
    bucket_size: int,
    dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    optimizer_offload: str,
    reduction: str,
) -> Iterator[str]:
    """Yield what is wrong with the options alone."""
    for name, value, allowed in (
        ("strategy", strategy, STRATEGIES),
        ("reduction", reduction, REDUCTIONS),
        ("optimizer_offload", optimizer_offload, OFFLOADS),
        ("dtype", dtype, (None, *COMPUTE_DTYPES)),
        ("reduce_dtype", reduce_dtype, (None, torch.float32, torch.bfloat16)),
    ):
        if value not in allowed:
            expected = f"one of {', '.join(map(str, allowed))}"
            yield describe(name, got=repr(value), expected=expected, do=f"give another {name}")
    for name, number, least in (
        ("microbatches", microbatches, 1),
        ("grad_slots", grad_slots, 1),
        ("bucket_size", bucket_size, 1),
        ("shard_size", shard_size, 0),
        *(() if param_slots == "all" else (("param_slots", param_slots, 1),)),
    ):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            also = ', or "all"' if name == "param_slots" else ""
            expected = f"a whole number from {least}{also}"
            yield describe(name, got=repr(number), expected=expected, do=f"change {name}")
    if not 0.0 <= clip < float("inf"):
        yield describe("clip", got=clip, expected="a norm, or 0 for none", do="change clip")


def _offload_option_problems(options: dict[str, Any]) -> Iterator[str]:
    """Yield keywords that are no option of the offload."""
    names = [each.name for part in (OffloadConfig, ZenFlowConfig) for each in fields(part)]
    names = [name for name in names if name not in ("optimizer_offload", "zenflow_config")]
    for name in options:
        if name not in names:
            expected = f"an argument of shard, or one of {', '.join(names)}"
            yield describe(name, got=repr(options[name]), expected=expected, do="leave it out")


def _chosen(part: Any, options: dict[str, Any]) -> Any:
    """Return a part of the configuration with those of the options that belong to it."""
    names = {each.name for each in fields(part)}
    return replace(part, **{name: value for name, value in options.items() if name in names})


def _model_problems(
    model: nn.Module, names: ParameterNames, dtype: torch.dtype | None
) -> Iterator[str]:
    """Yield what the engine cannot do with the parameters of a model."""
    if not names:
        yield describe("model", got="no parameters", expected="some", do="give the whole module")
    sharded = [name for name, module in model.named_modules() if isinstance(module, Intercepted)]
    if sharded:
        yield describe(
            clean_name(sharded[0]) or "model",
            got="a module that shard has taken already",
            expected="a plain one",
            do="shard the whole model once, and build it anew to shard it after engine.close()",
        )
        return
    for parameter, (name, *_) in names.items():
        if type(parameter) is not nn.Parameter:
            yield describe(
                clean_name(name),
                got=type(parameter).__name__,
                expected="a plain nn.Parameter",
                do="call shard before other libraries change the parameters, and run lazy modules "
                "once before it",
            )
        elif not parameter.is_floating_point():
            yield describe(
                clean_name(name),
                got=parameter.dtype,
                expected="real numbers",
                do="register it as a buffer, or keep it out of the model",
            )
        elif parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield describe(
                clean_name(name),
                got="a hook on its gradient from before shard()",
                expected="none: the engine trains a parameter of its own in this place",
                do="call self.weight.register_hook in forward, or scale what the module returns",
            )
        elif parameter.grad is not None:
            yield describe(
                clean_name(name),
                got="a gradient from before shard()",
                expected="none: the first step begins with its own backward passes",
                do="call model.zero_grad() before shard()",
            )
    dtypes: dict[torch.dtype, list[str]] = {}
    for parameter, (name, *_) in names.items():
        dtypes.setdefault(parameter.dtype, []).append(clean_name(name))
    if dtype is None and len(dtypes) > 1:
        found = ", ".join(
            f"{kind} of {counted(len(which), 'parameter')} ({which[0]}, ...)"
            for kind, which in dtypes.items()
        )
        yield describe(
            "dtype", got=f"None for {found}", expected="one dtype", do="give shard(dtype=)"
        )
    elif dtype is None and dtypes and next(iter(dtypes)) not in COMPUTE_DTYPES:
        yield describe(
            "dtype",
            got=f"None for parameters of {next(iter(dtypes))}",
            expected=f"one of {', '.join(map(str, COMPUTE_DTYPES))}",
            do="give shard(dtype=torch.bfloat16)",
        )


def _classes(model: nn.Module) -> str:
    """Return the names of the classes of which a model has several modules with parameters."""
    counts: dict[str, int] = {}
    for module in model.modules():
        if any(True for _ in module.parameters()):
            counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
    repeated = sorted((name for name in counts if counts[name] > 1), key=lambda name: counts[name])
    return ", ".join(repeated[:5] or sorted(counts)[:5])
