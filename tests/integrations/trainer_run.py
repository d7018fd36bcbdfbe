"""One rank of runs of Transformers' Trainer and TRL's, with their own DDP and with the engine. Rank 0 prints what they
made."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from megatron_llama.integrations.transformers import EngineMixin, EngineTrainer
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.integrations.models import UNITS, data, model

COMMON = {
    "gradient_accumulation_steps": 3,
    "learning_rate": 3e-3,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": [],
    "warmup_steps": 5,
    "per_device_train_batch_size": 2,
}
"""With 40 samples, ten batches of a rank make four steps of an epoch, the last of one batch."""


class EngineSFT(EngineMixin, SFTTrainer):
    pass


class EngineDPO(EngineMixin, DPOTrainer):
    pass


def numbers(trainer: Trainer) -> list[list[float]]:
    """(step, loss, evaluation loss, gradient norm, learning rate) of each line of the log."""
    lines = [line for line in trainer.state.log_history if "loss" in line or "eval_loss" in line]
    return [[line.get(name, 0.0) for name in ("step", "loss", "eval_loss", "grad_norm", "learning_rate")] for line in lines]


def run(kind: str, folder: Path, *, steps: int, checkpoint: Path | None = None, max_grad_norm: float = 0.5) -> Trainer:
    arguments = TrainingArguments(
        str(folder / kind), **{**COMMON, "max_grad_norm": max_grad_norm}, max_steps=steps, save_steps=6, eval_strategy="steps", eval_steps=5
    )
    options = {"train_dataset": data(40), "eval_dataset": data(8)}
    trainer = Trainer(model(), arguments, **options) if kind == "plain" else EngineTrainer(model(), arguments, **options, sharding=UNITS)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return trainer


def hf(folder: Path) -> Any:
    """20 steps over five epochs; then again from the checkpoint at step 12."""
    plain, engine = (run(kind, folder, steps=20) for kind in ("plain", "engine"))
    found = {"plain": numbers(plain), "engine": numbers(engine)}
    found["resumed"] = numbers(run("engine", folder, steps=20, checkpoint=folder / "engine" / "checkpoint-12"))
    found["from plain"] = numbers(run("engine", folder, steps=20, checkpoint=folder / "plain" / "checkpoint-12"))
    plain.save_model(folder / "saved-plain")
    engine.save_model(folder / "saved-engine")
    if torch.distributed.get_rank() == 0:
        own, theirs = (load_file(folder / f"saved-{kind}" / "model.safetensors") for kind in ("engine", "plain"))
        found["same names"] = own.keys() == theirs.keys()
        found["largest difference"] = max((own[name] - theirs[name]).abs().max().item() for name in theirs)
    torch.distributed.barrier()
    unclipped = [numbers(run(kind, folder, steps=3, max_grad_norm=0.0)) for kind in ("plain", "engine")]
    return {**found, "plain unclipped": unclipped[0], "engine unclipped": unclipped[1]}


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte is a token."""
    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    plain = Tokenizer(BPE(letters, []))
    plain.pre_tokenizer = ByteLevel(add_prefix_space=False)
    special = sorted(letters)[:2]
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=special[0], pad_token=special[1])


def lora(kind: str) -> Any:
    """A model with low-rank additions whose B is not zero, so that the first loss depends on A."""
    torch.manual_seed(3)
    made = get_peft_model(model(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"))
    return made


def dpo(folder: Path) -> Any:
    """Low-rank additions without a second model: the reference is the model with its adapter switched off."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").encode("ascii", "ignore").decode()
    rows = [
        {"prompt": text[60 * n : 60 * n + 20], "chosen": text[60 * n + 20 : 60 * n + 40], "rejected": text[60 * n + 59 : 60 * n + 39 : -1]} for n in range(40)
    ]
    found = {}
    for kind in ("plain", "engine"):
        made = DPOConfig(str(folder / kind), **COMMON, max_steps=20, save_strategy="steps", save_steps=12, bf16=False, gradient_checkpointing=False)
        given = {"args": made, "train_dataset": Dataset.from_list(rows), "processing_class": tokenizer()}
        trainer = DPOTrainer(lora(kind), **given) if kind == "plain" else EngineDPO(lora(kind), **given, sharding=UNITS)
        trainer.train()
        found[kind] = numbers(trainer)
    again = EngineDPO(lora("engine"), **given, sharding=UNITS)
    again.train(resume_from_checkpoint=str(folder / "engine" / "checkpoint-12"))
    found["resumed"] = numbers(again)
    if torch.distributed.get_rank() == 0:
        own, theirs = (load_file(folder / kind / "checkpoint-12" / "adapter_model.safetensors") for kind in ("engine", "plain"))
        found["same names"] = own.keys() == theirs.keys()
        found["largest difference"] = max((own[name] - theirs[name]).abs().max().item() for name in theirs)
    return found


def sft(folder: Path) -> Any:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").encode("ascii", "ignore").decode()
    rows = [{"text": text[60 * n : 60 * n + 30 + n % 7]} for n in range(40)]
    found = {}
    for kind in ("plain", "engine"):
        made = SFTConfig(str(folder / kind), **COMMON, max_steps=20, save_strategy="no", bf16=False, gradient_checkpointing=False)
        given = {"args": made, "train_dataset": Dataset.from_list(rows), "processing_class": tokenizer()}
        trainer = SFTTrainer(model(), **given) if kind == "plain" else EngineSFT(model(), **given, sharding=UNITS)
        trainer.train()
        found[kind] = numbers(trainer)
    return found


def main() -> None:
    case, folder = sys.argv[1:]
    found = {"hf": hf, "dpo": dpo, "sft": sft}[case](Path(folder))
    if torch.distributed.get_rank() == 0:
        print("found", json.dumps(found))
    torch.distributed.destroy_process_group()
