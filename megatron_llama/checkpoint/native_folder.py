"""The tensors of a native checkpoint, and reading an engine's regions from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from megatron_llama.checkpoint.bounds import largest_index, largest_meta
from megatron_llama.checkpoint.checksums import ANOTHER_COPY, read_listed, read_sums
from megatron_llama.checkpoint.chunks import Region, is_state
from megatron_llama.checkpoint.container import Box, Container
from megatron_llama.checkpoint.index import (
    INDEX_TABLE,
    METADATA,
    cover_problems,
    paused_collector,
    shared_bytes,
)
from megatron_llama.checkpoint.meta import META
from megatron_llama.checkpoint.storage import file_problems, refuse
from megatron_llama.errors import describe

SAVED_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8})
"""Dtypes of the tensors that an engine saves."""


def index_name(folder: Path) -> str | None:
    """Return the name of the file with which a checkpoint's index begins; None without it."""
    return next((name for name in (INDEX_TABLE, METADATA) if (folder / name).is_file()), None)


def read_small_files(folder: Path) -> dict[str, bytes]:
    """Return what all ranks need of a checkpoint's small files, by name: ``meta.json``, and the
    table of an index in parts. Raises CheckpointError unless they are as they were saved."""
    small = {META: read_listed(folder, META, largest=largest_meta)}
    if index_name(folder) == INDEX_TABLE:
        small[INDEX_TABLE] = read_listed(folder, INDEX_TABLE, largest=largest_index)
    return small


@paused_collector()
def open_native(folder: Path, table: bytes | None = None) -> Container:
    """Open the files of a native checkpoint. Raises CheckpointError when the index is not as it was
    saved, names code to run, or has chunks that do not make up its tensors. ``table``: that of an
    index in parts, if it has been read and compared with its checksum."""
    path = folder / METADATA
    name = index_name(folder) if table is None else INDEX_TABLE
    if name is None and INDEX_TABLE in read_sums(folder):
        name = INDEX_TABLE  # it is lost, and has to be named
    if name == INDEX_TABLE:
        from megatron_llama.checkpoint.index_parts import PartedContainer

        if table is None:
            table = read_listed(folder, INDEX_TABLE, largest=largest_index)
        return PartedContainer(folder, table)
    content = read_listed(folder, METADATA, largest=largest_index)
    container = Container(folder, content, do=ANOTHER_COPY)
    problems = []
    if container.objects:
        got = f"objects, such as {next(iter(container.objects))}"
        problems.append(describe(path, got=got, expected="tensors alone", do=ANOTHER_COPY))
    for name, tensor in container.tensors.items():
        where = f"{path} {name}"
        if tensor.dtype in SAVED_DTYPES:
            problems += cover_problems(where, tensor, do=ANOTHER_COPY)
        else:
            expected = "a dtype that is saved"
            problems.append(describe(where, got=tensor.dtype, expected=expected, do=ANOTHER_COPY))
    problems += shared_bytes(folder, container.places(), do=ANOTHER_COPY)
    refuse(f"{path} cannot be used:", problems)
    return container


def require_regions(
    container: Container, wanted: Sequence[Region], *, any_dtype: bool, all_files: bool = False
) -> None:
    """Raise CheckpointError if the files cannot fill the regions. With ``any_dtype`` values may be
    converted. ``all_files``: the regions are all that is there, so they are not looked up one by
    one."""
    problems = list(
        dict.fromkeys(
            problem
            for region in wanted
            for problem in _region_problems(container, region, any_dtype=any_dtype)
        )
    )
    if all_files and not problems:
        problems = container.missing_files()
    elif not problems:
        places = [
            chunk.place
            for region in wanted
            for chunk in container.tensors[region.key].within(region.offset, region.size)
        ]
        problems = file_problems(container.folder, places, do=ANOTHER_COPY)
    refuse(f"{container.folder} is incomplete:", problems)


def read_regions(container: Container, wanted: Iterable[Region]) -> None:
    """Fill the tensors of regions that ``require_regions`` has seen. Raises CheckpointError naming
    the file whose values are damaged."""
    container.read_boxes(Box(region.key, region.offset, region.tensor) for region in wanted)


def _region_problems(container: Container, region: Region, *, any_dtype: bool) -> Iterator[str]:
    saved = container.tensors.get(region.key)
    where = f"{container.folder} {region.key}"
    do = "load another checkpoint"
    if saved is None:
        yield describe(where, got="no such tensor", expected=f"shape {region.shape}", do=do)
        return
    if saved.shape != region.shape:
        yield describe(where, got=f"shape {saved.shape}", expected=region.shape, do=do)
        return
    dtypes = {saved.dtype, region.tensor.dtype}
    # A moment that is kept in bf16 is a rounded one, whether it is rounded in the save or the load.
    converted = is_state(region.key) and dtypes <= {torch.float32, torch.bfloat16}
    if len(dtypes) > 1 and not any_dtype and not converted:
        do = "resume in the precision that it was saved in"
        yield describe(where, got=saved.dtype, expected=region.tensor.dtype, do=do)
