"""The part ``contenders``: the same damage, read by us and by others who read such files."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from tools.harm.corrupting import Corruptor
from tools.harm.formats import READ, Format, Values, convert, digest, resume, tensor_values
from tools.harm.hostile_inputs.case import CHECKPOINT
from tools.harm.judging import Journal, Result
from tools.harm.materials import Workshop

PART = "contenders"


def read_with_dcp(_: Workshop) -> Values:
    """All tensors, with ``torch.distributed.checkpoint.load`` alone."""
    return tensor_values(READ / CHECKPOINT)


def read_with_megatron_core(_: Workshop) -> Values:
    """All tensors, the common state and the metadata, with Megatron-Core's own functions."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    folder = str(READ / CHECKPOINT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        common = dist_checkpointing.load_common_state_dict(folder)
        tensors = dist_checkpointing.load_plain_tensors(folder)
    values = {
        name: digest(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
    }
    return {**values, "common": repr(sorted(common.items(), key=str))}


@dataclass(frozen=True)
class Contest:
    """Files that several programs read."""

    readers: Mapping[str, Format]
    files: tuple[str, ...]
    """Endings of the names of the files that all readers read, and that are harmed."""

    def harms(self, name: str) -> bool:
        """Whether a file may be harmed."""
        return name.startswith(CHECKPOINT) and name.endswith(self.files)


def _readers(**readers: Format) -> Mapping[str, Format]:
    return MappingProxyType(
        {name: replace(format, name=name, drawn_as=PART) for name, format in readers.items()}
    )


OURS = "ours"
CONTESTS: Mapping[str, Contest] = MappingProxyType(
    {
        "native": Contest(
            _readers(
                ours=Format("", "native", resume, True),
                dcp=Format("", "native", read_with_dcp, True),
            ),
            (".metadata", ".distcp"),
        ),
        "torch_dist": Contest(
            _readers(
                ours=Format("", "torch_dist", partial(convert, "native"), True),
                mcore=Format("", "torch_dist", read_with_megatron_core, True),
            ),
            (".metadata", ".distcp", "common.pt", "metadata.json"),
        ),
    }
)
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "ours": "megatron_llama",
        "dcp": "torch.distributed.checkpoint",
        "mcore": "Megatron-Core (load_plain_tensors, load_common_state_dict)",
    }
)


def compete(
    count: int, shop: Workshop, journal: Journal, seed: int, deadline: float
) -> Iterator[Result | str]:
    """Yield the results that the journal lacks, of every reader of every contest."""
    scratch: Path = shop.root.parent / "scratch-contenders"
    for title, contest in CONTESTS.items():
        for reader, format in contest.readers.items():
            name = f"{title} {reader}"
            missing = [case for case in range(count) if (PART, name, case) not in journal]
            if not missing or time.monotonic() > deadline:
                continue
            try:
                corruptor = Corruptor(format, shop, scratch, seed, only=contest.harms)
            except RuntimeError as error:
                yield f"{name}: not tried: {error}"
                continue
            for case in missing:
                if time.monotonic() > deadline:
                    break
                result = replace(corruptor.result(case), part=PART, format=name)
                journal.add(result)
                yield result


def comparison(journal: Journal) -> Iterator[str]:
    """Yield the table that holds the readers against each other. An exception of another program
    counts as a refusal: it has no other way to refuse, and none is told from a traceback."""
    rows = [result for result in journal.results.values() if result.part == PART]
    if not rows:
        return
    yield "| files | reader | cases | refused | by a traceback | equal | another result |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for title, contest in CONTESTS.items():
        for reader in contest.readers:
            verdicts = [row.verdict for row in rows if row.format == f"{title} {reader}"]
            broken = sum(verdict in ("traceback", "memory", "time") for verdict in verdicts)
            refused = verdicts.count("refused") + broken
            equal = verdicts.count("equal") + verdicts.count("harmless")
            silent = verdicts.count("silent")
            numbers = (len(verdicts), refused, broken if reader == OURS else "-", equal, silent)
            yield f"| {title} | {NAMES[reader]} | {' | '.join(map(str, numbers))} |"
