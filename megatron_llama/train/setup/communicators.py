"""The communicators of a rank on GPUs, which ``launch/mesh.py`` makes, and the memory that NCCL
takes for them beside what torch's allocator counts.

How much NCCL takes is what its sources and maintainers say, and is not measured here:

- A channel of a communicator has a buffer for each of three protocols (``NCCL_BUFFSIZE`` in the
  user guide, by default 4 MiB; ``computeBuffSizes`` in ``src/init.cc``).
- Memory is proportional to the number of channels. A ring has two connections, however many ranks
  there are (NVIDIA/nccl issue 864); each channel has its own buffers (issue 1450).
- Messages between two ranks use buffers of one protocol. torch makes a communicator of its own for
  each pair of ranks of a pipeline.

Rings alone are counted. A tree or a switch that sums (NVLS) takes more, for the axes that
all-reduce; NCCL connects only what it uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_llama.config.schema import Config
from megatron_llama.config.world import dp_size
from megatron_llama.engine.plan.memory import sized
from megatron_llama.model.plan.params import has_tied_head, kv_copies, partition_of
from megatron_llama.pipeline.plan.run_engine import shard_count
from megatron_llama.schedule import Op, connection_order

SCALARS = 1
"""Channels of the communicator of all ranks (``engine/comm/groups.py``)."""
SIMPLE = 4 << 20
"""Bytes of NCCL_BUFFSIZE."""
LOW_LATENCY = 8 * 512 * 8 * 16
"""Bytes of protocol LL: lines of a thread, threads, steps, bytes of a line."""
LOW_LATENCY_128 = 120 * 640 * 8 * 8
"""Bytes of protocol LL128: elements of a thread, threads, steps, bytes of an element."""
CONNECTIONS = 2
"""Of a ring: a rank receives from one neighbour and sends to another. On the way through a network
both ends have buffers on a GPU; inside a machine the receiving one has."""
CHANNELS = 16
"""Channels of a communicator that is not limited: two for each network card of a machine that has
one for each of its eight GPUs. Inside a machine NCCL takes up to 24, whose buffers are fewer."""


@dataclass(frozen=True)
class Communicators:
    """What a rank has for one axis: one communicator for its collectives, or one for each link."""

    axis: str
    ranks: int
    channels: int
    collective: bool
    links: int
    """Connections for messages to one neighbour or from one."""

    @property
    def count(self) -> int:
        """The number of communicators."""
        return 1 if self.collective else self.links

    @property
    def bytes(self) -> int:
        """Bytes of a GPU's memory."""
        ring = CONNECTIONS * (SIMPLE + LOW_LATENCY + LOW_LATENCY_128) if self.collective else 0
        return self.channels * (ring + self.links * SIMPLE)


def communicators(config: Config, world: int, pipeline_rank: int) -> tuple[Communicators, ...]:
    """Return the communicators of a rank on a GPU, by axis. ``config`` is resolved."""
    return tuple(_by_axis(config, world, pipeline_rank)) if world > 1 else ()


def most_communicators(config: Config, world: int) -> tuple[Communicators, ...]:
    """Return the communicators of a rank for which NCCL takes most memory."""
    ranks = range(config.parallel.pipeline_model_parallel_size)
    return max((communicators(config, world, rank) for rank in ranks), key=total_bytes)


def total_bytes(axes: Iterable[Communicators]) -> int:
    """Return the bytes of a GPU's memory that NCCL takes for them."""
    return sum(axis.bytes for axis in axes)


def describe_communicators(axes: Sequence[Communicators]) -> str:
    """Return a line about the communicators of a rank."""
    names = ", ".join(
        f"{axis.axis} {axis.ranks:,}" if axis.collective else f"{axis.axis} {axis.count} pairs"
        for axis in axes
        if axis.count
    )
    count = sum(axis.count for axis in axes)
    return f"{count} of a rank on GPUs: {names}; NCCL takes about {sized(total_bytes(axes))}"


def _by_axis(config: Config, world: int, pipeline_rank: int) -> Iterator[Communicators]:
    parallel = config.parallel
    model = config.model
    tp = parallel.tensor_model_parallel_size
    cp = parallel.context_parallel_size
    pp = parallel.pipeline_model_parallel_size
    data = dp_size(config, world) * cp
    shards = shard_count(parallel, data)
    copies = kv_copies(model, tp) if model.num_key_value_heads else 1
    partition = partition_of(config)
    tied = has_tied_head(model) and not partition.first_and_last_share_rank
    heads = parallel.head_ranks
    ep = parallel.expert_model_parallel_size
    # An exchange of sequence for heads connects each rank to each, and so does one of tokens.
    ends = {"cp" if heads == cp else "cp_heads": 2 * (heads - 1), "cp_keys": 2}
    ends["ep"] = 2 * (ep - 1) if parallel.exchanges_tokens else 0
    ends.setdefault("cp", 2 if parallel.cp_comm_type == "ring" else 0)
    yield Communicators("world", world, SCALARS, collective=True, links=0)
    sizes = {
        "tp": tp,
        "kv": copies if copies < tp else 1,
        "cp": cp,
        "cp_heads": heads if heads < cp else 1,
        "cp_keys": cp // heads if heads else 1,
        "dp": data,
        "dp_shard": 1 if shards == data else shards,
        "dp_replica": 1 if shards == 1 else data // shards,
        "dp_gather": shards,
        "ep": ep,
        "expert_dp": data // ep if ep > 1 else 1,
        "expert_dp_gather": shards // ep if ep > 1 else 1,
        "embedding": 2 if tied and pipeline_rank in (0, pp - 1) else 1,
    }
    for name, size in sizes.items():
        if size > 1:
            links = ends.get(name, 0)
            yield Communicators(name, size, CHANNELS, collective=True, links=links)
    if pp > 1:
        neighbours = _links(partition.placement, pipeline_rank, virtual=partition.stages > pp)
        channels = parallel.nccl_pp_max_ctas or CHANNELS
        for name, count in neighbours.items():
            yield Communicators(name, pp, channels, collective=False, links=count)


def _links(placement: Sequence[int], rank: int, *, virtual: bool) -> dict[str, int]:
    """Return the number of neighbours of a pipeline rank on each axis of the pipeline
    (``Mesh.link``)."""
    names = ("pp", "pp_backward", *(("pp_return", "pp_backward_return") if virtual else ()))
    links = dict.fromkeys(names, 0)
    for op, sender, receiver in connection_order(tuple(placement)):
        if rank in (sender, receiver):
            backward = op is Op.SEND_BACKWARD
            returns = (sender < receiver) is backward
            links[f"pp{'_backward' if backward else ''}{'_return' if returns else ''}"] += 1
    return links
