"""The references of a case: the same training in one process, and with transformers.

The one process is the trainer itself, with all options of the layout at their defaults. The
training with transformers' model and torch's AdamW, and the learning rates, follow the formulas of
the documented options and share no code with the trainer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from megatron_llama.checkpoint.model_folders.hf.stacked_experts import by_file_names, stacked_places
from megatron_llama.config.parse import options_of
from megatron_llama.config.schema import Config, LoraConfig, OptimizerConfig
from megatron_llama.data.loader import Batch
from megatron_llama.engine.offload_options import OffloadConfig, ZenFlowConfig
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.plan.lora import adapter_shapes
from megatron_llama.prove.case import Case, Note
from megatron_llama.prove.compare import History
from megatron_llama.prove.given import SECTIONS

DTYPES = ("bf16", "fp16", "fp64", "fp8", "fp8_gather")
ADAM_EPS = 1e-6
"""Epsilon of Adam: a thousand times the rounding of a gradient's elements in fp32, and a thousandth
of the elements."""
LORA_EPS = 1e-2
"""The same for low-rank additions in half precision. B begins at 0, so A's second gradient depends
on Adam's update of B by the first. With an epsilon of 1e-6 it was up to 30 % from fp32 in bf16, and
a run up to 6 times as far as one process in some tensor. With this epsilon: 4 %, and 1.2 times. In
FP8 Adam's first update, all signs, makes the second gradient 47 % wrong from 5 %."""
SPREAD = frozenset(
    name for name, option in options_of(SECTIONS).items() if option.rules.changes == "messages"
)
"""Options of the layout, which do not change what a run computes."""
OFFLOAD = {field.name for field in fields(OffloadConfig)} | {
    field.name for field in fields(ZenFlowConfig)
}


SAMPLES_OF_ROUTERS = (
    "losses of routers are of whole samples, and in transformers each document is a sequence of "
    "its own"
)


class NotComparedError(Exception):
    """Raised if a check has nothing to compare a case with. The message is the reason."""


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings of transformers and PEFT on their own future and on small models, but
    no errors."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def last_line(error: Exception) -> str:
    """Return the last line of an error's message."""
    said = str(error).strip().splitlines()
    return said[-1].strip() if said else type(error).__name__


def steady(case: Case) -> Case:
    """Return the case with an epsilon of Adam that is above the rounding of a gradient.

    With a smaller epsilon an element whose gradient is all rounding makes a full step in either
    direction. Two right runs then differ by a thousand times more than rounding, which a bound
    would have to allow."""
    given = case.options.get("adam_eps", OptimizerConfig().adam_eps)
    assert isinstance(given, float)
    eps = max(given, ADAM_EPS)
    steadier = replace(case, options={**case.options, "adam_eps": eps})
    smoothed = smooth(steadier).options
    notes = []
    smoothed_eps = smoothed["adam_eps"]
    here = f"{eps:g}" if smoothed_eps == eps else f"{eps:g}, and {smoothed_eps:g} in half precision"
    if here != f"{given:g}":
        why = "an element whose gradient is all rounding would make a full step, in any run"
        notes.append(Note("--adam-eps", f"{given:g}", here, why))
    chosen = case.options.get("num_experts_per_tok")
    if smoothed.get("num_experts_per_tok") != chosen:
        here = f"{chosen}, and {smoothed['num_experts_per_tok']} in half precision"
        why = "a token between two experts would go to either by rounding, in any run"
        notes.append(Note("--num-experts-per-tok", f"{chosen}", here, why))
    return replace(steadier, notes=(*case.notes, *notes))


