"""Models of sound, and of other series of numbers."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from torch import nn

from tools.zoo.entry import Entry, built, drawn, noise, numbers
from tools.zoo.texts import WORDS

hf = partial(built, "transformers")
SIDES = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 2), ("ffn_dim", 56), ("attention_heads", 4))
}


def wav2vec2() -> nn.Module:
    """Convolutions, a convolution whose weight is parametrized, and layers of which each pass drops
    some. Its parts run on all ranks alike, which transformers does for models that it knows to be
    sharded: DDP has to be told."""
    transformers = import_module("transformers")
    config = transformers.Wav2Vec2Config(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=56,
        conv_dim=(16, 16),
        conv_kernel=(10, 4),
        conv_stride=(5, 4),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        layerdrop=0.5,
        mask_time_prob=0.0,
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
    )
    model: nn.Module = transformers.Wav2Vec2ForCTC(config)
    for module in model.modules():
        vars(module)["_is_fsdp_managed_module"] = True
    return model


SOUNDS = {
    "wav2vec2": Entry(
        "transformers",
        wav2vec2,
        drawn(input_values=noise(2, 900), labels=numbers(WORDS, 2, 6, first=1)),
        ("Wav2Vec2EncoderLayer",),
    ),
    "whisper": Entry(
        "transformers",
        hf(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **SIDES,
            vocab_size=WORDS,
            d_model=32,
            num_mel_bins=12,
            max_source_positions=20,
            max_target_positions=20,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        drawn(input_features=noise(2, 12, 40), labels=numbers(WORDS, 2, 9, first=3)),
        ("WhisperEncoderLayer", "WhisperDecoderLayer"),
    ),
    "patchtst": Entry(
        "transformers",
        hf(
            "PatchTSTForPrediction",
            "PatchTSTConfig",
            num_input_channels=3,
            context_length=32,
            patch_length=8,
            patch_stride=8,
            prediction_length=6,
            d_model=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            ffn_dim=56,
        ),
        drawn(past_values=noise(4, 32, 3), future_values=noise(4, 6, 3)),
        ("PatchTSTEncoderLayer",),
    ),
}
