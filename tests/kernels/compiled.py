"""Compile every kernel for a GPU that is not here, through the functions that launch it, at the sizes of models from 7B to 405B.

Prints one JSON object: for each kernel and size of model, the most registers and bytes of stack of a thread, as NVIDIA's own tool reads
them from the machine code, how many instructions multiply and add with one rounding, and how often its PTX says ``.f64``. Nothing runs: tensors are the host's, and launching ends when the code is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.rules import schedule_free_kernel
from megatron_llama.engine.rules.adamw_kernel import adamw
from megatron_llama.engine.rules.moments import InBytes, Tables
from megatron_llama.engine.squares_kernel import squares
from megatron_llama.model.nn.fp8 import kernels as fp8
from megatron_llama.model.nn.kernels import experts, rows, scaled_experts
from megatron_llama.model.nn.kernels.cross_entropy import cross_entropy
from megatron_llama.model.nn.kernels.gate import geglu, geglu_backward, of_rows, swiglu, swiglu_backward
from megatron_llama.model.nn.kernels.head_norm import norm_heads, norm_heads_backward
from megatron_llama.model.nn.kernels.norm import add_norm, norm_backward
from megatron_llama.model.nn.kernels.rotary import rotate, rotate_back
from megatron_llama.model.nn.ops import Gate
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class Absent:
    """What Triton asks a driver before it launches, answered for one kind of GPU."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class Compiler:
    """Stands in for launching: compiles, and reads what came out."""

    def __init__(self) -> None:
        self.case, self.found = "", dict[str, dict[str, int]]()
        self._run = JITFunction.run

    def run(self, function: Any, *args: Any, grid: Any, warmup: bool, **names: Any) -> Any:
        kernel = self._run(function, *args, grid=grid, warmup=True, **names)
        used = self.found.setdefault(f"{function.fn.__module__.rpartition('.')[2]}.{function.fn.__name__} {self.case}", {})
        for name, value in (usage(kernel.asm["cubin"]) | {"f64": kernel.asm["ptx"].count(".f64")}).items():
            used[name] = max(value, used.get(name, 0))
        return kernel


