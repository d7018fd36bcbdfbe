"""Codes with one scale a tensor: against the definition, against one process, and what carries them over tp."""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from dataclasses import replace

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.engine.comm.recorder import Recorder, Traffic
from megatron_llama.errors import ConfigError
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.nn.fp8.support import fp8_problem
from megatron_llama.model.nn.fp8.tensorwise import GRADIENTS, NUMBERS, Codes, codes, decoded, product, tensorwise_products, transposed
from megatron_llama.model.nn.linear import ColumnLinear, RowLinear
from megatron_llama.model.plan.fp8 import SCALE_BYTES, code_bytes
from megatron_llama.model.presets import PRESETS
from megatron_llama.train.setup.resolve import problems
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.harness import Cluster
from tests.model.nn.fp8.numbers import hard_tiles, normal
from tests.model.nn.fp8.published import MAGNITUDES
from tests.model.nn.fp8.shapes import weights_of
from tests.parallel.cases import Layout
from tests.refused import refused

E5M2 = [(fraction / 4 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 15) for exponent in range(31) for fraction in range(4)]
"""Magnitudes of the codes 0 to 123 of e5m2, in order: 5 bits of exponent, 2 of fraction; 124 is infinity."""
LADDERS = {NUMBERS: MAGNITUDES, GRADIENTS: E5M2}
EACH_CODE = pytest.mark.parametrize("dtype", LADDERS, ids=str)


