"""Bytes that one rank of data parallelism needs for its state, under ``megatron_llama.shard`` and
under FSDP2: ``python -m tools.compare_memory``.

Nothing is allocated. Ours is what the plan says of which the engine is made;
``tests/tools/test_compare_memory.py`` checks it against the engine itself on torch's device
``meta``. FSDP2's is what torch's ``FSDPMemTracker`` sees of real FSDP2 objects with fake tensors
and a fake process group, at the highest moment of a second microbatch. The gaps that a caching
allocator leaves are in neither. Activations are left out of both: they are the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_llama.engine.options import BF16, EngineOptions
from megatron_llama.engine.plan.buckets import BucketPlan
from megatron_llama.engine.plan.memory import state_bytes
from megatron_llama.engine.shard.module_buckets import module_bucket_plan
from megatron_llama.engine.shard.names import parameter_names
from megatron_llama.engine.shard.optimizer import AdamW, parameter_groups
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
    ranks: int, layers: int, strategy: str, param_slots: int | None
) -> tuple[EngineOptions, BucketPlan]:
    """The options and the buckets that shard() makes of the model in bf16, with two gradient
    slots."""
    with torch.device("meta"):
        model: Any = llama31_8b(layers)
    names = parameter_names(model)
    groups = parameter_groups(AdamW(), names)
    units = module_units(model, names, unit_policies([type(model.model.layers[0])]))
    options = EngineOptions(strategy=strategy, param_slots=param_slots, dtype=BF16)
    plan = module_bucket_plan(unit_specs(names, units, groups), options, shards=ranks)
    return options, plan


def ours(
    name: str,
    ranks: int,
    layers: int,
    *,
    strategy: str = "optim_grads_params",
    param_slots: int | None = 2,
) -> Row:
    """Our engine in bf16 with fp32 masters."""
    options, plan = our_plan(ranks, layers, strategy, param_slots)
    state = state_bytes(options, plan)
    slots = 4 * sum(plan.gradient_slot_numel().values())
    parts = (
        state["master weights"] + state["moments"] + state["scalars"],
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


def rows(ranks: int, layers: int) -> Iterator[Row]:
    """The rows of the table. FSDP2 holds as little as it can in the first two, and gathers once in
    a step in the last one."""
    yield ours("shard, 2 parameter slots", ranks, layers)
    yield ours("shard, 3 parameter slots", ranks, layers, param_slots=3)
    yield ours("shard, optim", ranks, layers, strategy="optim")
    yield fsdp2("FSDP2: embedding, layers, head", shard_all, ranks, layers)
    yield fsdp2("FSDP2: layers, root", shard_layers, ranks, layers)
    yield fsdp2("FSDP2 without resharding", shard_all, ranks, layers, reshard=False)


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
    options = parser.parse_args()
    print("\n".join(table(list(rows(options.ranks, options.layers)))))


if __name__ == "__main__":
    main()