@cache  # many sizes of model have the same code
def usage(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack of a thread, how many instructions multiply and add at once, and how many read a register that nothing
    was written to: the assembler names the stack's, R1, which a kernel without a stack has no use for."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        found = {name.lower(): int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", read("-res-usage", file.name))}
        code = read("-sass", file.name)
    reading = re.findall(r"^\s+/\*[0-9a-f]+\*/.*\bR1\b.*;", code, re.MULTILINE)
    return found | {"fused": len(re.findall(r"\bFFMA", code)), "unwritten": sum("LDC R1," not in line for line in reading)}


def read(option: str, path: str) -> str:
    """What the disassembler says of a file."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def launch_all(dtype: torch.dtype, hidden: int, inner: int, vocabulary: int) -> None:
    """Every launching function once. Few rows: a kernel's code does not depend on their number."""
    x, weight, scale = (torch.empty(4, 1, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype), torch.empty(4, 1, 1))
    for beside in (None, x):
        for one_plus in (False, True):
            add_norm(x, beside, weight, 1e-5, one_plus)
            norm_backward(x, beside, x, weight, scale, one_plus)
    projected, table = torch.empty(4, 1, 48, 128, dtype=dtype), torch.empty(4, 1, 1, 64)
    rotate(projected[:, :, :40], table, table)
    rotate_back(*projected.split([32, 8, 8], dim=2), table, table)
    head_weight = torch.empty(128, dtype=dtype)
    for one_plus in (False, True):
        kept, scales = norm_heads(projected[:, :, :40], head_weight, head_weight, 1e-5, one_plus, 32)
        norm_heads_backward(projected[:, :, :40], kept, head_weight, head_weight, scales, one_plus, 32)
    gate_up = torch.empty(4, 1, 2 * inner, dtype=dtype)
    for forward, backward in ((swiglu, swiglu_backward), (geglu, geglu_backward)):
        forward(gate_up)
        backward(gate_up[..., :inner], gate_up)
        of_rows(Gate(forward, backward), torch.empty(1, dtype=torch.int32)).forward(gate_up)
        of_rows(Gate(forward, backward), torch.empty(1, dtype=torch.int32)).backward(gate_up[..., :inner], gate_up)
    move_rows(dtype, hidden, inner)
    # Weights of all experts of a large model are too many for a host.
    narrow, of_experts = torch.empty(4, inner // 16, dtype=dtype), torch.empty(2, inner // 16, hidden // 4, dtype=dtype)
    ends = torch.empty(2, dtype=torch.int32)
    experts.linear(x[:, 0, : hidden // 4], of_experts, ends)
    experts.linear(narrow, of_experts.mT, ends)
    for beta in (0.0, 1.0):
        experts.accumulate(of_experts.float(), beta, narrow, x[:, 0, : hidden // 4], ends)
    ways = ((x[:, 0, : hidden // 4], of_experts), (narrow, of_experts.mT.contiguous()))
    for left, right in ways if dtype is torch.bfloat16 else ():
        for code in (torch.float8_e4m3fn, torch.float8_e5m2):
            left_scales, right_scales = torch.empty(len(left), 1), torch.empty(2, 1, 1)
            scaled_experts.linear(left.to(code), left_scales, right.to(torch.float8_e4m3fn), right_scales, ends)
        left_scales, right_scales = torch.empty(len(left), left.shape[1] // 128), torch.empty(2, right.shape[1] // 128, right.shape[2] // 128)
        scaled_experts.linear(left.to(torch.float8_e4m3fn), left_scales, right.to(torch.float8_e4m3fn), right_scales, ends)
    for columns in (hidden, inner):
        fp8.tiles(torch.empty(4, 1, columns, dtype=dtype))
        for code in (torch.float8_e4m3fn, torch.float8_e5m2):
            fp8.scaled(torch.empty(4, 1, columns, dtype=dtype), torch.empty(()), code)
            fp8.transposed(torch.empty(hidden, columns, dtype=code))
        for both in (False, True):
            fp8.blocks(torch.empty(hidden, columns, dtype=dtype), both)
    cross_entropy(torch.empty(4, vocabulary, dtype=dtype), torch.zeros(4, dtype=torch.int64), torch.empty(4), vocabulary - 8, 0.0)
    shard, number = torch.empty(1 << 20), torch.empty(())
    squares(shard.view(-1, 64))
    names = {"scale": number, "skip": number, "lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "decay": 0.1, "eps": 1e-8}
    copy = None if dtype is torch.float32 else torch.empty(1 << 20, dtype=dtype)
    adamw(shard, shard, shard, shard, number.clone(), copy, **names)
    in_bytes, tables = InBytes(torch.empty(1 << 20, dtype=torch.uint8), torch.empty((1 << 20) // 64)), Tables.on(torch.device("cpu"))
    for average in (in_bytes, shard):
        adamw(shard, shard, average, in_bytes, number.clone(), copy, tables=tables, **names)
    step = dict.fromkeys(("share", "rate", "forgets", "correction", "scale", "skip"), number)
    schedule_free_kernel.update(shard, shard, shard, shard, shard if copy is None else copy, **step, beta1=0.9, decay=0.1, eps=1e-8)
    schedule_free_kernel.show(shard, shard, shard if copy is None else copy, beta1=0.9)


def move_rows(dtype: torch.dtype, hidden: int, inner: int) -> None:
    """Rows of experts, all in use or not."""
    order, table, end = torch.empty(6, dtype=torch.int64), torch.empty(3, 2), torch.empty(1, dtype=torch.int32)
    values = torch.empty(6, inner, dtype=dtype)
    for used, elsewhere in ((None, None), (end, torch.empty(3, 2, dtype=torch.bool))):
        for weights in (None, table):
            rows.gather(torch.empty(3, hidden, dtype=dtype), weights, order, 2, used)
            rows.sum_rows(torch.empty(6, hidden, dtype=dtype), weights, order, elsewhere, 2)
        rows.weigh(values, table, order, used, values)
        rows.dots(values, values, order, used, table)


def main(capability: int) -> None:
    """Compile all for one kind of GPU, 90 for Hopper."""
    triton.runtime.driver.set_active(Absent(capability))
    devices.multiprocessors = lambda device: 132
    compiler = Compiler()
    JITFunction.run = lambda function, *args, **names: compiler.run(function, *args, **names)
    for name, dtype, *sizes in (
        ("7b", torch.bfloat16, 4096, 11008, 32000),
        ("8b", torch.bfloat16, 4096, 14336, 128256),
        ("13b", torch.float16, 5120, 13824, 32000),
        ("65b", torch.bfloat16, 8192, 22016, 32000),
        ("405b", torch.bfloat16, 16384, 53248, 128256),
        ("fp32", torch.float32, 4096, 11008, 32000),
    ):
        compiler.case = name
        launch_all(dtype, *sizes)
    print(json.dumps(compiler.found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
