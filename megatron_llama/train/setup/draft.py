"""The decisions so far between the words of a user and the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_llama.config.parse import Parsed
from megatron_llama.train.setup.processes import Processes

if TYPE_CHECKING:
    from megatron_llama.checkpoint.carried import Carried
    from megatron_llama.checkpoint.lease import Held
    from megatron_llama.checkpoint.listed_files import ListedFile
    from megatron_llama.checkpoint.meta import TrainState
    from megatron_llama.config.schema import Config, ModelConfig
    from megatron_llama.data.loader import Samples
    from megatron_llama.train.setup.inputs import Reading
    from megatron_llama.train.setup.start import Source, Start
    from megatron_llama.train.setup.vocabulary import Vocabulary

UNDECIDED: Any = object()
"""The value of a field of a draft that no decider has filled yet."""


@dataclass(frozen=True)
class Draft:
    """The decisions so far. It is made with the first three fields; each other field is filled by
    the decider that names it in ``fills``."""

    parsed: Parsed
    """The user's words."""
    processes: Processes
    needs_data: bool = True
    """Whether --data-path must be given."""

    start: Start | None = UNDECIDED
    """The start that --load names; None: the run begins with other weights."""
    trained: ModelConfig | None = UNDECIDED
    """The model of ``start``."""
    source: Source = UNDECIDED
    """The identity of the folder of the first weights."""
    config: Config = UNDECIDED
    vocabulary: Vocabulary = UNDECIDED
    reading: Reading = UNDECIDED
    """The samples of the command, and how it reads them."""
    training: Samples = UNDECIDED
    validation: Samples | None = UNDECIDED
    """None in a run that never evaluates."""
    identity: Mapping[str, Any] = UNDECIDED
    """The identity of the training samples."""
    state: TrainState = UNDECIDED
    """The position from which the run starts."""
    prompts: tuple[tuple[int, ...], ...] = UNDECIDED
    carried: Carried = UNDECIDED
    """The files that came with the model."""

    notes: tuple[str, ...] = ()
    """Decisions made for the user."""
    warnings: tuple[str, ...] = ()
    """Options that can run but are probably not meant."""
    missing: tuple[str, ...] = ()
    """Things that this machine lacks, if the run would be on another: see
    ``Processes.are_here``."""
    files_of_rank_0: tuple[tuple[str, str], ...] = ()
    """Names and marks of the training samples' files, then of the others, as rank 0 sees them."""
    held: Held | None = None
    """The run's lease of --save, if it could be taken without waiting and if no other run has saved
    there since the decisions began."""
    listed: Sequence[ListedFile] = ()
    """The files of the first weights that have sums, as this rank sees them."""
    shown: Shown | None = None
    """What this rank shows the others when they agree for the next time."""
    seen: Sequence[Shown | None] = ()
    """What each rank has shown when they agreed for the last time."""


class Shown(NamedTuple):
    """What a rank shows the others, so that those which share a disk share out its files."""

    weights: str
    """A digest of the files of the first weights that this rank sees."""
    samples: str
    """The same for the files of samples; empty if this rank compares none."""
    local_rank: int


class Need(Enum):
    """The needs of a decision."""

    WORDS = auto()
    """The options, and nothing else."""
    FILES = auto()
    """Folders of weights, tokenizers, datasets."""
    PROCESSES = auto()
    """The number of processes, and their devices."""
    MEMORY = auto()
    SAMPLES = auto()
    """The opened samples."""
    MACHINE = auto()
    """Things that only the machine of the run must have: packages, ports, folders to write into."""


class By(Enum):
    """The ranks that decide."""

    RANK_0 = auto()
    """The first rank alone; the others get its fields, or raise its error."""
    EACH_RANK = auto()
    """Every rank for itself: the decision depends on what all have alike, or on its own disk. An
    error of one becomes an error of all."""
    ALL_TOGETHER = auto()
    """All ranks with messages of their own, which also agree on errors."""


@dataclass(frozen=True)
class Decider:
    """One decision, or one refusal."""

    needs: Need
    by: By
    decide: Callable[[Draft], Draft]
    """Returns the draft with the decided fields filled. Raises UserError with every problem that it
    sees."""
    fills: tuple[str, ...] = ()
    """The filled fields; none for a refusal."""


def decides(*fills: str, needs: Need, by: By) -> Callable[[Callable[[Draft], Draft]], Decider]:
    """Make a decider of a function that fills fields of a draft."""

    def decider(decide: Callable[[Draft], Draft]) -> Decider:
        return Decider(needs, by, decide, fills)

    return decider


def refuses(*, needs: Need, by: By) -> Callable[[Callable[[Draft], None]], Decider]:
    """Make a decider of a function that only raises UserError for problems of a draft."""

    def decider(refuse: Callable[[Draft], None]) -> Decider:
        def decide(draft: Draft) -> Draft:
            refuse(draft)
            return draft

        return Decider(needs, by, decide)

    return decider
