"""Every option of the trainer, as frozen dataclasses.

The string under a field is its help text, its line in ``docs/options.md`` and its YAML comment.
``option`` says what its value has to be and what ``prove`` does with it (``option.py``).
Model fields carry the names of the HuggingFace ``config.json``; everything else carries Megatron's
flag names (``--micro-batch-size`` is ``micro_batch_size`` in YAML). ``parse.py`` reads them,
``train/setup/checks`` has what can be wrong with their combinations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron_llama.config.limits import (
    LARGEST_EXPERTS,
    LARGEST_LAYERS,
    LARGEST_RANKS,
    LARGEST_SIZE,
)
from megatron_llama.engine.offload_options import OffloadConfig, ZenFlowConfig
from megatron_llama.option import (
    ANY_NUMBER,
    KEPT,
    NOT_NEGATIVE,
    POSITIVE,
    Check,
    is_count,
    kept,
    left_out,
    lowered,
    option,
    scaled,
    section,
)

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
"""The names of ``schedule/builders.py``."""

# The treatment by prove of options of which several are alike.
OWN_TEXT = left_out("prove reads text of its own, with a tokenizer of its own")
OWN_START = left_out("prove writes the weights to begin with")
OWN_FOLDERS = left_out("prove writes checkpoints and exports of its own")
FEW_STEPS = left_out("prove runs a few steps")
ADAMW_ALONE = left_out("prove holds updates against AdamW's")
ADAMW_IN_FP32 = left_out("prove holds updates against AdamW's in fp32")
NOT_COMPUTED = left_out("it changes nothing that is computed")
NO_GPU = kept("on CPUs it changes nothing")
NO_BAD_STEP = kept("seen only if a step here is bad")
NO_OVERFLOW = kept("seen only if a gradient here overflows")
PADDED = scaled("padded if yours is, and split over the tensor-parallel ranks that there are")
TURNS = scaled("blocks take turns in them or have their own, as yours")
LIKE_STEPS = scaled("in the same relation to the steps that are run")


def _share_below_one(do: str) -> Check:
    return Check(lambda value: 0 <= value < 1, "a number in [0, 1)", do)


def _ends_in_port(address: str) -> bool:
    """Whether a text is ``PORT`` or ``ADDRESS:PORT``."""
    match = re.fullmatch(r"(?:.+:)?(\d{1,5})", address)
    return match is not None and 0 < int(match[1]) < 65536


@section()
@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model, in the words of the HuggingFace ``config.json``."""

    preset: str | None = option(None, small=left_out("it stands for the fields of the model"))
    """Take all model fields from a known model (`--model llama3-8b`; `inspect presets` lists them).
    Flags given with it win."""
    model_type: str = option("llama", small=KEPT)
    """The family, by the name that config.json has for it: what its models always have, and how
    HuggingFace names their tensors."""
    vocab_size: int = option(0, largest=LARGEST_SIZE, small=PADDED)
    """Rows of the embedding, without padding. 0: the tokenizer's size."""
    hidden_size: int = option(
        0,
        largest=LARGEST_SIZE,
        small=scaled("no rule depends on the width; it is heads x head_dim if yours is"),
    )
    """Width of the residual stream."""
    intermediate_size: int = option(
        0, largest=LARGEST_SIZE, small=scaled("no rule depends on the width")
    )
    """Width of the gated MLP."""
    num_hidden_layers: int = option(
        0,
        largest=LARGEST_LAYERS,
        small=scaled("every kind of block, and one or several to a stage, as yours"),
    )
    """Number of transformer blocks."""
    num_attention_heads: int = option(
        0,
        largest=LARGEST_SIZE,
        small=scaled("1 or more to a rank, and to a key/value head, as yours"),
    )
    """Number of query heads."""
    num_key_value_heads: int = option(
        0, largest=LARGEST_SIZE, small=scaled("fewer than tp (copies), as many or more, as yours")
    )
    """Number of key/value heads (grouped-query attention). 0: as many as query heads."""
    head_dim: int = option(
        0,
        largest=LARGEST_SIZE,
        small=scaled("no rule depends on it; as many dims in proportion are rotated"),
    )
    """Width of one attention head. 0: hidden_size / num_attention_heads."""
    max_position_embeddings: int = option(
        0,
        largest=LARGEST_SIZE,
        small=scaled(
            "shorter or longer than the sequence, or in proportion to rope_scaling, as yours"
        ),
        draws=(8, 64),
    )
    """Longest sequence the model is meant for. 0: --seq-length."""
    rms_norm_eps: float = option(1e-5, check=POSITIVE, small=KEPT, draws=(1e-06, 0.001))
    """Epsilon inside the square root of RMSNorm."""
    rope_theta: float = option(10000.0, check=POSITIVE, small=KEPT, draws=(100.0, 1e6))
    """Base of the rotary frequencies."""
    rope_scaling: dict[str, Any] | None = option(
        None, small=scaled("it changes frequencies and positions of the shorter sequence")
    )
    """Rotary scaling as in config.json: rope_type `llama3` (factor, low_freq_factor,
    high_freq_factor, original_max_position_embeddings), `linear` or `dynamic` (factor), `yarn`
    (factor, original_max_position_embeddings) or `longrope` (short_factor, long_factor,
    original_max_position_embeddings). With --sliding-window and --rope-local-base-freq it is that
    of layers without a window."""
    tie_word_embeddings: bool = option(False, small=KEPT)
    """Use the embedding as the output head."""
    initializer_range: float = option(0.02, small=KEPT, draws=(0.005, 0.1))
    """Standard deviation of the initial weights (normal; norm weights start at 1)."""
    attention_bias: bool = option(False, small=KEPT, draws=(True,))
    """Biases of the query, key, value and output projections."""
    add_qkv_bias: bool = option(False, small=KEPT, draws=(True, False))
    """Biases of the query, key and value projections alone, as in Qwen2."""
    mlp_bias: bool = option(False, small=KEPT, draws=(True,))
    """Biases of the MLP's projections."""
    qk_norm: Literal["none", "head", "projection", "l2"] = option(
        "none", small=KEPT, draws=("none", "head", "projection")
    )
    """RMSNorm of queries and keys before they are rotated: of each head with one weight for all
    heads (Qwen3, Gemma 3), of all heads together (OLMo 2), or, `l2`, of each head without a weight,
    in layers that rotate (LLaMA 4)."""
    norm_position: Literal["before", "after", "both"] = option(
        "before", small=KEPT, draws=("before", "after", "both")
    )
    """Where attention and MLP have their norms: before them (LLaMA), behind them (OLMo 2), or both
    (Gemma)."""
    apply_layernorm_1p: bool = option(False, small=KEPT, draws=(True, False))
    """Norms multiply by 1 + weight, as in Gemma."""
    hidden_act: str = option("silu", small=KEPT, draws=("silu", "gelu_pytorch_tanh"))
    """Activation of the gated MLP: silu (SwiGLU) or gelu_pytorch_tanh."""
    embedding_multiplier: float = option(
        1.0, check=POSITIVE, small=scaled("it follows from hidden_size"), draws=(2.5,)
    )
    """Factor of the embeddings, rounded to the precision of the computation. Gemma has the square
    root of hidden_size."""
    query_pre_attn_scalar: float = option(
        0.0, small=scaled("in the same proportion to head_dim"), draws=(5.0, 20.0)
    )
    """Attention scores are divided by the square root of this. 0: head_dim."""
    attn_logit_softcapping: float = option(0.0, small=KEPT, draws=(3.0, 0.0))
    """Attention scores x become c * tanh(x / c). 0: they stay as they are."""
    final_logit_softcapping: float = option(0.0, small=KEPT, draws=(4.0, 0.0))
    """The head's logits x become c * tanh(x / c). 0: they stay as they are."""
    sliding_window: int = option(0, small=scaled("in the same proportion to the sequence"))
    """Positions that a query sees, its own and those before it. 0: all."""
    layer_types: tuple[str, ...] = option((), small=scaled("every kind of layer"))
    """`full_attention`, `sliding_attention` or `chunked_attention` for each layer. Default:
    --sliding-window, or --attention-chunk-size, counts in all layers."""
    attention_chunk_size: int = option(
        0, largest=LARGEST_SIZE, small=scaled("shorter than the sequence or not, as yours")
    )
    """Positions of a chunk: a query sees those of its own chunk, up to itself, in layers of
    `chunked_attention`. Layers of `full_attention` beside them do not rotate (LLaMA 4). 0: no layer
    has chunks."""
    attn_temperature_tuning: bool = option(False, small=KEPT)
    """In layers that do not rotate, queries are multiplied by 1 + attn_scale * log(1 + floor((p +
    1) / floor_scale)), p their position (LLaMA 4)."""
    floor_scale: int = option(
        8192,
        largest=LARGEST_SIZE,
        check=POSITIVE,
        small=scaled("in proportion to the sequence"),
        draws=(2, 5),
    )
    """See --attn-temperature-tuning."""
    attn_scale: float = option(0.1, small=KEPT)
    """See --attn-temperature-tuning."""
    partial_rotary_factor: float = option(1.0, check=POSITIVE, small=KEPT, draws=(0.25, 0.5))
    """Share of each head, its first dims, that is rotated."""
    rope_local_base_freq: float = option(0.0, small=KEPT, draws=(50.0,))
    """Base of the rotary frequencies in layers with a window, which are not scaled. 0: the same
    frequencies in all layers."""
    num_experts: int = option(
        0, largest=LARGEST_EXPERTS, small=scaled("of every token some are chosen, as of yours")
    )
    """Experts of a sparse block: MLPs, of which a router chooses some for each token. 0: every
    block is dense."""
    num_experts_per_tok: int = option(
        0, largest=LARGEST_EXPERTS, small=scaled("one or several, some or all, as yours")
    )
    """Experts that are chosen for a token: those with the highest probability."""
    moe_intermediate_size: int = option(
        0, largest=LARGEST_SIZE, small=scaled("no rule depends on the width")
    )
    """Width of one expert. Mixtral's config.json calls it intermediate_size."""
    norm_topk_prob: bool = option(False, small=KEPT, draws=(True, False))
    """The probabilities of a token's experts are divided by their sum before they multiply the
    experts' outputs. Mixtral always does so."""
    decoder_sparse_step: int = option(1, check=POSITIVE, small=scaled("every kind of block"))
    """Every so many blocks one has experts: 2 is blocks 1, 3, 5 and so on."""
    mlp_only_layers: tuple[int, ...] = option((), small=scaled("every kind of block"))
    """Blocks that are dense all the same, counted from 0."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = option("softmax", small=KEPT)
    """Probabilities of experts from the router's logits: over all of them, or of each by itself
    (LLaMA 4)."""
    moe_apply_probs_on_input: bool = option(False, small=KEPT)
    """The probabilities multiply the experts' inputs, as in LLaMA 4, not their outputs."""
    moe_shared_expert_intermediate_size: int = option(
        0, largest=LARGEST_SIZE, small=scaled("no rule depends on the width")
    )
    """Width of an expert of all tokens, beside those that a router chooses. 0: there is none."""
    bos_token_id: int | None = option(None, small=OWN_TEXT)
    """Written to the exported config.json. Default: the tokenizer's."""
    eos_token_id: int | None = option(None, small=OWN_TEXT)
    """Written to the exported config.json; ends generation. Default: the tokenizer's."""
    pad_token_id: int | None = option(
        None,
        check=ANY_NUMBER,
        small=scaled("the token that ends every document and answer here"),
        draws=(-1, 40),
    )
    """Written to the exported config.json. Lookups do not train the row of this token, unless
    --train-pad-embedding says so; -1 is the last row. HuggingFace's reward models read the score at
    the last token that is not this one. Default: none, and all rows are trained."""
    num_labels: int = option(
        0,
        check=Check(
            lambda value: value in (0, 1),
            "0, a language model, or 1, a reward model",
            "classifiers with several labels are not supported",
        ),
        small=left_out("a reward model is trained by align, on pairs"),
    )
    """0: a language model. 1: a reward model, which has a score in the place of the output head:
    HuggingFace's ForSequenceClassification."""
    make_vocab_size_divisible_by: int = option(
        128, check=POSITIVE, largest=LARGEST_SIZE, small=PADDED, draws=(1, 8, 100)
    )
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
    "num_experts",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "decoder_sparse_step",
    "mlp_only_layers",
)
"""Fields of the model that decide which weights it has, and their shapes."""


