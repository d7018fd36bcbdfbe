"""Bytes that one rank of data parallelism needs for its state, under ``megatron_llama.shard`` and
under FSDP2: ``python -m tools.compare_memory``, and with ``--optimizers`` for each optimizer.

Nothing is allocated. Ours is what the plan says of which the engine is made;
``tests/tools/test_compare_memory.py`` checks it against the engine itself on torch's device
``meta``. FSDP2's is what torch's ``FSDPMemTracker`` sees of real FSDP2 objects with fake tensors
and a fake process group, at the highest moment of a second microbatch, and the state that its real
optimizers hold of its shards. The gaps that a caching allocator leaves are in neither. Activations
are left out of both: they are the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_llama.engine.options import BF16, EIGHT_BIT, EngineOptions
from megatron_llama.engine.plan.buckets import BucketPlan
from megatron_llama.engine.plan.memory import state_bytes
from megatron_llama.engine.shard.module_buckets import module_bucket_plan
from megatron_llama.engine.shard.more_optimizers import ScheduleFreeAdamW
from megatron_llama.engine.shard.muon import Muon
from megatron_llama.engine.shard.names import parameter_names
from megatron_llama.engine.shard.optimizer import AdamW, Optimizer, parameter_groups
from megatron_llama.engine.shard.specs import module_units, unit_specs
from megatron_llama.engine.shard.unit_policies import unit_policies

COLUMNS = (
    "masters and moments",
    "bf16 shards",
    "gradient shards",
    "whole weights",
    "whole gradients",
)
"""``whole weights`` counts buffers of gathers; ``whole gradients`` those of reductions."""


OurOptimizer = Callable[[nn.Module], Optimizer]
TorchOptimizers = Callable[[nn.Module], Sequence[torch.optim.Optimizer]]


def fused_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW of all parameters."""
    return [torch.optim.AdamW(model.parameters(), fused=True)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), momentum=0.9)


def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    """Adam with the largest second moments."""
    return torch.optim.Adam(model.parameters(), amsgrad=True)


def schedule_free(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The package of the authors."""
    from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped]

    optimizer = AdamWScheduleFree(model.parameters(), foreach=False)
    optimizer.train()
    return [optimizer]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers, AdamW for the rest."""
    matrices = {n for n, p in model.named_parameters() if p.dim() == 2 and ".layers." in n}
    named = dict(model.named_parameters())
    return [
        torch.optim.Muon([named[name] for name in named if name in matrices]),
        torch.optim.AdamW([named[name] for name in named if name not in matrices], fused=True),
    ]


OPTIMIZERS: Mapping[str, tuple[OurOptimizer, TorchOptimizers | None]] = MappingProxyType(
    {
        "AdamW": (lambda model: AdamW(), fused_adamw),
        "AdamW, moments in bf16": (
            lambda model: AdamW(betas=(0.9, 0.95), exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16),
            None,
        ),
        "AdamW, moments in 8 bits": (
            lambda model: AdamW(exp_avg_dtype=EIGHT_BIT, exp_avg_sq_dtype=EIGHT_BIT),
            None,
        ),
        "SGD with momentum": (sgd, lambda model: [sgd(model)]),
        "Adam with amsgrad": (amsgrad, lambda model: [amsgrad(model)]),
        "schedule-free AdamW": (lambda model: ScheduleFreeAdamW(), schedule_free),
        "Muon": (lambda model: Muon(), muon),
    }
)
"""Ours, and what FSDP2's users have; None: torch has no such optimizer."""


@dataclass(frozen=True)
class Row:
    """The state of one rank."""

    name: str
    parts: tuple[int, ...]
    """Bytes, one for each of COLUMNS."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts)


def llama31_8b(layers: int) -> nn.Module:
    """Hugging Face's LLaMA 3.1 8B with so many layers, on the current device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def our_plan(
    ranks: int,
    layers: int,
    strategy: str,
    param_slots: int | None,
    make: OurOptimizer = lambda model: AdamW(),
) -> tuple[EngineOptions, BucketPlan]:
    """The options and the buckets that shard() makes of the model in bf16, with two gradient
    slots."""
    with torch.device("meta"):
        model: Any = llama31_8b(layers)
    names = parameter_names(model)
    units = module_units(model, names, unit_policies([type(model.model.layers[0])]))
    groups = parameter_groups(make(model), names, units)
    options = EngineOptions(
        strategy=strategy,
        param_slots=param_slots,
        dtype=BF16,
        rule=groups[0].rule,
        groups=tuple(group.update_options() for group in groups),
    )
    plan = module_bucket_plan(unit_specs(names, units, groups), options, shards=ranks)
    return options, plan


