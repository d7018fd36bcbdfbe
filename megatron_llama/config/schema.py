"""Every option of the trainer, as frozen dataclasses.

The string under a field is its help text, its line in ``docs/options.md`` and its YAML comment.
Model fields carry the names of the HuggingFace ``config.json``; everything else carries Megatron's
flag names (``--micro-batch-size`` is ``micro_batch_size`` in YAML). ``parse.py`` reads
them, ``plans/checks`` has what can be wrong with their combinations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_llama.config.offload import OffloadConfig, ZenFlowConfig

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
"""The names of ``plans/schedule/builders.py``."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model, in the words of the HuggingFace ``config.json``."""

    preset: str | None = None
    """Take all model fields from a known model (`--model llama3-8b`; `inspect presets` lists them).
    Flags given with it win."""
    model_type: str = "llama"
    """The family, by the name that config.json has for it: what its models always have, and how
    HuggingFace names their tensors."""
    vocab_size: int = 0
    """Rows of the embedding, without padding. 0: the tokenizer's size."""
    hidden_size: int = 0
    """Width of the residual stream."""
    intermediate_size: int = 0
    """Width of the gated MLP."""
    num_hidden_layers: int = 0
    """Number of transformer blocks."""
    num_attention_heads: int = 0
    """Number of query heads."""
    num_key_value_heads: int = 0
    """Number of key/value heads (grouped-query attention). 0: as many as query heads."""
    head_dim: int = 0
    """Width of one attention head. 0: hidden_size / num_attention_heads."""
    max_position_embeddings: int = 0
    """Longest sequence the model is meant for. 0: --seq-length."""
    rms_norm_eps: float = 1e-5
    """Epsilon inside the square root of RMSNorm."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary scaling as in config.json: rope_type `llama3` (factor, low_freq_factor,
    high_freq_factor, original_max_position_embeddings), `linear` or `dynamic` (factor), `yarn`
    (factor, original_max_position_embeddings) or `longrope` (short_factor, long_factor,
    original_max_position_embeddings). With --sliding-window and --rope-local-base-freq it is that
    of layers without a window."""
    tie_word_embeddings: bool = False
    """Use the embedding as the output head."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights (normal; norm weights start at 1)."""
    attention_bias: bool = False
    """Biases of the query, key, value and output projections."""
    add_qkv_bias: bool = False
    """Biases of the query, key and value projections alone, as in Qwen2."""
    mlp_bias: bool = False
    """Biases of the MLP's projections."""
    qk_norm: Literal["none", "head", "projection"] = "none"
    """RMSNorm of queries and keys before they are rotated: of each head with one weight for all
    heads (Qwen3, Gemma 3), or of all heads together (OLMo 2)."""
    norm_position: Literal["before", "after", "both"] = "before"
    """Where attention and MLP have their norms: before them (LLaMA), behind them (OLMo 2), or both
    (Gemma)."""
    apply_layernorm_1p: bool = False
    """Norms multiply by 1 + weight, as in Gemma."""
    hidden_act: str = "silu"
    """Activation of the gated MLP: silu (SwiGLU) or gelu_pytorch_tanh."""
    embedding_multiplier: float = 1.0
    """Factor of the embeddings, rounded to the precision of the computation. Gemma has the square
    root of hidden_size."""
    query_pre_attn_scalar: float = 0.0
    """Attention scores are divided by the square root of this. 0: head_dim."""
    attn_logit_softcapping: float = 0.0
    """Attention scores x become c * tanh(x / c). 0: they stay as they are."""
    final_logit_softcapping: float = 0.0
    """The head's logits x become c * tanh(x / c). 0: they stay as they are."""
    sliding_window: int = 0
    """Positions that a query sees, its own and those before it. 0: all."""
    layer_types: tuple[str, ...] = ()
    """`full_attention` or `sliding_attention` for each layer. Default: --sliding-window counts in
    all layers."""
    partial_rotary_factor: float = 1.0
    """Share of each head, its first dims, that is rotated."""
    rope_local_base_freq: float = 0.0
    """Base of the rotary frequencies in layers with a window, which are not scaled. 0: the same
    frequencies in all layers."""
    bos_token_id: int | None = None
    """Written to the exported config.json. Default: the tokenizer's."""
    eos_token_id: int | None = None
    """Written to the exported config.json; ends generation. Default: the tokenizer's."""
    pad_token_id: int | None = None
    """Written to the exported config.json. Lookups do not train the row of this token, unless
    --train-pad-embedding says so; -1 is the last row. HuggingFace's reward models read the score at
    the last token that is not this one. Default: none, and all rows are trained."""
    num_labels: int = 0
    """0: a language model. 1: a reward model, which has a score in the place of the output head:
    HuggingFace's ForSequenceClassification."""
    make_vocab_size_divisible_by: int = 128
    """The embedding is padded inside to a multiple of this times the tensor-parallel size. Never
    exported."""


