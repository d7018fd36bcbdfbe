"""A file of ``torch.save`` with plain named tensors, behind the interface of an opened safetensors
file."""

from __future__ import annotations

from collections.abc import KeysView

from torch import Tensor

from megatron_llama.convert.pickled import PickledFile
from megatron_llama.convert.safetensors_file import DTYPES
from megatron_llama.errors import CheckpointError


class PickledWeights:
    """Names, and slices of tensors that know their shape and dtype."""

    def __init__(self, file: PickledFile) -> None:
        """Raises CheckpointError when the file holds something else."""
        content = file.content
        if not isinstance(content, dict) or not all(
            isinstance(name, str) and isinstance(t, Tensor) for name, t in content.items()
        ):
            do = "give the file that transformers' save_pretrained or Meta's download gave"
            raise CheckpointError(
                file.path, got="other things", expected="names with tensors", do=do
            )
        self.file = file
        self.tensors = dict[str, Tensor](content)

    def keys(self) -> KeysView[str]:
        """Names of the tensors."""
        return self.tensors.keys()

    def get_slice(self, name: str) -> PickledSlice:
        """A tensor, of which nothing is read yet."""
        return PickledSlice(self.file, self.tensors[name])


class PickledSlice:
    """See PickledWeights."""

    def __init__(self, file: PickledFile, tensor: Tensor) -> None:
        self._file = file
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Of the whole tensor."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """In the words of safetensors where it has one."""
        return DTYPES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, window: tuple[slice, ...]) -> Tensor:
        """The values, compared with the file's checksum. Raises CheckpointError."""
        self._file.verify(self._tensor)
        return self._tensor[window]
