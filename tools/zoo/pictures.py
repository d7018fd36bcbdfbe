"""Models of pictures, and of pictures with text."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from tools.zoo.entry import Entry, Inputs, built, drawn, noise, numbers
from tools.zoo.texts import LENGTH, QUERIES, SIZES, WORDS

SAMPLES, LABELS = 4, 10
hf = partial(built, "transformers")


def classified(size: int, name: str = "pixel_values", labels: str = "labels") -> Any:
    """Return what draws pictures with a label each."""
    return drawn(**{name: noise(SAMPLES, 3, size, size), labels: numbers(LABELS, SAMPLES)})


def label_loss(output: Tensor, inputs: Inputs) -> Tensor:
    """Return the loss of a classifier that returns logits."""
    return cross_entropy(output, inputs["target"])


def noise_loss(output: Any, inputs: Inputs) -> Tensor:
    """Return the loss of a model of diffusers that predicts noise."""
    predicted = output.sample
    return mse_loss(predicted[:, : inputs["target"].shape[1]], inputs["target"])


def picture_loss(output: Any, inputs: Inputs) -> Tensor:
    """Return the loss of an autoencoder: how far its picture is from the one that it read."""
    return mse_loss(output.sample, inputs["target"])


def boxes_loss(output: Any, inputs: Inputs) -> Tensor:
    """Return the loss of a detector whose queries are matched in their order."""
    places = mse_loss(output.pred_boxes, inputs["target"].sigmoid())
    labels = inputs["target"][..., 0].long().abs()
    return places + cross_entropy(output.logits.flatten(0, 1), labels.flatten())


def contrast_loss(output: Any, inputs: Inputs) -> Tensor:
    """Return CLIP's loss."""
    pairs = torch.arange(SAMPLES)
    logits = output.logits_per_image
    return (cross_entropy(logits, pairs) + cross_entropy(logits.t(), pairs)) / 2


def same_picture(generator: Generator) -> Inputs:
    """Draw pictures that are the target, too."""
    picture = noise(2, 3, 16, 16)(generator)
    return {"sample": picture, "target": picture}


def detr() -> nn.Module:
    """A ResNet, whose batch norms stay as they are, below an encoder and a decoder."""
    transformers = import_module("transformers")
    backbone = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIDE}
    config = transformers.DetrConfig(
        backbone_config=backbone, d_model=32, num_queries=5, num_labels=LABELS, **sides
    )
    model: nn.Module = transformers.DetrForObjectDetection(config)
    return model


def timm_resnet() -> nn.Module:
    """A narrow ResNet, with batch norm and its buffers."""
    resnet = import_module("timm.models.resnet")
    model: nn.Module = resnet.ResNet(
        resnet.BasicBlock,
        (1, 1, 1, 1),
        num_classes=LABELS,
        channels=(8, 12, 16, 20),
        stem_width=8,
        zero_init_last=False,
    )
    return model


SIDE = (("layers", 2), ("ffn_dim", 56), ("attention_heads", 4))


def clip() -> nn.Module:
    """A tower of text, a tower of pictures, and a temperature."""
    transformers = import_module("transformers")
    tower = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
    config = transformers.CLIPConfig(
        text_config={**tower, "num_attention_heads": 4, "vocab_size": WORDS, "eos_token_id": 2},
        vision_config={**tower, "num_attention_heads": 4, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    model: nn.Module = transformers.CLIPModel(config)
    return model


def llava() -> nn.Module:
    """A language model that reads what a tower of pictures says."""
    transformers = import_module("transformers")
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**SIZES, **QUERIES),
        image_token_id=WORDS - 1,
        vision_feature_layer=-2,
    )
    model: nn.Module = transformers.LlavaForConditionalGeneration(config)
    return model


