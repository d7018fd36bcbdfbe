"""The model of a run as a HuggingFace folder, when the run is complete."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.metrics.log import MetricLog
from megatron_llama.train.run.callbacks import Part, Run
from megatron_llama.train.run.checkpoints import Checkpoints
from megatron_llama.train.run.course import Course

if TYPE_CHECKING:
    from megatron_llama.checkpoint.model_folders.export import FinalExport


class Export(Part):
    """Writes --export-hf, unless the run was only interrupted."""

    def __init__(
        self,
        final_export: FinalExport | None,
        checkpoints: Checkpoints,
        course: Course,
        log: MetricLog,
        recorder: Recorder,
    ) -> None:
        """``final_export``: None without --export-hf."""
        self._final_export = final_export
        self._checkpoints = checkpoints
        self._course = course
        self._log = log
        self._recorder = recorder
        self.folder: Path | None = None
        """The folder of the model; None if none was written."""

    def before_end(self, run: Run) -> None:
        if self._final_export is None:
            return
        # Only models whose first weights are known to be sound are published.
        if self._course.is_complete and self._checkpoints.are_weights_compared:
            with self._recorder.outside_steps("exporting"):
                self.folder = self._final_export.write(
                    self._course.state, self._checkpoints.newest, self._log
                )
