"""Options of the commands that are no part of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from megatron_llama.config.schema import PipelineSchedule

Format: TypeAlias = Literal["hf", "native", "megatron", "megatron-llama", "meta", "torch_dist"]
"""The formats of model folders."""


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
    memory and schedule; write nothing. What is missing on this machine (files, packages, devices,
    memory) is a warning, with `strict` an error."""
    world_size: int = 0
    """Processes that --dry-run plans for. 0: the `launch:` block of the YAML, else the
    environment."""


@dataclass(frozen=True)
class EvaluateConfig:
    """What a model is measured on: text, tasks, or without them the validation split of
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
    limit: float = 0.0
    """So many questions of each of --tasks; below 1: such a share of them. 0: all."""
    output: str | None = None
    """Also write the results of --tasks into this JSON file, as lm-evaluation-harness has them."""


@dataclass(frozen=True)
class GenerateConfig:
    """Continue prompts with a trained model."""

    prompt: tuple[str, ...] = ("",)
    """One or more texts to continue."""
    prompt_file: str | None = None
    """File with a text to continue on each line, instead of --prompt."""
    batch_size: int = 8
    """Prompts that are continued side by side. More are faster and take more memory; texts stay the
    same."""
    stop: tuple[str, ...] = ()
    """Texts that end a continuation, as the end token does. They are not part of it."""
    json: bool = False
    """Print a JSON object on a line for each prompt, when its text is done: prompt, text (the
    continuation alone), token_ids (its tokens; with --stop, those of the stop text too),
    finish_reason (stop: by an end token or --stop; length: by --max-new-tokens or the model's
    longest sequence)."""


@dataclass(frozen=True)
class ChatConfig:
    """Talk with a trained model: a line is a message, and /help lists the commands."""

    system: str | None = None
    """What the model is told before the conversation."""
    chat_template: str | None = None
    """File with the jinja template of a conversation. Default: the one in the tokenizer's
    folder."""


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
class MergeConfig:
    """Add low-rank additions to the weights of their model, and write those as a HuggingFace
    folder, in one process without a GPU."""

    src: str
    """Model folder of any format, or checkpoint of a run with --lora-rank. May stand first, without
    its name: `merge SRC DST`."""
    dst: str
    """Folder to write; it appears whole or not at all."""
    adapter: str | None = None
    """Folder with the additions as HuggingFace's PEFT has them. Default: those of the checkpoint
    itself."""
    ignore_hf_config_fields: tuple[str, ...] = ()
    """Names of fields in a HuggingFace config.json that do not change what the model computes.
    Fields that are not known here are refused otherwise."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the written weights. auto: the model's."""
    max_shard_bytes: int = 5_000_000_000
    """Largest weight file, unless a single tensor is larger."""
    workers: int = 2
    """Files that are written at the same time."""
    overwrite: bool = False
    """Replace an earlier conversion in the target folder. Anything else there is refused all the
    same."""


@dataclass(frozen=True)
class ConvertConfig:
    """Write a model folder of any format in any other, in one process without a GPU: weights,
    configuration, tokenizer."""

    src: str
    """Folder to read. May stand first, without its name: `convert SRC DST --to FORMAT`."""
    dst: str
    """Folder to write; it appears whole or not at all."""
    to: Format
    """Format to write."""
    source_format: Format | None = None
    """Format of the source (also `--from`). Default: found from its content."""
    hf_config: str | None = None
    """A config.json of HuggingFace, for what the source does not say of its model."""
    ignore_hf_config_fields: tuple[str, ...] = ()
    """Names of fields in a HuggingFace config.json that do not change what the model computes.
    Fields that are not known here are refused otherwise."""
    vocab_size: int = 0
    """Number of token ids, for a source that stores only a padded vocabulary. 0: what the source or
    its tokenizer says."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the written weights (native: what a run computes in; its masters are fp32). auto:
    the source's."""
    tensor_model_parallel_size: int = 1
    """Tensor-parallel size to write (megatron formats), for which the vocabulary is padded
    (torch_dist), or number of consolidated files (meta)."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages to write (megatron formats)."""
    pipeline_layer_split: tuple[int, ...] = ()
    """Transformer blocks of each stage, first to last. Default: equal shares."""
    make_vocab_size_divisible_by: int = 128
    """The written embedding is padded to a multiple of this times the tensor-parallel size
    (megatron formats, torch_dist)."""
    megatron_layout: Literal["transformer_engine", "local", "legacy"] = "transformer_engine"
    """Names to write for Megatron-LM: those of its --transformer-impl, or of the models before
    Megatron Core (legacy)."""
    max_shard_bytes: int = 5_000_000_000
    """Largest weight file (hf), unless a single tensor is larger."""
    workers: int = 2
    """Files that are written at the same time."""
    overwrite: bool = False
    """Replace an earlier conversion in the target folder. Anything else there is refused all the
    same."""