MODEL_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Fields of the model that nothing derives."""
MODEL_SHAPE = (
    "model_type",
    "vocab_size",
    *MODEL_SIZES,
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "attention_bias",
    "add_qkv_bias",
    "mlp_bias",
    "qk_norm",
    "norm_position",
    "num_labels",
)
"""Fields of the model that decide which weights it has, and their shapes."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread over processes. dp = processes / (tp x cp x pp)."""

    tensor_model_parallel_size: int = 1
    """Processes that share each layer (tp)."""
    pipeline_model_parallel_size: int = 1
    """Processes that each hold a part of the layers (pp)."""
    virtual_pipeline_model_parallel_size: int = 1
    """Model chunks per pipeline process, for the interleaved schedule. zb-v always has 2."""
    pipeline_layer_split: tuple[int, ...] = ()
    """Transformer blocks of each stage, first to last (with virtual stages: of each chunk).
    Default: equal shares."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer of the first stage when sharing out the layers."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the head and loss as one layer of the last stage when sharing out the layers."""
    context_parallel_size: int = 1
    """Processes that share each sequence (cp)."""
    cp_comm_type: Literal["all_gather", "ring"] = "all_gather"
    """How context-parallel ranks see each other's keys and values: all at once, or around a ring in
    cp - 1 steps. Layers with a window always send only what it reaches, straight to the ranks that
    need it."""
    sequence_parallel: bool = False
    """Split norms and residual stream along the sequence over the tp processes. Ignored with tp
    1."""
    pipeline_schedule: PipelineSchedule = "1f1b"
    """Order of forward and backward passes over the pipeline stages. zb-*: weight gradients fill
    the bubbles."""
    data_parallel_sharding_strategy: Literal[
        "no_shard", "optim", "optim_grads", "optim_grads_params", "auto"
    ] = "optim"
    """What each data-parallel rank holds a share of: nothing (plain DDP), the optimizer state
    (reduce once per step), state and gradients (reduce after every microbatch), or parameters as
    well (gather before use). auto: by memory and microbatches."""
    data_parallel_shard_size: int = 0
    """Shard within so many neighbouring data-parallel ranks and replicate across (hybrid sharding).
    0: within all."""
    param_slots: str = "default"
    """Block-sized buffers for whole parameters under optim_grads_params: a number, `all`, `auto`
    (as many as fit into memory), or `default` (2; all with pipeline stages). More buffers mean
    fewer gathers."""
    grad_slots: int = 2
    """Buffers for whole gradients that blocks take turns in, under optim_grads and
    optim_grads_params."""
    prefetch_bytes: int = 0
    """Most bytes of parameters that are gathered ahead of their use. 0: as many as the parameter
    slots hold."""
    exchange_chunk_bytes: int = 1_048_576
    """Largest piece in which the gloo backend sends gathers and reductions."""
    reduce_bucket_size: int = 40_000_000
    """Elements in one data-parallel message. Messages hold whole parameters: one exceeds this only
    when a single parameter does."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations to compute again in backward instead of keeping them: norm and SwiGLU outputs
    (selective), or whole blocks (full)."""
    recompute_num_layers: str = "all"
    """Blocks of each stage that recompute: `all`, a number, or `auto` (the fewest with which the
    run fits into the device's memory)."""
    grad_reduce_in_bf16: bool = False
    """Send gradients in bfloat16 between data-parallel ranks. Over microbatches they are still
    accumulated in fp32."""
    high_priority_stream_groups: tuple[Literal["tp", "cp", "dp", "pp", "none"], ...] = (
        "tp",
        "cp",
        "dp",
    )
    """On a GPU: groups of ranks whose NCCL kernels go before waiting kernels of the computation;
    `none` for no group. Messages that are waited for at once run in the computation's own stream
    and have no priority. Not measured yet."""
    nccl_pp_max_ctas: int = 4
    """On a GPU: most thread blocks, each on a multiprocessor, of NCCL's kernels between pipeline
    stages. 0: as many as NCCL takes. Not measured yet."""
    distributed_timeout_minutes: float = 10.0
    """A rank that waits longer ends the run, on all ranks, with an error that says which one
    stopped where."""


