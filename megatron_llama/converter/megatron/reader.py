"""Reads checkpoints of Megatron-LM and Megatron-LLaMA, memory-mapped; ``names`` has the places of
their tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_llama.checkpoint.model_folders.formats import Reading
from megatron_llama.checkpoint.model_folders.model_fields import (
    MATCHING_FILES,
    OPTIMIZER_LEFT_OUT,
    PLAIN_MODELS,
    read_config,
)
from megatron_llama.checkpoint.model_folders.tokenizer_files import tokenizer_files_of
from megatron_llama.checkpoint.model_folders.tracked_folder import find_folder
from megatron_llama.checkpoint.storage import LISTED, refuse
from megatron_llama.checkpoint.torch_file import TorchFile
from megatron_llama.config.fields import finite_number, shown
from megatron_llama.config.schema import ModelConfig
from megatron_llama.converter.megatron.args import (
    MEGATRON_LLAMA_ONLY,
    MEGATRON_ONLY,
    read_args,
    stored_vocab_size,
)
from megatron_llama.converter.megatron.names import (
    CHECKPOINT_VERSION,
    EMBEDDING,
    FILE,
    HEAD,
    IGNORED,
    TP_SIZES,
    WHOLE_HEAD,
    file_tensors,
    flat,
    own_name,
    partition_of,
)
from megatron_llama.converter.tensor_map import TensorMap, TensorReader
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import CheckpointError, describe, listing

OLDEST_GROUPED = 2.0
"""First ``checkpoint_version`` in which q, k and v have today's order."""
SAME_ON_ALL_RANKS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "padded_vocab_size",
    "iteration",
    "hf_config",
)
"""Arguments that all files of one checkpoint have in common."""


@dataclass(frozen=True)
class RankFile:
    """The content of one file: arguments, and for each of the rank's model chunks its tensors by
    name."""

    file: TorchFile
    args: Mapping[str, Any]
    chunks: tuple[Mapping[str, Tensor], ...]


def rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the files by (tensor rank, pipeline rank). Raises CheckpointError when there are two
    of one rank."""
    paths: dict[tuple[int, int], Path] = {}
    for entry in sorted(folder.glob("mp_rank_*")):
        match = re.fullmatch(r"mp_rank_(\d{2,})(?:_(\d{3}))?(?:_dp_000)?", entry.name)
        names = (FILE, "model_rng.pt")
        path = next((entry / name for name in names if (entry / name).is_file()), entry / FILE)
        if match and paths.setdefault((int(match[1]), int(match[2] or 0)), path) != path:
            do = "keep the one that belongs there"
            raise CheckpointError(entry, got="a second folder of one rank", expected="one", do=do)
    return paths


def open_files(folder: Path) -> dict[tuple[int, int], RankFile]:
    """Open the files by (tensor rank, pipeline rank). Raises CheckpointError when some are missing,
    damaged or of another format."""
    paths = rank_files(folder)
    tp, pp = (1 + max((key[axis] for key in paths), default=0) for axis in (0, 1))
    # A folder's name alone may claim a rank of nine digits: only so many missing ones are listed as
    # are shown.
    missing = [
        describe(
            f"{folder} tensor rank {t}, pipeline rank {p}",
            got="no file",
            expected=FILE,
            do=MATCHING_FILES,
        )
        for p, t in islice(_missing_ranks(folder, paths, tp, pp), LISTED)
    ]
    if missing:
        more = tp * pp - sum(path.is_file() for path in paths.values()) - len(missing)
        rest = [f"and {more:,} more"] if more else []
        raise CheckpointError(listing(f"{folder} is incomplete:", [*missing, *rest]))
    return {key: _open(path) for key, path in sorted(paths.items())}


def _missing_ranks(
    folder: Path, paths: Mapping[tuple[int, int], Path], tp: int, pp: int
) -> Iterator[tuple[int, int]]:
    """Yield the (pipeline rank, tensor rank) without a file."""
    for p in range(pp):
        for t in range(tp):
            if not paths.get((t, p), folder / "none").is_file():
                yield p, t


def _open(path: Path) -> RankFile:
    file = TorchFile(path)
    content = file.content if isinstance(file.content, dict) else {}
    args = content.get("args")
    # Virtual stages are saved as model0, model1 and so on.
    chunks = sorted(
        (name for name in content if re.fullmatch(r"model\d{1,4}", str(name))),
        key=lambda name: int(name[5:]),
    )
    models = [content[name] for name in ("model", *chunks) if name in content]
    if not models:
        do = "give a folder that Megatron saved with --ckpt-format torch"
        raise CheckpointError(path, got="no model in it", expected="a Megatron checkpoint", do=do)
    fields = vars(args) if hasattr(args, "__dict__") else {}
    return RankFile(file, fields, tuple(dict(flat(model)) for model in models))


def family(path: Path) -> str:
    """Return the name of the program that wrote the folder, by its content. Raises CheckpointError
    when the content leaves it open."""
    files = open_files(find_folder(path)).values()
    names = {name for file in files for chunk in file.chunks for name in chunk}
    args = {name for file in files for name in file.args}
    theirs = any(name.startswith("decoder.") for name in names) or bool(args & set(MEGATRON_ONLY))
    own = WHOLE_HEAD in names or bool(args & set(MEGATRON_LLAMA_ONLY))
    if theirs == own:
        got = (
            "signs of both Megatron-LM and Megatron-LLaMA"
            if own
            else "neither Megatron-LM's nor Megatron-LLaMA's names or arguments"
        )
        do = (
            "say which program wrote it: --from megatron or --from megatron-llama"
            " (they order q, k and v differently)"
        )
        raise CheckpointError(path, got=got, expected="those of one of them", do=do)
    return "megatron-llama" if own else "megatron"


def _their_name(chunk: Mapping[str, Tensor], own: str) -> str | None:
    """Return the chunk's name of the tensor that is called ``own`` here."""
    return next((name for name in chunk if own_name(name) == own), None)