@section(changes="messages")
@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread over processes. dp = processes / (tp x cp x pp)."""

    tensor_model_parallel_size: int = option(
        1,
        check=POSITIVE,
        largest=LARGEST_RANKS,
        small=scaled("each rank has its share, as with more"),
    )
    """Processes that share each layer (tp)."""
    pipeline_model_parallel_size: int = option(
        1,
        check=POSITIVE,
        largest=LARGEST_RANKS,
        small=scaled("a first rank, a last one, and one between them"),
    )
    """Processes that each hold a part of the layers (pp)."""
    virtual_pipeline_model_parallel_size: int = option(
        1, check=POSITIVE, largest=LARGEST_RANKS, small=scaled("several chunks to a rank, as yours")
    )
    """Model chunks per pipeline process, for the interleaved schedule. zb-v always has 2."""
    pipeline_layer_split: tuple[int, ...] = option((), small=scaled("uneven where yours is"))
    """Transformer blocks of each stage, first to last (with virtual stages: of each chunk). The
    first may have 0 and only embed, the last 0 and only the head. Default: equal shares."""
    account_for_embedding_in_pipeline_split: bool = option(False, small=KEPT)
    """Count the embedding as one layer of the first stage when sharing out the layers."""
    account_for_loss_in_pipeline_split: bool = option(False, small=KEPT)
    """Count the head and loss as one layer of the last stage when sharing out the layers."""
    context_parallel_size: int = option(
        1,
        check=POSITIVE,
        largest=LARGEST_RANKS,
        small=scaled("each rank has one early and one late chunk, as with more"),
    )
    """Processes that share each sequence (cp)."""
    cp_comm_type: Literal["all_gather", "ring", "a2a", "a2a+p2p"] = option(
        "all_gather",
        small=scaled("the same messages between the ranks that there are"),
        words=(("p2p", "ring"),),
    )
    """How context-parallel ranks see each other's keys and values: all at once (all_gather), or
    around a ring in cp - 1 steps (ring; Megatron's p2p). With both, layers with a window send only
    what it reaches, straight to the ranks that need it. a2a: each rank exchanges its part of the
    sequence for a part of the heads before attention, and back behind it. a2a+p2p: neighbours
    exchange so, and keys and values of their heads travel around a ring of such groups."""
    hierarchical_context_parallel_sizes: tuple[int, ...] = option(
        (), small=scaled("groups of neighbours and a ring of them, as yours, where ranks suffice")
    )
    """With --cp-comm-type a2a+p2p: ranks that exchange the sequence for heads, and ranks of the
    ring. Their product is --context-parallel-size."""
    expert_model_parallel_size: int = option(
        1,
        check=POSITIVE,
        largest=LARGEST_RANKS,
        small=scaled("each rank has some experts, as with more"),
        draws=(2,),
    )
    """Neighbouring data-parallel ranks that divide the experts of each block among them (ep): a
    divisor of dp and of --num-experts."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = option(
        "allgather", small=KEPT, draws=("alltoall",)
    )
    """How tokens come to the experts of other ranks: ep ranks gather the tokens of all, and no host
    waits (allgather); or a token travels once to each rank that has some of its experts, and the
    host waits for their numbers in each block (alltoall). Ignored with ep 1."""
    sequence_parallel: bool = option(False, small=scaled("there is one tensor-parallel rank"))
    """Split norms and residual stream along the sequence over the tp processes. Ignored with tp
    1."""
    tp_comm_overlap: str = option(
        "0",
        check=Check(
            lambda value: value in ("0", "auto", "symm_mem") or is_count(value),
            "auto, 0, symm_mem, or a number of pieces",
            "give one of these",
        ),
        bare="auto",
        small=KEPT,
    )
    """Cut the messages of tensor-parallel layers into so many pieces, each sent under the product
    of another. 0: whole messages, which forward passes wait for. auto, or the flag alone: as many
    as leave pieces of 256 tokens, at most 4. symm_mem: by torch's fused operators for GPUs that
    NVLink joins, with --sequence-parallel; not measured yet. Ignored with tp 1."""
    pipeline_schedule: PipelineSchedule = option("1f1b", small=scaled("there is one pipeline rank"))
    """Order of forward and backward passes over the pipeline stages. zb-*: weight gradients fill
    the bubbles."""
    data_parallel_sharding_strategy: Literal[
        "no_shard", "optim", "optim_grads", "optim_grads_params", "auto"
    ] = option("optim", small=scaled("of all strategies it does most"))
    """The tensors of which each data-parallel rank holds a share: none (plain DDP), the optimizer
    state (reduce once per step), state and gradients (reduce after every microbatch), or parameters
    as well (gather before use). auto: by memory and microbatches."""
    data_parallel_shard_size: int = option(
        0, largest=LARGEST_RANKS, small=scaled("shards, and replicas of them, as yours")
    )
    """Shard within so many neighbouring data-parallel ranks and replicate across (hybrid sharding).
    0: within all."""
    param_slots: str = option(
        "default",
        check=Check(
            lambda value: value in ("default", "all", "auto") or is_count(value),
            "default, all, auto, or a number of 1 or more",
            "give one of these",
        ),
        small=TURNS,
    )
    """Block-sized buffers for whole parameters under optim_grads_params: a number, `all`, `auto`
    (as many as fit into memory), or `default` (2; all with pipeline stages). More buffers mean
    fewer gathers."""
    grad_slots: int = option(2, check=POSITIVE, small=TURNS)
    """Buffers for whole gradients that blocks take turns in, under optim_grads and
    optim_grads_params. With --cuda-graph-scope block so many blocks have buffers for all their
    gradients at once."""
    prefetch_bytes: int = option(
        0, small=scaled("as many blocks are gathered ahead, as far as there are")
    )
    """Most bytes of parameters that are gathered ahead of their use. 0: as many as the parameter
    slots hold."""
    exchange_chunk_bytes: int = option(
        1_048_576, check=POSITIVE, small=KEPT, draws=(64, 1000, 4096)
    )
    """Largest piece in which the gloo backend sends gathers and reductions."""
    reduce_bucket_size: int = option(
        0,
        check=replace(NOT_NEGATIVE, do="give 0 for the default"),
        small=scaled("several messages, as yours"),
    )
    """Elements in one data-parallel message. 0: 40 million, or a million for each rank that shares
    a copy of the model, whichever is more, so that a ring over many ranks sends no tiny pieces.
    Messages hold whole parameters: one exceeds this only when a single parameter does."""
    recompute_granularity: Literal["none", "selective", "full"] = option("none", small=KEPT)
    """Activations to compute again in backward instead of keeping them: norm and SwiGLU outputs
    (selective), or whole blocks (full)."""
    recompute_num_layers: str = option(
        "all",
        small=scaled("some blocks of a stage, or all, as yours"),
        draws=("0", "1", "2", "auto"),
    )
    """Blocks of each stage that recompute: `all`, a number, or `auto` (the fewest with which the
    run fits into the device's memory)."""
    grad_reduce_in_bf16: bool = option(False, small=KEPT, draws=(True,))
    """Send gradients in bfloat16 between data-parallel ranks. Over microbatches they are still
    accumulated in fp32."""
    ddp_reduce_scatter_with_fp32_accumulation: bool = option(
        False, small=left_out("CPUs always add up so")
    )
    """With --grad-reduce-in-bf16 on a GPU: each rank receives its part of the others' gradients in
    bfloat16 and adds them up in fp32, as CPUs always do, instead of NCCL in bfloat16. Each rank
    sends as many bytes, but each pair of ranks its own: where several ranks of a machine share
    gradients with other machines, more of them cross the network."""
    high_priority_stream_groups: tuple[Literal["tp", "cp", "dp", "pp", "none"], ...] = option(
        ("tp", "cp", "dp"),
        check=Check(
            lambda value: "none" not in value or len(value) == 1,
            "groups, or none alone",
            "leave out none",
        ),
        small=NO_GPU,
        draws=(("none",), ("dp", "pp")),
    )
    """On a GPU: groups of ranks whose NCCL kernels go before waiting kernels of the computation;
    `none` for no group. Messages that are waited for at once run in the computation's own stream
    and have no priority. Not measured yet."""
    nccl_pp_max_ctas: int = option(
        4,
        check=replace(NOT_NEGATIVE, do="give 0 for as many as NCCL takes"),
        small=NO_GPU,
        draws=(0, 1),
    )
    """On a GPU: most thread blocks, each on a multiprocessor, of NCCL's kernels between pipeline
    stages. 0: as many as NCCL takes. Not measured yet."""
    nccl_register_buffers: bool = option(False, small=NO_GPU, draws=(True,))
    """On a GPU: register the memory of parameters and gradients with NCCL, which then sends and
    receives in place instead of through buffers of its own. Not measured yet."""
    distributed_timeout_minutes: float = option(
        10.0, check=POSITIVE, changes="nothing", small=NOT_COMPUTED
    )
    """A rank that waits longer ends the run, on all ranks, with an error that says which one
    stopped where."""
    max_restarts_in_place: int = option(
        0, changes="nothing", small=left_out("no rank of a small run is lost")
    )
    """How often ranks begin again within the job after a fault of a machine (a process that was
    killed, a device's memory error, a message that failed): from the newest checkpoint, with the
    largest dp that the remaining processes fill and that divides the batch; processes beyond that
    are spares. Needs --save, --load auto and --global-batch-size."""

    @property
    def exchanges_tokens(self) -> bool:
        """Whether ranks divide experts, and a token travels only to those that have some of its."""
        return self.expert_model_parallel_size > 1 and self.moe_token_dispatcher_type == "alltoall"

    @property
    def head_ranks(self) -> int:
        """Context-parallel ranks that exchange the sequence for heads; 0: keys and values travel
        instead."""
        cp = self.context_parallel_size
        if cp == 1 or not self.cp_comm_type.startswith("a2a"):
            return 0
        sizes = (cp,) if self.cp_comm_type == "a2a" else self.hierarchical_context_parallel_sizes
        return next(iter(sizes), 0)


