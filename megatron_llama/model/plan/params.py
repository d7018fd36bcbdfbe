"""The parameters of a pipeline stage, their local shapes, and the place of each element in the
HuggingFace model.

There is one table, so that its readers cannot disagree: the model builds its modules from it,
``buckets.py`` packs the parameters into messages, checkpoints and conversions read the HuggingFace
coordinates, and ``--dry-run`` counts. ``specs.py`` has the words of the table: slices, rectangles,
units. A *partition* says which transformer blocks each pipeline stage holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.plan.specs import HFSlice, ParamSpec, UnitSpec
from megatron_llama.model.families import FAMILIES
from megatron_llama.model.families.family import Family
from megatron_llama.schedule import placement_of

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""HuggingFace's modules that ``qkv_proj`` stacks."""
EMBEDDING = "model.embed_tokens.weight"
VOCABULARY_TENSORS = (EMBEDDING, "lm_head.weight")
"""HuggingFace's tensors with a row for each token id."""
SCORE = "score.weight"
"""The head of a reward model, in the place of the output head."""


def padded_vocab_size(model: ModelConfig, tp: int) -> int:
    """Return rows of the embedding over all tensor-parallel ranks, padding included."""
    multiple = model.make_vocab_size_divisible_by * tp
    return -(-model.vocab_size // multiple) * multiple


def padding_idx(config: Config) -> int | None:
    """Return the row of the embedding that gets no gradient from its lookups, as transformers' and
    torch's ``padding_idx``: that of ``pad_token_id``, counted from the end if it is negative. None:
    lookups train all rows."""
    model = config.model
    if model.pad_token_id is None or config.optimizer.train_pad_embedding:
        return None
    return model.pad_token_id % model.vocab_size


@dataclass(frozen=True)
class Partition:
    """Which transformer blocks each pipeline stage holds, and which pipeline rank runs it."""

    layers: tuple[range, ...]
    placement: tuple[int, ...]

    @property
    def stages(self) -> int:
        """Number of stages, virtual ones counted."""
        return len(self.layers)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of one pipeline rank, first to last."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    @property
    def first_and_last_share_rank(self) -> bool:
        """Whether first and last stage run on one rank: a tied head is the embedding itself."""
        return self.placement[0] == self.placement[-1]


def split_layers(
    layers: int, stages: int, *, explicit: Sequence[int] = (), first: int = 0, last: int = 0
) -> tuple[range, ...]:
    """Return the blocks of each stage: as listed in ``explicit``, or equal shares of which the
    first and the last stage give up ``first`` and ``last`` blocks.

    The caller has checked that the numbers fit (``train/setup/checks/parallel.py``)."""
    share = (layers + first + last) // stages
    counts = list(explicit) or [
        share - (first if s == 0 else 0) - (last if s == stages - 1 else 0) for s in range(stages)
    ]
    stops = [sum(counts[: index + 1]) for index in range(stages)]
    return tuple(range(stop - count, stop) for count, stop in zip(counts, stops, strict=True))


def partition_of(config: Config) -> Partition:
    """Return the partition of a resolved configuration."""
    parallel = config.parallel
    placement = placement_of(
        parallel.pipeline_schedule,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
    )
    layers = split_layers(
        config.model.num_hidden_layers,
        len(placement),
        explicit=parallel.pipeline_layer_split,
        first=int(parallel.account_for_embedding_in_pipeline_split),
        last=int(parallel.account_for_loss_in_pipeline_split),
    )
    return Partition(layers, placement)


def kv_copies(model: ModelConfig, tp: int) -> int:
    """Return how many consecutive tensor-parallel ranks share one key/value head: more than 1 when
    tp exceeds the number of heads."""
    return max(1, tp // model.num_key_value_heads)


@dataclass(frozen=True)
class Shapes:
    """Makes the specs of one tensor-parallel rank of one pipeline stage."""

    model: ModelConfig
    tp: int = 1
    tp_rank: int = 0
    sequence_parallel: bool = False
    stage: int = 0

    def embedding(self, *, tied: bool, contributions: int) -> UnitSpec:
        """Return the token embedding, rows split over tp."""
        weight = self._vocab(EMBEDDING, EMBEDDING, tied, contributions)
        return UnitSpec("embed_tokens", (weight,))

    def block(self, layer: int) -> UnitSpec:
        """Return one transformer block, in the order of its forward pass."""
        m = self.model
        prefix = f"model.layers.{layer}"
        before = m.norm_position in ("before", "both")
        behind = m.norm_position in ("after", "both")
        query = m.num_attention_heads * m.head_dim
        params = (
            *self._block_norm(prefix, "input_layernorm", present=before),
            *self._attention_inputs(prefix),
            *self._head_norms(prefix),
            *self._rows(prefix, "self_attn.o_proj", query, bias=m.attention_bias),
            *self._block_norm(prefix, "post_self_attn_layernorm", present=behind),
            *self._block_norm(prefix, "post_attention_layernorm", present=before),
            *self._mlp(prefix, layer),
            *self._block_norm(prefix, "post_mlp_layernorm", present=behind),
        )
        return UnitSpec(f"layers.{layer}", params, is_block=True)

    def head(self, *, tied: bool, shared: bool) -> UnitSpec:
        """Return the final norm and the output head, or the score of a reward model. ``shared``:
        the head is the embedding of the same process and is not listed again."""
        name = "model.norm.weight"
        norm = self._norm(name, name)
        if self.model.num_labels:
            from megatron_llama.model.plan.score import score_param  # of reward models

            return UnitSpec("head", (norm, score_param(self)))
        # One parameter, with two gradients: the spec of the embedding counts both.
        if shared:
            return UnitSpec("head", (norm,))
        source = EMBEDDING if tied else "lm_head.weight"
        return UnitSpec("head", (norm, self._vocab("lm_head.weight", source, tied, 1)))

    def _mlp(self, prefix: str, layer: int) -> tuple[ParamSpec, ...]:
        """Return what follows attention: the weights of an MLP, or of a router and experts."""
        m = self.model
        if m.num_experts:
            from megatron_llama.model.plan import experts  # of few models

            if experts.is_sparse(m, layer):
                return experts.expert_params(self, prefix)
        modules = ("mlp.gate_proj", "mlp.up_proj")
        return (
            *self._columns(prefix, "mlp.gate_up_proj", modules, bias=m.mlp_bias),
            *self._rows(prefix, "mlp.down_proj", m.intermediate_size, bias=m.mlp_bias),
        )

    def _attention_inputs(self, prefix: str) -> tuple[ParamSpec, ...]:
        """Return one fused weight ``qkv_proj``. When several ranks share a key/value head, keys and
        values are apart from queries: they are copies, and each rank sees only the gradient through
        its own queries."""
        m = self.model
        bias = m.attention_bias or m.add_qkv_bias
        copies = kv_copies(m, self.tp)
        if copies == 1:
            return self._columns(prefix, "self_attn.qkv_proj", QKV, bias=bias)
        queries = self._columns(prefix, QKV[0], QKV[:1], bias=bias)
        shared = self._sharing(copies)._columns(prefix, "self_attn.kv_proj", QKV[1:], bias=bias)
        return *queries, *(replace(spec, copies=copies, partial_grad=True) for spec in shared)

    def _sharing(self, copies: int) -> Shapes:
        """Return the shapes as if tp were the number of key/value heads, so that neighbours get the
        same rows."""
        return replace(self, tp=self.tp // copies, tp_rank=self.tp_rank // copies)

    def _head_norms(self, prefix: str) -> tuple[ParamSpec, ...]:
        """Return the norms of queries and keys: one weight for all heads, or rows that are split as
        those of the projection."""
        m = self.model
        names = ("self_attn.q_norm", "self_attn.k_norm")
        if m.qk_norm in ("none", "l2"):
            return ()
        if m.qk_norm == "head":
            # Each rank applies them to its own heads.
            return tuple(
                self._vector(
                    f"{prefix}.{name}.weight",
                    f"{prefix}.{self._family.tensors.get(name, name)}.weight",
                    m.head_dim,
                    partial_grad=True,
                )
                for name in names
            )
        copies = kv_copies(m, self.tp)
        query = self._split_vector(prefix, names[0], m.num_attention_heads * m.head_dim)
        key = self._sharing(copies)._split_vector(
            prefix, names[1], m.num_key_value_heads * m.head_dim
        )
        return query, replace(key, copies=copies, partial_grad=copies > 1)

    def _block_norm(self, prefix: str, module: str, *, present: bool) -> tuple[ParamSpec, ...]:
        theirs = self._family.tensors.get(module, module)
        norm = self._norm(f"{prefix}.{module}.weight", f"{prefix}.{theirs}.weight")
        return (norm,) if present else ()

    def _norm(self, name: str, theirs: str) -> ParamSpec:
        # With sequence parallelism each rank normalizes its part of the sequence.
        return self._vector(
            name, theirs, self.model.hidden_size, partial_grad=self.sequence_parallel
        )

    def _vector(self, name: str, theirs: str, size: int, *, partial_grad: bool) -> ParamSpec:
        """Return a vector that every tp rank holds, ``theirs`` in the HuggingFace model.
        ``partial_grad``: each rank applies it to other positions or heads, so their gradients have
        to be summed."""
        partial_grad = partial_grad and self.tp > 1
        return ParamSpec(
            name,
            (size,),
            (HFSlice(theirs, (size,), 0, size),),
            decay=False,
            copies=self.tp,
            partial_grad=partial_grad,
            stage=self.stage,
            resident=True,
        )

    def _split_vector(self, prefix: str, module: str, size: int) -> ParamSpec:
        """Return a norm's weight over all heads, split over tp."""
        local = size // self.tp
        name = f"{prefix}.{self._family.tensors.get(module, module)}.weight"
        return ParamSpec(
            f"{prefix}.{module}.weight",
            (local,),
            (HFSlice(name, (size,), 0, local, hf_row=self.tp_rank * local),),
            decay=False,
            stage=self.stage,
            resident=True,
        )

    def _columns(
        self, prefix: str, name: str, modules: Sequence[str], *, bias: bool
    ) -> tuple[ParamSpec, ...]:
        """Return a fused column-parallel weight, and its bias: the outputs of each of the modules
        are split over tp, and the rank's shares are stacked."""
        outputs = self._outputs
        row = 0
        slices = []
        # One product computes all modules; each keeps its place in a HuggingFace tensor.
        for module in modules:
            theirs, rows, first = self._family.place(module, outputs)
            local = outputs[module] // self.tp
            slices.append(
                HFSlice(
                    f"{prefix}.{theirs}", (rows,), row, local, hf_row=first + self.tp_rank * local
                )
            )
            row += local
        build = partial(ParamSpec, stage=self.stage)
        hidden = self.model.hidden_size
        weight = build(
            f"{prefix}.{name}.weight",
            (row, hidden),
            tuple(
                replace(hf_slice, name=f"{hf_slice.name}.weight", shape=(*hf_slice.shape, hidden))
                for hf_slice in slices
            ),
            decay=True,
        )
        if not bias:
            return (weight,)
        parts = tuple(replace(hf_slice, name=f"{hf_slice.name}.bias") for hf_slice in slices)
        vector = build(f"{prefix}.{name}.bias", (row,), parts, decay=False, resident=True)
        return weight, vector

    @property
    def _outputs(self) -> dict[str, int]:
        """The outputs of a block's column-parallel modules, over all tp ranks."""
        m = self.model
        query = m.num_attention_heads * m.head_dim
        key_value = m.num_key_value_heads * m.head_dim
        sizes = dict(zip(QKV, (query, key_value, key_value), strict=True))
        return sizes | dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), m.intermediate_size)

    def _rows(self, prefix: str, module: str, inputs: int, *, bias: bool) -> tuple[ParamSpec, ...]:
        """Return a row-parallel weight, whose input columns are split over tp, and its bias, which
        is added to the sum over tp."""
        hidden = self.model.hidden_size
        local = inputs // self.tp
        name = f"{prefix}.{module}"
        theirs = f"{prefix}.{self._family.tensors.get(module, module)}"
        size = (hidden, inputs)
        hf_slice = HFSlice(f"{theirs}.weight", size, 0, hidden, hf_col=self.tp_rank * local)
        weight = ParamSpec(
            f"{name}.weight", (hidden, local), (hf_slice,), decay=True, stage=self.stage
        )
        if not bias:
            return (weight,)
        # Like a norm's weight: all tp ranks hold the bias, and with sequence parallelism each adds
        # it to its part of the sequence.
        return weight, self._norm(f"{name}.bias", f"{theirs}.bias")

    @property
    def _family(self) -> Family:
        return FAMILIES[self.model.model_type]

    def _vocab(self, name: str, source: str, tied: bool, contributions: int) -> ParamSpec:
        m = self.model
        local = padded_vocab_size(m, self.tp) // self.tp
        first = self.tp_rank * local
        # The last ranks of a small vocabulary may have only padding.
        rows = max(0, min(m.vocab_size - first, local))
        hf_slice = HFSlice(
            source, (m.vocab_size, m.hidden_size), 0, rows, hf_row=min(first, m.vocab_size)
        )
        return ParamSpec(
            name,
            (local, m.hidden_size),
            (hf_slice,),
            decay=True,
            tied=tied,
            contributions=contributions,
            stage=self.stage,
        )


def has_tied_head(model: ModelConfig) -> bool:
    """Whether the embedding is the output head too. A reward model has a score instead."""
    return model.tie_word_embeddings and not model.num_labels


def stage_units(
    model: ModelConfig,
    partition: Partition,
    stage: int,
    *,
    tp: int = 1,
    tp_rank: int = 0,
    sequence_parallel: bool = False,
) -> tuple[UnitSpec, ...]:
    """Return the units of one pipeline stage on one tensor-parallel rank, in forward order.
    ``run_params.trained_units`` adds and freezes what a run asks for."""
    shapes = Shapes(model, tp, tp_rank, sequence_parallel, stage)
    tie = has_tied_head(model)
    shared = tie and partition.first_and_last_share_rank
    tied_across_ranks = tie and not partition.first_and_last_share_rank
    units = [shapes.block(layer) for layer in partition.layers[stage]]
    if stage == 0:
        # A head on the same rank is the same parameter: its gradient comes in two parts.
        units.insert(0, shapes.embedding(tied=tied_across_ranks, contributions=2 if shared else 1))
    if stage == partition.stages - 1:
        units.append(shapes.head(tied=tied_across_ranks, shared=shared))
    return tuple(units)


def whole_model(model: ModelConfig) -> Partition:
    """Return the partition of a model that is one single stage."""
    return Partition((range(model.num_hidden_layers),), (0,))


def hf_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the HuggingFace model, in forward order."""
    specs = (spec for unit in stage_units(model, whole_model(model), 0) for spec in unit.params)
    return {hf_slice.name: hf_slice.shape for spec in specs for hf_slice in spec.slices}


def parameter_count(model: ModelConfig) -> int:
    """Count the whole model's parameters as HuggingFace does: no padding, tied weights once."""
    return sum(math.prod(shape) for shape in hf_shapes(model).values())