class MegatronReader:
    """A checkpoint of either program as a ModelReader."""

    def __init__(
        self,
        path: Path,
        family: str,
        config: str | Path | None,
        vocab_size: int,
        tokens: int = 0,
        ignored: Collection[str] = (),
    ) -> None:
        """Open the files; the arguments are those of ``open_model``. Raises CheckpointError with
        everything that is missing, unknown, contradictory or of another shape."""
        self.format = family
        self.folder = find_folder(path)
        self._files = open_files(self.folder)
        self.tp, self.pp = (1 + max(key[axis] for key in self._files) for axis in (0, 1))
        self.tokenizer_files = tokenizer_files_of(
            self.folder.parent, self.folder, self.folder.parent / "tokenizer"
        )
        problems = [*self._file_problems(), *self._other_runs()]
        refuse(f"{self.folder} cannot be used:", problems)
        first = self._files[0, 0]
        self._stages = list(self._ordered())
        embedding = first.chunks[0].get(_their_name(first.chunks[0], EMBEDDING) or "")
        if embedding is None or embedding.dim() != 2:
            raise CheckpointError(
                first.file.path, got="no embedding", expected="a language model", do=MATCHING_FILES
            )
        self.dtype = str(embedding.dtype).removeprefix("torch.")
        user, self.extra = read_config(config, first.args.get("hf_config"), ignored=ignored)
        where = f"{first.file.path} args"
        self.model = read_args(first.args, user, tied=self._tied(), where=where)
        size = stored_vocab_size(
            first.args,
            f"{self.folder}",
            embedding.shape[0] * self.tp,
            self.tokenizer_files,
            tp=self.tp,
            user=user,
            given=vocab_size,
            believed=tokens,
        )
        self.model = replace(self.model, vocab_size=size)
        self._reader = TensorReader()
        # With this padding the plan's local rows are those of the files.
        self._add_tensors(replace(self.model, make_vocab_size_divisible_by=embedding.shape[0]))
        has_optimizer = any(
            "optimizer" in file.file.content
            or file.file.path.with_name("distrib_optim.pt").exists()
            for file in self._files.values()
        )
        self.notes = (OPTIMIZER_LEFT_OUT,) if has_optimizer else ()

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        self._reader(rectangle, out)

    def _file_problems(self) -> Iterator[str]:
        """Yield problems of single files: their rank, their sizes, their age."""
        for (tp, pp), file in self._files.items():
            where = f"{file.file.path}"
            ranks = file.args.get("stored_ranks", (tp, pp))
            if not isinstance(ranks, list | tuple) or tuple(ranks) != (tp, pp):
                pair = isinstance(ranks, list | tuple) and len(ranks) == 2
                got = (
                    f"the file of tensor rank {ranks[0]}, pipeline rank {ranks[1]}"
                    if pair
                    else shown(ranks)
                )
                do = "put the files in their places"
                yield describe(where, got=got, expected=f"that of {tp} and {pp}", do=do)
            sizes = {"tensor_model_parallel_size": self.tp, "pipeline_model_parallel_size": self.pp}
            for name, size in sizes.items():
                if file.args.get(name, size) != size:
                    expected = f"{size}, by the folders"
                    got = file.args[name]
                    yield describe(
                        f"{where} args.{name}", got=got, expected=expected, do=MATCHING_FILES
                    )
            version = finite_number(file.file.content.get("checkpoint_version", 0))
            if version is None:
                got = shown(file.file.content["checkpoint_version"])
                yield describe(
                    f"{where} checkpoint_version", got=got, expected="a number", do=MATCHING_FILES
                )
            elif self.format == "megatron" and version < OLDEST_GROUPED:
                expected = f"at least {OLDEST_GROUPED}"
                do = f"load and save it with a Megatron-LM of today (version {CHECKPOINT_VERSION})"
                yield describe(f"{where} checkpoint_version", got=version, expected=expected, do=do)

    def _other_runs(self) -> Iterator[str]:
        """Yield the files whose arguments differ from those of the first file, though all ranks
        should have the same."""
        first = self._files[0, 0]
        for file in self._files.values():
            given = {f"args.{name}": file.args.get(name) for name in SAME_ON_ALL_RANKS}
            wanted = {f"args.{name}": first.args.get(name) for name in SAME_ON_ALL_RANKS}
            given["iteration"] = file.file.content.get("iteration")
            wanted["iteration"] = first.file.content.get("iteration")
            for name, got in given.items():
                if got != wanted[name]:
                    expected = f"{wanted[name]} as in {first.file.path}"
                    where = f"{file.file.path} {name}"
                    yield describe(where, got=got, expected=expected, do=MATCHING_FILES)

    def _ordered(self) -> Iterator[list[tuple[RankFile, Mapping[str, Tensor]]]]:
        """Yield for every stage, first to last, the files of its tensor ranks. Stages go through
        the pipeline ranks once for each model chunk."""
        for chunk in range(len(self._files[0, 0].chunks)):
            for pp in range(self.pp):
                files = [self._files[tp, pp] for tp in range(self.tp)]
                if any(len(file.chunks) <= chunk for file in files):
                    raise CheckpointError(
                        files[0].file.path,
                        got="fewer model chunks than in others",
                        expected="equally many",
                        do=MATCHING_FILES,
                    )
                yield [(file, file.chunks[chunk]) for file in files]

    def _tied(self) -> bool:
        """Whether the embedding is the head. A head that may be separate is kept."""
        head = _their_name(self._stages[-1][0][1], HEAD)
        untied = self._files[0, 0].args.get("untie_embeddings_and_output_weights")
        if head == "output_layer.weight":
            return untied is False
        return head == "word_embeddings_for_head.weight" or (head is None and untied is not True)

    def _add_tensors(self, model: ModelConfig) -> None:
        # Blocks of each stage, from the largest number in the names of its first tensor rank.
        counts = []
        for files in self._stages:
            numbers = [re.search(r"\.layers\.(\d{1,9})\.", name) for name in files[0][1]]
            counts.append(1 + max((int(match[1]) for match in numbers if match), default=-1))
        problems = [
            describe(
                f"{self.folder} {name}",
                got=getattr(model, name),
                expected=f"a multiple of tp {self.tp}",
                do=MATCHING_FILES,
            )
            for name in TP_SIZES
            if getattr(model, name) % self.tp
        ]
        if sum(counts) != model.num_hidden_layers:
            got = f"{sum(counts):,} blocks"
            expected = model.num_hidden_layers
            problems.append(describe(self.folder, got=got, expected=expected, do=MATCHING_FILES))
        refuse(f"{self.folder} does not hold the model:", problems)
        partition = partition_of(counts, self.pp)
        for stage, files in enumerate(self._stages):
            for tp_rank, (file, chunk) in enumerate(files):
                maps = file_tensors(
                    model,
                    self.format,
                    partition,
                    stage,
                    tp=self.tp,
                    tp_rank=tp_rank,
                    whole_head=WHOLE_HEAD in chunk,
                )
                problems += self._add_chunk(file, chunk, maps)
        refuse(f"{self.folder} does not hold the model:", problems)

    def _add_chunk(
        self, file: RankFile, chunk: Mapping[str, Tensor], maps: Mapping[str, TensorMap]
    ) -> Iterator[str]:
        """Add the tensors of a model chunk to the reader, and yield their problems."""
        names = {own_name(name): name for name in chunk}
        for own, map in maps.items():
            if own not in names:
                expected = f"{own} of shape {map.shape}"
                got = "no such tensor"
                yield describe(file.file.path, got=got, expected=expected, do=MATCHING_FILES)
                continue
            tensor = chunk[names[own]]
            unpadded = (self.model.vocab_size, self.model.hidden_size)
            if own == HEAD and self.format == "megatron-llama" and tuple(tensor.shape) == unpadded:
                # Megatron-LLaMA's own converter leaves out the padding of the head, which its
                # loader then misses.
                map = TensorMap(unpadded, map.slices)
            yield from self._reader.add(names[own], map, tensor, file.file)
        for name in sorted(chunk):
            # A tied head may be stored where none is expected: it is a copy.
            copied = own_name(name) == HEAD and self.model.tie_word_embeddings
            known = own_name(name) in maps or copied
            if not known and not IGNORED.fullmatch(name):
                where = f"{file.file.path} {name}"
                expected = "none of this name"
                yield describe(where, got="a tensor", expected=expected, do=PLAIN_MODELS)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of all ranks of a folder. Raises CheckpointError."""
    return [*rank_files(find_folder(folder)).values()]


def opened(folder: Path, kind: str, reading: Reading) -> MegatronReader:
    """Open a folder of either program (an ``OpenFolder``)."""
    config, vocab_size, tokens, ignored = reading
    return MegatronReader(folder, kind, config, vocab_size, tokens, ignored)