@section()
@dataclass(frozen=True)
class TrainingConfig:
    """Batches, length of the run, precision, seed."""

    seq_length: int = option(
        2048, check=POSITIVE, largest=LARGEST_SIZE, small=scaled("no rule depends on it")
    )
    """Tokens per sample."""
    micro_batch_size: int = option(
        1,
        check=POSITIVE,
        largest=LARGEST_SIZE,
        changes="messages",
        small=scaled("one sample or several, as yours"),
    )
    """Samples in one forward pass of one data-parallel rank."""
    global_batch_size: int = option(
        0, largest=LARGEST_SIZE, small=scaled("one microbatch in a step or several, as yours")
    )
    """Samples in one optimizer step. 0: micro_batch_size x dp (no gradient accumulation)."""
    rampup_batch_size: tuple[int, ...] = option(
        (), small=scaled("it grows, if yours does, within the steps that are run")
    )
    """START INCREMENT SAMPLES: the global batch size grows from START to --global-batch-size, by
    INCREMENT at a time, over the first SAMPLES samples."""
    train_iters: int = option(0, check=ANY_NUMBER, small=FEW_STEPS)
    """Optimizer steps in the whole run, resumed steps included."""
    train_samples: int = option(0, small=scaled("the steps that are run"))
    """Samples in the whole run, instead of --train-iters: as many whole steps as they are enough
    for."""
    epochs: float = option(
        0.0,
        small=scaled("a part of a pass, one, or more, as yours; the last step has fewer samples"),
    )
    """Passes over the training samples, instead of --train-iters; `0.5` is half of one. Each sample
    is read so many times: steps go on from one pass into the next, and the last step has what is
    left. With `--on-bad-step rollback` samples that are left out are not made up for: the run has
    fewer steps."""
    exit_interval: int = option(0, changes="nothing", small=FEW_STEPS)
    """Save and end after every iteration that is a multiple of this. 0: go on to the end of the
    run."""
    exit_duration_in_mins: float = option(0.0, changes="nothing", small=FEW_STEPS)
    """Save and end when the run has taken so many minutes, with exit status 0. 0: however long it
    takes."""
    exit_zero_on_signal: bool = option(False, changes="nothing", small=FEW_STEPS)
    """Exit status 0 for a run that saves and ends because of Control-C or SIGTERM, for schedulers
    that take any other status for a failure. Without it 130 and 143, as a shell has them."""
    z_loss_weight: float = option(0.0, small=KEPT, draws=(0.001, 0.1))
    """Weight of the square of the logarithm of the softmax's denominator, which keeps logits from
    drifting: it is trained, and is no part of the losses that are printed."""
    moe_router_load_balancing_type: str = option(
        "none",
        check=Check(
            lambda value: value in ("none", "seq_aux_loss", "global_aux_loss", "hf_aux_loss"),
            "none, seq_aux_loss, global_aux_loss or hf_aux_loss",
            "give seq_aux_loss or global_aux_loss: the value of aux_loss would depend on the "
            "micro-batch, and others are not written here",
        ),
        small=KEPT,
    )
    """The loss that loads the experts of a block equally, with --moe-aux-loss-coeff: within each
    sequence (`seq_aux_loss`), or over the global batch (`global_aux_loss`), or over the global
    batch and all blocks together, as transformers has it (`hf_aux_loss`). The last two need a
    forward pass more for each step. `none`: no such loss."""
    moe_aux_loss_coeff: float = option(0.0, small=KEPT)
    """Weight of the loss that loads experts equally. It is trained, and printed by itself."""
    moe_z_loss_coeff: float = option(0.0, small=KEPT)
    """Weight of the square of the logarithm of the router's softmax denominator, in each block the
    mean over all tokens. It is trained, and printed by itself."""
    seed: int = option(1234, small=KEPT, draws=(7,))
    """Seeds the initial weights and the order of the samples."""
    bf16: bool = option(False, small=KEPT, draws=(True,))
    """Compute and communicate parameters in bfloat16; master weights, gradients and moments stay
    fp32. Off: fp32 throughout."""
    fp16: bool = option(False, small=KEPT)
    """Compute in float16 with a dynamic loss scale; master weights, gradients and moments stay
    fp32."""
    fp8: Literal["none", "blockwise", "tensorwise"] = option("none", small=KEPT)
    """With --bf16: linear layers of blocks multiply in FP8, forward and for the gradients of their
    inputs. blockwise: in e4m3, with a scale for 128 numbers of a row and for 128 x 128 of a weight.
    tensorwise: with one scale a tensor, gradients in e5m2. On a CPU this is emulated, and is
    slower."""
    fp8_gather: bool = option(False, small=KEPT)
    """With --fp8 tensorwise and --sequence-parallel: gather the inputs of layers in FP8 as codes,
    which are half as many bytes. Weight gradients gather them again in bf16. Ignored with tp 1."""
    fp8_bf16_layers: int = option(1, small=scaled("a block of the small model is in FP8"))
    """With --fp8: so many first and so many last blocks stay in bf16."""
    initial_loss_scale: float = option(65536.0, check=POSITIVE, small=KEPT)
    """Loss scale at the start, with --fp16."""
    min_loss_scale: float = option(1.0, check=POSITIVE, small=NO_OVERFLOW)
    """The loss scale never falls below this."""
    loss_scale_window: int = option(
        1000, check=POSITIVE, small=kept("seen only if it is shorter than the steps that are run")
    )
    """Steps without overflow after which the loss scale doubles."""
    hysteresis: int = option(2, check=POSITIVE, small=NO_OVERFLOW)
    """Overflows in a row before the loss scale halves. Each overflowing step is skipped."""
    fp64: bool = option(False, small=KEPT, draws=(True,))
    """Compute in double precision: the reference of the parity checks, not for training."""
    attention_backend: Literal["auto", "flash", "fused", "fa3"] = option(
        "auto", small=left_out("it chooses kernels of GPUs, which prove does not compare")
    )
    """Whose kernels compute attention on a GPU: torch's flash attention, cuDNN's (fused), or the
    faster one that is sound there. Packed documents, and layers with a window, are always computed
    by flash attention. `fa3` puts FlashAttention 3 in the place of torch's, for documents and
    windows too; it needs a Hopper GPU and the package flash-attn-3. On CPUs the other values change
    nothing."""
    deterministic_mode: bool = option(False, small=NO_GPU, draws=(True,))
    """Compute every sum in a fixed order on GPUs too, so that the same run gives the same bits:
    torch's deterministic algorithms, flash attention instead of cuDNN's, a fixed workspace for
    cuBLAS, parts of bf16 products added in fp32, no NVLink SHARP in NCCL. Slower. On CPUs it
    changes no bit: a run is always the same there."""
    compile: bool = option(
        False, small=left_out("it takes a minute, and prove compares no kernels")
    )
    """Compile what layers compute between matrix products (torch.compile): each becomes one pass
    over its tensors. The first step takes a minute longer; without a compiler on the machine a
    warning is printed and nothing else changes. Not worth it for tiny models."""
    cuda_graph_scope: Literal["none", "block"] = option(
        "none", small=left_out("it captures kernels of GPUs")
    )
    """On a GPU: capture the forward and the backward pass of each block as CUDA graphs, which the
    host starts by one call (block). For layers that take the GPU less time than the host, as small
    ones under --tensor-model-parallel-size 8. Not measured yet."""
    on_bad_step: Literal["stop", "skip", "rollback"] = option(
        "stop", small=NO_BAD_STEP, draws=("skip", "rollback")
    )
    """After a step whose loss or gradient norm is not finite, or whose loss is a spike: stop with
    an error; leave the weights as they are and go on with the next samples (needs --clip-grad); or
    go back to the newest checkpoint and leave out that step's samples when they come again. Samples
    that are left out are listed in `skipped.jsonl` next to the checkpoints."""
    loss_spike_factor: float = option(
        0.0,
        check=Check(
            lambda value: value == 0 or value > 1,
            "more than 1, or 0 for no spikes",
            "give --loss-spike-factor 2 or so",
        ),
        small=NO_BAD_STEP,
    )
    """A loss beyond so many times the mean of the last good steps is a spike. 0: none is."""
    loss_spike_window: int = option(100, check=POSITIVE, small=NO_BAD_STEP)
    """Good steps in that mean. Before there are as many, no loss is a spike."""
    max_bad_steps: int = option(10, small=NO_BAD_STEP)
    """With skip and rollback: more bad steps than this in a row, without a good step between them
    (rollback: without a checkpoint), end the run with an error. So do more returns than this in a
    row by `--on-bad-checkpoint rollback`."""
    check_weight_hash_across_dp_replicas_interval: int = option(
        200, changes="nothing", small=lowered(2, "within the steps that are run"), draws=(1, 3)
    )
    """Every so many iterations compare, bit by bit, what several ranks hold alike: gathered
    parameters, replicas of shards, norms under tensor parallelism, tied embeddings. A difference
    ends the run with the parameter and the rank. Ranks exchange 16 bytes for each tensor; a run in
    which no rank holds what another does compares nothing. 0: never."""
    eval_interval: int = option(
        0, changes="nothing", small=lowered(3, "within the steps that are run")
    )
    """Evaluate before the first iteration, every so many iterations and after the last. A resumed
    run also evaluates where it begins, and prints that loss only. 0: never."""
    eval_iters: int = option(10, changes="nothing", small=scaled("some batches tell as much"))
    """Global batches per evaluation; the same validation samples every time, fewer when the split
    is smaller. 0: the whole split."""
    early_stop_patience: int = option(0, changes="nothing", small=FEW_STEPS)
    """End the run after so many evaluations in a row whose loss is not below the lowest before. 0:
    never. With checkpoints at the iterations of evaluations `best` is the one with the lowest
    loss."""

    @property
    def has_router_losses(self) -> bool:
        """Whether losses of routers are trained."""
        return self.moe_router_load_balancing_type != "none" or self.moe_z_loss_coeff > 0

    @property
    def counts_experts_first(self) -> bool:
        """Whether a step begins with a forward pass that counts the tokens of each expert."""
        return self.moe_router_load_balancing_type in ("global_aux_loss", "hf_aux_loss")


