"""Where the kernels run: on a GPU if there is one, else in Triton's interpreter, which tests/kernels.sh chooses."""

from __future__ import annotations

import os
from typing import Any

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
    """The interpreter cuts bits off where a device rounds to the nearest bf16, and that would be most of every difference; it mistakes
    subnormal bf16, and e4m3 on ties and where rounding carries into the exponent. torch's conversions, which have tests, stand in. Products
    of bf16 are those of its bits taken for integers: they are widened."""
    from triton.runtime import interpreter

    tl, cut_off = interpreter.tl, interpreter._convert_float
    rounded = {tl.float32: torch.float32, tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if not {source, target} <= set(rounded):
            return cut_off(values, source, target, rounding)
        found = torch.frombuffer(bytearray(values.tobytes()), dtype=rounded[source]).to(rounded[target])
        return found.view(torch.uint8).numpy().view(f"u{found.itemsize}").reshape(values.shape)

    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(convert(handle.data, tl.bfloat16, tl.float32, None).view("f4"), tl.float32)

    def product(builder: Any, left: Any, right: Any, *others: Any) -> Any:
        return multiply(builder, widened(left), widened(right), *others)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = product
