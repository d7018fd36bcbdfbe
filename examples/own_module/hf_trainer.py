"""Hugging Face's Trainer with the engine of megatron_llama; ``keep_whole`` serves Accelerate, too.

torchrun --nproc-per-node 2 examples/own_module/hf_trainer.py README.md
"""

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import megatron_llama as ml


def keep_whole(accelerator):
    """Keep ``accelerator.prepare`` from wrapping a model in DDP: shard() does DDP's work."""
    prepare = accelerator.prepare_model
    unchanged = {"device_placement": False, "evaluation_mode": True}
    accelerator.prepare_model = lambda model, **given: prepare(model, **unchanged)


class ShardedTrainer(Trainer):
    """A Trainer whose optimizer is the engine's. ``sharding`` has arguments for shard()."""

    def __init__(self, *args, sharding, **kwargs):
        self.sharding = sharding
        self.engine = None
        super().__init__(*args, **kwargs)
        keep_whole(self.accelerator)

    def create_optimizer(self, model=None):
        if self.engine is None:
            adamw = super().create_optimizer()  # torch's, with the groups of TrainingArguments
            clip = self.args.max_grad_norm
            self.engine = ml.shard(self.model, optimizer=adamw, clip=clip, **self.sharding)
            self.optimizer = self.engine.optimizer
        return self.optimizer

    def get_batch_samples(self, *args):
        batches, items = super().get_batch_samples(*args)
        self.engine.microbatches = len(batches)  # fewer in the last step of an epoch
        return batches, items

    def _get_grad_norm(self, model, grad_norm=None):
        return None  # known after the step: see log()

    _clip_grad_norm = _get_grad_norm  # the engine clips

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            logs["grad_norm"] = self.engine.result.grad_norm.item()
        super().log(logs, *args, **kwargs)

    def save_model(self, *args, **kwargs):
        with self.engine.gathered():
            super().save_model(*args, **kwargs)

    def _state(self):
        return {"engine": self.engine, "scheduler": self.lr_scheduler}

    def _save_optimizer_and_scheduler(self, output_dir):
        dcp.save(self._state(), checkpoint_id=f"{output_dir}/engine")

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is not None:
            dcp.load(self._state(), checkpoint_id=f"{checkpoint}/engine")


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_bytes()
    samples = [list(text[start : start + 64]) for start in range(0, len(text) - 64, 64)]
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=4))
    arguments = TrainingArguments("runs/hf_trainer", max_steps=12, logging_steps=1, use_cpu=True)
    data = [{"input_ids": ids, "labels": ids} for ids in samples]
    units = {"units": [type(model.model.layers[0])]}
    ShardedTrainer(model, arguments, train_dataset=data, sharding=units).train()
