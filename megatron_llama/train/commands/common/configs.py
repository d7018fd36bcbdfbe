"""Options of the trainer's commands that are no part of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_llama.option import Check, option


@dataclass(frozen=True)
class QuickstartConfig:
    """Where the example run goes, and how long it is."""

    output: str = "runs/quickstart"
    """Folder for everything that is written. Started again with the same one, an interrupted run is
    resumed, and a finished one is only evaluated and sampled."""
    train_iters: int = 0
    """Steps of the training. 0: those of the recipe, `quickstart.yaml` in the folder."""


@dataclass(frozen=True)
class DryRunConfig:
    """Check a run without starting it."""

    dry_run: Literal["no", "yes", "strict"] = "no"
    """Do what the run does up to its first step, in one process, and print parameters, layout,
    memory and schedule; write nothing. Things missing on this machine (files, packages, devices,
    memory) are warnings, with `strict` errors."""
    world_size: int = 0
    """Processes that --dry-run plans for, spares of --max-restarts-in-place included. 0: the
    `launch:` block of the YAML, else the environment."""


@dataclass(frozen=True)
class EvaluateConfig:
    """The data of a measurement: text, tasks, or without them the validation split of
    --data-path."""

    text: tuple[str, ...] = ()
    """Files or folders as `preprocess --input` takes them, tokenized with the model's tokenizer and
    laid end to end."""
    seq_length: int = 0
    """Tokens per sample. 0: 2048, or as many as the model has positions or the text has tokens, if
    that is less."""
    eval_iters: int | None = None
    """Measure on so many global batches, as a run with this option does; 0: on all whole samples.
    Default: on every token, in a last sample that is shorter where tokens are left. The first token
    has nothing before it and does not count."""
    global_batch_size: int = 0
    """Samples of a global batch. 0: micro_batch_size x dp."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness instead of a text or dataset, by name or as their YAML files:
    those that ask for log-likelihoods. --micro-batch-size requests are computed at once.
    --seq-length is how many tokens the model reads of one, by default all its positions; what is
    longer loses its beginning. Needs `pip install '.[lm-eval]'`."""
    num_fewshot: int | None = None
    """Examples in front of each question of --tasks. Default: as each task says."""
    limit: float = option(
        0.0,
        check=Check(
            lambda value: 0 <= value < 1 or (value >= 1 and value % 1 == 0),
            "a number of questions, or a share of them below 1",
            "correct it",
        ),
    )
    """So many questions of each of --tasks; below 1: such a share of them. 0: all."""
    output: str | None = None
    """Also write the results of --tasks into this JSON file, as lm-evaluation-harness has them."""


@dataclass(frozen=True)
class ExportConfig:
    """Write a checkpoint as a HuggingFace folder, in one process."""

    load: str = ""
    """Folder with checkpoints (any layout); the newest complete one is read."""
    output: str = ""
    """Folder to write: model.safetensors (or shards with an index), config.json,
    generation_config.json and the tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the written weights. auto: bfloat16 for a run with --bf16, else float32."""
    tokenizer_model: str | None = None
    """Tokenizer file or folder. Default: the one saved with the checkpoint."""
    adapter: bool = False
    """For a run with --lora-rank, write the low-rank additions alone, as HuggingFace's PEFT has
    them. Without it they are added to the weights."""
    overwrite: bool = False
    """Replace a model in the output folder that no export has written. An earlier export is
    replaced without it; the folder from which the run took its weights never is."""


@dataclass(frozen=True)
class NoOptions:
    """This command has no options."""
