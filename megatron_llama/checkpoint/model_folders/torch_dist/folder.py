"""Opens a folder of Megatron-Core's ``torch_dist`` format: ``iter_NNNNNNN/`` with
``metadata.json``, ``common.pt``, ``.metadata`` and ``*.distcp``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_llama.checkpoint.checksums import file_sum
from megatron_llama.checkpoint.container import COPY_AGAIN, Container
from megatron_llama.checkpoint.index import METADATA
from megatron_llama.checkpoint.model_folders.torch_dist.files import BACKEND
from megatron_llama.checkpoint.model_folders.tracked_folder import find_folder
from megatron_llama.checkpoint.storage import refuse
from megatron_llama.checkpoint.torch_file import TorchFile
from megatron_llama.config.json_file import read_json_object
from megatron_llama.config.model_files import MANIFEST as MANIFEST
from megatron_llama.config.model_files import read_sums, sum_problem
from megatron_llama.errors import CheckpointError, describe

COMMON = "common.pt"
MODELOPT = "modelopt_state"
"""A folder in which TensorRT Model Optimizer keeps its changes to a model."""
VERSIONS: Mapping[str, Any] = MappingProxyType(
    {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
)
"""Fields of ``metadata.json`` for the format that is read here."""
SAVE_AGAIN = "load it with Megatron-LM and save it with --ckpt-format torch_dist"


def chunk_files(path: Path) -> list[Path]:
    """Return the files with tensors or their index, of ``path`` or of the checkpoint that the
    tracker in it names. Raises CheckpointError."""
    folder = find_folder(path, (BACKEND, METADATA), "a checkpoint in it")
    return [*folder.glob("*.distcp"), *(folder / name for name in (COMMON, METADATA, BACKEND))]


class TorchDistFolder:
    """One checkpoint: its common part, and the index of its tensors."""

    def __init__(self, path: Path) -> None:
        """Open ``path``, or the checkpoint that the tracker in it names. No tensor is read. Raises
        CheckpointError for another format or version, and for files that are damaged or name code
        to run."""
        self.folder = find_folder(path, (BACKEND, METADATA), "a checkpoint in it")
        refuse(f"{self.folder} cannot be used:", list(_backend_problems(self.folder)))
        refuse(f"{self.folder} is damaged:", list(_integrity_problems(self.folder)))
        self.common_file = self.folder / COMMON
        common = TorchFile(self.common_file)
        common.verify_all()
        content = common.content
        if not isinstance(content, dict):
            got = f"a {type(content).__name__}"
            raise CheckpointError(
                self.common_file, got=got, expected="Megatron's common state", do=COPY_AGAIN
            )
        self.common: Mapping[str, Any] = content
        args = content.get("args")
        self.args: Mapping[str, Any] = vars(args) if hasattr(args, "__dict__") else {}
        """Megatron-LM's arguments; empty if another program saved the folder."""
        tp = self.args.get("tensor_model_parallel_size")
        self.tp = tp if isinstance(tp, int) and tp > 0 else 1
        """The tensor-parallel size of the run, by which Megatron padded the vocabulary."""
        self.container = Container(self.folder)


def _integrity_problems(folder: Path) -> Iterator[str]:
    """Yield a line for each small file that differs from the folder's checksum of it.
    ``metadata.json`` is compared where it is read, and tensors have checksums of their own."""
    path = folder / MANIFEST
    if not path.is_file():
        return
    sums = {name: entry for name, entry in read_sums(folder)[0].items() if entry.list == path}
    if not sums:
        got = "no checksums of kind sha256"
        yield describe(path, got=got, expected="one of each file", do=COPY_AGAIN)
    for name in (COMMON, METADATA):
        file = folder / name
        if name in sums:
            digest = f"sha256 {file_sum(file)}" if file.is_file() else "no such file"
            if digest != f"sha256 {sums[name].digest}":
                yield sum_problem(file, digest, sums[name])


def _backend_problems(folder: Path) -> Iterator[str]:
    """Yield the reasons why a folder is not of this format."""
    path = folder / BACKEND
    if not path.is_file():
        got = f"{METADATA} alone: a folder of fsdp_dtensor or torch_dcp"
        yield describe(path, got=got, expected="a folder of torch_dist", do=SAVE_AGAIN)
        return
    try:
        fields = read_json_object(path, do=COPY_AGAIN)
    except CheckpointError as error:
        yield str(error)
        return
    for name, expected in VERSIONS.items():
        value = fields.get(name)
        if value != expected:
            newer = isinstance(value, int) and isinstance(expected, int) and value > expected
            do = (
                "update megatron_llama, or save it with an earlier Megatron"
                if newer
                else SAVE_AGAIN
            )
            yield describe(f"{path} {name}", got=f"{value}"[:80], expected=expected, do=do)
    if (folder / MODELOPT).exists():
        got = "a model that TensorRT Model Optimizer has changed: quantised, pruned or distilled"
        do = "take the original"
        yield describe(folder / MODELOPT, got=got, expected="a plain model", do=do)
