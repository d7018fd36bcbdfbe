"""A ResNet on two processes: convolutions, and batch norms with buffers. It learns to tell in which
direction the stripes of an image run.

torchrun --nproc-per-node 2 examples/own_module/resnet.py
"""

import torch
import torch.distributed as dist
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.models.resnet.modeling_resnet import ResNetStage

import megatron_llama as ml

STEPS, SAMPLES, SIZE = 30, 16, 32


def stripes(count):
    """Noisy images [count, 3, SIZE, SIZE] with stripes across or along, and which: 0 or 1."""
    labels = torch.randint(2, (count,))
    waves = (torch.arange(SIZE) / 3 + 6 * torch.rand(count, 1)).sin()
    across = waves[:, None, None, :].expand(-1, 3, SIZE, SIZE)
    images = torch.where(labels.view(-1, 1, 1, 1) == 1, across.mT, across)
    return images + 0.5 * torch.randn(images.shape), labels


dist.init_process_group()
torch.manual_seed(0)
shape = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"}
model = ResNetForImageClassification(ResNetConfig(**shape, num_labels=2))
torch.manual_seed(1 + dist.get_rank())
with ml.shard(model, units=[ResNetStage], optimizer=ml.AdamW(lr=3e-3), clip=1.0) as engine:
    for step in range(STEPS):
        images, labels = stripes(SAMPLES)
        loss = model(pixel_values=images, labels=labels).loss
        loss.backward()
        norm = engine.step().grad_norm
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item():.4f} norm {norm.item():.4f}")
    model.eval()
    with torch.no_grad():
        images, labels = stripes(64)
        right = (model(pixel_values=images).logits.argmax(-1) == labels).float().mean()
    if dist.get_rank() == 0:
        print(f"right: {right:.2f}")
dist.destroy_process_group()
