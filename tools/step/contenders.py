"""One training step of every contender: forward, backward, clipping to a global norm, AdamW. Same
weights, same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.flash3 import activate_flash3
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import init_mesh
from megatron_llama.model.init import InitialWeights
from tools.compare_sharding import Trial, random_batches
from tools.step.plain import PlainLlama

DTYPES = ("fp32", "bf16")
NAMES = (
    *("ours", "ours-compile", "hf", "hf-compile", "torch", "torch-compile"),
    *("liger", "hf-fp8", "hf-fp8-compile"),
)


@dataclass(frozen=True)
class Entry:
    """A contender and the dtype of its weights and activations."""

    name: str
    dtype: str

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.name} {self.dtype}"

    @property
    def leaves_bf16_to_torch(self) -> bool:
        """Whether its products are torch's loops over bf16, on a host that has no instructions for
        it."""
        theirs = self.dtype == "bf16" and not self.name.startswith("ours")
        return theirs and devices.is_host(devices.accelerator(0)) and not devices.multiplies_bf16()


class Contender(Protocol):
    """A model with its optimizer, and the batch that it is trained with."""

    def step(self) -> Tensor:
        """One whole step. Returns the loss before its update, 0-dim on the device."""


def configured(entry: Entry, config: Config) -> Config:
    """What a contender runs of a configuration. Only ours multiplies in FP8, in bf16 and without a
    compiler."""
    compiled = entry.name.endswith("-compile")
    bf16 = entry.dtype == "bf16"
    fp8 = config.training.fp8 if entry == Entry("ours", "bf16") else "none"
    training = replace(config.training, compile=compiled, bf16=bf16, fp8=fp8)
    return replace(config, training=training)


class Ours:
    """The real engine. Master weights and gradients are fp32 also where parameters are bf16."""

    def __init__(self, entry: Entry, config: Config, world_size: int) -> None:
        config = configured(entry, config)
        self._mesh = init_mesh(config, Place(0, world_size, 0))
        if config.training.attention_backend == "fa3":
            activate_flash3(self._mesh.device)  # for this process, which has one contender
        optimizer = config.optimizer
        self._trial = Trial(config, self._mesh)
        self._trial.load()
        if world_size > 1:
            self._trial.fill()
        self._lr = optimizer.lr
        self._clip = optimizer.clip_grad
        self._batches = [
            batch.to(self._mesh.device) for batch in random_batches(config, self._mesh)
        ]

    def step(self) -> Tensor:
        """See Contender."""
        engine = self._trial.engine
        engine.announce_step(self._lr, clip=self._clip)
        loss = self._trial.runtime.step(self._batches)
        engine.step(self._lr, clip=self._clip)
        engine.settle()
        self._trial.begin_graphs()
        return loss


class _Torch:
    """What others have in common: parameters in the compute dtype, torch's clipping, and its fused
    AdamW over all of them."""

    def __init__(self, make: Callable[[], nn.Module], entry: Entry, config: Config) -> None:
        device = devices.accelerator(0)
        self._model = _made(
            make, torch.bfloat16 if entry.dtype == "bf16" else torch.float32, device
        ).train()
        _initialize(self._model, config, device)
        self._call: Any = (
            torch.compile(self._model) if entry.name.endswith("-compile") else self._model
        )
        o = config.optimizer
        self._clip, self._parameters = o.clip_grad, list(self._model.parameters())
        groups = _groups(self._parameters, o.weight_decay)
        self._optimizer = torch.optim.AdamW(
            groups, lr=o.lr, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps, fused=True
        )
        batches = random_batches(config, Mesh.single())
        self._batches = [
            (b.tokens.t().contiguous().to(device), b.labels.t().contiguous().to(device))
            for b in batches
        ]

    def _loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return cast(Tensor, self._call(tokens, labels))

    def step(self) -> Tensor:
        """See Contender."""
        self._optimizer.zero_grad()
        total = None
        for tokens, labels in self._batches:
            loss = self._loss(tokens, labels) / len(self._batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
        if self._clip:
            nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._optimizer.step()
        assert total is not None
        return total


class Transformers(_Torch):
    """HuggingFace's LlamaForCausalLM with torch's attention (``sdpa``). ``liger``: with Liger's
    kernels in it. ``hf-fp8``: with torchao's linear layers, all but the head, with a scale for each
    tensor."""

    def __init__(self, entry: Entry, config: Config) -> None:
        from transformers import LlamaForCausalLM

        if entry.name == "liger":
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama()
        make = partial(LlamaForCausalLM, hf_config(config.model))
        in_fp8 = entry.name.startswith("hf-fp8")
        super().__init__((lambda: _with_float8(make())) if in_fp8 else make, entry, config)

    def _loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return cast(
            Tensor,
            self._call(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss,
        )


def _with_float8(model: nn.Module) -> nn.Module:
    from torchao.float8 import (  # type: ignore[import-not-found]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    options = Float8LinearConfig(emulate=devices.is_host(devices.accelerator(0)))
    convert_to_float8_training(
        model, config=options, module_filter_fn=lambda module, name: name != "lm_head"
    )
    return model


def hf_config(model: ModelConfig) -> Any:
    """The shape in HuggingFace's class."""
    from transformers import LlamaConfig

    names = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ]
    names += ["head_dim", "rms_norm_eps", "max_position_embeddings"]
    options: dict[str, Any] = {name: getattr(model, name) for name in names}
    rope = {"rope_type": "default", **(model.rope_scaling or {}), "rope_theta": model.rope_theta}
    options |= {"rope_parameters": rope, "attn_implementation": "sdpa", "use_cache": False}
    return LlamaConfig(**options)


def _made(make: Callable[[], nn.Module], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A model that is made where and as it is needed: on a host billions of weights, of which none
    is used, take minutes."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return make()
    finally:
        torch.set_default_dtype(usual)


def _initialize(model: nn.Module, config: Config, device: torch.device) -> None:
    """The same initial weights as ours."""
    source = InitialWeights(config.training.seed, config.model.initializer_range, device)
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        source(Rectangle(name, shape, (0,) * len(shape), shape, 0), parameter.data)


def _groups(parameters: Iterable[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    matrices, norms = (
        [p for p in parameters if (p.dim() > 1) is matrix] for matrix in (True, False)
    )
    return [{"params": matrices, "weight_decay": decay}, {"params": norms, "weight_decay": 0.0}]


def build(entry: Entry, config: Config, world_size: int) -> Contender:
    """The contender of an entry. ``world_size``: of how many ranks ours is one (see
    ``--emulate-dp``)."""
    if entry.name.startswith("ours"):
        return Ours(entry, config, world_size)
    if entry.name.startswith("torch"):
        return _Torch(partial(PlainLlama, config.model), entry, config)
    return Transformers(entry, config)
