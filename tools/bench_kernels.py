"""The kernels of a layer one by one, forward and backward together: ours, torch's operators, the
same compiled, Liger's and apex's.

    python tools/bench_kernels.py [--tokens N] [--only fp8] [--json FILE]

On a GPU in bf16 at the sizes of LLaMA 8B; on a CPU torch's contenders only. Liger (PyPI
`liger-kernel`) and NVIDIA's apex take part where they are installed. *GB/s* counts each tensor that
has to be read or written once, so a contender that moves more shows less; weight gradients,
products in FP8 and attention, causal, are counted in TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.kernels import runs_kernels
from megatron_llama.engine.options import UpdateOptions
from megatron_llama.engine.param_handle import accumulate_product
from megatron_llama.engine.rules.moments import EightBitMoment, Tables
from megatron_llama.engine.rules.update_rule import rounded_adamw_step
from megatron_llama.model.nn import ops as plain
from megatron_llama.model.nn.attention import (
    PLAIN_SCORES,
    AttentionBackend,
    attend,
    attend_backward,
    attention_kernel,
    causal_attention,
    piece_kernel,
)
from megatron_llama.model.nn.documents import Documents, document_attention
from megatron_llama.model.nn.fp8 import codes as fp8
from megatron_llama.model.nn.fp8 import ops as plain_fp8
from megatron_llama.model.nn.fp8 import tensorwise
from megatron_llama.model.nn.fp8.product import product
from megatron_llama.model.nn.fp8.support import blockwise_problem
from megatron_llama.model.nn.rotary import rope_frequencies, rope_table
from megatron_llama.model.plan.chunks import HEAD_CHUNK
from megatron_llama.train.commands.env import apex_found

HIDDEN = 4096
INNER = 14336
VOCABULARY = 128256
HEADS = 32
KEYS = 8
WIDTH = 128
Body = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One thing to compute, and who can. ``work``: bytes, or floating-point operations."""

    name: str
    work: float
    contenders: dict[str, Body]
    unit: str = "GB/s"


@dataclass(frozen=True)
class Row:
    """One contender."""

    name: str
    contender: str
    ms: float
    rate: float
    unit: str


