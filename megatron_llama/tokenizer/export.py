"""Expresses a sentencepiece BPE model as a HuggingFace ``tokenizer.json`` with the same ids."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from megatron_llama.errors import DataError, describe, listing
from megatron_llama.tokenizer import proto
from megatron_llama.tokenizer.proto import SentencePieceModel

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's escaped space


def hf_tokenizer(model: SentencePieceModel, name: str, bos: str | None) -> Tokenizer:
    """Return a tokenizer of the ``tokenizers`` library with the ids of a sentencepiece BPE model.
    Encoding with special tokens puts ``bos`` first.

    Ids are equal for every text that does not spell a control token: ``tokenizers`` reads a literal
    ``</s>`` as the token, sentencepiece as text. Raises DataError with every property of the model
    that has no counterpart.
    """
    _check(model, name)
    vocabulary = {piece.text: id for id, piece in enumerate(model.pieces)}
    unknown = next((piece.text for piece in model.pieces if piece.type == proto.UNKNOWN), None)
    bpe = models.BPE(
        vocab=vocabulary,
        merges=_merges(model),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )
    tokenizer = Tokenizer(bpe)
    _set_normalizer(tokenizer, model)
    _set_decoder(tokenizer, model)
    special = [piece.text for piece in model.pieces if piece.type in (proto.UNKNOWN, proto.CONTROL)]
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special]
    )
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, vocabulary[bos])],
        )
    return tokenizer


def _check(model: SentencePieceModel, name: str) -> None:
    problems = []
    if model.model_type != proto.BPE:
        problems.append(
            f"model_type is {model.model_type}, expected {proto.BPE} (BPE),"
            " which every LLaMA with sentencepiece uses"
        )
    if model.whitespace_as_suffix:
        problems.append("treat_whitespace_as_suffix is set, expected unset")
    if not model.escape_whitespaces:
        problems.append("escape_whitespaces is unset, expected set")
    if any(piece.type == proto.USER_DEFINED for piece in model.pieces):
        problems.append(
            "it has user-defined symbols, expected none"
            " (the text after one would get another space prefix)"
        )
    if len({piece.text for piece in model.pieces}) != len(model.pieces):
        problems.append("two pieces have the same text, expected distinct pieces")
    if problems:
        title = describe(
            name,
            got="a model that tokenizer.json cannot express",
            expected="a LLaMA-like BPE model",
            do="keep using the .model file",
        )
        raise DataError(listing(title, problems))


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Return every pair of pieces whose concatenation is a piece, best score first.

    sentencepiece joins the neighbours whose joint piece scores highest, whichever way that piece
    was first built. Usual conversions take the order of ids, which is another one.
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
        # As sentencepiece does: newlines stay, which `Strip` would remove; at the end a literal
        # U+2581, which it reads as an escaped space, goes too.
        steps += [
            normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
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