def questions(generator: Generator) -> Inputs:
    """Draw texts that begin with a picture of four patches."""
    ids = numbers(WORDS - 1, 2, LENGTH, first=3)(generator)
    ids[:, :4] = WORDS - 1
    return {"input_ids": ids, "labels": ids, "pixel_values": noise(2, 3, 16, 16)(generator)}


UNET = {
    **{"sample_size": 16, "in_channels": 3, "out_channels": 3, "layers_per_block": 1},
    **{"block_out_channels": (8, 16), "norm_num_groups": 4},
}
DIT = {"num_attention_heads": 4, "attention_head_dim": 8, "patch_size": 2}
VIT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 56}

PICTURES = {
    "vit": Entry(
        "transformers",
        hf(
            "ViTForImageClassification",
            "ViTConfig",
            **VIT,
            image_size=16,
            patch_size=4,
            num_labels=LABELS,
        ),
        classified(16),
        ("ViTLayer",),
    ),
    "vit mae": Entry(
        "transformers",
        hf(
            "ViTMAEForPreTraining",
            "ViTMAEConfig",
            **VIT,
            image_size=16,
            patch_size=4,
            decoder_hidden_size=24,
            decoder_num_hidden_layers=2,
            decoder_num_attention_heads=4,
            decoder_intermediate_size=40,
        ),
        drawn(pixel_values=noise(SAMPLES, 3, 16, 16)),
        ("ViTMAELayer",),
    ),
    "swin": Entry(
        "transformers",
        hf(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=32,
            patch_size=4,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            num_labels=LABELS,
        ),
        classified(32),
        ("SwinLayer",),
    ),
    "convnext v2": Entry(
        "transformers",
        hf(
            "ConvNextV2ForImageClassification",
            "ConvNextV2Config",
            hidden_sizes=[12, 20],
            depths=[2, 2],
            num_stages=2,
            image_size=32,
            drop_path_rate=0.2,
            num_labels=LABELS,
        ),
        classified(32),
        ("ConvNextV2Layer",),
    ),
    "segformer": Entry(
        "transformers",
        hf(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            depths=[1, 1],
            num_encoder_blocks=2,
            sr_ratios=[2, 1],
            hidden_sizes=[16, 24],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[2, 4],
            mlp_ratios=[2, 2],
            decoder_hidden_size=24,
            num_labels=LABELS,
        ),
        drawn(pixel_values=noise(SAMPLES, 3, 32, 32), labels=numbers(LABELS, SAMPLES, 32, 32)),
        ("SegformerLayer",),
    ),
    "detr": Entry(
        "transformers",
        detr,
        drawn(pixel_values=noise(2, 3, 32, 32), target=noise(2, 5, 4)),
        ("ResNetBasicLayer", "DetrEncoderLayer", "DetrDecoderLayer"),
        boxes_loss,
    ),
    "clip": Entry(
        "transformers",
        clip,
        drawn(
            input_ids=numbers(WORDS, SAMPLES, LENGTH, first=3),
            pixel_values=noise(SAMPLES, 3, 16, 16),
        ),
        ("CLIPEncoderLayer",),
        contrast_loss,
    ),
    "llava": Entry(
        "transformers",
        llava,
        questions,
        ("CLIPEncoderLayer", "LlamaDecoderLayer"),
        # Pictures are read from the layer before the last.
        frozen=("*vision_tower*.layers.2.*", "*post_layernorm*"),
    ),
    "unet": Entry(
        "diffusers",
        built(
            "diffusers",
            "UNet2DModel",
            **UNET,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
        ),
        drawn(sample=noise(2, 3, 16, 16), timestep=numbers(1000, 2), target=noise(2, 3, 16, 16)),
        ("DownBlock2D", "AttnDownBlock2D", "AttnUpBlock2D", "UpBlock2D", "UNetMidBlock2D"),
        noise_loss,
    ),
    "unet with text": Entry(
        "diffusers",
        built(
            "diffusers",
            "UNet2DConditionModel",
            **UNET,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=12,
            attention_head_dim=4,
        ),
        drawn(
            sample=noise(2, 3, 16, 16),
            timestep=numbers(1000, 2),
            encoder_hidden_states=noise(2, 7, 12),
            target=noise(2, 3, 16, 16),
        ),
        ("ResnetBlock2D", "Transformer2DModel"),
        noise_loss,
    ),
    "dit": Entry(
        "diffusers",
        built(
            "diffusers",
            "DiTTransformer2DModel",
            **DIT,
            in_channels=4,
            out_channels=8,
            num_layers=3,
            sample_size=8,
            num_embeds_ada_norm=100,
            norm_num_groups=4,
        ),
        drawn(
            hidden_states=noise(2, 4, 8, 8),
            timestep=numbers(100, 2),
            class_labels=numbers(LABELS, 2),
            target=noise(2, 4, 8, 8),
        ),
        # The model calls the embedding of its first block once more, at its end.
        ("BasicTransformerBlock", "CombinedTimestepLabelEmbeddings"),
        noise_loss,
    ),
    "sd3": Entry(
        "diffusers",
        built(
            "diffusers",
            "SD3Transformer2DModel",
            **DIT,
            in_channels=4,
            num_layers=3,
            sample_size=8,
            joint_attention_dim=12,
            caption_projection_dim=32,
            pooled_projection_dim=20,
            pos_embed_max_size=8,
        ),
        drawn(
            hidden_states=noise(2, 16 // 4, 8, 8),
            encoder_hidden_states=noise(2, 7, 12),
            pooled_projections=noise(2, 20),
            timestep=numbers(1000, 2),
            target=noise(2, 4, 8, 8),
        ),
        ("JointTransformerBlock",),
        noise_loss,
    ),
    "vae": Entry(
        "diffusers",
        built(
            "diffusers",
            "AutoencoderKL",
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            latent_channels=4,
            sample_size=16,
        ),
        same_picture,
        ("DownEncoderBlock2D", "UpDecoderBlock2D", "UNetMidBlock2D"),
        picture_loss,
    ),
    "timm vit": Entry(
        "timm",
        built(
            "timm.models.vision_transformer",
            "VisionTransformer",
            img_size=16,
            patch_size=4,
            embed_dim=32,
            depth=3,
            num_heads=4,
            num_classes=LABELS,
            drop_path_rate=0.1,
        ),
        classified(16, "x", "target"),
        ("Block",),
        label_loss,
    ),
    "timm mixer": Entry(
        "timm",
        built(
            "timm.models.mlp_mixer",
            "MlpMixer",
            img_size=16,
            patch_size=4,
            embed_dim=32,
            num_blocks=3,
            num_classes=LABELS,
        ),
        classified(16, "x", "target"),
        ("MixerBlock",),
        label_loss,
    ),
    "timm convnext": Entry(
        "timm",
        built(
            "timm.models.convnext",
            "ConvNeXt",
            depths=(1, 1, 2, 1),
            dims=(8, 12, 16, 20),
            num_classes=LABELS,
        ),
        classified(32, "x", "target"),
        ("ConvNeXtBlock",),
        label_loss,
    ),
    "timm resnet": Entry(
        "timm", timm_resnet, classified(64, "x", "target"), ("BasicBlock",), label_loss, eps=1e-3
    ),
    "mobilenet v3": Entry(
        "torchvision",
        built("torchvision.models", "mobilenet_v3_small", num_classes=LABELS, width_mult=0.25),
        classified(64, "x", "target"),
        ("InvertedResidual",),
        label_loss,
        eps=1e-3,
    ),
    "torchvision swin": Entry(
        "torchvision",
        built(
            "torchvision.models",
            "SwinTransformer",
            patch_size=[4, 4],
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=[4, 4],
            num_classes=LABELS,
        ),
        classified(32, "x", "target"),
        ("SwinTransformerBlock",),
        label_loss,
    ),
}
