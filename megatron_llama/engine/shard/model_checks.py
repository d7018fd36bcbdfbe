"""The checks by which ``shard`` refuses a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.shard.intercept import Intercepted
from megatron_llama.engine.shard.names import ParameterNames, clean_name
from megatron_llama.engine.shard.unit_policies import COMPUTE_DTYPES
from megatron_llama.errors import counted, describe

Ranks = DeviceMesh | dist.ProcessGroup | None


def model_device(parameters: Collection[nn.Parameter], mesh: Ranks) -> torch.device | None:
    """Return the device of the engine: that of the DeviceMesh, else that of the parameters, else
    (on the meta device) this process's accelerator."""
    if isinstance(mesh, DeviceMesh):
        return torch.device(mesh.device_type) if mesh.device_type == "cpu" else None
    held_on = {parameter.device for parameter in parameters if not parameter.is_meta}
    on_accelerator = {device for device in held_on if not devices.is_host(device)}
    if on_accelerator:
        return next(iter(on_accelerator))
    return next(iter(held_on), None)


def usual_dtype(names: ParameterNames, own: Mapping[str, torch.dtype]) -> torch.dtype | None:
    """Return the dtype in which a model computes where no other one is asked for: that of its
    parameters, those first whose units have no dtype of their own. ``own`` has the others' by
    parameter."""
    asked = [parameter.dtype for parameter, (name, *_) in names.items() if name in own]
    usual = [parameter.dtype for parameter, (name, *_) in names.items() if name not in own]
    dtypes = (*usual, *asked, *own.values())
    return next((dtype for dtype in dtypes if dtype in COMPUTE_DTYPES), None)


def model_problems(
    model: nn.Module,
    names: ParameterNames,
    dtype: torch.dtype | None,
    own: Mapping[str, torch.dtype],
    device: torch.device | None,
    mesh: Ranks,
) -> Iterator[str]:
    """Yield what the engine cannot do with a model. ``own`` are the dtypes of units that have one,
    by parameter; ``device`` is the model's own."""
    yield from _parameter_problems(model, names, dtype, own)
    yield from _device_problems(device, mesh)


def _parameter_problems(
    model: nn.Module,
    names: ParameterNames,
    dtype: torch.dtype | None,
    own: Mapping[str, torch.dtype],
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
        # Quantised weights and lazy ones have values that are no view of a slot.
        if type(parameter) not in (nn.Parameter, DTensor):
            yield describe(
                name,
                got=type(parameter).__name__,
                expected="a plain nn.Parameter",
                do="call shard before other libraries change the parameters, and run lazy modules "
                "once before it",
            )
        elif not parameter.is_floating_point():
            yield describe(
                name,
                got=parameter.dtype,
                expected="real numbers",
                do="register it as a buffer, or keep it out of the model",
            )
        # Hooks of the parameter would stay behind with it, and never be called again.
        elif parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield describe(
                name,
                got="a hook on its gradient from before shard()",
                expected="none: the engine trains a parameter of its own in this place",
                do="call self.weight.register_hook in forward, or scale what the module returns",
            )
        # It would be lost: gradients live in the slots from now on.
        elif parameter.grad is not None:
            yield describe(
                name,
                got="a gradient from before shard()",
                expected="none: the first step begins with its own backward passes",
                do="call model.zero_grad() before shard()",
            )
    dtypes: dict[torch.dtype, list[str]] = {}
    for parameter, (name, *_) in names.items():
        if name not in own:
            dtypes.setdefault(parameter.dtype, []).append(name)
    if dtype is None and len(dtypes) > 1:
        listed = ", ".join(
            f"{kind} of {counted(len(which), 'parameter')} ({which[0]}, ...)"
            for kind, which in dtypes.items()
        )
        yield describe(
            "dtype",
            got=f"None for {listed}",
            expected="one dtype",
            do="give shard(dtype=), or ml.unit(..., dtype=)",
        )
    elif dtype is None and dtypes and next(iter(dtypes)) not in COMPUTE_DTYPES:
        yield describe(
            "dtype",
            got=f"None for parameters of {next(iter(dtypes))}",
            expected=f"one of {', '.join(map(str, COMPUTE_DTYPES))}",
            do="give shard(dtype=torch.bfloat16)",
        )


def _device_problems(device: torch.device | None, mesh: Ranks) -> Iterator[str]:
    """Yield that a model has been left on the CPU beside a process group of accelerators. A
    DeviceMesh says where the model is to be, and moves it there, as in FSDP2."""
    group = dist.group.WORLD if mesh is None else mesh
    if not isinstance(group, dist.ProcessGroup) or device is None or not devices.is_host(device):
        return
    kinds = sorted({supported.type for supported in group._device_types})
    if device.type not in kinds:
        yield describe(
            "model",
            got=f"parameters on {device}",
            expected=f"{' or '.join(kinds)}, as the process group has it",
            do="move the model there before shard(), or give a DeviceMesh of the CPUs",
        )
