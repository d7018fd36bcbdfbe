"""The losses of TRL's SFTTrainer beside those of ``sft``: the same model, conversations, order,
batches and options.

TRL is no dependency of this project. In an environment that has both (``pip install trl``), from
the root of the clone:

    python tools/compare_trl.py --model FOLDER --data FILE.jsonl --steps 20

Each side reads the conversations itself: TRL renders them with the exported tokenizer's template
and finds the learned tokens with ``assistant_only_loss``. Both compute in fp32 without clipping, at
a constant learning rate. Prints both curves and the largest relative difference; exit status 1 if
it exceeds the bound of parity, 1e-6.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

import torch

from megatron_llama.config.help import help_text
from megatron_llama.config.parse import parse
from megatron_llama.config.schema import TrainingConfig
from megatron_llama.data.order import sample_index
from megatron_llama.errors import UserError

BOUND = 1e-6


@dataclass(frozen=True)
class CompareConfig:
    """What is trained, and for how long."""

    model: str
    """HuggingFace folder."""
    data: str
    """Conversations in OpenAI's format, each of which fits into a sample."""
    steps: int = 20
    """Optimizer steps."""
    seq_length: int = 256
    """Tokens per sample."""
    micro_batch_size: int = 2
    """Conversations in one forward pass."""
    global_batch_size: int = 8
    """Conversations in one step."""
    lr: float = 1e-3
    """Learning rate."""


def ours(options: CompareConfig, folder: Path) -> list[float]:
    """The losses of ``sft``."""
    same = {
        name: getattr(options, name)
        for name in ("seq_length", "micro_batch_size", "global_batch_size", "lr")
    }
    given = {
        "init-from-hf": options.model,
        "train-data": options.data,
        "train-iters": options.steps,
        "save": folder,
        "log-interval": 1,
    }
    given |= {name.replace("_", "-"): value for name, value in same.items()}
    fixed = [
        "--lr-decay-style",
        "constant",
        "--clip-grad",
        "0",
        "--weight-decay",
        "0",
        "--split",
        "100,0,0",
        "--on-long-sample",
        "stop",
    ]
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    subprocess.run(
        [sys.executable, "-m", "megatron_llama", "sft", *words, *fixed],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # imports what we do
        stdout=subprocess.DEVNULL,
    )
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["lm_loss"] for line in lines if "lm_loss" in line]


def theirs(options: CompareConfig, tokenizer: Path, folder: Path) -> list[float]:
    """Those of TRL, with the tokenizer and the template that ours left beside its checkpoints."""
    # TRL is no dependency, and --help needs none of it.
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    class Trainer(SFTTrainer):  # type: ignore[misc]
        """Reads its samples in their order, and keeps the loss of each step as it is: a log line is
        rounded."""

        losses: list[float]

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> torch.utils.data.Sampler[int]:
            return torch.utils.data.SequentialSampler(args[0] if args else self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            """A microbatch: its share of the mean over the learned tokens of the step."""
            loss = super().training_step(*args, **kwargs)
            self.losses.append(float(loss))
            return loss

    rows = [json.loads(line) for line in Path(options.data).read_text().splitlines()]
    seed = TrainingConfig().seed
    count = options.steps * options.global_batch_size
    order = [sample_index(position, len(rows), seed, shuffled=True) for position in range(count)]
    settings = SFTConfig(
        output_dir=str(folder),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch_size,
        gradient_accumulation_steps=options.global_batch_size // options.micro_batch_size,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        weight_decay=0.0,
        optim="adamw_torch",
        max_length=options.seq_length + 1,
        assistant_only_loss=True,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
    )
    dataset = Dataset.from_list([{"messages": rows[index]["messages"]} for index in order])
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(tokenizer)
    words.pad_token = words.eos_token
    trainer = Trainer(model=model, args=settings, train_dataset=dataset, processing_class=words)
    trainer.losses = []
    trainer.train()
    parts = settings.gradient_accumulation_steps
    return [sum(trainer.losses[at : at + parts]) for at in range(0, len(trainer.losses), parts)]


def main(argv: Sequence[str]) -> int:
    """Train twice and compare."""
    if {"-h", "--help"} & set(argv):
        usage = "python tools/compare_trl.py --model FOLDER --data FILE.jsonl [--option value ...]"
        print(help_text(usage, __doc__ or "", [CompareConfig]), end="")
        return 0
    options = parse(argv, [CompareConfig], aliases={}).get(CompareConfig)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = ours(options, folder / "ours")
        expected = theirs(options, folder / "ours" / "tokenizer", folder / "theirs")
    differences = [abs(a - b) / b for a, b in zip(found, expected, strict=True)]
    for step, (a, b, difference) in enumerate(zip(found, expected, differences, strict=True), 1):
        print(f"step {step:3d}   sft {a:.7f}   TRL {b:.7f}   {difference:.1e}")
    print(f"largest relative difference: {max(differences):.1e}")
    return int(max(differences) > BOUND)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
