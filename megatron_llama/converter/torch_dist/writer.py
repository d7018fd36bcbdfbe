"""Writes checkpoints of Megatron-Core's ``torch_dist`` format, without megatron. Every layout of a
Megatron-LM run loads them.

iter_0000100/    metadata.json, common.pt, .metadata and *.distcp (torch.distributed.checkpoint),
                 integrity.json; ``release`` instead of ``iter_...`` for weights only

The keys and shapes are those of a model without parallelism, layers stacked in dimension 0 unless
some of them have experts and some not. The optimizer's state is the distributed optimizer's in its
fully reshardable shape.
"""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from megatron_llama.checkpoint.checkpoint_dir import TRACKER
from megatron_llama.checkpoint.checksums import HashedFile
from megatron_llama.checkpoint.chunks import CHUNK_ELEMENTS, Region, make_index
from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.folders import sync, write_synced
from megatron_llama.checkpoint.model_folders.optimizer_state import OptimizerState
from megatron_llama.checkpoint.model_folders.torch_dist.files import BACKEND
from megatron_llama.checkpoint.model_folders.torch_dist.folder import COMMON, MANIFEST, VERSIONS
from megatron_llama.checkpoint.model_folders.torch_file import require_finite, write_torch_file
from megatron_llama.checkpoint.model_folders.write_tasks import ProgressSource, WriteTask
from megatron_llama.checkpoint.storage import WrittenParts, write_index, write_parts
from megatron_llama.config.schema import ModelConfig
from megatron_llama.converter.megatron.args import held_problems, make_args
from megatron_llama.converter.megatron.names import CHECKPOINT_VERSION, TE
from megatron_llama.converter.tensor_map import MappedTensor
from megatron_llama.converter.torch_dist.names import LAYERS, written_weights
from megatron_llama.converter.torch_dist.run_state import (
    optimizer_entries,
    router_loss_args,
    training_args,
)
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.errors import describe
from megatron_llama.model.hf import carried_config

STATE_KEYS: Mapping[str, str] = MappingProxyType(
    {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
)
"""Names of the parts of the optimizer's state in the fully reshardable shape."""
ATTENTION = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
)
MLP = ("mlp.linear_fc1", "mlp.linear_fc2")
"""Modules of a layer for whose fp8 scaling Megatron asks. It is None: there is none."""
HEAD_NORMS = ("self_attention.q_layernorm", "self_attention.k_layernorm")
"""The same of models with norms of heads."""


@dataclass(frozen=True)
class _Part:
    """Some rows of a tensor of the model, as a chunk of a tensor in the file."""

    region: Region
    """The chunk, without values; for a stacked tensor it is one layer."""
    tensor: MappedTensor
    first: int
    last: int
    """Rows ``[first, last)`` of the model's tensor."""

    @property
    def bytes(self) -> int:
        """Bytes of the values to read from the source."""
        elements = self.tensor.elements_of(self.first, self.last)
        return elements * self.region.tensor.dtype.itemsize

    def read(self, path: Path) -> Region:
        """Return the chunk with its values. Raises CheckpointError when one is not finite."""
        values = self.tensor.rows(self.first, self.last, self.region.tensor.dtype)
        require_finite(path, values)
        return replace(self.region, tensor=values.view(self.region.size))


