"""--deterministic-mode and --attention-backend, as far as a host can show them: what torch, cuBLAS and NCCL are told, that no operator of a step is
one that torch refuses then, and which kernels attention is given."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_llama.config.schema import Config, ModelConfig, TrainingConfig
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.offload_options import OffloadConfig
from megatron_llama.errors import ConfigError
from megatron_llama.launch.launcher import Place, fix_sums
from megatron_llama.model import llama
from megatron_llama.model.llama import build_stages
from megatron_llama.train.setup.checks.run import attention_problems
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.cases import STRATEGIES, Layout, trainer

SINGLE = Place(0, 1, 0)
REFUSED = frozenset(
    [
        "histc", "bincount", "median", "nanmedian", "kthvalue", "mode", "put", "put_", "scatter_reduce", "scatter_reduce_",
        "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "_embedding_bag", "grid_sampler_2d_backward",
        "reflection_pad1d_backward", "_ctc_loss_backward", "upsample_linear1d_backward", "resize_", "adaptive_max_pool2d_backward",
        "avg_pool3d_backward",
    ]
)
"""Operators that torch has on a GPU in no deterministic form (docs of torch.use_deterministic_algorithms, 2.11 and 2.13); and cumsum of numbers
with fractions."""


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.refused = set[str]()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        name = func.overloadpacket.__name__
        if name in REFUSED or (name.startswith("cumsum") and args[0].is_floating_point()):
            self.refused.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "layout",
    [
        *(Layout(strategy=strategy, microbatches=2) for strategy in STRATEGIES),
        Layout(bf16=True, documents=True, tied=True),
        Layout(bf16=True, recompute="full", clip=0.0, early=True),
        Layout(lora=4, recompute="selective"),
        Layout(offload=OffloadConfig(optimizer_offload="exact")),
        Layout(offload=OffloadConfig(optimizer_offload="zenflow")),
    ],
    ids=lambda layout: f"{layout.strategy} {layout.name}",
)
def test_no_operator_of_a_step_is_refused(layout: Layout) -> None:
    run = trainer(SINGLE, layout)
    run.step(0)
    with Operators() as seen:
        run.step(1)
    assert seen.refused == set() and seen.count > 100


def test_torch_is_told_and_is_itself_again() -> None:
    switches, products = torch.utils.deterministic, torch.backends.cuda.matmul

    def state() -> tuple[Any, ...]:
        filled = switches.fill_uninitialized_memory  # type: ignore[attr-defined]
        return torch.are_deterministic_algorithms_enabled(), filled, products.allow_bf16_reduced_precision_reduction

    before = state()
    with devices.deterministic(wanted=False):
        assert state() == before
    with pytest.raises(KeyError), devices.deterministic(wanted=True):
        assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.empty(1000).isnan().all(), "new tensors are filled"
        assert products.allow_bf16_reduced_precision_reduction is False
        raise KeyError
    assert state() == before


@pytest.mark.parametrize("given", [{}, {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "^nvlstree,nvls"}], ids=str)
def test_the_environment_fixes_sums(given: dict[str, str]) -> None:
    """What the user has chosen stays."""
    environ = dict(given)
    fix_sums(environ)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS,NVLSTree", **given}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, "--deterministic-mode: got CUBLAS_WORKSPACE_CONFIG=:0:0, expected :4096:8 or :16:8; do unset"),
        ({"NCCL_ALGO": "NVLSTree"}, "--deterministic-mode: got NCCL_ALGO=NVLSTree, expected algorithms without NVLS"),
        ({"NCCL_ALGO": "^NVLS"}, "--deterministic-mode: got NCCL_ALGO=^NVLS, expected algorithms without NVLS"),
        ({"NCCL_ALGO": "allreduce:ring,nvls"}, "--deterministic-mode: got NCCL_ALGO=allreduce:ring,nvls, expected algorithms without NVLS"),
        ({"NCCL_ALGO": "allreduce:nvls;allgather:ring"}, "got NCCL_ALGO=allreduce:nvls"),
        ({"NCCL_ALGO": "^Tree"}, "got NCCL_ALGO=^Tree"),
    ],
    ids=str,
)
def test_an_environment_that_sums_in_any_order_is_refused(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fix_sums(given)
    assert complaint.replace("; do unset", "; unset") in str(refused.value)


@pytest.mark.parametrize(("backend", "whose"), [("fused", "cuDNN's attention"), ("fa3", "FlashAttention 3")])
def test_kernels_that_add_in_any_order_cannot_be_asked_for(backend: Any, whose: str) -> None:
    both = TrainingConfig(deterministic_mode=True, attention_backend=backend, bf16=True)
    model = ModelConfig(head_dim=128)
    [problem] = attention_problems(Config(model=model, training=both))
    assert problem.startswith(f"--deterministic-mode: got --attention-backend {backend}, expected flash or auto: the backward pass of {whose}")
    for fine in (replace(both, attention_backend="flash"), replace(both, deterministic_mode=False), TrainingConfig()):
        assert list(attention_problems(Config(model=model, training=fine))) == []


@pytest.mark.tries("attention_backend")
def test_the_backend_reaches_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both ways of computing attention on a device."""
    config = Layout().config()
    config = replace(config, training=replace(config.training, attention_backend="fused"))
    mesh = Mesh.single()
    [stage] = build_stages(config, mesh).values()
    seen = list[tuple[str, str]]()

    def noted(name: str) -> Any:
        return lambda query, *rest, **named: seen.append((name, named.get("backend", rest[-1]))) or query.flatten(2)

    for name in ("sliding_attention", "context_attention"):
        monkeypatch.setattr(llama, name, noted(name))
    monkeypatch.setattr(llama, "is_host", lambda device: False)
    size = (stage.model.layers["0"].self_attn.heads + 2 * stage.model.layers["0"].self_attn.kv_heads) * config.model.head_dim
    for cp in (mesh.cp, replace(mesh.cp, ranks=(0, 1))):
        for block in stage.model.layers.values():
            block.self_attn.cp = cp
            block.self_attn.attend(torch.zeros(4, 1, size), stage.positions(4, torch.device("cpu")))
    layers = len(stage.model.layers)
    assert seen == [("sliding_attention", "fused")] * layers + [("context_attention", "fused")] * layers


