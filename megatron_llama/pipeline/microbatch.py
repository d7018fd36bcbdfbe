"""The part of a batch of samples that the pipeline reads."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_llama.model.nn.documents import Bounds


class Microbatch(Protocol):
    """One microbatch, sequence first, the same on all ranks that share a sequence (cp) or a model
    (tp, pp)."""

    @property
    def tokens(self) -> Tensor:
        """[s, b] int64."""

    @property
    def labels(self) -> Tensor:
        """[s, b] int64."""

    @property
    def loss_mask(self) -> Tensor | None:
        """[s, b] float32 weights of the positions in the loss; None: all 1."""

    @property
    def position_ids(self) -> Tensor | None:
        """[s, b] int64; None: 0 to s - 1."""

    @property
    def document_ids(self) -> Tensor | None:
        """[s, b] int, number of the document within the sample; None: attention crosses
        documents."""

    @property
    def document_starts(self) -> Tensor | None:
        """``Documents.starts`` of the document ids; None: not counted."""

    @property
    def document_bounds(self) -> Bounds | None:
        """``Documents.bounds``, if they are counted."""

    @property
    def noise_scale(self) -> Tensor | None:
        """[s, b] float32, the largest noise that training adds to each embedding; None: no
        noise."""

    @property
    def noise_seeds(self) -> tuple[int, ...]:
        """One seed for each sample, if there is noise."""

    @property
    def completion_ids(self) -> Tensor | None:
        """[s, b] int32, 1 + the number, within its sample, of the completion that the label belongs
        to; 0: to none. None: the samples have no completions."""

    @property
    def completion_kinds(self) -> Tensor | None:
        """[c, b] int8, the kind of each completion of a sample: 0 absent, 1 chosen or desirable, 2
        rejected or undesirable."""

    @property
    def reference_logps(self) -> Tensor | None:
        """[c, b] float64, the log-probability of each completion under the reference."""

    @property
    def mismatched(self) -> Microbatch | None:
        """Prompts with completions of other prompts, from which KTO estimates a divergence."""

    def to(self, device: torch.device) -> Microbatch:
        """Return the same microbatch on another device."""