@section()
@dataclass(frozen=True)
class OptimizerConfig:
    """The update rule, learning-rate schedule, clipping."""

    optimizer: Literal["adam", "muon", "schedule_free_adamw"] = option("adam", small=ADAMW_ALONE)
    """adam: AdamW. muon: the weight matrices of the blocks are updated by orthogonalised momentum
    (torch.optim.Muon), everything else (embedding, head, norms, biases) by AdamW.
    schedule_free_adamw: AdamW whose weights are averaged, with --lr-decay-style constant."""
    lr: float = option(
        3e-4,
        small=scaled("so that a few steps change the weights by more than rounding"),
        draws=(0.0001, 0.01),
    )
    """Peak learning rate."""
    min_lr: float = option(0.0, small=scaled("in the same proportion to lr"), draws=(1e-05,))
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = option("linear", small=KEPT)
    """Shape of the decay from lr to min_lr. WSD (warm-up, stable, decay): lr until the last
    --lr-wsd-decay-iters of --lr-decay-iters."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = option(
        "exponential", small=KEPT
    )
    """Shape of the decay at the end of WSD."""
    lr_wsd_decay_iters: int = option(0, small=LIKE_STEPS)
    """Iterations of the decay at the end of WSD."""
    lr_decay_iters: int = option(0, small=LIKE_STEPS)
    """Iterations over which the rate decays, warm-up included. 0: train_iters."""
    lr_warmup_iters: int = option(0, small=LIKE_STEPS)
    """Iterations of linear warm-up from 0."""
    lr_decay_samples: int = option(0, small=LIKE_STEPS)
    """Samples over which the rate decays, warm-up included, instead of --lr-decay-iters. 0: all of
    the run, where its length or anything of the schedule is given in samples and nothing of the
    schedule in iterations."""
    lr_warmup_samples: int = option(0, small=LIKE_STEPS)
    """Samples of linear warm-up, instead of --lr-warmup-iters."""
    lr_wsd_decay_samples: int = option(0, small=LIKE_STEPS)
    """Samples of the decay at the end of WSD, instead of --lr-wsd-decay-iters."""
    lr_warmup_fraction: float = option(0.0, small=scaled("within the steps that are run"))
    """Share of the decay that is linear warm-up from 0, instead of its length."""
    weight_decay: float = option(0.01, small=KEPT, draws=(0.0, 0.3))
    """Decoupled weight decay, on every parameter of two or more dims (embeddings included, norms
    not)."""
    adam_beta1: float = option(
        0.9, check=_share_below_one("give --adam-beta1 0.9 or so"), small=KEPT, draws=(0.0, 0.5)
    )
    """Decay of the first moment."""
    adam_beta2: float = option(
        0.999, check=_share_below_one("give --adam-beta2 0.9 or so"), small=KEPT, draws=(0.9, 0.95)
    )
    """Decay of the second moment."""
    adam_eps: float = option(1e-8, check=POSITIVE, small=KEPT, draws=(1e-15, 0.001))
    """Added to the square root of the second moment."""
    exp_avg_dtype: Literal["fp32", "bf16", "8bit"] = option("fp32", small=ADAMW_IN_FP32)
    """Precision in which AdamW's first moment is kept. An update computes in fp32, and rounds what
    it keeps. 8bit: a byte for each element and a scale for each 64 of them, in matrices."""
    exp_avg_sq_dtype: Literal["fp32", "bf16", "8bit"] = option("fp32", small=ADAMW_IN_FP32)
    """The same of the second moment. Both take 8 bytes of each parameter in fp32, 4 in bf16 (with
    --adam-beta2 at most 0.996, or what is kept would never fall), and 2.125 in 8 bits."""
    muon_momentum: float = option(0.95, small=ADAMW_ALONE)
    """Decay of Muon's momentum."""
    muon_nesterov: bool = option(True, small=ADAMW_ALONE)
    """Muon orthogonalises the gradient moved towards its momentum; without it the momentum
    itself."""
    muon_num_ns_steps: int = option(5, small=ADAMW_ALONE)
    """Newton-Schulz iterations of each of Muon's updates."""
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = option(
        "match_rms_adamw", small=ADAMW_ALONE
    )
    """How --lr becomes the rate of a matrix with m rows and n columns. match_rms_adamw: times 0.2
    sqrt(max(m, n)), so that an update is as large as AdamW's and both take the same --lr. original:
    times sqrt(max(1, m / n)), whose --lr is about 0.02."""
    clip_grad: float = option(1.0, small=KEPT, draws=(0.0, 0.05, 1e9))
    """Largest global L2 norm of the gradient. 0: no clipping."""
    freeze: tuple[str, ...] = option(
        (), small=scaled("the same weights in the blocks that are left")
    )
    """Patterns (`*` and `?`) of HuggingFace parameter names that are not trained: `--freeze
    'model.embed_tokens.*' 'model.layers.0.*'`. Weights that are stored as one, such as q, k and v,
    are frozen together."""
    train_pad_embedding: bool = option(False, small=KEPT, draws=(True,))
    """Train the embedding of the model's pad_token_id as that of any token, as Megatron does.
    Otherwise its lookups give it no gradient, as in HuggingFace (`padding_idx`): only weight decay
    and the gradient of a tied head change it, and in a new model it begins as zeros."""
    param_group: tuple[str, ...] = option(
        (),
        small=left_out("prove holds updates against AdamW's with one learning rate"),
        repeats=True,
    )
    """Options of some parameters: `--param-group 'embed*: lr=1e-3, weight_decay=0'`, several values
    or several times. Before the colon stands a pattern (`*` and `?`) of HuggingFace parameter
    names, or of their ends from a dot on; behind it `lr` or `lr_mult` (times --lr), `min_lr`
    (default: in proportion), `weight_decay` (also of norms and biases) and `init_std` (of initial
    weights). Weights that are stored as one, such as q, k and v, have the same."""


