"""Tables of published runs: reads a row of a CSV file as the work of a step and its measurement."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_llama.config.schema import ModelConfig
from megatron_llama.errors import ConfigError, describe
from megatron_llama.planner.hardware import MIB, Gpu, gpu_named
from megatron_llama.planner.kernels import BF16_BYTES
from megatron_llama.planner.training_job import (
    Attention,
    Machine,
    Sharding,
    TrainerTraits,
    TrainingJob,
)

Cells = dict[str, str]

NEEDED: tuple[str, ...] = (
    "model",
    "n_layers",
    "hidden",
    "heads",
    "seq",
    "gpu",
    "n_gpus",
    "quality",
)
"""Columns without which no row can be used."""
GBIT = 1e9 / 8
"""Bytes per second of a Gbit/s."""


@dataclass(frozen=True)
class PublishedRun:
    """One published run."""

    label: str
    source: str
    cells: Cells
    job: TrainingJob
    seconds: float | None
    """Seconds of a step, if seconds or tokens per second were published; None if the run was out of
    memory, or another unit was published."""
    fits: bool


def read_rows(path: Path) -> list[Cells]:
    """Return all rows. Raises ConfigError for a file that is no table, or has other columns."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or ()
            rows = [
                {key: value or "" for key, value in row.items() if key is not None}
                for row in reader
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            describe(str(path), got=error, expected="a readable CSV file", do="check the path")
        ) from None
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise ConfigError(
            describe(
                str(path),
                got=f"no column {', '.join(missing)}",
                expected="columns of published runs",
                do="add them",
            )
        )
    return rows


def runs_of(rows: Sequence[Cells]) -> Iterator[PublishedRun]:
    """Yield the rows that can be judged: not of quality C, with a known GPU and enough of a
    layout."""
    for index, cells in enumerate(rows):
        if (
            cells["quality"] == "C" or "grpo" in cells["model"]
        ):  # reinforcement learning also holds what generates
            continue
        job = job_of_row(cells)
        if job is not None:
            label = cells.get("id") or f"row {index + 2}"
            source = cells.get("group") or cells.get("source", "")
            yield PublishedRun(
                label, source, cells, job, _seconds(cells, job), cells.get("status", "ok") != "oom"
            )


def _seconds(cells: Cells, job: TrainingJob) -> float | None:
    """The measured time of a step. FLOP rates are not used, because their definitions differ."""
    if cells.get("status") == "oom":
        return None
    if (value := number(cells, "step_s")) > 0:
        return value
    speed = number(cells, "tokens_s_gpu")
    return job.total_tokens / speed / job.machine.gpus if speed > 0 else None


def number(cells: Cells, name: str, default: float = 0) -> float:
    """Return a cell as a number, or the default if it is empty or text."""
    try:
        value = float(cells.get(name) or default)
    except ValueError:
        return default
    return value if abs(value) < 1e18 else default


def whole(cells: Cells, name: str, default: int = 0) -> int:
    """Return a cell as an integer."""
    return int(number(cells, name, default))