def smooth(case: Case) -> Case:
    """Return the case as it is compared in half precision. With low-rank additions, and in FP8, it
    gets an epsilon with which Adam's update is about as far from fp32 as the gradient. Updates are
    small with this epsilon; they are compared in fp32. Tokens have all experts: which of them a
    token has is compared in fp32, too."""
    if not any(case.options.get(name) for name in ("bf16", "fp16", "grad_reduce_in_bf16")):
        return case
    options = dict(case.options)
    eps = options["adam_eps"]
    assert isinstance(eps, float)
    if options.get("lora_rank") or options.get("fp8", "none") != "none":
        options["adam_eps"] = max(eps, LORA_EPS)
    if options.get("num_experts"):
        options["num_experts_per_tok"] = options["num_experts"]
    return replace(case, options=options)


def in_fp32(case: Case) -> Case:
    """Return the case with every number in fp32, including gradients that are sent."""
    left_out = (*DTYPES, "grad_reduce_in_bf16")
    return _without(case, left_out)


def one_process(case: Case, *, fp64: bool = False) -> Case:
    """Return the same training in one process and one batch, in the case's precision or in fp64.

    Of the modes of offload only zenflow is kept, since it trains differently from AdamW."""
    left_out = set(SPREAD)
    if case.options.get("optimizer_offload", "none") != "zenflow":
        left_out |= OFFLOAD
    if fp64:
        left_out |= set(DTYPES)
    single = _without(case, left_out)
    size = _one_batch(case)
    options = {**single.options, "micro_batch_size": size} | ({"fp64": True} if fp64 else {})
    return replace(single, name=f"{case.name}, one process", options=options, world_size=1)


def _without(case: Case, names: Iterable[str]) -> Case:
    options = {name: value for name, value in case.options.items() if name not in set(names)}
    return replace(case, options=options)