@section()
@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA): the model is frozen, and small additions to its projections are
    trained."""

    lora_rank: int = option(0, largest=LARGEST_SIZE, small=scaled("no rule depends on it"))
    """Rank of the additions: a projection W becomes W + alpha / rank * B A. 0: none, the model
    itself is trained."""
    lora_alpha: float = option(
        16.0, check=POSITIVE, small=scaled("in the same proportion to lora_rank")
    )
    """Weight of the additions, times the rank."""
    lora_dropout: float = option(
        0.0,
        check=Check(lambda value: value == 0, "0: nothing in a step is random", "leave it out"),
        small=KEPT,
    )
    """0 only: nothing in a step is random."""
    lora_target_modules: tuple[str, ...] = option(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), small=KEPT
    )
    """Projections that get an addition, by HuggingFace's names. Default: all, also where a family
    has several of them in one, as Phi-3."""


@section()
@dataclass(frozen=True)
class DataConfig:
    """The token stream and the tokenizer it was made with."""

    data_path: tuple[str, ...] = option(
        (), small=scaled("as many datasets, up to eight, of the text that is read here")
    )
    """Prefix of an indexed dataset: PREFIX.bin and PREFIX.idx, without suffix. Or several, each
    after its weight, in a blend: `0.7 web 0.3 code` takes seven samples of web to three of code,
    however large they are. Without weights each contributes what it has. Or text that is tokenized
    while the run trains on it: a folder, a pattern or a URL of `.jsonl` or `.parquet` files. PREFIX
    may be a URL, too, such as `s3://bucket/docs`: then the blocks are read that samples need."""
    data_cache_path: str | None = option(None, changes="nothing", small=OWN_TEXT)
    """Folder on a disk of this machine that keeps the tokens of examples, blocks of datasets behind
    a URL, and orders of `--megatron-data-order`, which its processes share. Runs share it, too.
    Default: `~/.cache/megatron_llama/data`."""
    data_cache_gib: float = option(64.0, changes="nothing", small=OWN_TEXT)
    """GiB of blocks that this folder holds at most, and as many of orders, unless the jobs that run
    need more: what was not used for longest goes."""
    split: str = option("969,30,1", small=OWN_TEXT, draws=("80,20,0", "50,30,20", "100,0,0"))
    """Shares of the documents for training, validation and test, in file order. `100,0,0` means no
    evaluation."""
    data_order: Literal["shuffled", "sequential"] = option(
        "shuffled", small=KEPT, draws=("sequential",)
    )
    """Order of the training samples: a pure function of seed and consumed samples, whatever the
    layout."""
    megatron_data_order: bool = option(False, small=KEPT, draws=(True,))
    """Read the training samples in the order in which Megatron-LM reads them: its documents,
    samples and blend, shuffled from --seed for a run of --train-iters or --train-samples, to the
    token. For a run that goes on from one of Megatron's checkpoints."""
    stream_key: str = option("text", small=OWN_TEXT)
    """Field or column with the text, where --data-path names text."""
    stream_window: int = option(1024, small=OWN_TEXT)
    """Samples among which those of a text are shuffled. A rank keeps its share of twice as many in
    memory."""
    stream_lanes: int = option(64, small=OWN_TEXT)
    """Lanes that a text is dealt out to. With a multiple of --micro-batch-size x dp no two of the
    data-parallel ranks read the same text. A run resumes with the same number of them."""
    stream_workers: int = option(2, changes="nothing", small=OWN_TEXT)
    """Processes of each rank that read and tokenize text."""
    tokenizer_model: str | None = option(None, small=OWN_TEXT)
    """A `.model` of sentencepiece or LLaMA, HF `tokenizer.json`, Mistral's `tekken.json`, a folder
    with one of them, or a name on the hub, `org/name` or `org/name@revision`. Default: what the
    dataset or HF folder says. Needed only to turn text into ids and back."""
    tokenizer_type: (
        Literal[
            "SentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer", "PretrainedFromHF"
        ]
        | None
    ) = option(None, small=OWN_TEXT)
    """Megatron's name for what the tokenizer has to be. Default: found from the file."""
    reset_position_ids: bool = option(False, small=KEPT, draws=(True, False))
    """Positions restart at 0 after each end-of-document token."""
    reset_attention_mask: bool = option(False, small=KEPT, draws=(True, False))
    """Tokens attend only within their own document."""
    eod_mask_loss: bool = option(False, small=KEPT, draws=(True, False))
    """Leave the positions whose input is the end-of-document token out of the loss."""