@dataclass(frozen=True)
class TrainingConfig:
    """Batches, length of the run, precision, seed."""

    seq_length: int = 2048
    """Tokens per sample."""
    micro_batch_size: int = 1
    """Samples in one forward pass of one data-parallel rank."""
    global_batch_size: int = 0
    """Samples in one optimizer step. 0: micro_batch_size x dp (no gradient accumulation)."""
    rampup_batch_size: tuple[int, ...] = ()
    """START INCREMENT SAMPLES: the global batch size grows from START to --global-batch-size, by
    INCREMENT at a time, over the first SAMPLES samples."""
    train_iters: int = 0
    """Optimizer steps in the whole run, resumed steps included."""
    train_samples: int = 0
    """Samples in the whole run, instead of --train-iters: as many whole steps as they are enough
    for."""
    epochs: float = 0.0
    """Passes over the training samples, instead of --train-iters; `0.5` is half of one. Each sample
    is read so many times: steps go on from one pass into the next, and the last step has what is
    left. With `--on-bad-step rollback` samples that are left out are not made up for: the run has
    fewer steps."""
    exit_interval: int = 0
    """Save and end after every iteration that is a multiple of this. 0: go on to the end of the
    run."""
    exit_duration_in_mins: float = 0.0
    """Save and end when the run has taken so many minutes, with exit status 0. 0: however long it
    takes."""
    exit_zero_on_signal: bool = False
    """Exit status 0 for a run that saves and ends because of Control-C or SIGTERM, for schedulers
    that take any other status for a failure. Without it 130 and 143, as a shell has them."""
    z_loss_weight: float = 0.0
    """Weight of the square of the logarithm of the softmax's denominator, which keeps logits from
    drifting: it is trained, and is no part of the losses that are printed."""
    seed: int = 1234
    """Seeds the initial weights and the order of the samples."""
    bf16: bool = False
    """Compute and communicate parameters in bfloat16; master weights, gradients and moments stay
    fp32. Off: fp32 throughout."""
    fp16: bool = False
    """Compute in float16 with a dynamic loss scale; master weights, gradients and moments stay
    fp32."""
    initial_loss_scale: float = 65536.0
    """Loss scale at the start, with --fp16."""
    min_loss_scale: float = 1.0
    """The loss scale never falls below this."""
    loss_scale_window: int = 1000
    """Steps without overflow after which the loss scale doubles."""
    hysteresis: int = 2
    """Overflows in a row before the loss scale halves. Each overflowing step is skipped."""
    fp64: bool = False
    """Compute in double precision: the reference of the parity checks, not for training."""
    attention_backend: Literal["auto", "flash", "fused"] = "auto"
    """Whose kernels compute attention on a GPU: torch's flash attention, cuDNN's (fused), or the
    faster one that is sound there. Packed documents, and layers with a window, are always computed
    by flash attention. On CPUs it changes nothing."""
    deterministic_mode: bool = False
    """Compute every sum in a fixed order on GPUs too, so that the same run gives the same bits:
    torch's deterministic algorithms, flash attention instead of cuDNN's, a fixed workspace for
    cuBLAS, no NVLink SHARP in NCCL. Slower. On CPUs it changes no bit: a run is always the same
    there."""
    compile: bool = False
    """Compile what layers compute between matrix products (torch.compile): each becomes one pass
    over its tensors. The first step takes a minute longer; without a compiler on the machine a
    warning is printed and nothing else changes. Not worth it for tiny models."""
    on_bad_step: Literal["stop", "skip", "rollback"] = "stop"
    """After a step whose loss or gradient norm is not finite, or whose loss is a spike: stop with
    an error; leave the weights as they are and go on with the next samples (needs --clip-grad); or
    go back to the newest checkpoint and leave out that step's samples when they come again. What is
    left out is listed in `skipped.jsonl` next to the checkpoints."""
    loss_spike_factor: float = 0.0
    """A loss beyond so many times the mean of the last good steps is a spike. 0: none is."""
    loss_spike_window: int = 100
    """Good steps in that mean. Before there are as many, no loss is a spike."""
    max_bad_steps: int = 10
    """With skip and rollback: more bad steps than this in a row, without a good step between them
    (rollback: without a checkpoint), end the run with an error. So do more returns than this in a
    row by `--on-bad-checkpoint rollback`."""
    check_weight_hash_across_dp_replicas_interval: int = 200
    """Every so many iterations compare, bit by bit, what several ranks hold alike: gathered
    parameters, replicas of shards, norms under tensor parallelism, tied embeddings. A difference
    ends the run with the parameter and the rank. Ranks exchange 16 bytes for each tensor; a run in
    which no rank holds what another does compares nothing. 0: never."""
    eval_interval: int = 0
    """Evaluate before the first iteration, every so many iterations and after the last. A resumed
    run also evaluates where it begins, and prints that loss only. 0: never."""
    eval_iters: int = 10
    """Global batches per evaluation; the same validation samples every time, fewer when the split
    is smaller. 0: the whole split."""
    early_stop_patience: int = 0
    """End the run after so many evaluations in a row whose loss is not below the lowest before. 0:
    never. With checkpoints at the iterations of evaluations `best` is the one with the lowest
    loss."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The update rule, learning-rate schedule, clipping."""

    optimizer: Literal["adam", "muon", "schedule_free_adamw"] = "adam"
    """adam: AdamW. muon: the weight matrices of the blocks are updated by orthogonalised momentum
    (torch.optim.Muon), everything else (embedding, head, norms, biases) by AdamW.
    schedule_free_adamw: AdamW whose weights are averaged, with --lr-decay-style constant."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = "linear"
    """Shape of the decay from lr to min_lr. WSD (warm-up, stable, decay): lr until the last
    --lr-wsd-decay-iters of --lr-decay-iters."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the decay at the end of WSD."""
    lr_wsd_decay_iters: int = 0
    """Iterations of the decay at the end of WSD."""
    lr_decay_iters: int = 0
    """Iterations over which the rate decays, warm-up included. 0: train_iters."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up from 0."""
    lr_decay_samples: int = 0
    """Samples over which the rate decays, warm-up included, instead of --lr-decay-iters. 0: all of
    the run, where its length or anything of the schedule is given in samples and nothing of the
    schedule in iterations."""
    lr_warmup_samples: int = 0
    """Samples of linear warm-up, instead of --lr-warmup-iters."""
    lr_wsd_decay_samples: int = 0
    """Samples of the decay at the end of WSD, instead of --lr-wsd-decay-iters."""
    lr_warmup_fraction: float = 0.0
    """Share of the decay that is linear warm-up from 0, instead of its length."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on every parameter of two or more dims (embeddings included, norms
    not)."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the square root of the second moment."""
    exp_avg_dtype: Literal["fp32", "bf16", "8bit"] = "fp32"
    """Precision in which AdamW's first moment is kept. An update computes in fp32, and rounds what
    it keeps. 8bit: a byte for each element and a scale for each 64 of them, in matrices."""
    exp_avg_sq_dtype: Literal["fp32", "bf16", "8bit"] = "fp32"
    """The same of the second moment. Both take 8 bytes of each parameter in fp32, 4 in bf16 (with
    --adam-beta2 at most 0.996, or what is kept would never fall), and 2.125 in 8 bits."""
    muon_momentum: float = 0.95
    """Decay of Muon's momentum."""
    muon_nesterov: bool = True
    """Muon orthogonalises the gradient moved towards its momentum; without it the momentum
    itself."""
    muon_num_ns_steps: int = 5
    """Newton-Schulz iterations of each of Muon's updates."""
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How --lr becomes the rate of a matrix with m rows and n columns. match_rms_adamw: times 0.2
    sqrt(max(m, n)), so that an update is as large as AdamW's and both take the same --lr. original:
    times sqrt(max(1, m / n)), whose --lr is about 0.02."""
    clip_grad: float = 1.0
    """Largest global L2 norm of the gradient. 0: no clipping."""
    freeze: tuple[str, ...] = ()
    """Patterns (`*` and `?`) of HuggingFace parameter names that are not trained: `--freeze
    'model.embed_tokens.*' 'model.layers.0.*'`. Weights that are stored as one, such as q, k and v,
    are frozen together."""
    train_pad_embedding: bool = False
    """Train the embedding of the model's pad_token_id as that of any token, as Megatron does.
    Otherwise its lookups give it no gradient, as in HuggingFace (`padding_idx`): only weight decay
    and the gradient of a tied head change it, and in a new model it begins as zeros."""
    param_group: tuple[str, ...] = field(default=(), metadata={"repeats": True})
    """Options of some parameters: `--param-group 'embed*: lr=1e-3, weight_decay=0'`, several values
    or several times. Before the colon stands a pattern (`*` and `?`) of HuggingFace parameter
    names, or of their ends from a dot on; behind it `lr` or `lr_mult` (times --lr), `min_lr`
    (default: in proportion), `weight_decay` (also of norms and biases) and `init_std` (of initial
    weights). Weights that are stored as one, such as q, k and v, have the same."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA): the model is frozen, and small additions to its projections are
    trained."""

    lora_rank: int = 0
    """Rank of the additions: a projection W becomes W + alpha / rank * B A. 0: none, the model
    itself is trained."""
    lora_alpha: float = 16.0
    """Weight of the additions, times the rank."""
    lora_dropout: float = 0.0
    """0 only: nothing in a step is random."""
    lora_target_modules: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Projections that get an addition, by HuggingFace's names. Default: all, also where a family
    has several of them in one, as Phi-3."""