def _one_batch(case: Case) -> int:
    """Return the largest micro-batch that divides every step of the case: the whole batch, unless
    the batch grows."""
    whole = int(case.options.get("global_batch_size", 0) or 0)  # type: ignore[call-overload]
    if not whole:
        spread = math.prod(
            int(case.options.get(f"{axis}_parallel_size", 1))  # type: ignore[call-overload]
            for axis in ("tensor_model", "pipeline_model", "context")
        )
        micro = int(case.options.get("micro_batch_size", 1))  # type: ignore[call-overload]
        whole = micro * (case.world_size // spread)
    ramp: Sequence[int] = case.options.get("rampup_batch_size") or ()  # type: ignore[assignment]
    return math.gcd(whole, *ramp[:2])


def learning_rates(
    optimizer: OptimizerConfig, train_iters: int, batches: Sequence[int]
) -> tuple[float, ...]:
    """Return the learning rates of the first steps of a run: linear warm-up from 0, then the decay,
    as in docs/options.md. ``batches`` are the samples of each step.

    ``optimizer`` is that of a resolved configuration."""
    rates = []
    samples = 0
    for step, batch in enumerate(batches):
        in_samples = optimizer.lr_decay_samples > 0
        at = samples if in_samples else step
        whole = optimizer.lr_decay_samples or optimizer.lr_decay_iters or train_iters
        warmup = (
            optimizer.lr_warmup_samples if in_samples else optimizer.lr_warmup_iters
        ) or optimizer.lr_warmup_fraction * whole
        last = optimizer.lr_wsd_decay_samples if in_samples else optimizer.lr_wsd_decay_iters
        rates.append(_rate(optimizer, at, warmup, whole, last))
        samples += batch
    return tuple(rates)


def _rate(optimizer: OptimizerConfig, at: int, warmup: float, whole: int, last: int) -> float:
    peak, least = optimizer.lr, optimizer.min_lr
    style: str = optimizer.lr_decay_style
    if at < warmup:
        return peak * at / warmup
    if style == "constant":
        return peak
    if at >= whole:
        return least
    share = (at - warmup) / (whole - warmup)
    if style == "WSD":
        style = optimizer.lr_wsd_decay_style
        share = max(0.0, (at - (whole - last)) / last)
    height: float = {
        "linear": 1 - share,
        "cosine": (1 + math.cos(math.pi * share)) / 2,
        "exponential": 2 * 0.5**share - 1,
        "minus_sqrt": 1 - math.sqrt(share),
    }[style]
    return least + (peak - least) * height


@dataclass(frozen=True)
class Sequences:
    """Documents as separate sequences, padded at their ends, so that transformers needs no mask."""

    tokens: Tensor
    """[n, s] int64."""
    labels: Tensor
    positions: Tensor
    weights: Tensor
    """[n, s] fp32; 0 where a label does not count."""


def sequences(microbatches: Iterable[Batch], *, whole: bool = False) -> Sequences:
    """Return the documents of a step's samples, without documents in which no label counts.
    ``whole``: each sample has to be one document. Raises NotComparedError for other samples, and
    for a step in which no label counts."""
    kept: list[tuple[Tensor, ...]] = []
    for batch in microbatches:
        length, samples = batch.tokens.shape
        positions = torch.arange(length).unsqueeze(-1).expand(length, samples)
        columns = (
            batch.tokens,
            batch.labels,
            positions if batch.position_ids is None else batch.position_ids,
            torch.ones(length, samples) if batch.loss_mask is None else batch.loss_mask,
        )
        for sample in range(samples):
            sizes = [length]
            if batch.document_ids is not None:
                ids = batch.document_ids[:, sample]
                sizes = torch.unique_consecutive(ids, return_counts=True)[1].tolist()
            if whole and len(sizes) > 1:
                raise NotComparedError(SAMPLES_OF_ROUTERS)
            documents = zip(
                *(torch.split(column[:, sample], sizes) for column in columns), strict=True
            )
            kept += [document for document in documents if bool(document[3].any())]
    if not kept:
        raise NotComparedError("a step has no label that counts")
    padded = [pad_sequence(list(column), batch_first=True) for column in zip(*kept, strict=True)]
    return Sequences(*padded)


def not_in_transformers(case: Case, config: Config) -> str:
    """Return the reason why transformers has no counterpart of a case; empty if it has one."""
    if find_spec("transformers") is None:
        return "transformers is not installed (pip install transformers)"
    if config.lora.lora_rank and find_spec("peft") is None:
        return "peft, which has LoRA for transformers, is not installed (pip install peft)"
    if case.options.get("neftune_noise_alpha"):
        return "its noise is drawn otherwise (--neftune-noise-alpha)"
    if config.offload.optimizer_offload == "zenflow":
        return "torch has no ZenFlow (--optimizer-offload zenflow)"
    scaling = (config.model.rope_scaling or {}).get("rope_type")
    documents = config.data.reset_attention_mask or case.options.get("packing")
    if documents and scaling in ("dynamic", "longrope"):
        return f"its {scaling} frequencies follow the length of each document"
    chunks = config.model.attention_chunk_size and config.data.reset_attention_mask
    if chunks and not config.data.reset_position_ids:
        return "it counts chunks from the start of each document (--reset-position-ids does so)"
    return ""


def train_transformers(
    folder: Path, config: Config, batches: Sequence[Sequence[Batch]], rates: Sequence[float]
) -> History:
    """Train transformers' model of a folder with torch's AdamW and ``clip_grad_norm_``, in fp32 on
    the microbatches of each step, and return its numbers."""
    with quiet():
        model, trained = _model(folder, config)
    optimizer = config.optimizer
    matrices = [parameter for parameter in trained.values() if parameter.dim() > 1]
    vectors = [parameter for parameter in trained.values() if parameter.dim() < 2]
    adamw = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": optimizer.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=optimizer.lr,
        betas=(optimizer.adam_beta1, optimizer.adam_beta2),
        eps=optimizer.adam_eps,
    )
    losses: list[float] = []
    norms: list[float] = []
    gradients: list[Mapping[str, Tensor]] = []
    for microbatches, rate in zip(batches, rates, strict=True):
        adamw.zero_grad(set_to_none=False)
        loss, trains = _loss(model, microbatches, config)
        trains.backward()  # type: ignore[no-untyped-call]
        found = {
            name: torch.zeros_like(parameter).double()
            if parameter.grad is None
            else parameter.grad.double()
            for name, parameter in trained.items()
        }
        gradients.append(by_file_names(config.model, found))
        limit = optimizer.clip_grad or math.inf
        norms.append(float(nn.utils.clip_grad_norm_(trained.values(), limit)))
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        losses.append(float(loss.detach()))
    return History(tuple(losses), tuple(norms), tuple(gradients), None)


