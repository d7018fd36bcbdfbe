"""Reads checkpoints of Megatron-LM and Megatron-LLaMA; ``megatron.py`` has their names and
layouts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_llama.checkpoint.storage import refuse
from megatron_llama.config.schema import ModelConfig
from megatron_llama.convert.megatron.args import MEGATRON_LLAMA_ONLY, MEGATRON_ONLY, read_args
from megatron_llama.convert.megatron.names import (
    CHECKPOINT_VERSION,
    EMBEDDING,
    FILE,
    HEAD,
    IGNORED,
    WHOLE_HEAD,
    find_folder,
    flat,
    local_parts,
    own_name,
)
from megatron_llama.convert.parts import FOREIGN_MODEL, Part, PartReader
from megatron_llama.convert.pickled import PickledFile
from megatron_llama.convert.tokenizer_files import (
    OPTIMIZER_LEFT_OUT,
    read_config,
    tokenizer_files_of,
    tokens_in,
    vocabulary,
)
from megatron_llama.errors import CheckpointError, describe
from megatron_llama.plans.params import Partition, Rectangle

OLDEST_GROUPED = 2.0
"""From this ``checkpoint_version`` on q, k and v have today's order."""


@dataclass(frozen=True)
class RankFile:
    """What one file holds: arguments, and the tensors of each of the rank's model chunks by
    name."""

    file: PickledFile
    args: Mapping[str, Any]
    chunks: tuple[Mapping[str, Tensor], ...]

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return {name for chunk in self.chunks for name in chunk}


def open_files(folder: Path) -> dict[tuple[int, int], RankFile]:
    """The files by (tensor rank, pipeline rank). Raises CheckpointError when some are missing,
    damaged or of another format."""
    paths: dict[tuple[int, int], Path] = {}
    for entry in sorted(folder.glob("mp_rank_*")):
        match = re.fullmatch(r"mp_rank_(\d{2,})(?:_(\d{3}))?(?:_dp_000)?", entry.name)
        path = next(
            (entry / name for name in (FILE, "model_rng.pt") if (entry / name).is_file()),
            entry / FILE,
        )
        if match and paths.setdefault((int(match[1]), int(match[2] or 0)), path) != path:
            do = "keep the one that belongs there"
            raise CheckpointError(entry, got="a second folder of one rank", expected="one", do=do)
    tp, pp = (1 + max((key[axis] for key in paths), default=0) for axis in (0, 1))
    missing = [
        (t, p)
        for p in range(pp)
        for t in range(tp)
        if not paths.get((t, p), folder / "none").is_file()
    ]
    text = [
        describe(
            f"{folder} tensor rank {t}, pipeline rank {p}",
            got="no file",
            expected=FILE,
            do=FOREIGN_MODEL,
        )
        for t, p in missing
    ]
    refuse(f"{folder} is incomplete:", text)
    return {key: _open(path) for key, path in sorted(paths.items())}


def _open(path: Path) -> RankFile:
    file = PickledFile(path)
    content = file.content if isinstance(file.content, dict) else {}
    args = content.get("args")
    chunks = sorted(
        (name for name in content if re.fullmatch(r"model\d+", str(name))),
        key=lambda name: int(name[5:]),
    )
    models = [content[name] for name in ("model", *chunks) if name in content]
    if not models:
        do = "give a folder that Megatron saved with --ckpt-format torch"
        raise CheckpointError(path, got="no model in it", expected="a Megatron checkpoint", do=do)
    return RankFile(
        file,
        vars(args) if hasattr(args, "__dict__") else {},
        tuple(dict(flat(model)) for model in models),
    )


def family(path: Path) -> str:
    """Which of the two programs wrote the folder, by its content. Raises CheckpointError when that
    leaves it open."""
    files = open_files(find_folder(path)).values()
    names = {name for file in files for name in file.names}
    args = {name for file in files for name in file.args}
    theirs = any(name.startswith("decoder.") for name in names) or bool(args & set(MEGATRON_ONLY))
    own = WHOLE_HEAD in names or bool(args & set(MEGATRON_LLAMA_ONLY))
    if theirs == own:
        got = (
            "signs of both Megatron-LM and Megatron-LLaMA"
            if own
            else "neither Megatron-LM's nor Megatron-LLaMA's names or arguments"
        )
        do = "say which program wrote it: --from megatron or --from megatron-llama (they order q, k and v differently)"
        raise CheckpointError(path, got=got, expected="those of one of them", do=do)
    return "megatron-llama" if own else "megatron"


def _has_optimizer(file: PickledFile) -> bool:
    return "optimizer" in file.content or file.path.with_name("distrib_optim.pt").exists()