@dataclass(frozen=True)
class DataConfig:
    """The token stream and the tokenizer it was made with."""

    data_path: tuple[str, ...] = ()
    """Prefix of an indexed dataset: PREFIX.bin and PREFIX.idx, without suffix. Or several, each
    after its weight, in a blend: `0.7 web 0.3 code` takes seven samples of web to three of code,
    however large they are. Without weights each contributes what it has. Or text that is tokenized
    while the run trains on it: a folder, a pattern or a URL of `.jsonl` or `.parquet` files. PREFIX
    may be a URL, too, such as `s3://bucket/docs`: then the blocks are read that samples need."""
    data_cache_path: str | None = None
    """Folder on a disk of this machine that keeps the tokens of examples, and blocks of datasets
    behind a URL. Runs share it. Default: `~/.cache/megatron_llama/data`."""
    data_cache_gib: float = 64.0
    """GiB of blocks that this folder holds at most: what was not used for longest goes."""
    split: str = "969,30,1"
    """Shares of the documents for training, validation and test, in file order. `100,0,0` means no
    evaluation."""
    data_order: Literal["shuffled", "sequential"] = "shuffled"
    """Order of the training samples: a pure function of seed and consumed samples, whatever the
    layout."""
    megatron_data_order: bool = False
    """Read the training samples in the order in which Megatron-LM reads them: its documents,
    samples and blend, shuffled from --seed for a run of --train-iters or --train-samples, to the
    token. For a run that goes on from one of Megatron's checkpoints."""
    stream_key: str = "text"
    """Field or column with the text, where --data-path names text."""
    stream_window: int = 1024
    """Samples among which those of a text are shuffled. A rank keeps its share of twice as many in
    memory."""
    stream_lanes: int = 64
    """Lanes that a text is dealt out to. With a multiple of --micro-batch-size x dp no two of the
    data-parallel ranks read the same text. A run resumes with the same number of them."""
    stream_workers: int = 2
    """Processes of each rank that read and tokenize text."""
    tokenizer_model: str | None = None
    """A `.model` of sentencepiece or LLaMA, HF `tokenizer.json`, Mistral's `tekken.json`, a folder
    with one of them, or a name on the hub, `org/name` or `org/name@revision`. Default: what the
    dataset or HF folder says. Needed only to turn text into ids and back."""
    tokenizer_type: (
        Literal[
            "SentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer", "PretrainedFromHF"
        ]
        | None
    ) = None
    """Megatron's name for what the tokenizer has to be. Default: found from the file."""
    reset_position_ids: bool = False
    """Positions restart at 0 after each end-of-document token."""
    reset_attention_mask: bool = False
    """Tokens attend only within their own document."""
    eod_mask_loss: bool = False
    """Leave the positions whose input is the end-of-document token out of the loss."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Where weights come from and where they go."""

    save: str | None = None
    """Folder for checkpoints (`iter_0000100/`), `latest_checkpointed_iteration.txt` and
    `log.jsonl`."""
    steal_save: bool = False
    """Take --save over from a run that writes there: that run ends with an error, and saves no
    more. Without it a start beside such a run is refused."""
    save_interval: int = 0
    """Save every so many iterations. 0: once, at the end. SIGUSR1, or a file named `save-now` in
    the folder, saves at once."""
    save_first_step: bool = False
    """Save after the first step too: what goes wrong with saving is seen at once, not after
    hours."""
    save_retain: int = 0
    """Keep so many of the newest checkpoints, and the best one (`best`, by validation loss). 0:
    keep all."""
    save_retain_interval: int = 0
    """With --save-retain, keep also those whose iteration is a multiple of this. 0: none
    besides."""
    on_bad_checkpoint: Literal["stop", "warn", "rollback"] = "stop"
    """When a save finds weights or moments that are infinite or NaN, also where no token reads
    them: stop with an error that names them, and keep no such checkpoint; warn, and keep it with a
    mark (it is never `best`, the newest good one stays besides, and `--load auto` passes over it
    unless the run that starts has `warn`); or keep none, go back to the newest good checkpoint, and
    do the same steps again."""
    async_save: bool = False
    """Write checkpoints in a background process of each rank: training stops only while the state
    is copied to memory of the host, twice 12 bytes for each parameter of the rank's shard at most.
    Linux only."""
    load: str | None = None
    """Resume from the newest complete checkpoint of this folder, or from this `iter_...` folder
    itself. An empty folder equal to --save is a fresh start. `auto`: the newest complete checkpoint
    of --save whose files are all there, else a fresh start. A HuggingFace folder, one of Megatron
    (`mp_rank_00`) or Meta gives its weights alone; with Megatron's `torch_dist` and its optimizer
    a run goes on, into another --save."""
    finetune: bool = False
    """Take only the weights of --load: the run begins at iteration 0 with the first samples and a
    fresh optimizer."""
    load_optim: bool = True
    """Take the optimizer's state of --load too. With --no-load-optim the run goes on where it was
    with a fresh optimizer."""
    init_from_hf: str | None = None
    """HuggingFace folder (config.json, *.safetensors), or a model's name on the hub, `org/name` or
    `org/name@revision` (needs `pip install '.[hub]'`): gives the model fields and the initial
    weights."""
    ignore_hf_config_fields: tuple[str, ...] = ()
    """Names of fields in a HuggingFace config.json that do not change what the model computes.
    Fields that are not known here are refused otherwise."""
    resize_embeddings: bool = False
    """Give the weights of --init-from-hf, or those of --load (with --finetune where it is a
    checkpoint), rows for all tokens of the tokenizer, or --vocab-size rows: each new row of
    embedding and head is the mean of the old ones. Rows are never taken away."""
    export_hf: str | None = None
    """When all iterations are done, write the model into this folder as HuggingFace has it: weights
    in bfloat16 with --bf16, else in float32, config.json, tokenizer and chat template. Needs no
    --save. Replaces an earlier export, and nothing else."""