def fp32(number: float) -> float:
    """The nearest number of fp32."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def by_definition(x: Tensor, dtype: torch.dtype) -> tuple[list[int], float]:
    """Bytes of codes and the scale, one number at a time."""
    ladder = LADDERS[dtype]
    numbers = x.double().flatten().tolist()
    factor = fp32(ladder[-1] / max(1e-12, max(abs(number) for number in numbers)))
    found = []
    for number in numbers:
        scaled = min(abs(fp32(number * factor)), ladder[-1])
        above = bisect_left(ladder, scaled)
        below = max(above - 1, 0)
        down, up = scaled - ladder[below], ladder[above] - scaled
        nearest = below if down < up or (down == up and below % 2 == 0) else above
        found.append(nearest | (128 if math.copysign(1.0, number) < 0 else 0))
    return found, fp32(1 / factor)


@EACH_CODE
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32], ids=str)
def test_codes_are_those_of_the_definition(dtype: torch.dtype, given: torch.dtype) -> None:
    assert torch.tensor(LADDERS[dtype]).to(dtype).view(torch.uint8).tolist() == list(range(len(LADDERS[dtype])))
    tensors = [*hard_tiles(given), *normal(40, 128, seed=3, dtype=given), normal(64, 48, seed=4, dtype=given)]
    numbers = [x for x in tensors if bool(x.isfinite().all())]
    assert len(tensors) - len(numbers) == 4
    for x in numbers:
        found = codes(x, dtype)
        expected, scale = by_definition(x, dtype)
        assert float(found.scale) == scale and found.codes.view(torch.uint8).flatten().tolist() == expected, x


@EACH_CODE
def test_a_tensor_with_a_number_that_is_none_decodes_to_nothing_else(dtype: torch.dtype) -> None:
    for odd in (torch.inf, -torch.inf, torch.nan):
        x = normal(3, 64, seed=1)
        x[1, 7] = odd
        assert decoded(codes(x, dtype)).isnan().all()
    assert decoded(codes(torch.zeros(3, 64, dtype=torch.bfloat16), dtype)).eq(0).all()
    assert codes(torch.empty(0, 2, 64, dtype=torch.bfloat16), dtype).codes.shape == (0, 2, 64)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@EACH_CODE
def test_products_are_those_of_the_decoded_numbers(device: str, dtype: torch.dtype) -> None:
    """Within a step of bf16 of the product in fp64, and what a sum of these terms loses, in fp32 or in a tensor core."""
    for m, n, k in ((1, 16, 16), (5, 48, 640), (70, 384, 2048)):
        x, weight = codes(torch.randn(m, 1, k, device=device) * 1e-3, dtype), codes(torch.randn(n, k, device=device), NUMBERS)
        found = product(x, weight)
        assert found.shape == (m, 1, n) and found.dtype is torch.bfloat16
        left, right = (part.codes.double() * part.scale.double() for part in (x, weight))
        exact = left @ right.t()
        step = 2.0 ** (torch.frexp(exact).exponent - 8).double()
        lost = k * 2.0**-24 if device == "cpu" else 2.0**-13
        assert ((found.double() - exact).abs() <= step + left.abs() @ right.t().abs() * lost).all()
        back = product(codes(found, dtype), transposed(weight))
        assert back.shape == (m, 1, k)
    made = (part.nbytes for part in (weight.codes, transposed(weight).codes, weight.scale))
    assert sum(made) == code_bytes(n, k, "tensorwise")


S, B, D, F = 8, 2, 64, 128


def layers_over(
    place: Place, tp: int, cp: int, sequence: bool, gathers: bool, odd: float
) -> tuple[dict[str, Tensor], dict[tuple[str, str], Traffic]]:
    """A column-parallel layer and a row-parallel one, with the same numbers whatever the layout: this rank's parts of what they return,
    and the messages. ``odd`` stands in one place of the input."""
    config = Config(parallel=replace(Config().parallel, tensor_model_parallel_size=tp, context_parallel_size=cp))
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    options = {"tp": mesh.tp, "sequence_parallel": sequence, **tensorwise_products(mesh, gathers_codes=gathers)}
    column, row = ColumnLinear(D, F, **options), RowLinear(F, D, **options)
    column.weight = nn.Parameter(normal(F, D, seed=1).chunk(tp)[mesh.tp.rank].clone())
    row.weight = nn.Parameter(normal(D, F, seed=2).chunk(tp, dim=1)[mesh.tp.rank].clone())

    def mine(whole: Tensor) -> Tensor:
        part = whole.chunk(cp)[mesh.cp.rank]
        return (part.chunk(tp)[mesh.tp.rank] if sequence else part).clone()

    given = normal(S, B, D, seed=3)
    given[0, 0, 5] = odd
    x = mine(given).requires_grad_()
    mesh.recorder.traffic.clear()
    hidden = column(x)
    out = row(hidden)
    out.backward(mine(normal(S, B, D, seed=4)))
    traffic = dict(mesh.recorder.traffic)
    return {"hidden": hidden.detach(), "out": out.detach(), "x": x.grad.detach()}, traffic


SPREADS = [(2, 1, False, False), (2, 1, True, False), (4, 1, True, True), (2, 2, True, True), (1, 2, False, False), (2, 2, False, False)]


@pytest.mark.parametrize("spread", SPREADS, ids=str)
@pytest.mark.few(3)
@pytest.mark.tries("fp8_gather")
def test_every_rank_has_the_products_of_one_process(cluster: Cluster, spread: tuple[int, int, bool, bool]) -> None:
    """To the bit where a rank sums all terms of a product: its scales are those of whole tensors."""
    tp, cp, sequence, gathers = spread
    [(alone, _)] = cluster.run(1, layers_over, 1, 1, False, False, 3.0)
    for rank, (found, traffic) in enumerate(cluster.run(tp * cp, layers_over, *spread, 3.0)):
        part = alone["hidden"].chunk(cp)[rank // tp].chunk(tp, dim=-1)[rank % tp]
        assert torch.equal(found["hidden"], part), rank
        for name in ("out", "x"):
            whole = alone[name].chunk(cp)[rank // tp]
            expected = whole.chunk(tp)[rank % tp] if sequence else whole
            # Sums of partial sums that are rounded to bf16; with scales of their own ranks would be off by 2^-4.
            assert (found[name] - expected).abs().max() <= tp * 2.0**-8 * whole.abs().max(), (name, rank)
        if sequence:
            # Forward as codes or bf16, and again for the weight gradient; the gradient of the other layer's output.
            stream = S // cp * B * D
            assert traffic["tp", "all_gather"].bytes == stream * ((1 if gathers else 2) + 2 + 2)


def sent_by_layers(place: Place, gathers: bool) -> list[tuple[str, int]]:
    """The messages over tp in the order in which a rank starts them, each with its bytes."""
    sent: list[tuple[str, int]] = []
    count = Recorder.count

    def counted(self: Recorder, axis: str, operation: str, size: int, bucket: int | None = None) -> object:
        if axis == "tp":
            sent.append((operation, size))
        return count(self, axis, operation, size, bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "count", counted)
        layers_over(place, 2, 1, True, gathers, 3.0)
    return sent


@pytest.mark.parametrize("gathers", [False, True])
def test_a_gradients_scale_does_not_wait_for_the_gather_of_an_input(cluster: Cluster, gathers: bool) -> None:
    """Its message is started before. Codes that are gathered need their scale first. Weights of no engine have codes made at each read."""
    agreed, codes_of_stream, stream = ("all_reduce", SCALE_BYTES), ("all_gather", S * B * D), ("all_gather", 2 * S * B * D)
    summed = ("reduce_scatter", 2 * S * B * D)
    column = [agreed, codes_of_stream, agreed] if gathers else [stream, agreed]
    row, row_back, column_back = [agreed, agreed, summed], [stream, agreed], [agreed, stream, agreed, summed]
    for sent in cluster.run(2, sent_by_layers, gathers):
        assert sent == [*column, *row, *row_back, *column_back]


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_a_number_that_is_none_on_one_rank_reaches_all(cluster: Cluster, odd: float) -> None:
    for found, _ in cluster.run(4, layers_over, 2, 2, True, True, odd):
        assert found["hidden"].isnan().all() and found["out"].isnan().all()


def test_a_piece_has_no_scale() -> None:
    mesh = build_mesh(Config(), rank=0, world_size=1, device=torch.device("cpu"))
    products = tensorwise_products(mesh, gathers_codes=False)["products"]
    x, weight = normal(1, S, D, seed=1), normal(F, D, seed=2)
    for write, given in ((products.linear_into, x), (products.linear_backward_into, normal(1, S, F, seed=1))):
        with pytest.raises(RuntimeError, match="piece"):
            write(torch.empty(1, S, D), given, weight)


TENSORWISE = Layout(bf16=True, tp=2, sp=True).sized()
TENSORWISE = replace(TENSORWISE, training=replace(TENSORWISE.training, fp8="tensorwise", train_iters=1))


@pytest.mark.parametrize(
    ("changed", "got"),
    [
        ({"tp_comm_overlap": "2"}, "--tp-comm-overlap 2"),
        ({"tensor_model_parallel_size": 4}, "--tensor-model-parallel-size 4 with 2 key/value heads"),
    ],
    ids=str,
)
def test_layouts_are_refused(changed: dict[str, object], got: str) -> None:
    assert problems(TENSORWISE, 2) == []
    config = replace(TENSORWISE, parallel=replace(TENSORWISE.parallel, **changed))
    [problem] = [sentence for sentence in problems(config, config.parallel.tensor_model_parallel_size) if got in sentence]
    assert refused(ConfigError(problem)).where in ("--fp8 tensorwise",)


def test_widths_are_multiples_of_16_on_every_rank() -> None:
    config = replace(TENSORWISE, model=replace(TENSORWISE.model, intermediate_size=176))
    [problem] = problems(config, 2)
    sentence = refused(problem)
    assert sentence.got == "a rank's intermediate size 88 with --tensor-model-parallel-size 2" and "multiples of 16" in sentence.expected
    assert problems(replace(config, parallel=replace(config.parallel, tensor_model_parallel_size=1, sequence_parallel=False)), 1) == []


@pytest.mark.parametrize("recipe", ["none", "blockwise"])
def test_only_codes_of_whole_tensors_are_gathered(recipe: str) -> None:
    config = replace(TENSORWISE, training=replace(TENSORWISE.training, fp8=recipe, fp8_gather=True))
    assert [refused(problem).got for problem in problems(config, 2) if "gather" in problem] == [f"--fp8 {recipe}"]


def test_there_are_gathers() -> None:
    config = replace(TENSORWISE, training=replace(TENSORWISE.training, fp8_gather=True))
    assert problems(config, 2) == []
    [problem] = problems(replace(config, parallel=replace(config.parallel, sequence_parallel=False)), 2)
    assert refused(problem).where == "--fp8-gather"


@pytest.mark.parametrize(("capability", "runs"), [((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)])
def test_devices(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], runs: bool) -> None:
    from megatron_llama.engine.comm import device as devices

    monkeypatch.setattr(devices, "capability", lambda device: capability)
    monkeypatch.setattr(devices, "name", lambda device: "a GPU")
    problem = fp8_problem(torch.device("cuda"), "tensorwise")
    assert (problem is None) == runs and fp8_problem(torch.device("cpu"), "tensorwise") is None
    if problem is not None:
        assert refused(problem).got == "a GPU"


def test_codes_are_views_of_nothing() -> None:
    x = normal(4, 32, seed=1)
    assert isinstance(codes(x.t(), NUMBERS), Codes) and codes(x.t(), NUMBERS).codes.is_contiguous()


@pytest.mark.few(3)
@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b", "llama3.1-405b"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_gpu_takes_the_products_of_a_model(model: str, tp: int) -> None:
    """Shapes, strides and dtypes as torch checks them without a GPU, also of codes that have been gathered; forward and backward."""
    for n, k in weights_of(PRESETS[model], tp):
        with FakeTensorMode():
            weight = codes(torch.empty(n, k, dtype=torch.bfloat16, device="cuda"), NUMBERS)
            back = transposed(weight)
            assert back.codes.shape == (k, n) and back.codes.is_contiguous() and weight.scale.shape == () and weight.scale.dtype is torch.float32
            for tokens in (1, 6, 8192 // tp):
                x = codes(torch.empty(tokens, 1, k, dtype=torch.bfloat16, device="cuda"), NUMBERS)
                gathered = Codes(torch.empty(tokens, 1, k, dtype=torch.uint8, device="cuda").view(NUMBERS), x.scale)
                for made in (x, gathered):
                    out = product(made, weight)
                    assert out.shape == (tokens, 1, n) and out.device.type == "cuda" and out.dtype is torch.bfloat16
                encoded = codes(out, GRADIENTS)
                assert encoded.codes.is_contiguous() and product(encoded, back).shape == (tokens, 1, k)


def test_a_gpu_takes_no_weight_whose_codes_are_not_transposed() -> None:
    """So shapes and strides above are checked: as one would multiply a gradient by the codes of the forward product."""
    with FakeTensorMode():
        weight = codes(torch.empty(64, 128, dtype=torch.bfloat16, device="cuda"), NUMBERS)
        grad = codes(torch.empty(6, 1, 64, dtype=torch.bfloat16, device="cuda"), GRADIENTS)
        with pytest.raises(RuntimeError):
            product(grad, Codes(weight.codes.t(), weight.scale))