def _named(chunk: Mapping[str, Tensor], own: str) -> str | None:
    return next((name for name in chunk if own_name(name) == own), None)


class MegatronSource:
    """The weights of a checkpoint of either program as HuggingFace rectangles, memory-mapped."""

    def __init__(
        self, path: Path, family: str, config: str | Path | None, vocab_size: int, tokens: int = 0
    ) -> None:
        """See ``open_source``. Raises CheckpointError with everything that is missing, unknown,
        contradictory or of another shape."""
        self.format = family
        self.folder = find_folder(path)
        self._files = open_files(self.folder)
        self.tp, self.pp = (1 + max(key[axis] for key in self._files) for axis in (0, 1))
        self.tokenizer_files = tokenizer_files_of(
            self.folder.parent, self.folder, self.folder.parent / "tokenizer"
        )
        self._check_files()
        first = self._files[0, 0]
        self._stages = list(self._ordered())
        embedding = first.chunks[0].get(_named(first.chunks[0], EMBEDDING) or "")
        if embedding is None or embedding.dim() != 2:
            raise CheckpointError(
                first.file.path, got="no embedding", expected="a language model", do=FOREIGN_MODEL
            )
        self.dtype = str(embedding.dtype).removeprefix("torch.")
        user, self.extra = read_config(config, first.args.get("hf_config"))
        self.model = read_args(first.args, user, tied=self._tied(), where=f"{first.file.path} args")
        self.model = replace(
            self.model, vocab_size=self._vocabulary(embedding.shape[0], user, vocab_size, tokens)
        )
        self._reader = PartReader()
        # This padding makes the local rows what they are in the files.
        self._take(replace(self.model, make_vocab_size_divisible_by=embedding.shape[0]))
        self.notes = (
            (OPTIMIZER_LEFT_OUT,)
            if any(_has_optimizer(each.file) for each in self._files.values())
            else ()
        )

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """See Source."""
        self._reader(rectangle, out)

    def _check_files(self) -> None:
        problems = []
        for (tp, pp), each in self._files.items():
            where = f"{each.file.path}"
            args = each.args
            ranks = args.get("stored_ranks", (tp, pp))
            if tuple(ranks) != (tp, pp):
                got = f"the file of tensor rank {ranks[0]}, pipeline rank {ranks[1]}"
                problems.append(
                    describe(
                        where,
                        got=got,
                        expected=f"that of {tp} and {pp}",
                        do="put the files in their places",
                    )
                )
            for name, size in (
                ("tensor_model_parallel_size", self.tp),
                ("pipeline_model_parallel_size", self.pp),
            ):
                if args.get(name, size) != size:
                    problems.append(
                        describe(
                            f"{where} args.{name}",
                            got=args[name],
                            expected=f"{size}, by the folders",
                            do=FOREIGN_MODEL,
                        )
                    )
            version = each.file.content.get("checkpoint_version", 0)
            if self.format == "megatron" and version < OLDEST_GROUPED:
                do = f"load and save it with a Megatron-LM of today (version {CHECKPOINT_VERSION})"
                problems.append(
                    describe(
                        f"{where} checkpoint_version",
                        got=version,
                        expected=f"at least {OLDEST_GROUPED}",
                        do=do,
                    )
                )
        problems += self._other_runs()
        refuse(f"{self.folder} cannot be used:", problems)

    def _other_runs(self) -> Iterator[str]:
        """Files whose arguments differ from those of the first where all ranks have the same."""
        first = self._files[0, 0]
        same = (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "padded_vocab_size",
            "iteration",
            "hf_config",
        )
        for each in self._files.values():
            for name in same:
                if each.args.get(name) != first.args.get(name):
                    got = each.args.get(name)
                    expected = f"{first.args.get(name)} as in {first.file.path}"
                    yield describe(
                        f"{each.file.path} args.{name}",
                        got=got,
                        expected=expected,
                        do=FOREIGN_MODEL,
                    )
            own, theirs = (file.file.content.get("iteration") for file in (each, first))
            if own != theirs:
                yield describe(
                    f"{each.file.path} iteration",
                    got=own,
                    expected=f"{theirs} as in {first.file.path}",
                    do=FOREIGN_MODEL,
                )

    def _ordered(self) -> Iterator[list[tuple[RankFile, Mapping[str, Tensor]]]]:
        """For every stage, first to last, the files of its tensor ranks: chunk by chunk, then rank
        by rank."""
        for chunk in range(len(self._files[0, 0].chunks)):
            for pp in range(self.pp):
                files = [self._files[tp, pp] for tp in range(self.tp)]
                if any(len(file.chunks) <= chunk for file in files):
                    got = "fewer model chunks than in others"
                    do = FOREIGN_MODEL
                    raise CheckpointError(
                        f"{files[0].file.path}", got=got, expected="equally many", do=do
                    )
                yield [(file, file.chunks[chunk]) for file in files]

    def _tied(self) -> bool:
        """Whether the embedding is the head. A head that may be one of its own is kept."""
        head = _named(self._stages[-1][0][1], HEAD)
        untied = self._files[0, 0].args.get("untie_embeddings_and_output_weights")
        if head == "output_layer.weight":
            return untied is False
        return head == "word_embeddings_for_head.weight" or (head is None and untied is not True)

    def _vocabulary(self, local: int, user: ModelConfig | None, given: int, believed: int) -> int:
        args = self._files[0, 0].args
        tokens = believed or tokens_in(self.tokenizer_files)
        known = args.get("orig_vocab_size") or (
            args.get("vocab_size") if args.get("tokenizer_type") != "NullTokenizer" else 0
        )
        known = (user.vocab_size if user else 0) or known or 0
        stored = local * self.tp
        multiple = args.get("make_vocab_size_divisible_by")
        padded = multiple and tokens and -(-tokens // (multiple * self.tp)) * multiple * self.tp
        # A tokenizer with fewer tokens than the model would cost rows: where the file says how it
        # was padded, that has to fit.
        exact = padded == stored if multiple else believed > 0
        return vocabulary(
            f"{self.folder}", stored, given=given, known=known, tokens=tokens, exact=exact
        )

    def _take(self, model: ModelConfig) -> None:
        problems = [*self._sizes(model)]
        refuse(f"{self.folder} does not hold the model:", problems)
        partition = self._partition(model)
        for stage, files in enumerate(self._stages):
            for tp_rank, (file, chunk) in enumerate(files):
                whole = WHOLE_HEAD in chunk
                parts = local_parts(
                    model,
                    self.format,
                    partition,
                    stage,
                    tp=self.tp,
                    tp_rank=tp_rank,
                    whole_head=whole,
                )
                problems += self._compare(file, chunk, parts)
        refuse(f"{self.folder} does not hold the model:", problems)

    def _sizes(self, model: ModelConfig) -> Iterator[str]:
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if getattr(model, name) % self.tp:
                yield describe(
                    f"{self.folder} {name}",
                    got=getattr(model, name),
                    expected=f"a multiple of tp {self.tp}",
                    do=FOREIGN_MODEL,
                )
        counted = sum(self._counts())
        if counted != model.num_hidden_layers:
            yield describe(
                f"{self.folder}",
                got=f"{counted} blocks",
                expected=model.num_hidden_layers,
                do=FOREIGN_MODEL,
            )

    def _counts(self) -> list[int]:
        """Blocks of each stage."""
        layers = [
            {int(m[1]) for name in files[0][1] if (m := re.search(r"\.layers\.(\d+)\.", name))}
            for files in self._stages
        ]
        return [1 + max(found, default=-1) for found in layers]

    def _partition(self, model: ModelConfig) -> Partition:
        stops = [sum(self._counts()[: index + 1]) for index in range(len(self._stages))]
        layers = tuple(
            range(stop - count, stop) for stop, count in zip(stops, self._counts(), strict=True)
        )
        return Partition(layers, tuple(index % self.pp for index in range(len(self._stages))))

    def _compare(
        self, file: RankFile, chunk: Mapping[str, Tensor], parts: Mapping[str, Part]
    ) -> Iterator[str]:
        found = {own_name(name): name for name in chunk}
        for own, part in parts.items():
            if own not in found:
                # With virtual stages and a tied head the copy may be left out where the first stage
                # is on the same rank.
                yield describe(
                    f"{file.file.path}",
                    got="no such tensor",
                    expected=f"{own} of shape {part.shape}",
                    do=FOREIGN_MODEL,
                )
                continue
            tensor = chunk[found[own]]
            yield from self._reader.add(
                found[own], self._fitting(own, part, tensor), tensor, file.file
            )
        for name in sorted(chunk):
            known = own_name(name) in parts or (
                own_name(name) == HEAD and self.model.tie_word_embeddings
            )
            if not known and not IGNORED.fullmatch(name):
                do = "only plain LLaMA models can be converted"
                yield describe(
                    f"{file.file.path} {name}", got="a tensor", expected="none of this name", do=do
                )

    def _fitting(self, own: str, part: Part, tensor: Tensor) -> Part:
        """Megatron-LLaMA's own converter leaves the padding of the head away, which its loader then
        misses."""
        if (
            own == HEAD
            and self.format == "megatron-llama"
            and tuple(tensor.shape) == (self.model.vocab_size, self.model.hidden_size)
        ):
            return Part(tuple(tensor.shape), part.slices)
        return part
