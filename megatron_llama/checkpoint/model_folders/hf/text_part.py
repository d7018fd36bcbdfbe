"""The text model of a folder whose model also sees pictures (LLaMA 4's Scout and Maverick, as
published): its tensors have a prefix, and others stand beside them."""

from __future__ import annotations

from typing import Any

PREFIX = "language_model."
PICTURES = ("vision_model.", "multi_modal_projector.")


class TextPart:
    """A file of weights, behind the interface of one, with the tensors of the text model by their
    own names."""

    def __init__(self, file: Any) -> None:
        self._file = file
        names = list(file.keys())
        is_part = any(name.startswith((PREFIX, *PICTURES)) for name in names)
        kept = [name for name in names if not (is_part and name.startswith(PICTURES))]
        self._stored = {name.removeprefix(PREFIX): name for name in kept}
        self.left_out = len(names) - len(kept)
        """Number of other tensors."""

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._stored)

    def get_slice(self, name: str) -> Any:
        """Return a tensor as a slice of the file."""
        return self._file.get_slice(self._stored[name])