@dataclass(frozen=True)
class VerifyConfig:
    """Compare two models: weights bit for bit, configurations field by field, logits within
    rounding. Exit status 1: they differ."""

    a: str
    """Model folder of any format. May stand first, without its name: `verify A B`."""
    b: str
    """The other one."""
    from_a: Format | None = None
    """Format of the first folder. Default: found from its content."""
    from_b: Format | None = None
    """Format of the second folder."""
    hf_config_a: str | None = None
    """A config.json of HuggingFace, for what the first folder does not say of its model."""
    hf_config_b: str | None = None
    """The same for the second folder."""
    ignore_hf_config_fields: tuple[str, ...] = ()
    """Names of fields in a HuggingFace config.json that do not change what the model computes.
    Fields that are not known here are refused otherwise."""
    vocab_size: int = 0
    """Number of token ids, for a format that stores only a padded vocabulary. 0: what the folders
    say."""
    prompt_tokens: int = 0
    """Length of the text whose logits are compared. 0: 64 tokens more than
    original_max_position_embeddings and than the window, 128 without a rotary scaling and a window.
    Fewer are faster, and may miss a wrong scaling or window."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Show a pipeline schedule, for passes that all last equally long."""

    pipeline_schedule: PipelineSchedule = "1f1b"
    """Order of forward and backward passes over the pipeline stages."""
    pipeline_model_parallel_size: int = 4
    """Pipeline ranks (pp)."""
    virtual_pipeline_model_parallel_size: int = 1
    """Model chunks per rank, for the interleaved schedule. zb-v always has 2."""
    num_microbatches: int = 8
    """Microbatches of a step: global_batch_size / (micro_batch_size x dp)."""
    svg: str | None = None
    """Also draw the schedule into this SVG file."""
    html: str | None = None
    """Also write the drawing and the numbers into this page, for a browser."""


@dataclass(frozen=True)
class ProveConfig:
    """What is proven, on how many processes of this machine, and how long it may take."""

    world_size: int = 0
    """Processes of the run. 0: the `launch:` block of the YAML, else two data-parallel ranks."""
    ranks: int = 8
    """Most processes here. Axes that do not fit into them together are shown in turn."""
    budget: str = "3m"
    """How long it may take, about: `90s`, `3m`, `1h`. Checks for which no time is left are listed
    as not run."""
    output: str | None = None
    """Folder for `prove.json`, and for `prove.html` of a configuration. Default: what is printed is
    all."""
    fuzz: int = 0
    """Instead of a configuration: draw so many over all options from --seed, and prove each. One
    that fails is made small, and the command that runs it alone is printed."""
    steps_from: tuple[str, ...] = ()
    """Instead of a configuration that shrinks: a finished run's log, `LOG` or `LOG OTHER`
    (`log.jsonl`, Megatron-LM's or torchtitan's text, TensorBoard events), against another log, or
    without one against the first steps of the configuration on one process. Says from which step on
    they differ by more than rounding."""
    log_dtype: Literal["fp32", "tf32", "fp16", "bf16"] | None = None
    """Type of the matrix products of the runs whose logs are compared; of two types the coarser
    one. Default: that of the configuration, else bf16."""


@dataclass(frozen=True)
class ReportConfig:
    """Which runs are shown, and where."""

    runs: tuple[str, ...] = ()
    """Folders of runs (their `--save`), finished or not, or a `log.jsonl`. Several are compared."""
    html: str | None = None
    """Write this page: one file below 1 MB that needs nothing but a browser. Default: the numbers
    are printed, and that is all."""
    json: str | None = None
    """Also write the numbers of the page into this file."""
    coefficients: str | None = None
    """A file of `plan calibrate`: the speeds with which steps are planned. Default: those of the
    run's GPU, if the planner knows it."""


@dataclass(frozen=True)
class NoOptions:
    """This command has no options."""