@section(changes="nothing", small=OWN_FOLDERS)
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
    async_save: bool = option(False, small=left_out("prove saves every step in the foreground"))
    """Write checkpoints in a background process of each rank: training stops only while the state
    is copied to memory of the host, twice 12 bytes for each parameter of the rank's shard at most.
    Linux only."""
    load: str | None = option(None, changes="weights", small=OWN_START)
    """Resume from the newest complete checkpoint of this folder, or from this `iter_...` folder
    itself. An empty folder equal to --save is a fresh start. `auto`: the newest complete checkpoint
    of --save whose files are all there, else a fresh start. A HuggingFace folder, one of Megatron
    (`mp_rank_00`) or Meta gives its weights alone; with Megatron's `torch_dist` and its optimizer
    a run goes on, into another --save."""
    finetune: bool = option(False, changes="weights", small=OWN_START)
    """Take only the weights of --load: the run begins at iteration 0 with the first samples and a
    fresh optimizer."""
    load_optim: bool = option(True, changes="weights", small=OWN_START)
    """Take the optimizer's state of --load too. With --no-load-optim the run goes on where it was
    with a fresh optimizer."""
    init_from_hf: str | None = option(None, changes="weights", small=OWN_START)
    """HuggingFace folder (config.json, *.safetensors), or a model's name on the hub, `org/name` or
    `org/name@revision` (needs `pip install '.[hub]'`): gives the model fields and the initial
    weights."""
    ignore_hf_config_fields: tuple[str, ...] = option((), changes="weights", small=OWN_START)
    """Names of fields in a HuggingFace config.json that do not change what the model computes.
    Fields that are not known here are refused otherwise."""
    resize_embeddings: bool = option(False, changes="weights", small=OWN_START)
    """Give the weights of --init-from-hf, or those of --load (with --finetune where it is a
    checkpoint), rows for all tokens of the tokenizer, or --vocab-size rows: each new row of
    embedding and head is the mean of the old ones. Rows are never taken away."""
    export_hf: str | None = None
    """When all iterations are done, write the model into this folder as HuggingFace has it: weights
    in bfloat16 with --bf16, else in float32, config.json, tokenizer and chat template. Needs no
    --save. Replaces an earlier export, and nothing else."""