class Sizes:
    """Tensors of one layer, made when they are needed."""

    def __init__(self, tokens: int, device: torch.device, scale: int) -> None:
        """``scale``: every size but the tokens is so many times smaller."""
        self.tokens = tokens
        self.device = device
        self.hidden = HIDDEN // scale
        self.inner = INNER // scale
        self.vocabulary = VOCABULARY // scale
        self.dtype = torch.float32 if devices.is_host(device) else torch.bfloat16
        self.fused = runs_kernels(device, self.dtype)
        self.compiled = not devices.is_host(device)
        in_tiles = blockwise_problem(device) is None
        self.multiplies_tiles = in_tiles and not devices.is_host(device)
        """In FP8, with a scale for each: Hopper."""
        self.absent: dict[str, str] = {}
        """Packages that are not here, and what says so."""

    def draw(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers on the device."""
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)

    def optional(self, name: str) -> Any:
        """A module that may be missing or broken: whether it can be had is part of what is
        reported. None on a host."""
        if not self.compiled:
            return None
        try:
            return import_module(name)
        except Exception as error:  # an extension for another CUDA raises whatever it likes
            self.absent[name] = f"{type(error).__name__}: {error}"
            return None

    def contenders(self, body: Callable[..., Any], *given: Any) -> dict[str, Body]:
        """torch's, by operators and compiled."""
        found: dict[str, Body] = {"torch": lambda: body(*given)}
        if self.compiled:
            whole = torch.compile(body, dynamic=False)
            found["torch-compile"] = lambda: whole(*given)
        return found


def norm(sizes: Sizes) -> Case:
    """Residual addition and RMSNorm."""
    x, delta, grad, through = (sizes.draw(sizes.tokens, 1, sizes.hidden) for _ in range(4))
    weight = sizes.draw(sizes.hidden)

    def torchs(x: Tensor, delta: Tensor, grad: Tensor, through: Tensor) -> tuple[Tensor, Tensor]:
        total, _, scale = plain.add_norm(x, delta, weight, 1e-5, False)
        return plain.norm_backward(grad, through, total, weight, scale, False)

    found = sizes.contenders(torchs, x, delta, grad, through)
    if sizes.fused:
        from megatron_llama.model.nn.kernels.norm import add_norm, norm_backward

        def ours() -> None:
            total, _, scale = add_norm(x, delta, weight, 1e-5, False)
            norm_backward(grad, through, total, weight, scale, False)

        found["ours"] = ours
    leaf = x.clone().requires_grad_()
    factor = weight.clone().requires_grad_()
    if (apex := sizes.optional("apex.normalization.fused_layer_norm")) is not None:
        found["apex"] = lambda: apex.fused_rms_norm_affine(
            leaf + delta, factor, (sizes.hidden,), 1e-5
        ).backward(grad)
    if (liger := sizes.optional("liger_kernel.ops.fused_add_rms_norm")) is not None:

        def ligers() -> None:
            out, total = liger.LigerFusedAddRMSNormFunction.apply(
                leaf, delta, factor, 1e-5, 0.0, "llama", False
            )
            torch.autograd.backward((out, total), (grad, through))

        found["liger"] = ligers
    return Case("residual + RMSNorm", 8 * x.nbytes, found)


def rope(sizes: Sizes) -> Case:
    """Rotation of queries and keys."""
    heads = sizes.draw(sizes.tokens, 1, HEADS + 2 * KEYS, WIDTH)
    frequencies = rope_frequencies(WIDTH, 500000.0, None, sizes.device)
    cos, sin = rope_table(
        torch.arange(sizes.tokens, device=sizes.device).unsqueeze(-1), frequencies
    )
    query, key, value = torch.split(heads.clone(), [HEADS, KEYS, KEYS], dim=2)

    def torchs(heads: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        plain.rotate(heads[:, :, : HEADS + KEYS], cos, sin)
        return plain.rotate_back(query, key, value, cos, sin)

    found = sizes.contenders(torchs, heads, query, key, value)
    if sizes.fused:
        from megatron_llama.model.nn.kernels.rotary import rotate, rotate_back

        def ours() -> None:
            rotate(heads[:, :, : HEADS + KEYS], cos, sin)
            rotate_back(query, key, value, cos, sin)

        found["ours"] = ours
    turned = (query.numel() + key.numel()) * heads.element_size()
    return Case("RoPE", 2 * turned + 2 * heads.nbytes, found)


def swiglu(sizes: Sizes) -> Case:
    """silu(gate) * up."""
    gate_up = sizes.draw(sizes.tokens, 1, 2 * sizes.inner)
    grad = sizes.draw(sizes.tokens, 1, sizes.inner)

    def torchs(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return plain.swiglu(gate_up), plain.swiglu_backward(grad, gate_up)

    found = sizes.contenders(torchs, gate_up, grad)
    if sizes.fused:
        from megatron_llama.model.nn.kernels.gate import swiglu as forward
        from megatron_llama.model.nn.kernels.gate import swiglu_backward

        found["ours"] = lambda: (forward(gate_up), swiglu_backward(grad, gate_up))
    if (liger := sizes.optional("liger_kernel.ops.swiglu")) is not None:
        gate, up = (half.contiguous().requires_grad_() for half in gate_up.chunk(2, dim=-1))
        found["liger"] = lambda: liger.LigerSiLUMulFunction.apply(gate, up).backward(grad)
    return Case("SwiGLU", 8 * grad.nbytes, found)


def loss(sizes: Sizes) -> Case:
    """Cross entropy with the gradient in the place of the scores."""
    rows = max(1, sizes.tokens // 4)
    scores = sizes.draw(rows, sizes.vocabulary)
    labels = torch.randint(0, sizes.vocabulary, (rows,), device=sizes.device)
    weights = torch.full((rows,), 1.0 / rows, device=sizes.device)
    found: dict[str, Body] = {
        "torch": lambda: plain.cross_entropy(scores, labels, weights, sizes.vocabulary, 0.0)
    }
    if sizes.fused:
        from megatron_llama.model.nn.kernels.cross_entropy import cross_entropy

        found["ours"] = lambda: cross_entropy(scores, labels, weights, sizes.vocabulary, 0.0)
    if (liger := sizes.optional("liger_kernel.transformers.functional")) is not None:
        leaf = scores.clone().requires_grad_()
        found["liger"] = lambda: liger.liger_cross_entropy(leaf.view_as(leaf), labels).backward()
    return Case("cross entropy", 3 * scores.nbytes, found)


def adamw(sizes: Sizes) -> Case:
    """One update of a shard with fp32 state, and the copy in the compute dtype."""
    count = sizes.hidden * sizes.inner
    master, grad, average, square = (sizes.draw(count, dtype=torch.float32) for _ in range(4))
    square.abs_()
    copy = torch.empty(count, device=sizes.device, dtype=torch.bfloat16)
    step, scale, skip = (torch.full((), value, device=sizes.device) for value in (1.0, 1.0, 0.0))
    rates: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}

    def torchs() -> None:
        flags = {
            "fused": True,
            "amsgrad": False,
            "maximize": False,
            "weight_decay": 0.1,
            "grad_scale": scale,
            "found_inf": skip,
        }
        torch_adamw([master], [grad], [average], [square], [], [step], **flags, **rates)  # type: ignore[arg-type]
        copy.copy_(master)

    found: dict[str, Body] = {"torch": torchs}
    if sizes.fused:
        from megatron_llama.engine.rules.adamw_kernel import adamw as one_pass

        found["ours"] = lambda: one_pass(
            master, grad, average, square, step, copy, scale=scale, skip=skip, decay=0.1, **rates
        )
    if (apex := sizes.optional("apex.optimizers")) is not None and sizes.optional(
        "amp_C"
    ) is not None:
        leaf = master.clone().requires_grad_()
        leaf.grad = grad
        optimizer = apex.FusedAdam([leaf], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
        found["apex"] = lambda: (optimizer.step(), copy.copy_(leaf.detach()))
    return Case("AdamW", 30.0 * count, found)


def adamw_in_8_bits(sizes: Sizes) -> Case:
    """The same with moments in 8 bits."""
    count = sizes.hidden * sizes.inner
    master, grad = (sizes.draw(count, dtype=torch.float32) for _ in range(2))
    copy = torch.empty(count, device=sizes.device, dtype=torch.bfloat16)
    step, scale, skip = (torch.full((), value, device=sizes.device) for value in (1.0, 1.0, 0.0))
    tables = Tables.on(sizes.device)
    first, second = (EightBitMoment(master, tables, signed=signed) for signed in (True, False))
    config = UpdateOptions(lr=1e-4, adam_beta2=0.95)

    def torchs() -> None:
        rounded_adamw_step(
            master, grad, first, second, step, config, decay=0.1, scale=scale, skip=skip, lr=1e-4
        )
        copy.copy_(master)

    found: dict[str, Body] = {"torch": torchs}
    if sizes.fused:
        from megatron_llama.engine.rules.adamw_kernel import adamw as one_pass

        found["ours"] = lambda: one_pass(
            master,
            grad,
            first.kept,
            second.kept,
            step,
            copy,
            scale=scale,
            skip=skip,
            lr=1e-4,
            beta1=0.9,
            beta2=0.95,
            decay=0.1,
            eps=1e-8,
            tables=tables,
        )
    return Case("AdamW in 8 bits", 18.25 * count, found)


def attention(sizes: Sizes) -> Case:
    """Causal attention. Ours says which kernel it gets; the other is what torch takes by itself."""
    qkv = sizes.draw(sizes.tokens, 1, HEADS + 2 * KEYS, WIDTH).requires_grad_()
    query, key, value = torch.split(qkv, [HEADS, KEYS, KEYS], dim=2)
    print(f"attention: ours runs {attention_kernel(query, key, value).name}", flush=True)

    def torchs() -> Tensor:
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def both(body: Callable[[], Tensor]) -> None:
        out = body()
        torch.autograd.grad(out, qkv, torch.ones_like(out))

    found: dict[str, Body] = {
        "ours": lambda: both(lambda: causal_attention(query, key, value, None)),
        "torch": lambda: both(torchs),
    }
    return Case("attention", 3.5 * 2 * sizes.tokens**2 * HEADS * WIDTH, found, "TFLOP/s")


def attention_pieces(sizes: Sizes) -> Case:
    """A piece of context parallelism, forward and backward with its log-sum-exp: all queries
    against as many keys of another rank. By flash attention, and by cuDNN's."""
    shapes = ((HEADS, WIDTH), (KEYS, WIDTH), (KEYS, WIDTH))
    query, key, value = (
        sizes.draw(sizes.tokens, 1, *shape).permute(1, 2, 0, 3) for shape in shapes
    )

    def both(backend: AttentionBackend) -> None:
        out, lse = attend(query, key, value, backend=backend)
        attend_backward(out, query, key, value, out, lse, backend=backend)

    found: dict[str, Body] = {"ours": partial(both, "auto")}
    if not devices.is_host(sizes.device):
        found |= {"flash": partial(both, "flash"), "cuDNN": partial(both, "fused")}
        kernel = piece_kernel(query, key, value, None, causal=False, backend="auto")
        print(f"attention of a piece: ours runs {kernel.name}", flush=True)
    return Case("attention, a piece", 7.0 * 2 * sizes.tokens**2 * HEADS * WIDTH, found, "TFLOP/s")


def attention_documents(sizes: Sizes) -> Case:
    """Packed documents of one sequence, four of them. By flash attention, and by cuDNN's."""
    qkv = sizes.draw(sizes.tokens, 1, HEADS + 2 * KEYS, WIDTH).requires_grad_()
    parts = torch.split(qkv, [HEADS, KEYS, KEYS], dim=2)
    starts = torch.arange(0, sizes.tokens + 1, sizes.tokens // 4, dtype=torch.int32)
    documents = Documents(starts.to(sizes.device), starts.long().numpy())

    def both(backend: AttentionBackend) -> None:
        query, key, value = parts
        out = document_attention(query, key, value, documents, PLAIN_SCORES, backend)
        torch.autograd.grad(out, qkv, torch.ones_like(out))

    found: dict[str, Body] = {"ours": partial(both, "auto")}
    if not devices.is_host(sizes.device):
        found["cuDNN"] = partial(both, "fused")
    work = 3.5 * 2 * sizes.tokens * (sizes.tokens // 4) * HEADS * WIDTH
    return Case("attention, documents", work, found, "TFLOP/s")


def head_chunks(sizes: Sizes) -> Case:
    """The three products of the head, a chunk of rows at a time: as many rows as the chunk's logits
    allow, and the next multiple of 256 below, which fills tiles of matrix products."""
    x = sizes.draw(sizes.tokens, sizes.hidden)
    weight = sizes.draw(sizes.vocabulary, sizes.hidden)
    total = torch.zeros(sizes.vocabulary, sizes.hidden, device=sizes.device)
    out = torch.empty_like(x)

    def products(rows: int) -> None:
        for start in range(0, sizes.tokens, rows):
            part = slice(start, start + rows)
            logits = F.linear(x[part], weight)
            accumulate_product(total, 1.0, logits.t(), x[part])
            torch.mm(logits, weight, out=out[part])

    most = min(sizes.tokens, max(1, HEAD_CHUNK // sizes.vocabulary))
    found: dict[str, Body] = {f"{most} rows": partial(products, most)}
    if whole := most - most % 256:
        found[f"{whole} rows"] = partial(products, whole)
    work = 6.0 * sizes.tokens * sizes.hidden * sizes.vocabulary
    return Case("head", work, found, "TFLOP/s")


def weight_gradient(sizes: Sizes) -> Case:
    """A product in the compute dtype, added to a gradient in fp32."""
    x = sizes.draw(sizes.tokens, sizes.hidden)
    grad = sizes.draw(sizes.tokens, sizes.inner)
    total = torch.zeros(sizes.inner, sizes.hidden, device=sizes.device)
    found: dict[str, Body] = {
        "ours": lambda: accumulate_product(total, 1.0, grad.t(), x),
        "torch": lambda: total.add_(grad.t() @ x),
    }
    if (apex := sizes.optional("fused_weight_gradient_mlp_cuda")) is not None:
        found["apex"] = lambda: apex.wgrad_gemm_accum_fp32(x, grad, total)
    return Case(
        "weight gradient", 2.0 * sizes.tokens * sizes.hidden * sizes.inner, found, "TFLOP/s"
    )


def fp8_tiles(sizes: Sizes) -> Case:
    """Codes of an input."""
    x = sizes.draw(sizes.tokens, 1, _in_tiles(sizes.hidden))
    found = sizes.contenders(plain_fp8.tiles, x)
    if sizes.multiplies_tiles and sizes.fused:
        found["ours"] = lambda: fp8.tiles(x)
        kernels = "torchao.prototype.blockwise_fp8_training.kernels"
        if (torchao := sizes.optional(kernels)) is not None:
            found["torchao"] = lambda: torchao.triton_fp8_blockwise_act_quant_lhs(x.flatten(0, 1))
    return Case("FP8 codes, input", x.nbytes + x.numel() * (1 + 4 / 128), found)


def fp8_blocks(sizes: Sizes) -> Case:
    """Codes of a weight in both orders."""
    weight = sizes.draw(_in_tiles(sizes.inner), _in_tiles(sizes.hidden))

    def torchs(weight: Tensor) -> Tensor:
        codes, _ = plain_fp8.blocks(weight)
        return codes.t().contiguous()

    found = sizes.contenders(torchs, weight)
    if sizes.multiplies_tiles and sizes.fused:
        found["ours"] = lambda: fp8.both_orders(weight)
    return Case("FP8 codes, weight", weight.nbytes + 2 * weight.numel(), found)


def fp8_scaled(sizes: Sizes) -> Case:
    """Codes of a weight with one scale, in both orders."""
    weight = sizes.draw(_in_tiles(sizes.inner), _in_tiles(sizes.hidden))
    reach = torch.finfo(tensorwise.NUMBERS).max

    def torchs(weight: Tensor) -> Tensor:
        largest = weight.abs().amax().double().clamp(min=tensorwise.LEAST)
        scaled = weight.float() * (reach / largest).float()
        return scaled.clamp(-reach, reach).to(tensorwise.NUMBERS).t().contiguous()

    found = sizes.contenders(torchs, weight)
    if sizes.fused:
        found["ours"] = lambda: tensorwise.TensorwiseWeights().encoded(weight)
    return Case("FP8 codes, one scale", 2 * weight.nbytes + 2 * weight.numel(), found)


def fp8_product(sizes: Sizes) -> Case:
    """A product in FP8, with the codes of its input and without, and in the compute dtype."""
    x = sizes.draw(sizes.tokens, _in_tiles(sizes.hidden))
    weight = sizes.draw(_in_tiles(sizes.inner), _in_tiles(sizes.hidden))
    found: dict[str, Body] = {"torch": lambda: F.linear(x, weight)}
    if sizes.multiplies_tiles:
        made, blocks = fp8.tiles(x), fp8.blocks(weight)
        found["ours"] = lambda: product(fp8.tiles(x), blocks)
        found["ours, alone"] = lambda: product(made, blocks)
    return Case("FP8 product", 2.0 * x.numel() * len(weight), found, "TFLOP/s")


def _in_tiles(size: int) -> int:
    return -(-size // plain_fp8.SIDE) * plain_fp8.SIDE


def rows_of(case: Case, device: torch.device, rounds: int) -> Iterator[Row]:
    """All contenders of a case, in turns. One that fails is said to, and the others go on."""
    times: dict[str, list[float]] = {name: [] for name in case.contenders}
    for round_ in range(rounds + 1):
        for name, body in case.contenders.items():
            if name not in times:
                continue
            try:
                seconds = timed(body, device)
            except Exception as error:  # of others' code
                print(f"{case.name}, {name}: {type(error).__name__}: {error}", file=sys.stderr)
                del times[name]
                continue
            if round_:
                times[name].append(seconds)
    for name, found in times.items():
        seconds = statistics.median(found)
        yield Row(
            case.name,
            name,
            seconds * 1e3,
            case.work / seconds / (1e12 if case.unit == "TFLOP/s" else 1e9),
            case.unit,
        )


def timed(body: Body, device: torch.device, least: float = 0.02) -> float:
    """Seconds of one call, over as many as take ``least`` seconds."""
    count = 1
    while True:
        devices.synchronize(device)
        begin = time.perf_counter()
        for _ in range(count):
            body()
        devices.synchronize(device)
        seconds = time.perf_counter() - begin
        if seconds >= least:
            return seconds / count
        count *= 4


def main(words: Sequence[str]) -> int:
    """1 if one of ours failed."""
    parser = argparse.ArgumentParser(
        "python tools/bench_kernels.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of a microbatch (default 4096)")
    parser.add_argument(
        "--scale",
        type=int,
        default=1,
        help="make all other sizes so many times smaller (default 1)",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="how often contenders take turns (default 5)"
    )
    parser.add_argument(
        "--only", default="", metavar="NAME", help="cases whose functions begin so: fp8, attention"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the rows into this file"
    )
    options = parser.parse_args(words)
    device = devices.accelerator(0)
    found = list[Row]()
    sizes = Sizes(options.tokens, device, options.scale)
    print(
        f"{devices.name(device)}; torch {torch.__version__}; {sizes.dtype}; "
        f"{options.tokens} tokens; apex {apex_found()}"
    )
    missing = 0
    cases = (
        *(adamw, adamw_in_8_bits, attention, attention_pieces, attention_documents, head_chunks),
        *(norm, rope, swiglu, loss, weight_gradient),
        *(fp8_tiles, fp8_blocks, fp8_scaled, fp8_product),
    )
    for make in (case for case in cases if case.__name__.startswith(options.only)):
        case = make(sizes)
        rows = list(rows_of(case, device, options.rounds))
        missing += "ours" in case.contenders and all(row.contender != "ours" for row in rows)
        for row in rows:
            print(
                f"{row.name:<22}{row.contender:<15}{row.ms:>9.3f} ms{row.rate:>10.1f} {row.unit}",
                flush=True,
            )
        found += rows
    for name, why in sizes.absent.items():
        print(f"absent: {name}: {why}")
    if options.json is not None:
        options.json.write_text(
            json.dumps({"rows": [asdict(row) for row in found], "absent": sizes.absent}, indent=2)
            + "\n"
        )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