@dataclass(frozen=True)
class LogConfig:
    """What is printed and written while training."""

    log_interval: int = 100
    """Print and write a log line every so many iterations; the last iteration always."""
    log_format: Literal["compact", "megatron"] = "compact"
    """The log line on the terminal: loss, gradient norm, learning rate, batch, time of an iteration
    under Megatron's names, tokens a second, MFU, memory and remaining time; or every field of
    Megatron's line in its order, for programs that parse it, with others behind. As Megatron's, its
    loss is the mean since the last line, without skipped steps; elsewhere it is that of the step.
    `log.jsonl` has the loss of the step either way."""
    log_straggler: bool = False
    """Add to every log line how long ranks compute in a step (its time without waiting for
    communication): least, median, most, and which rank that is."""
    progress_bar: bool = True
    """Show a progress bar when the output is a terminal."""
    sample_interval: int = 0
    """Every so many iterations, and after the last, print how the model continues each
    --sample-prompt. 0: never."""
    sample_prompt: tuple[str, ...] = ()
    """Texts for --sample-interval; `sft` and `align` take each as a user's message."""
    sample_tokens: int = 32
    """Tokens of such a continuation, always the most probable one; the end token ends it
    earlier."""
    job_name: str | None = None
    """Name of the run: first line of the log, and the run's name in TensorBoard."""
    profile: bool = False
    """Trace some steps with torch's profiler: `rank-R.trace.json.gz` in --profile-dir, on a GPU
    also a snapshot of its memory."""
    profile_step_start: int = 10
    """Iterations before tracing begins."""
    profile_step_end: int = 12
    """The last iteration that is traced."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that trace."""
    profile_dir: str = "profile"
    """Folder for traces."""
    record_timeline: str | None = None
    """Write what every rank did when into this file, from --profile-step-start to
    --profile-step-end: passes, messages, waits and updates, for ui.perfetto.dev and `plan compare`.
    Compressed where the name ends in `.gz`."""
    open_metrics: str | None = None
    """Serve the newest numbers to Prometheus while the run lasts: rank 0 answers
    `http://127.0.0.1:PORT/metrics` in OpenMetrics text. Only this machine sees it; to let others
    in, give `ADDRESS:PORT`, `0.0.0.0:PORT` for all addresses of the machine."""
    mlflow_experiment: str | None = None
    """Write every log line and evaluation as a run of this experiment of MLflow, under --job-name.
    Needs `pip install '.[mlflow]'`."""
    mlflow_tracking_uri: str | None = None
    """MLflow's server or store. Default: MLFLOW_TRACKING_URI, or MLflow's own choice."""
    trackio_project: str | None = None
    """Write every log line and evaluation as a run of this project of Trackio, under --job-name,
    into TRACKIO_DIR or the Space that TRACKIO_SPACE_ID names. Needs `pip install '.[trackio]'`."""
    wandb_project: str | None = None
    """Write every log line and evaluation to this project of Weights & Biases. Needs `pip install
    '.[wandb]'`."""
    wandb_exp_name: str | None = None
    """Name of the run there. Default: --job-name."""
    wandb_save_dir: str | None = None
    """Folder for the files that wandb keeps on this machine. Default: its own choice."""
    tensorboard_dir: str | None = None
    """Write every log line and evaluation as TensorBoard events, under Megatron's names, into this
    folder, with --job-name into a folder of that name in it. Needs `pip install
    '.[tensorboard]'`."""
    tensorboard_queue_size: int = 1000
    """Events that may wait in memory to be written; a log line that adds more waits."""
    log_timers_to_tensorboard: bool = False
    """Also the time of an iteration, exposed communication, tokens per second, TFLOP/s."""
    log_batch_size_to_tensorboard: bool = False
    """Also the global batch size."""
    log_validation_ppl_to_tensorboard: bool = False
    """Also the perplexity of evaluations."""


@dataclass(frozen=True)
class LaunchConfig:
    """The machines a YAML is written for; --dry-run reads it, and --auto-parallel where the
    launcher does not say."""

    nodes: int = 0
    """Machines."""
    gpus_per_node: int = 0
    """Processes on each machine."""


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    zenflow: ZenFlowConfig = field(default_factory=ZenFlowConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
