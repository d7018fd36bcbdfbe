"""Options of functions that are no part of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AutoParallelConfig:
    """Let the planner choose the layout; with --dry-run it is only printed."""

    auto_parallel: bool = False
    """Take the fastest layout that is planned to fit: tp, pp with its schedule and virtual stages,
    cp, data-parallel sharding, micro-batch, recomputation. What is given of these stays as it is.
    Needs --global-batch-size."""
    gpu: str | None = None
    """The kind to plan for, as with `plan`. Default: what this machine has."""
    nic_gbit: float = 0.0
    """Gbit/s between nodes for each GPU. 0: what machines with this GPU usually have."""
    coefficients: str | None = None
    """A file of `plan calibrate`: plan with the rates that were measured instead of those that are
    shipped."""


@dataclass(frozen=True)
class ModelFolderConfig:
    """The trained model to use, in one process."""

    load: str | None = None
    """Model folder of any format: checkpoints of a run (any layout; the newest complete one is
    read), HuggingFace, Megatron, Meta."""
    init_from_hf: str | None = None
    """HuggingFace folder, the same as --load FOLDER; or a model's name on the hub, `org/name` or
    `org/name@revision` (needs `pip install '.[hub]'`)."""
    tokenizer_model: str | None = None
    """Tokenizer file or folder. Default: the one saved with the checkpoint or lying in the model
    folder."""
    hf_config: str | None = None
    """A config.json of HuggingFace, for what a Megatron or Meta folder does not say of its
    model."""
    ignore_hf_config_fields: tuple[str, ...] = ()
    """Names of fields in a HuggingFace config.json that do not change what the model computes.
    Fields that are not known here are refused otherwise."""
    vocab_size: int = 0
    """Number of token ids, for a folder that stores only a padded vocabulary. 0: what the folder or
    its tokenizer says."""
    bf16: bool = False
    """Compute in bfloat16."""


@dataclass(frozen=True)
class SamplingConfig:
    """How new tokens are drawn."""

    max_new_tokens: int = 64
    """Tokens to add to each prompt; the end token ends it earlier."""
    temperature: float = 0.8
    """Divides the logits before sampling. 0: always the most probable token."""
    top_k: int = 0
    """Sample among the k most probable tokens. 0: no limit."""
    top_p: float = 0.95
    """Sample among the most probable tokens that together have this probability."""
    seed: int = 1234
    """Same seed, same text."""


@dataclass(frozen=True)
class PlanConfig:
    """Find the fastest layout for a cluster that is not here; options of a layout that are given
    stay as they are."""

    action: Literal["search", "compare", "calibrate", "trace"] = "search"
    """compare: a run that pretrain --record-timeline has recorded, next to its plan. calibrate:
    measure these devices and their links, started like a run, and write a file for --coefficients.
    trace: the step of the layout that a run's options describe, on --gpus processes, operator by
    operator. May stand first, without its name: `plan compare FILE`."""
    file: str | None = None
    """What was recorded, with `plan compare`, or the file to write, with `plan calibrate`. May
    stand after the action without its name."""
    gpus: int = 0
    """GPUs of the whole cluster."""
    gpu: str = "h100"
    """Their kind: v100-16, v100, a100-40, a100, h100, h100-96, h200, b200, gb200 or gb300."""
    nic_gbit: float = 0.0
    """Gbit/s between nodes for each GPU. 0: what machines with this GPU usually have."""
    coefficients: str | None = None
    """A file of `plan calibrate`, instead of --gpu: plan with the device and the rates that were
    measured."""
    seconds: float = 120.0
    """How long `plan calibrate` may take, about. Of less it makes less exact coefficients."""
    top: int = 10
    """Layouts to show."""
    explain: str | None = None
    """Show one layout only, as the table writes them:
    `tp4/pp4/mbs1/interleaved/v5/optim/recompute-none`."""
    json: str | None = None
    """Also write everything into this file."""
    html: str | None = None
    """Also draw it into this file, for a browser: the pipeline, memory, the table; with `plan
    compare` measured and planned on one axis."""
    svg: str | None = None
    """Also draw the pipeline of the fastest layout into this SVG file; with `plan compare` measured
    and planned on one axis."""