@section(changes="nothing", small=NOT_COMPUTED)
@dataclass(frozen=True)
class LogConfig:
    """Output and files of a run while it trains."""

    log_interval: int = option(100, check=POSITIVE)
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
    sample_tokens: int = option(32, check=POSITIVE)
    """Tokens of such a continuation, always the most probable one; the end token ends it
    earlier."""
    job_name: str | None = None
    """Name of the run: first line of the log, and the run's name in TensorBoard."""
    profile: bool = False
    """Trace some steps with torch's profiler: `rank-R.trace.json.gz` in --profile-dir, on a GPU
    also a snapshot of its memory."""
    profile_step_start: int = 10
    """Iterations before tracing begins."""
    profile_step_end: int = option(12, check=ANY_NUMBER)
    """The last iteration that is traced."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that trace."""
    profile_dir: str = "profile"
    """Folder for traces."""
    record_timeline: str | None = None
    """Write what every rank did when into this file, from --profile-step-start to
    --profile-step-end: passes, messages, waits and updates, for ui.perfetto.dev and `plan compare`.
    Compressed where the name ends in `.gz`."""
    open_metrics: str | None = option(
        None,
        check=Check(_ends_in_port, "PORT or ADDRESS:PORT, a port from 1 to 65535", "correct it"),
    )
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
    tensorboard_queue_size: int = option(1000, check=POSITIVE)
    """Events that may wait in memory to be written; a log line that adds more waits."""
    log_timers_to_tensorboard: bool = False
    """Also the time of an iteration, exposed communication, tokens per second, TFLOP/s."""
    log_batch_size_to_tensorboard: bool = False
    """Also the global batch size."""
    log_validation_ppl_to_tensorboard: bool = False
    """Also the perplexity of evaluations."""


@section(changes="nothing", small=left_out("it says how many processes yours are"))
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