def ours(
    name: str,
    ranks: int,
    layers: int,
    *,
    strategy: str = "optim_grads_params",
    param_slots: int | None = 2,
    make: OurOptimizer = lambda model: AdamW(),
) -> Row:
    """Our engine in bf16 with fp32 masters."""
    options, plan = our_plan(ranks, layers, strategy, param_slots, make)
    state = state_bytes(options, plan)
    slots = 4 * sum(plan.gradient_slot_numel().values())
    of_rule = ("master weights", "moments", "scalars", "update buffers")
    parts = (
        sum(state.get(name, 0) for name in of_rule),
        state["parameter shards"],
        state["gradients"] - slots,
        state["parameters"],
        slots,
    )
    assert sum(parts) == sum(state.values())
    return Row(name, parts)


@contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """The default process group of a rank in the middle, whose collectives do nothing."""
    dist.init_process_group("fake", rank=ranks // 2, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard_layers(model: Any, **policy: Any) -> None:
    """As in FSDP2's tutorial: each layer, and the root with embedding, last norm and head."""
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)


def shard_all(model: Any, **policy: Any) -> None:
    """As torchtitan does: the embedding and the head are groups of their own, too."""
    fully_shard(model.model.embed_tokens, **policy)
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    fully_shard([model.model.norm, model.lm_head], **policy | {"reshard_after_forward": False})
    fully_shard(model, **policy)