TWICE = """
import hashlib, sys, torch
from megatron_llama.launch.launcher import Place, fix_sums
fix_sums()
from megatron_llama.engine.comm import device as devices
from megatron_llama.model.nn.attention import PLAIN_SCORES, causal_attention
from megatron_llama.model.nn.documents import Documents, document_attention
from tests.parallel.cases import Layout, trainer

def digest(*tensors):
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()

device, tokens = devices.accelerator(0), int(sys.argv[1])
with devices.deterministic(wanted=True):
    run = trainer(Place(0, 1, 0), Layout(bf16=True, documents=True, microbatches=2), device=device)
    for index in range(4):
        loss, norm = run.step(index)
    print(digest(loss, norm, *run.optimizer.masters))
    generator = torch.Generator(device).manual_seed(1)
    starts = torch.tensor([0, 10, tokens], dtype=torch.int32, device=device)
    for documents in (None, Documents(starts, starts.long().cpu().numpy())):
        found = set()
        for repeat in range(5):
            generator.manual_seed(1)
            q, k, v = (torch.randn(tokens, 1, heads, 128, device=device, dtype=torch.bfloat16, generator=generator) for heads in (32, 8, 8))
            leaves = [part.requires_grad_() for part in (q, k, v)]
            out = causal_attention(*leaves, None) if documents is None else document_attention(*leaves, documents, PLAIN_SCORES)
            found.add(digest(out, *torch.autograd.grad(out.sum(), leaves)))
        assert len(found) == 1, "attention"
        print(*found)
"""


@pytest.mark.parametrize("tokens", [pytest.param(64, marks=pytest.mark.long), pytest.param(4096, marks=pytest.mark.gpu)])
def test_two_runs_have_the_same_bits(tokens: int) -> None:
    """In processes of their own: cuBLAS reads its variable when it is first used. Some steps, and attention of one sequence of 4096 tokens, whose
    gradient is added up with atomics otherwise."""
    environ = {name: value for name, value in os.environ.items() if name not in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")}
    said = [subprocess.run([sys.executable, "-c", TWICE, str(tokens)], capture_output=True, text=True, env=environ) for _ in range(2)]
    assert all(done.returncode == 0 for done in said), said[0].stderr
    assert said[0].stdout == said[1].stdout and len(said[0].stdout.split()) == 3
