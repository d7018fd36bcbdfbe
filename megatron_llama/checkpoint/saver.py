"""Decides when a run saves, and whether training waits for the save."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.carried import NO_FILES, Carried, save_tokenizer
from megatron_llama.checkpoint.checkpoint_dir import (
    TOKENIZER,
    Retention,
    Standing,
    checkpoint_path,
    latest,
    newest_good,
    tidy,
)
from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.finite import NotFinite, describe_not_finite
from megatron_llama.checkpoint.folders import fresh_staging, new_folder
from megatron_llama.checkpoint.lease import Lease
from megatron_llama.checkpoint.listed_files import seal_files
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.checkpoint.storage_paths import copy_files, is_remote, storage_path
from megatron_llama.config.schema import Config
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.engine.comm.object_collectives import (
    MEETING_SECONDS,
    all_reduce_max,
    broadcast_object,
    raise_error_on_all_ranks,
    raise_on_all_ranks,
)
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.errors import CheckpointError, LeaseError
from megatron_llama.metrics.events import NOT_FINITE, SAVED
from megatron_llama.metrics.log import MetricLog

if TYPE_CHECKING:
    from megatron_llama.checkpoint.background import BackgroundSaver

# Values of --on-bad-checkpoint.
STOP = "stop"
WARN = "warn"
ROLLBACK = "rollback"


@dataclass(frozen=True)
class RefusedSave:
    """A save that has found values which are not finite, and that is not kept."""

    iteration: int
    target: Path
    """The checkpoint that it would have been."""
    words: str
    """The tensors, with numbers and first places."""
    good: Path | None
    """The newest checkpoint in which all values are finite."""

    def error(self) -> CheckpointError:
        """Return the error with which the run ends."""
        again = f"resume from {self.good}" if self.good is not None else "begin anew"
        return CheckpointError(
            self.target,
            got=f"values that are not finite: {self.words}",
            expected="finite weights and moments: this checkpoint is not kept",
            do=f"{again}, on other machines if it does not come again; with --on-bad-checkpoint "
            "rollback a run goes back by itself, with warn it keeps such a checkpoint with a mark",
        )


class Saver:
    """Writes the checkpoints of a run. A copy of the tokenizer goes beside them, so that they can
    be used on their own.

    With ``background`` they are written while training goes on; without it training waits.
    ``data`` identifies the training samples; ``carried`` has the files that the model came with.
    ``lease`` is this run's, and has been taken. ``begins_finite``: whether all values were finite
    with which the run has begun.

    Only rank 0 knows of values that are not finite until the ranks have agreed on them, which they
    do in ``save`` and ``finish``. Results of this class follow from that agreement, apart from
    ``failed`` and ``found_refusal``. It is made without messages: CheckpointError or DataError are
    raised on rank 0 when nothing can be written to --save, at the start and not at the first
    save."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        optimizer: OverlappedDistributedOptimizer,
        tokenizer: Tokenizer | None,
        background: BackgroundSaver | None = None,
        data: Mapping[str, Any] | None = None,
        carried: Carried = NO_FILES,
        lease: Lease | None = None,
        *,
        begins_finite: bool = True,
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._optimizer = optimizer
        self._background = background
        self._data = data
        self._carried = carried
        self._lease = lease
        self._held = lease.held if lease is not None else None
        options = config.checkpoint
        self._folder = storage_path(options.save) if options.save is not None else None
        self._keep = Retention(options.save_retain, options.save_retain_interval)
        self._known: dict[str, Standing] = {}
        """Standings of the checkpoints there; with ``background`` its process has them."""
        self._plan: native.RankSavePlan | None = None
        policy = options.on_bad_checkpoint
        # With WARN a lost value stays lost: if the run gave up all training since then for it, it
        # would come to the same place again and again.
        self._returns_to_good = begins_finite and policy != WARN
        # A value with which a run has begun comes again, however often the run goes back to it.
        self._policy = STOP if policy == ROLLBACK and not begins_finite else policy
        self._saved: int | None = None
        self._good: int | None = None
        """Newest saved iteration whose values are all finite."""
        self._refused: RefusedSave | None = None
        self._agreed: RefusedSave | None = None
        """The refused save on which the ranks have agreed, from ``_refused``."""
        self._written: list[Path] = []
        self._error: CheckpointError | None = None
        if self._folder is not None:
            target = self._folder / TOKENIZER
            if mesh.rank == 0:
                with writing(target):
                    # Another run may have taken the folder while the weights were loaded.
                    if lease is not None:
                        lease.require()
                    tidy(self._folder)
                    # Without a checkpoint it may be that of a run which never came to its first.
                    begun = target.exists() and latest(self._folder) is not None
                    if (tokenizer is not None or carried.generation) and not begun:
                        _save_beside(tokenizer, target, carried.generation)

    @property
    def newest(self) -> Path | None:
        """The last checkpoint of this run, or None before the first. With background saves it is
        complete after ``finish``."""
        return self._path(self._saved)

    @property
    def return_point(self) -> Path | None:
        """The newest checkpoint of this run whose values are all finite, or None if the run has to
        return to its start. Call ``finish`` first.

        With WARN, and if the values at the start were not finite either, it is the newest
        checkpoint."""
        return self._path(self._good if self._returns_to_good else self._saved)

    def _path(self, iteration: int | None) -> Path | None:
        if self._folder is None or iteration is None:
            return None
        return checkpoint_path(self._folder, iteration)

    def due(self, state: TrainState, *, last: bool) -> bool:
        """Whether the run saves after this step: at the interval, after its last one, and with
        --save-first-step after the first."""
        options = self._config.checkpoint
        now = state.iteration
        at_interval = options.save_interval > 0 and now % options.save_interval == 0
        at_ends = last or (options.save_first_step and now == 1)
        return self._folder is not None and (at_interval or at_ends)

    def save(
        self,
        state: TrainState,
        log: MetricLog,
        validation_loss: float | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Save, unless the run has no --save or this iteration is saved already. Collective.
        ``validation_loss`` is that of this iteration, if it was measured. With ``last`` the run may
        end here, so it has to be known on return whether ``refusal`` keeps it from that.

        Raises CheckpointError on every rank, also for an earlier save in the background, and
        LeaseError if --save has become another run's. Earlier checkpoints stay as they were."""
        if self._folder is None or state.iteration == self._saved:
            return
        state = replace(state, data=self._data, hf_config=self._carried.hf_config)
        if self._background is not None:
            self._begin(self._folder, self._background, state, log, validation_loss)
            if last and self._policy == ROLLBACK:
                self.finish(log)
            return
        if self._plan is None:
            self._plan = native.plan_save(self._optimizer, self._mesh)
        try:
            saved = native.save_checked(
                self._folder,
                self._optimizer,
                self._mesh,
                state,
                self._config,
                validation_loss=validation_loss,
                keep=self._keep,
                publishes_not_finite=self._policy == WARN,
                held=self._held,
                known=self._known,
                plan=self._plan,
            )
        except CheckpointError:  # on every rank
            # A run that has taken the folder over removes the staged files during this save.
            self._raise_failure()
            raise
        self._saved = state.iteration
        self._record(saved.path, saved.not_finite, log)
        if self._refused is not None:
            self._agree()

    def _begin(
        self,
        folder: Path,
        background: BackgroundSaver,
        state: TrainState,
        log: MetricLog,
        validation_loss: float | None,
    ) -> None:
        meta = native.describe_state(
            self._optimizer, self._mesh, state, self._config, validation_loss
        )
        self._collect_while(lambda: background.full, background, log)
        self._agree()
        if self._agreed is not None:
            return  # the run goes back, so this state is not wanted
        if self._plan is None:
            self._plan = native.plan_save(self._optimizer, self._mesh)
        target = checkpoint_path(folder, state.iteration)
        with raise_on_all_ranks(self._mesh.world), writing(target):
            if self._mesh.rank == 0:
                fresh_staging(target, self._held.run if self._held is not None else "")
        start = time.perf_counter()
        background.write(
            self._plan,
            target,
            meta,
            self._keep,
            self._held,
            publishes_not_finite=self._policy == WARN,
        )
        waited = f"{(time.perf_counter() - start) * 1e3:.0f} ms"
        log.say(f" saving {target} in the background; training waited {waited} for the copy")
        self._saved = state.iteration

    def take_written(self) -> list[Path]:
        """Return the checkpoints that have been written since the last call. Of a save in the
        background, rank 0 knows the whole, another rank its part."""
        written = self._written
        self._written = []
        return written

    def failed(self, log: MetricLog) -> bool:
        """Log the saves that have ended, and return whether one has failed or no other one can
        succeed. Then this rank should ask for a stop, and ``finish`` raises."""
        if self._background is not None:
            self._collect(self._background, log, 0.0)
        lost = self._lease is not None and self._lease.is_lost
        refused = self._refused is not None and self._policy == STOP
        return lost or refused or self._error is not None

    @property
    def found_refusal(self) -> bool:
        """Whether this rank knows of a save behind which the run has to go back. Then it should ask
        for that."""
        return self._refused is not None and self._policy == ROLLBACK

    @property
    def refusal(self) -> RefusedSave | None:
        """The save behind which the run has to go back, the same on all ranks; None if there is
        none."""
        return self._agreed

    @property
    def newest_good(self) -> int | None:
        """The newest iteration that this run has saved with values that are all finite. Call
        ``finish`` first."""
        return self._good

    def rewind(self) -> None:
        """Go back to ``return_point``. Call ``finish`` first."""
        self._saved = self._good if self._returns_to_good else self._saved
        self._refused = None
        self._agreed = None

    def finish(self, log: MetricLog) -> None:
        """Wait until everything is on the disk. Collective. Raises CheckpointError on every
        rank."""
        background = self._background
        if background is not None:
            self._collect_while(lambda: background.busy, background, log)
        self._agree()

    def _agree(self) -> None:
        """Bring rank 0's knowledge to all ranks. Collective. Raises CheckpointError on every rank,
        for a save that has failed, and for values that are not finite if the run is to stop."""
        self._raise_failure()
        self._good, self._refused = broadcast_object((self._good, self._refused), self._mesh.world)
        self._agreed = self._refused
        if self._agreed is None:
            return
        if self._policy == STOP:
            # All ranks raise the same, so none is named as the one that has failed.
            raise_error_on_all_ranks(self._agreed.error(), self._mesh.world)
        self._saved = self._good

    def _raise_failure(self) -> None:
        """Raise the error of a failed save or a lost lease, the same on every rank. Collective."""
        error = self._error
        if self._lease is not None:
            try:
                self._lease.require()
            except LeaseError as lost:
                # If a save has failed, the loss of the folder is the reason.
                error = lost
            except CheckpointError:
                # The holder cannot be seen. That ends no run whose saves have succeeded, and the
                # next save asks again before it publishes anything.
                pass
        raise_error_on_all_ranks(error, self._mesh.world)

    def _collect_while(
        self, waits: Callable[[], bool], background: BackgroundSaver, log: MetricLog
    ) -> None:
        """Take outcomes as long as this ``waits`` on any rank. Collective."""
        # Rank 0's process waits for the parts of all other ranks. If one of these ranks dies, rank
        # 0 hears of it only here.
        waiting = True
        while waiting:
            if waits():
                self._collect(background, log, MEETING_SECONDS)
            waits_somewhere, agreed = all_reduce_max(int(waits()), self._mesh.world)
            agreed.wait()
            waiting = bool(waits_somewhere)

    def _collect(self, background: BackgroundSaver, log: MetricLog, seconds: float) -> None:
        """Take all outcomes that have arrived; wait ``seconds`` for the first."""
        while (outcome := background.collect(seconds)) is not None:
            seconds = 0.0
            if outcome.error is None:
                self._record(outcome.target, outcome.not_finite, log)
            self._error = self._error or outcome.error

    def _record(self, target: Path, not_finite: Sequence[NotFinite], log: MetricLog) -> None:
        """Log and remember the result of a save that raised no error."""
        kept = not not_finite or self._policy == WARN
        if kept:
            log.say(f" saved {target}")
            log.event(SAVED, path=str(target))
            self._written.append(target)
        iteration = int(target.name.removeprefix("iter_"))
        if not not_finite:
            self._good = iteration
            return
        words = describe_not_finite(not_finite)
        fate = "it is kept with a mark" if kept else "it is not kept"
        log.say(f" warning: {target} has values that are not finite: {words}; {fate}")
        log.event(NOT_FINITE, path=str(target), words=words, iteration=iteration, kept=kept)
        if not kept and self._refused is None:
            good = newest_good(target.parent) if self._mesh.rank == 0 else None
            self._refused = RefusedSave(iteration, target, words, good)


def _save_beside(tokenizer: Tokenizer | None, target: Path, generation: Mapping[str, Any]) -> None:
    """Write the folder of the tokenizer with the checksums of its files."""
    if not is_remote(target):
        with new_folder(target) as fresh:
            save_tokenizer(tokenizer, fresh, generation)
            seal_files(fresh)
        return
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(tokenizer, Path(folder), generation)
        seal_files(Path(folder))
        copy_files(Path(folder), target)