def fsdp2(
    name: str,
    wrap: Callable[..., None],
    ranks: int,
    layers: int,
    *,
    reshard: bool = True,
    reduce_dtype: torch.dtype = torch.float32,
) -> Row:
    """FSDP2 in bf16 with fp32 masters."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    with fake_group(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        with FakeTensorMode():
            model = llama31_8b(layers)
            wrap(model, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
            peak = _peak_of_second_microbatch(model)
    kind = _FSDPRefType
    parts = (
        peak[kind.SHARDED_PARAM] + peak[kind.OPT],
        0,
        peak[kind.SHARDED_GRAD],
        peak[kind.UNSHARDED_PARAM] + peak[kind.ALL_GATHER],
        # A buffer of a reduction is temporary to the tracker until its collective has begun.
        peak[kind.UNSHARDED_GRAD] + peak[kind.REDUCE_SCATTER] + peak[kind.TEMP],
    )
    return Row(name, parts)


def _peak_of_second_microbatch(model: nn.Module) -> dict[Any, int]:
    """Bytes by kind."""
    ids = torch.zeros(1, 2, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tracker = FSDPMemTracker(model, optimizer)
    for microbatch in range(3):
        # Each entry begins a new peak. The first microbatch is for the optimizer to get its state.
        with tracker:
            model(input_ids=ids, labels=ids).loss.backward()
            if microbatch == 0:
                optimizer.step()
                optimizer.zero_grad()
        tracker.reset_mod_stats()
    [peak] = tracker.get_tracker_snapshot("peak").values()
    return peak


def fsdp2_state(make: TorchOptimizers, ranks: int, layers: int) -> int:
    """Bytes of a rank's fp32 parameters under FSDP2, and of the state that torch's optimizers have
    of them after a step."""
    with fake_group(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        with FakeTensorMode():
            model = llama31_8b(layers)
            shard_all(model, mesh=mesh)
            optimizers = make(model)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            for optimizer in optimizers:
                optimizer.step()
            held = [
                *model.parameters(),
                *(
                    tensor
                    for optimizer in optimizers
                    for state in optimizer.state.values()
                    for tensor in state.values()
                    if isinstance(tensor, torch.Tensor)
                ),
            ]
            parts = [part.to_local() if isinstance(part, DTensor) else part for part in held]
            return sum(part.numel() * part.itemsize for part in parts)


def rows(ranks: int, layers: int) -> Iterator[Row]:
    """The rows of the table. FSDP2 holds as little as it can in the first two, and gathers once in
    a step in the last one."""
    yield ours("shard, 2 parameter slots", ranks, layers)
    yield ours("shard, 3 parameter slots", ranks, layers, param_slots=3)
    yield ours("shard, optim", ranks, layers, strategy="optim")
    yield fsdp2("FSDP2: embedding, layers, head", shard_all, ranks, layers)
    yield fsdp2("FSDP2: layers, root", shard_layers, ranks, layers)
    yield fsdp2("FSDP2 without resharding", shard_all, ranks, layers, reshard=False)


@dataclass(frozen=True)
class OptimizerRow:
    """What one rank holds with an optimizer."""

    name: str
    own: Row
    """Weights are gathered for each pass."""
    own_once: Row
    """Weights are gathered once in a step."""
    fsdp2: Row | None
    fsdp2_once: Row | None


def optimizer_rows(ranks: int, layers: int) -> Iterator[OptimizerRow]:
    """A row for each optimizer. What FSDP2 holds beside parameters and state does not depend on it,
    and is measured once."""
    peaks = [fsdp2("", shard_all, ranks, layers, reshard=reshard) for reshard in (True, False)]
    for name, (make, torchs) in OPTIMIZERS.items():
        rows_of_fsdp2: list[Row | None] = [None, None]
        if torchs is not None:
            state = fsdp2_state(torchs, ranks, layers)
            rows_of_fsdp2 = [Row(name, (state, *peak.parts[1:])) for peak in peaks]
        yield OptimizerRow(
            name,
            ours(name, ranks, layers, make=make),
            ours(name, ranks, layers, param_slots=None, make=make),
            *rows_of_fsdp2,
        )


def optimizer_table(found: Sequence[OptimizerRow]) -> list[str]:
    """In GB, of 10^9 bytes."""
    heads = ("masters and state", "all", "all, gathered once")
    columns = [f"{whose}: {head}" for head in heads for whose in ("shard", "FSDP2")]
    lines = [f"| GB a rank | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in found:
        sizes = [
            *(None if held is None else held.parts[0] for held in (row.own, row.fsdp2)),
            *(
                None if held is None else held.total
                for held in (row.own, row.fsdp2, row.own_once, row.fsdp2_once)
            ),
        ]
        figures = ("" if size is None else f"{size / 1e9:.2f}" for size in sizes)
        lines.append(f"| {row.name} | {' | '.join(figures)} |")
    return lines


def table(found: Sequence[Row]) -> list[str]:
    """In GB, of 10^9 bytes."""
    lines = [f"| GB a rank | {' | '.join(COLUMNS)} | all |", "|---" * (len(COLUMNS) + 2) + "|"]
    for row in found:
        figures = (f"{part / 1e9:.2f}" for part in (*row.parts, row.total))
        lines.append(f"| {row.name} | {' | '.join(figures)} |")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m tools.compare_memory", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks (default 8)")
    parser.add_argument("--layers", type=int, default=32, help="of LLaMA 3.1 8B (default 32)")
    parser.add_argument("--optimizers", action="store_true", help="a row for each optimizer")
    options = parser.parse_args()
    if options.optimizers:
        lines = optimizer_table(list(optimizer_rows(options.ranks, options.layers)))
    else:
        lines = table(list(rows(options.ranks, options.layers)))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
