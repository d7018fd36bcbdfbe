"""The fields of a HuggingFace ``config.json`` that may be left unread.

An unread field that changes what the model computes gives other text than the model's own program,
and no error. So every field of the file is in one of the groups below, or the file is refused. To
accept a field, enter it in the group whose reason holds for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from megatron_llama.errors import describe


def _names(*texts: str) -> frozenset[str]:
    """Return the words of the texts."""
    return frozenset(name for text in texts for name in text.split())


IGNORE = "--ignore-hf-config-fields"
GENERATION_FIELDS = _names(
    "max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens"
)
"""Fields of generate(), for which this program's commands have options. Today's files have them in
``generation_config.json``."""
HARMLESS = _names(
    # The author of the file, the program, and the place of its code and weights. The code of
    # auto_map runs only where the user trusts it; the family's class runs without it.
    "_name_or_path _commit_hash _from_model_config transformers_version auto_map "
    "transformers.js_config unsloth_version unsloth_fixed is_llama_config",
    # The precision and the kernels of the same computation. pretraining_tp cuts matrix products
    # into summands, chunk_size_feed_forward computes some rows at a time.
    "torch_dtype dtype use_bfloat16 torchscript tf_legacy_loss gradient_checkpointing "
    "pretraining_tp chunk_size_feed_forward attn_implementation _attn_implementation "
    "_attn_implementation_internal _attn_implementation_autoset _flash_attn_2_enabled "
    "use_flash_attention use_flash_attn use_flash_attention_2",
    # Results that a call returns or keeps beside the logits.
    "use_cache return_dict use_return_dict output_hidden_states output_attentions "
    "tie_last_hidden_states keys_to_ignore_at_inference",
    # Heads of other tasks, and an encoder, which causal language models do not have.
    "id2label label2id num_labels problem_type finetuning_task task_specific_params "
    "classifier_dropout is_decoder tie_encoder_decoder cross_attention_hidden_size",
    # Ids and files of the tokenizer, and lengths that are meant for it.
    "unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id tokenizer_class "
    "prefix model_max_length max_sequence_length max_seq_len seq_length",
    # The layer from which on a window counts; other fields say whether there is one.
    "max_window_layers",
    *GENERATION_FIELDS,
)
"""Fields that do not change what the model computes, whatever their value."""
FIXED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "quantization_config": (),
        "is_encoder_decoder": (False,),
        "add_cross_attention": (False,),
        "is_causal": (True,),
        "pruned_heads": ({},),
    }
)
"""Fields with the values that a readable model has, unless its family reads them; null is always
allowed. They cannot be ignored."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        # transformers drops attention weights while it trains. Training here has no dropout, so it
        # would not follow a file that asks for one.
        **dict.fromkeys(
            _names(
                "attention_dropout hidden_dropout hidden_dropout_prob attention_dropout_prob "
                "attention_probs_dropout_prob attn_pdrop resid_pdrop embd_pdrop residual_dropout "
                "ffn_dropout dropout"
            ),
            (0.0,),
        ),
        **dict.fromkeys(
            _names(
                "rope_interleaved use_sliding_window bias use_bias qkv_bias use_qkv_bias "
                "use_qk_norm qk_norm qk_layernorm use_parallel_residual parallel_residual "
                "apply_residual_connection_post_layernorm use_mup"
            ),
            (False,),
        ),
        **dict.fromkeys(
            _names(
                "logits_scaling logit_scale residual_multiplier embedding_multiplier rotary_pct "
                "rope_ratio"
            ),
            (1.0,),
        ),
        "activation": ("silu", "swiglu", "swish"),
        "layer_types": ("full_attention",),
        "no_rope_layers": (1,),  # as in SmolLM3: 1 is a layer with rotary positions
        "num_experts": (0,),
        "num_local_experts": (0,),
        "n_routed_experts": (0,),
    }
)
"""Fields of other models, with the values that change nothing; of a list every item counts."""


def field_problems(
    config_json: Mapping[str, Any],
    ignored: Iterable[str],
    *,
    where: str,
    read: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]],
    architecture: str,
) -> Iterator[str]:
    """Yield the problems of the fields of a ``config.json`` that are not ``read``, and of the names
    that the user wants ``ignored``. ``where`` is the path of the file, for messages. ``neutral``:
    what the family adds to ``NEUTRAL``."""
    allowed = {**NEUTRAL, **neutral}
    for name in ignored:
        if name in read or name in FIXED:
            do = "correct the field in the file, or leave the name out"
            got = "a field that says what the model computes"
            yield describe(f"{IGNORE} {name}", got=got, expected="another field", do=do)
    for name, values in FIXED.items():
        if name not in read and not _is_one_of(config_json.get(name), values):
            yield describe(
                f"{where} {name}",
                got=repr(config_json[name]),
                expected=" or ".join(map(repr, values)) or "nothing",
                do="such models are not supported",
            )
    unknown = {
        name: value
        for name, value in config_json.items()
        if name not in read
        and name not in HARMLESS
        and name not in FIXED
        and name not in ignored
        and not _is_one_of(value, allowed.get(name, ()))
        # Qwen's files keep the size of a window that is switched off.
        and not (name == "sliding_window" and config_json.get("use_sliding_window") is False)
    }
    if unknown:
        yield describe(
            where,
            got=", ".join(f"{name} {_short(value)}" for name, value in unknown.items()),
            expected=f"only fields and values that are known to change nothing in a {architecture}",
            do="if it computes the same without these, give "
            f"{IGNORE} {' '.join([*ignored, *unknown])}, or remove them from the file",
        )


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether a value is null or among ``values``; a list, whether all of its items are."""
    if isinstance(value, list) and values:
        return all(item in values for item in value)
    return value is None or value in values


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