@dataclass(frozen=True)
class TorchDistWriter:
    """The format as a ModelWriter."""

    files: int
    tp: int
    """Number of tensor ranks for which the vocabulary is padded."""
    state: OptimizerState | None = None
    """State of the run. Without it the checkpoint is a release: weights, iteration 0."""
    ep: int = 1
    """Expert-parallel size of the run that loads the state."""

    def problems(self, model: ModelConfig) -> Iterator[str]:
        """Yield the reasons why Megatron-Core cannot hold the model, or why its experts cannot be
        divided."""
        yield from held_problems(model, "megatron", TE, has_experts=True)
        experts = model.num_experts
        divisor = f"a divisor of num_experts {experts}"
        if self.ep > 1 and (experts == 0 or experts % self.ep):
            yield describe(
                "--expert-model-parallel-size",
                got=self.ep,
                expected=divisor if experts else "1 for a model without experts",
                do="give the size of the run that will load it",
            )

    def tasks(
        self,
        folder: Path,
        model: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        extra: Mapping[str, Any],
    ) -> Iterator[WriteTask]:
        """Yield a task for each file of tensors and one for the index and the common part."""
        iteration = self.state.iteration if self.state is not None else 0
        name = f"iter_{iteration:07d}" if self.state is not None else "release"
        checkpoint = folder / name
        checkpoint.mkdir()
        parts = list(self._parts(model, source, dtype))
        total = sum(part.region.tensor.numel() for part in parts)
        shares: list[list[_Part]] = [[] for _ in range(self.files)]
        before = 0
        for part in parts:
            shares[self.files * before // total].append(part)
            before += part.region.tensor.numel()
        written = list[WrittenParts]()

        def write(number: int, own: list[_Part]) -> None:
            path = checkpoint / f"__{number}_0{DEFAULT_SUFFIX}"
            written.append(write_parts(checkpoint, number, (part.read(path) for part in own)))

        def finish() -> None:
            names = list(_extra_states(model))
            objects = [_object_item(object_name) for object_name in names]
            index = make_index([[part.region.write_item() for part in parts], objects])
            written.append(_write_objects(checkpoint, self.files, names))
            sums = write_index(checkpoint, index, written)
            common = checkpoint / COMMON
            write_torch_file(common, self._common(model, dtype, extra), dtype)
            backend = json.dumps(dict(VERSIONS)).encode()
            sums[COMMON] = hashlib.sha256(common.read_bytes()).hexdigest()
            sums[BACKEND] = hashlib.sha256(backend).hexdigest()
            manifest = {"algorithm": "sha256", "files": dict(sorted(sums.items()))}
            with writing(checkpoint):
                write_synced(checkpoint / MANIFEST, json.dumps(manifest, indent=2).encode())
                # Megatron takes a folder with this file for a checkpoint.
                write_synced(checkpoint / BACKEND, backend)
                sync(checkpoint)
                tracker = "release" if self.state is None else str(iteration)
                write_synced(folder / TRACKER, tracker.encode())

        for number, own in enumerate(shares):
            if own:
                # The bar counts bytes, in elements of the weights' dtype.
                elements = sum(part.bytes for part in own) // dtype.itemsize
                yield WriteTask(elements, partial(write, number, own))
        yield WriteTask(0, finish, last=True)

    def _parts(
        self, model: ModelConfig, source: WeightSource, dtype: torch.dtype
    ) -> Iterator[_Part]:
        """Yield all parts to be written, layer by layer."""
        sources = [("", source, dtype)]
        if self.state is not None:
            for state, key in STATE_KEYS.items():
                values = self.state.sources[state]
                counted = source.beside(values) if isinstance(source, ProgressSource) else values
                sources.append((f"optimizer.state.{key}.", counted, torch.float32))
        padded = replace(
            model, make_vocab_size_divisible_by=model.make_vocab_size_divisible_by * self.tp
        )
        for weight in written_weights(padded):
            map = weight.map
            shape = (*weight.stacked, *map.shape)
            for prefix, values, kind in sources:
                tensor = MappedTensor(map, values)
                # A chunk is in memory several times: as read from the source, as rows of
                # Megatron's tensor and as the bytes of its file.
                step = max(1, CHUNK_ELEMENTS // map.width)
                for first in range(0, map.shape[0], step):
                    last = min(first + step, map.shape[0])
                    offset = (*weight.index, first, *(0 for _ in map.shape[1:]))
                    size = (*(1 for _ in weight.index), last - first, *map.shape[1:])
                    like = torch.empty((), dtype=kind).expand(size)
                    region = Region(prefix + weight.key, shape, offset, size, like)
                    yield _Part(region, tensor, first, last)

    def _common(
        self, model: ModelConfig, dtype: torch.dtype, extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the entries that Megatron-LM keeps beside tensors, in its order."""
        args = make_args(model, "megatron", dtype, self.tp, [model.num_hidden_layers], TE)
        if model.num_experts:
            args["expert_model_parallel_size"] = self.ep
        args["hf_config"] = carried_config(model, extra, dtype=str(dtype).removeprefix("torch."))
        content_metadata: dict[str, Any] = {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }
        if self.state is None:
            # Megatron must not ask for entries that are not there.
            args |= {"ckpt_format": "torch_dist", "no_save_optim": True, "no_save_rng": True}
            content: dict[str, Any] = {"iteration": 0}
        else:
            args |= training_args(self.state)
            if model.num_experts:
                args |= router_loss_args(self.state.config.training)
            content = {
                "iteration": self.state.iteration,
                **optimizer_entries(self.state, ep=self.ep),
            }
            content_metadata |= {
                "distrib_optim_sharding_type": "fully_reshardable",
                "distrib_optim_fully_reshardable_mem_efficient": False,
            }
        return {
            "args": Namespace(**args),
            "checkpoint_version": CHECKPOINT_VERSION,
            **content,
            "num_floating_point_operations_so_far": 0,
            "content_metadata": content_metadata,
        }


def _extra_states(model: ModelConfig) -> Iterator[str]:
    """Yield the names under which Megatron asks for the fp8 scaling of modules, by layer, with
    TransformerEngine's modules and without."""
    layers = model.num_hidden_layers
    attention = ATTENTION + (HEAD_NORMS if model.qk_norm == "head" else ())
    if model.num_experts:
        from megatron_llama.converter.torch_dist import experts  # of few models

        yield from experts.scaling_states(model, attention)
    else:
        for module in (*attention, *MLP):
            for layer in range(layers):
                yield f"{LAYERS}{module}._extra_state/shard_{layer}_{layers}"
    yield "decoder.final_layernorm._extra_state/shard_0_1"


def _object_item(name: str) -> WriteItem:
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


def _write_objects(folder: Path, number: int, names: list[str]) -> WrittenParts:
    """Write a file of objects that are all [None], which Megatron reads as None."""
    name = f"__{number}_0{DEFAULT_SUFFIX}"
    places = {}
    with writing(folder / name), HashedFile(folder / name) as file:
        for object_name in names:
            start = file.tell()
            torch.save([None], cast(IO[bytes], file))
            places[MetadataIndex(object_name)] = _StorageInfo(name, start, file.tell() - start)
    return WrittenParts(places, {name: file.sum})
