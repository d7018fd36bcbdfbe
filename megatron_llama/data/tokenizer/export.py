"""Expresses a sentencepiece model as a HuggingFace ``tokenizer.json`` with the same ids."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from megatron_llama.data.tokenizer import proto
from megatron_llama.data.tokenizer.proto import SentencePieceModel
from megatron_llama.errors import DataError, describe, listing

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's escaped space
SPECIAL = (proto.UNKNOWN, proto.CONTROL)
"""Types of the pieces that are special tokens."""


def hf_tokenizer(model: SentencePieceModel, name: str, bos: str | None) -> Tokenizer:
    """Return a tokenizer of the ``tokenizers`` library with the ids of a sentencepiece model.
    Encoding with special tokens puts ``bos`` first.

    Ids are equal for every text that does not spell a control token: ``tokenizers`` reads a literal
    ``</s>`` as the token, sentencepiece as text. A text that is a user-defined symbol and nothing
    else gets no space in front. For a unigram model this holds up to rounding: sentencepiece adds
    scores in float32, ``tokenizers`` in float64. So if several sequences of pieces have the same
    score, as in a long run of one character, the order of these pieces may be another. Raises
    DataError with every property of the model that has no counterpart.
    """
    require_expressible(model, name)
    vocabulary = {piece.text: id for id, piece in enumerate(model.pieces)}
    tokenizer = Tokenizer(_unigram(model) if model.model_type == proto.UNIGRAM else _bpe(model))
    if model.model_type == proto.UNIGRAM and model.byte_fallback:
        # `tokenizers` would read a literal "<0x0A>" as the byte's piece. It cannot if the text is
        # cut behind its first character.
        tokenizer.pre_tokenizer = pre_tokenizers.Split(
            Regex("<(?=0x[0-9A-F]{2}>)"), "merged_with_previous"
        )
    _set_normalizer(tokenizer, model)
    _set_decoder(tokenizer, model)
    special = [piece.text for piece in model.pieces if piece.type in SPECIAL]
    tokenizer.add_special_tokens([*map(special_token, special)])
    # They are searched in the normalized text, where no word begins behind one.
    tokenizer.add_tokens([AddedToken(text, normalized=True) for text in _user_defined(model)])
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, vocabulary[bos])],
        )
    return tokenizer


def special_token(text: str) -> AddedToken:
    """Return a special token that is searched in the text before it is normalized."""
    return AddedToken(text, special=True, normalized=False)


def require_expressible(model: SentencePieceModel, name: str) -> None:
    """Raise DataError with every property of the model that a tokenizer.json cannot express."""
    problems = []
    kinds = (proto.BPE, proto.UNIGRAM)
    if model.model_type not in kinds:
        problems.append(
            f"model_type is {model.model_type}, expected {proto.BPE} (BPE) or"
            f" {proto.UNIGRAM} (unigram)"
        )
    if model.whitespace_as_suffix:
        problems.append("treat_whitespace_as_suffix is set, expected unset")
    if not model.escape_whitespaces:
        problems.append("escape_whitespaces is unset, expected set")
    if symbols := _user_defined(model):
        problems += _beside_symbols(model, symbols)
    if model.model_type == proto.UNIGRAM and any(
        piece.type == proto.UNUSED for piece in model.pieces
    ):
        problems.append("it has unused pieces, expected none (tokenizers would use them)")
    if len({piece.text for piece in model.pieces}) != len(model.pieces):
        problems.append("two pieces have the same text, expected distinct pieces")
    if problems:
        title = describe(
            name,
            got="a model that tokenizer.json cannot express",
            expected="a BPE or unigram model as LLaMA's",
            do="use another tokenizer: checkpoints and exports come with a tokenizer.json",
        )
        raise DataError(listing(title, problems))


def _user_defined(model: SentencePieceModel) -> list[str]:
    return [piece.text for piece in model.pieces if piece.type == proto.USER_DEFINED]


def _beside_symbols(model: SentencePieceModel, symbols: Sequence[str]) -> Iterator[str]:
    """Yield features that a model with user-defined symbols must not have. sentencepiece finds the
    symbols in the given text, ``tokenizers`` in the normalized text."""
    if model.model_type == proto.UNIGRAM:
        yield "it is a unigram model with user-defined symbols, expected a BPE or none"
    if model.charsmap or model.remove_extra_whitespaces:
        yield (
            "it normalizes text and has user-defined symbols, expected one of the two"
            " (what a text spells otherwise would become a symbol)"
        )
    spaced = [text for text in symbols if SPACE in text or any(map(str.isspace, text))]
    if spaced:
        yield f"its user-defined symbol {spaced[0]!r} has a space, expected none in symbols"


def _bpe(model: SentencePieceModel) -> models.BPE:
    unknown = next((piece.text for piece in model.pieces if piece.type == proto.UNKNOWN), None)
    return models.BPE(
        vocab={piece.text: id for id, piece in enumerate(model.pieces)},
        merges=_merges(model),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _unigram(model: SentencePieceModel) -> models.Unigram:
    """Return the unigram model. The score of an unknown character is 10 below the lowest in both
    libraries; sentencepiece considers normal pieces only, so all others get their lowest score."""
    lowest = min((piece.score for piece in model.pieces if piece.type == proto.NORMAL), default=0.0)
    unknown = [id for id, piece in enumerate(model.pieces) if piece.type == proto.UNKNOWN]
    return models.Unigram(
        vocab=[
            (piece.text, piece.score if piece.type == proto.NORMAL else lowest)
            for piece in model.pieces
        ],
        unk_id=unknown[0] if unknown else None,
        byte_fallback=model.byte_fallback,
    )


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Return every pair of pieces whose concatenation is a piece, best score first.

    sentencepiece joins the neighbours whose joint piece scores highest, whichever way that piece
    was first built. Usual conversions take the order of ids, which is different.
    """
    mergeable = {piece.text for piece in model.pieces if piece.type == proto.NORMAL}
    joined = sorted(
        (piece for piece in model.pieces if piece.type == proto.NORMAL),
        key=lambda piece: -piece.score,
    )
    splits = (
        (piece.text[:at], piece.text[at:]) for piece in joined for at in range(1, len(piece.text))
    )
    return [(left, right) for left, right in splits if left in mergeable and right in mergeable]


def _set_normalizer(tokenizer: Tokenizer, model: SentencePieceModel) -> None:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        # As in sentencepiece, newlines stay, which `Strip` would remove; at the end a literal
        # U+2581 is removed, too, since sentencepiece reads it as an escaped space.
        steps += [
            normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
        if symbols := _user_defined(model):
            # `tokenizers` also normalizes the symbol before it searches for it.
            alone = "|".join(map(re.escape, symbols))
            steps.append(normalizers.Replace(Regex(rf"\A{SPACE}(?=(?:{alone})\z)"), ""))
    steps.append(normalizers.Replace(" ", SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)


def _set_decoder(tokenizer: Tokenizer, model: SentencePieceModel) -> None:
    steps: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if model.add_dummy_prefix or model.remove_extra_whitespaces:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
