"""One rank of a run of Hugging Face's Trainer: ``python trainer_run.py plain|sharded|accelerate FOLDER TEXT STEPS [CHECKPOINT]``. Rank 0 prints its log as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import megatron_llama as ml
import torch
from accelerate import Accelerator
from examples.own_module.hf_trainer import ShardedTrainer, keep_whole
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SAMPLES, ACCUMULATE = 40, 2
"""Two ranks with four samples a batch: five batches an epoch, so its last step has one."""


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True))


def data(text: bytes) -> list[dict[str, list[int]]]:
    pieces = [list(text[64 * n : 64 * n + 64]) for n in range(SAMPLES)]
    return [{"input_ids": ids, "labels": ids} for ids in pieces]


def with_trainer(kind: str, folder: str, text: bytes, steps: int, checkpoint: str | None) -> list[dict[str, float]]:
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=ACCUMULATE,
        learning_rate=1e-3,
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=4,
        eval_strategy="steps",
        eval_steps=4,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        # The schedule is that of all steps also in the run that ends early.
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
    )
    lm = model()
    options = {"train_dataset": data(text), "eval_dataset": data(text)[:8]}
    if kind == "plain":
        trainer = Trainer(lm, arguments, **options)
    else:
        trainer = ShardedTrainer(lm, arguments, **options, sharding={"units": [type(lm.model.layers[0])]})
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer.state.log_history


def with_accelerate(kind: str, text: bytes, steps: int) -> list[dict[str, float]]:
    accelerator = Accelerator(cpu=True)
    lm = model()
    batches = DataLoader(
        data(text), batch_size=4, collate_fn=lambda samples: {k: torch.tensor([s[k] for s in samples]) for k in samples[0]}
    )
    if kind == "accelerate":
        keep_whole(accelerator)
        engine = ml.shard(lm, units=[type(lm.model.layers[0])], optimizer=ml.AdamW(lr=1e-3, weight_decay=0.0))
        optimizer = engine.optimizer
    else:
        optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3, weight_decay=0.0)
    lm, optimizer, batches = accelerator.prepare(lm, optimizer, batches)
    history = []
    for batch, _ in zip(batches, range(steps), strict=False):
        loss = lm(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        history.append({"loss": loss.item()})
    return history


if __name__ == "__main__":
    kind, folder, text, steps, *checkpoint = sys.argv[1:]
    content = Path(text).read_bytes()
    if "accelerate" in kind:
        history = with_accelerate(kind, content, int(steps))
    else:
        history = with_trainer(kind, folder, content, int(steps), *checkpoint or [None])
    if torch.distributed.get_rank() == 0:
        print("history", json.dumps(history))
    torch.distributed.destroy_process_group()
