"""The mesh of a user's model, as ``shard`` makes it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron_llama.engine.comm.object_collectives import all_gather_object
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.shard.data_mesh import add_shard_axes, close_data_mesh, data_mesh
from torch.distributed.device_mesh import DeviceMesh


def sharded_mesh(group: DeviceMesh | dist.ProcessGroup | None = None, shard_size: int = 0, device: torch.device | None = None) -> Mesh:
    """The mesh of ``group`` with all its axes. Collective."""
    mesh = data_mesh(group, device)
    try:
        # ``shard`` compares model and options here: a rank that refuses what comes next would leave while others still connect to it.
        all_gather_object(None, mesh.world)
        return add_shard_axes(mesh, group, shard_size)
    except BaseException:
        close_data_mesh(mesh)
        raise
