"""Shows a folder of Megatron-Core for ``inspect``."""

from __future__ import annotations

import math
from pathlib import Path

from megatron_llama.checkpoint.model_folders.torch_dist.folder import TorchDistFolder
from megatron_llama.checkpoint.storage import refuse
from megatron_llama.converter.torch_dist.names import model_keys
from megatron_llama.errors import counted
from megatron_llama.train.commands.inspect import print_rows

OF_A_RUN = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "data_parallel_size",
    "use_distributed_optimizer",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "max_position_embeddings",
    "vocab_size",
    "padded_vocab_size",
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "expert_model_parallel_size",
    "transformer_impl",
)
"""Arguments of Megatron that are shown for a checkpoint."""


def show(path: str) -> None:
    """Print the run's arguments and the tensors as they are stored."""
    opened = TorchDistFolder(Path(path))
    args = opened.args
    tensors = opened.container.tensors
    keys = list(model_keys(tensors))
    rows: dict[str, object] = {
        "checkpoint": opened.folder,
        "format": "torch_dist",
        "iteration": opened.common.get("iteration"),
        "consumed_samples": args.get("consumed_train_samples"),
        "parameters, with padding": f"{sum(math.prod(tensors[key].shape) for key in keys):,}",
        "optimizer state": "none" if len(keys) == len(tensors) else "there",
    }
    print_rows(rows | {name: args[name] for name in OF_A_RUN if args.get(name) is not None})
    print("[tensors]")
    for key in keys:
        tensor = tensors[key]
        shape = " x ".join(map(str, tensor.shape))
        print(f"{key}: {shape} {tensor.dtype}".replace("torch.", ""), end=", ")
        print(counted(len(tensor.chunks), "chunk"))


def verify(path: str) -> None:
    """Compare all chunks with their sums. Raises CheckpointError."""
    container = TorchDistFolder(Path(path)).container
    container.require(container.tensors)
    refuse(f"{container.folder} is damaged:", list(container.damaged()))
    chunks = sum(len(tensor.chunks) for tensor in container.tensors.values())
    print(f"verified: {chunks} chunks of {len(container.tensors)} tensors are as they were saved")