def model_of_row(cells: Cells) -> ModelConfig:
    """Return the shape of the model. Without an inner width it is four times the hidden one."""
    hidden = whole(cells, "hidden")
    heads = whole(cells, "heads")
    vocabulary = re.search(r"\d{4,}", cells.get("vocab", ""))
    return ModelConfig(
        vocab_size=int(vocabulary.group()) if vocabulary else 50257,
        hidden_size=hidden,
        intermediate_size=max(0, whole(cells, "ffn")) or 4 * hidden,
        num_hidden_layers=whole(cells, "n_layers"),
        num_attention_heads=heads,
        num_key_value_heads=max(0, whole(cells, "kv_heads")) or heads,
        head_dim=max(1, hidden // heads),
        tie_word_embeddings=cells.get("tied_emb") == "1",
    )


def job_of_row(cells: Cells) -> TrainingJob | None:
    """Return the work of a step of a row, or None if the row does not say enough."""
    try:
        gpu = gpu_named(cells["gpu"])
    except ConfigError:
        return None
    if not all(
        whole(cells, name) > 0 for name in ("n_layers", "hidden", "heads", "seq", "n_gpus", "tp")
    ):
        return None
    model = model_of_row(cells)
    world = whole(cells, "n_gpus")
    if "1node" in cells["model"] and gpu.node < world:
        world = gpu.node
    tp, pp, vpp, cp = (max(1, whole(cells, name, 1)) for name in ("tp", "pp", "vpp", "cp"))
    dp = max(1, min(whole(cells, "dp") or world, world // (tp * pp * cp)))
    micro = max(1, whole(cells, "mbs", 1))
    batch = whole(cells, "gbs") or micro * dp
    if batch < micro * dp:  # fewer GPUs took part than the row has
        dp = max(1, batch // micro)
        world = tp * pp * cp * dp
    if tp * pp * cp * dp > world:  # the row contradicts itself
        return None
    counted = re.search(r"vp(\d+)_account_for_embedding_loss", cells["model"])
    vpp = (
        vpp
        if cells.get("vpp")
        else int(counted.group(1))
        if counted
        else _usual_chunks(cells, model.num_hidden_layers, pp)
    )
    traits = traits_of_row(cells)
    if "cross_entropy_loss_fusion" in cells["model"]:
        traits = replace(traits, logit_bytes=10.0)
    sharding, shards = _sharding(cells.get("dp_shard", ""), dp * cp)
    if "multi_dist_optimizer_instances" in cells["model"]:
        shards = max(1, shards // 2)
    part, scores = _recomputed(cells, model.num_hidden_layers)
    job = TrainingJob(
        model=model,
        machine=_machine(cells, gpu, world),
        traits=traits,
        seq=whole(cells, "seq"),
        micro_batch=micro,
        microbatches=max(1, round(batch / (micro * dp))),
        last_stage_lacks=int("uneven_pipeline" in cells["model"]),
        tp=tp,
        pp=pp,
        vpp=max(1, min(vpp, (model.num_hidden_layers + 2 * (counted is not None)) // pp)),
        cp=cp,
        dp=dp,
        sequence_parallel=tp > 1
        and (cells.get("sp") == "1" or (not cells.get("sp") and traits.family == "nemo")),
        recomputed=part,
        recomputes_scores=scores,
        ends_counted=counted is not None,
        sharding=sharding,
        shards=shards,
        precision=_precision(cells.get("precision", "")),
    )
    return job if _possible(job) else None


def _possible(job: TrainingJob) -> bool:
    """Whether every rank has something to do."""
    sizes = (size for spec in job.weights for size in spec.shape)
    return (
        job.pp <= job.model.num_hidden_layers
        and job.tokens > 0
        and job.queries > 0
        and min(sizes) > 0
    )


def _usual_chunks(cells: Cells, layers: int, pp: int) -> int:
    """Virtual stages if the row does not say: NeMo's recipes and anything called interleaved have
    some."""
    name = cells.get("framework", "").lower()
    if pp == 1 or not ("interleaved" in name or "nemo" in name):
        return 1
    return max(
        (count for count in range(1, 6) if layers % (pp * count) == 0),
        default=2 if "interleaved" in name else 1,
    )


def _machine(cells: Cells, gpu: Gpu, world: int) -> Machine:
    node = max(1, whole(cells, "gpus_per_node", gpu.node))
    domain = max(node, gpu.domain if gpu.domain > gpu.node else node)
    return Machine(gpu, world, node, domain, nic_of(cells.get("inter_node", ""), gpu, node))


def nic_of(text: str, gpu: Gpu, node: int) -> float:
    """Return the bytes per second between nodes for each GPU, from words such as ``4x100Gb/s RoCE``
    (of a node) or ``400Gb/s per GPU``."""
    if "Jean Zay" in text or "Omni-Path" in text:
        return 4 * 100 * GBIT / node
    found = re.search(r"(?:(\d+)x)?(\d+)\s*Gb", text)
    if found is None:
        return gpu.nic
    speed = int(found.group(1) or 1) * int(found.group(2)) * GBIT
    return (
        speed
        if "per GPU" in text
        else speed / node
        if found.group(1) or "node" in text or int(found.group(2)) > 400
        else speed
    )


def _sharding(text: str, ranks: int) -> tuple[Sharding, int]:
    group = re.search(r"subgroup(\d+)", text)
    shards = min(ranks, int(group.group(1))) if group else ranks
    if "zero3" in text or "fsdp" in text.lower().split() or text == "hsdp":
        return "parameters", min(shards, 8) if text == "hsdp" else shards
    if "zero2" in text:
        return "gradients", shards
    return ("optimizer", shards) if "zero1" in text else ("none", 1)


def _recomputed(cells: Cells, layers: int) -> tuple[float, bool]:
    """Share of the forward pass that is computed again, and whether it is the attention scores
    alone."""
    text = cells.get("recompute", "")
    if text == "full-some-layers":
        return min(1.0, number(cells, "recompute_layers") / layers), False
    if text.startswith("full"):
        return 1.0, False
    # Every second product and what lies between; every second layer; of IBM's scheme a third of the
    # layers.
    shares = {"selective-op": 0.45, "selective-layer": 0.5}
    if text in shares:
        return shares[text], False
    if text == "selective":
        scores = whole(cells, "tp", 1) * whole(cells, "pp", 1) > 1
        return (0.0, True) if scores else (0.33, False)
    return 0.0, False


def _precision(text: str) -> str:
    words = (("nvfp4", "nvfp4"), ("mx", "mxfp8"), ("rowwise", "rowwise"), ("fp8", "fp8"))
    return next((name for word, name in words if word in text), "bf16")


def _writes_scores(cells: Cells) -> bool:
    """Whether a row of Megatron's tests writes attention scores: because it says so, or because its
    old container has no deterministic flash attention."""
    notes = cells.get("notes", "")
    old = "dracooci" in cells.get("source", "")
    return "attn=unfused" in notes or ("attn=nan" in notes and (old or "impl=local" in notes))


def says_recompute(cells: Cells) -> bool:
    """Return whether the row says what is recomputed; recipes are published without it."""
    return cells.get("recompute", "") != "" and not cells["recompute"].startswith(
        ("recipe", "unknown")
    )


def workspaces(cells: Cells) -> float:
    """Return the bytes that libraries keep in a row of Megatron's tests.

    cuBLAS has a workspace for each handle: eight of 4 MiB where results have to be deterministic or
    the GPU is newer than Ampere, else 8. Megatron's own layers have two handles (in fp16 a third)
    and keep the scores of a microbatch in a buffer. Transformer Engine has a workspace of its own
    beside the two, and three more for the streams of products that overlap with tensor
    parallelism."""
    notes = cells.get("notes", "")
    gpu = cells.get("gpu", "")
    handle = (32.0 if "det=True" in notes or "A100" not in gpu else 8.125) * MIB
    if "impl=local" in notes:
        scores = (
            whole(cells, "mbs", 1)
            * whole(cells, "heads")
            // max(1, whole(cells, "tp"))
            * whole(cells, "seq") ** 2
        )
        return (3 if "fp16" in cells.get("precision", "") else 2) * handle + BF16_BYTES * scores
    own = (4 if "A100" in gpu else 32) * MIB
    return 2 * handle + own * (4 if "tp_overlap" in cells["model"] else 1)


FAMILIES = (
    ("aleph", ("aa-scaling",)),
    ("deepspeed", ("deepspeed zero", "deepspeed(hf)")),
    (
        "megatron",
        (
            "megatron-deepspeed",
            "megatron-lm 2021",
            "megatron-lm 2022",
            "megatron-lm 285068c8",
            "megascale",
            "megatron-llama",
        ),
    ),
    ("nemo", ("nemo", "megatron-core", "megatron-bridge", "meta internal")),
    ("composer", ("composer",)),
    ("fsdp1", ("fsdp1",)),
    ("yafsdp", ("yafsdp",)),
    ("torchtitan", ("torchtitan", "kempner", "fsdp2")),
    ("intern", ("internevo",)),
)
"""Families of trainers by words of the column ``framework``; the first match counts."""


OTHERS = TrainerTraits(reduces_every_microbatch=False, wide_context_gradients=False)
"""What all other trainers have in common."""


def traits_of_row(cells: Cells) -> TrainerTraits:
    """Return what the named trainer is known to do."""
    name = cells.get("framework", "").lower()
    words = cells.get("attention", "")
    family = next(
        (family for family, parts in FAMILIES if any(part in name for part in parts)), "other"
    )
    recent = any(word in name for word in ("285068c8", "megascale", "megatron-llama"))
    old = family in ("megatron", "aleph")
    attention: Attention = "flash"
    if "torch" in words:
        attention = "plain"
    elif (
        _writes_scores(cells)
        or "softmax" in words
        or words == "fused"
        or (not words and family == "megatron" and not recent)
    ):
        attention = "fused"
    elif "triton" in words:
        attention = "triton"
    elif "v1" in words:
        attention = "flash1"
    compiled = "compile" in name and "no compile" not in name
    traits = replace(
        OTHERS,
        family=family,
        attention=attention,
        fused_norms=not (family == "aleph" and "RMS" not in words),
        compiled=compiled or family == "nemo",
        overlap_data=not old
        or "megascale" in name
        or "overlapped" in cells.get("optimizer", "").lower(),
        overlap_tensor="async" in name or "megascale" in name or family == "nemo",
        gradient_bytes=2
        if "PURE" in cells.get("precision", "") or family in ("megatron", "intern", "composer")
        else 4,
        gated=cells.get("gated_mlp", "1") == "1",
        biased=old or "megatron-core ci" in name,
        learned_positions=family == "megatron" or "megatron-core ci" in name,
        dropout=family == "megatron" or "megatron-core ci" in name,
        packed="packed" in name or "SFT" in cells.get("framework", ""),
    )
    if family == "nemo" and "megatron-core ci" not in name:
        return replace(traits, gradient_bytes=2, kept_gradient_bytes=2)
    if family in ("torchtitan", "fsdp1", "yafsdp"):
        return replace(traits, state_bytes=10)
    if family == "aleph":
        norms = 0.0 if traits.fused_norms else 24.0
        return replace(
            traits,
            gradient_bytes=2,
            kept_gradient_bytes=2,
            whole_logits=True,
            logit_bytes=20.0,
            norm_bytes=norms,
        )
    return replace(traits, gradient_bytes=2) if family == "deepspeed" else traits