def _loss(model: nn.Module, microbatches: Iterable[Batch], config: Config) -> tuple[Tensor, Tensor]:
    """Return the mean loss over the labels that count, and the trained loss with the z-loss and
    those of routers."""
    training = config.training
    batch = sequences(microbatches, whole=training.has_router_losses)
    # Without a mask transformers takes positions that restart for several documents.
    mask = torch.ones_like(batch.tokens)
    routers = {"output_router_logits": True} if training.has_router_losses else {}
    output = model(
        batch.tokens, attention_mask=mask, position_ids=batch.positions, use_cache=False, **routers
    )
    logits = output.logits
    counted = batch.weights.sum()
    nll = nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), reduction="none"
    )
    loss = (nll * batch.weights.flatten()).sum() / counted
    trained = loss
    if training.z_loss_weight:
        squares = logits.logsumexp(-1).square()
        trained = loss + training.z_loss_weight * (squares * batch.weights).sum() / counted
    if training.has_router_losses:
        from megatron_llama.prove.router_losses import router_losses  # of few models

        trained = trained + router_losses(output.router_logits, len(batch.tokens), config)
    return loss, trained


def _model(folder: Path, config: Config) -> tuple[nn.Module, Mapping[str, nn.Parameter]]:
    """Return transformers' model of a folder, and the trained parameters by HuggingFace's names.
    Raises NotComparedError."""
    from transformers import AutoModelForCausalLM

    attention = "eager" if config.model.attn_logit_softcapping else "sdpa"
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=attention, local_files_only=True
        )
    except Exception as error:  # its checks of a configuration raise many kinds
        raise NotComparedError(f"transformers refuses the model: {last_line(error)}") from error
    model = model.float().train()
    if config.optimizer.train_pad_embedding:
        model.get_input_embeddings().padding_idx = None
    if config.lora.lora_rank:
        model, named = _with_adapters(model, config)
    else:
        named = dict(model.named_parameters())
    # What is stacked is frozen as one: any of its matrices says whether.
    of_files = {place.tensor: name for name, place in stacked_places(config.model).items()}
    trained = {}
    for name, parameter in named.items():
        own = of_files.get(name, name)
        wanted = not any(fnmatchcase(own, pattern) for pattern in config.optimizer.freeze)
        parameter.requires_grad_(wanted)
        if wanted:
            trained[name] = parameter
    return model, trained


def _with_adapters(model: Any, config: Config) -> tuple[nn.Module, Mapping[str, nn.Parameter]]:
    """Return the model with PEFT's additions, and their parameters by the names of checkpoints. The
    additions start with the values that the trainer draws from the seed."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    lora: LoraConfig = config.lora
    adapted: Any = get_peft_model(
        model,
        PeftConfig(
            r=lora.lora_rank,
            lora_alpha=lora.lora_alpha,  # type: ignore[arg-type]
            target_modules=list(lora.lora_target_modules),
        ),
    )
    parameters = dict(adapted.named_parameters())
    source = InitialWeights.of(config)
    named = {}
    for name, shape in adapter_shapes(config.model, lora).items():
        parameter = parameters[f"base_model.model.{name.replace('.weight', '.default.weight')}"]
        with torch.no_grad():
            source(Rectangle(name, shape, (0,) * len(shape), shape, 0), parameter)
        named[name] = parameter
    return adapted, named
