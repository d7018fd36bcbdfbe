"""Times matrix products, attention, memory-bound operators and whole steps of the trainer, on the
device of this process alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import product

import torch

from megatron_llama.config.schema import Config, ModelConfig, TrainingConfig
from megatron_llama.data.loader import Batch
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.host_gemm import linear
from megatron_llama.engine.mesh import Mesh
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import build_stages
from megatron_llama.model.nn.attention import causal_attention
from megatron_llama.model.nn.kernels.choice import kernels_for
from megatron_llama.model.nn.ops import PLAIN
from megatron_llama.pipeline.build import build_optimizer, compute_dtype
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.planner.measurements import Point
from megatron_llama.train.setup.resolve import resolve

FEWEST = 3
MOST = 50
"""Fewest and most repetitions of one point."""
SHARE = 1 / 60
"""Share of the whole time that one point may take."""
SIZES = (64, 256, 1024, 4096, 8192)
"""Dimensions of products, without products that take too long."""
LENGTHS = (256, 1024, 4096, 8192)
"""Sequence lengths of attention."""
HEADS = 8
HEAD_DIM = 128
VOCABULARY = 512
PROBE = 512


def seconds_of(call: Callable[[], object], device: torch.device, budget: float) -> float:
    """Return the least seconds of a call in about ``budget`` seconds. The least is taken because
    disturbances only add time. A first call is not counted."""
    call()
    devices.synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < FEWEST or (len(times) < MOST and time.perf_counter() < end):
        begin = time.perf_counter()
        call()
        devices.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)


def probed(device: torch.device, dtype: torch.dtype, budget: float) -> float:
    """Return the FLOP/s of a product of moderate size."""
    square = torch.randn(PROBE, PROBE, device=device).to(dtype)
    return 2 * PROBE**3 / seconds_of(partial(linear, square, square), device, budget)


def kernel_points(
    device: torch.device, dtype: torch.dtype, budget: float, rate: float
) -> Iterator[tuple[Point, float]]:
    """Yield every point that needs one process, in the order of their kinds. Sizes are chosen so
    that a point takes about ``budget`` seconds at ``rate`` FLOP/s, which is equal on all ranks."""

    def timed(call: Callable[[], object]) -> float:
        return seconds_of(call, device, budget)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    most = rate * budget / FEWEST
    for m, n, k in shapes():
        if m == n == k == SIZES[1] or 2 * m * n * k <= most:
            yield ("product", (m, n, k)), timed(partial(linear, made(m, k), made(n, k)))
    for tokens in LENGTHS:
        if tokens == LENGTHS[0] or 8 * HEADS * tokens**2 * HEAD_DIM <= most:
            query, key, value = (made(tokens, 1, HEADS, HEAD_DIM) for _ in range(3))
            yield (
                ("attention", (HEADS, tokens, HEAD_DIM)),
                timed(partial(causal_attention, query, key, value, None)),
            )
    host = devices.is_host(device)
    large = made(1 << (24 if host else 28))
    yield ("copy", (large.nbytes,)), timed(partial(torch.empty_like(large).copy_, large))
    rows = large[: 1 << (20 if host else 24)].view(-1, 1024)
    weight = made(1024)
    ops = kernels_for(device, dtype, 1024) or PLAIN
    yield ("norm", (rows.numel(),)), timed(partial(ops.add_norm, rows, None, weight, 1e-5, False))
    yield ("gate", (rows.numel() // 2,)), timed(partial(ops.swiglu, rows))
    yield from _steps(device, dtype, rate, budget)


def shapes() -> Iterator[tuple[int, int, int]]:
    """Yield (m, n, k) of products: each m with four shapes of weights, squares, and tall ones."""
    for m, n, k in product(SIZES, repeat=3):
        if {n, k} <= {256, 1024} or (n == k and m >= n):
            yield m, n, k


def _steps(
    device: torch.device, dtype: torch.dtype, rate: float, budget: float
) -> Iterator[tuple[Point, float]]:
    """Yield the steps of a tiny model, which consist of overhead, and of a model whose width suits
    the speed of the device."""
    # Four layers of 12 h^2 weights each, h tokens, 6 FLOPs for each weight and token.
    fitting = (size for size in (4096, 2048, 1024, 512) if 6 * 12 * 4 * size**3 <= rate * budget)
    hidden = next(fitting, 256)
    for layers, width, tokens in (
        (2, 64, 16),
        (6, 64, 16),
        (2, hidden, hidden),
        (4, hidden, hidden),
    ):
        heads = max(1, width // 64)
        sizes = (layers, width, 256 * -(-8 * width // 3 // 256), heads, VOCABULARY, tokens)
        yield ("step", sizes), _training_step(sizes, device, dtype, budget)


def _training_step(
    sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype, budget: float
) -> float:
    """Return the seconds of a whole step of this trainer in one process: forward, backward,
    clipping, update."""
    layers, hidden, inner, heads, vocabulary, tokens = sizes
    model = ModelConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    training = TrainingConfig(
        seq_length=tokens, global_batch_size=1, train_iters=1, bf16=dtype == torch.bfloat16
    )
    config = resolve(Config(model=model, training=training), 1)
    mesh = Mesh.single(device)
    stages = build_stages(config, mesh)
    options = config.optimizer
    with closing(build_optimizer(config, stages.values(), mesh)) as engine:
        engine.load_weights(InitialWeights.of(config))
        runtime = PipelineRuntime(stages, engine, mesh, config, dtype=compute_dtype(config))
        words = torch.randint(vocabulary, (tokens, 1), device=device)
        batch = Batch(words, words, None)

        def step() -> None:
            engine.announce_step(options.lr, clip=options.clip_grad)
            runtime.step([batch])
            engine.step(options.lr, clip=options.clip_grad)
            engine.settle()

        step()
        return seconds_of(step, device, budget)
