"""Where the kernels run: on a GPU if there is one, else in Triton's interpreter, which tests/kernels.sh chooses."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Of the tensors that kernels get."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    assert os.environ.get("TRITON_INTERPRET") == "1", "no GPU: run tests/kernels.sh, which chooses Triton's interpreter"
    round_as_a_device_does()
    return torch.device("cpu")


def round_as_a_device_does() -> None:
    """The interpreter cuts bits off where a device rounds to the nearest bf16, and that would be most of every difference."""
    from triton.runtime import interpreter

    cut_off = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if not (source == interpreter.tl.float32 and target == interpreter.tl.bfloat16):
            return cut_off(values, source, target, rounding)
        narrow = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
        return narrow.view(torch.int16).numpy().view(np.uint16).reshape(values.shape)

    interpreter._convert_float = convert
