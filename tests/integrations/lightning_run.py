"""One rank of runs of Lightning, with its own DDP and with the engine. Rank 0 prints what they made."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from megatron_llama.errors import UserError
from megatron_llama.integrations.lightning import EngineStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

STEPS = 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Module(LightningModule):
    """With a parameter of its own, which ``training_step`` reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.scale = nn.Parameter(torch.ones(12))
        self.found: list[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)

    def _loss(self, batch: Tensor) -> Tensor:
        return (self(batch) * self.scale - batch.flip(1)).square().mean()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self._loss(batch)
        self.found.append([self.global_step, loss.item(), self.optimizers().param_groups[0]["lr"]])
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("validation", self._loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.found.append([self.global_step, self.trainer.callback_metrics["validation"].item(), -1.0])

    def test_step(self, batch: Tensor, index: int) -> None:
        self.log("test", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=STEPS + 1), "interval": "step"}]


def batches() -> DataLoader:
    samples = torch.randn(40, 12, generator=torch.Generator().manual_seed(1))
    return DataLoader(samples, batch_size=2)


def trainer(kind: str, folder: Path, **options: Any) -> Trainer:
    """Ten batches of a rank make four steps of an epoch, the last of one batch."""
    strategy = DDPStrategy(process_group_backend="gloo") if kind == "plain" else EngineStrategy(sharding={"units": [Block]}, process_group_backend="gloo")
    defaults = {
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 0.5,
        "max_steps": STEPS,
        "callbacks": [ModelCheckpoint(folder / kind, every_n_train_steps=6, save_top_k=-1, filename="{step}")],
    }
    return Trainer(
        accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_progress_bar=False, enable_model_summary=False, **defaults | options
    )


def compare(folder: Path) -> Any:
    found: dict[str, Any] = {}
    for kind in ("plain", "engine"):
        module, made = Module(), trainer(kind, folder)
        made.fit(module, batches(), batches())
        found[kind] = module.found
        found[f"{kind} test"] = made.test(module, batches(), verbose=False)[0]["test"]
    for kind in ("engine", "plain"):
        module = Module()
        trainer("engine", folder).fit(module, batches(), batches(), ckpt_path=folder / kind / "step=12.ckpt")
        found[f"resumed from {kind}"] = module.found
    module = Module()
    trainer("plain", folder).fit(module, batches(), batches(), ckpt_path=folder / "engine" / "step=12.ckpt")
    found["plain from engine"] = module.found
    return found


def refused(folder: Path) -> Any:
    found = {}
    for name, options in {"value": {"gradient_clip_algorithm": "value"}, "precision": {"precision": "16-true"}}.items():
        try:
            trainer("engine", folder, callbacks=None, enable_checkpointing=False, **options).fit(Module(), batches())
        except UserError as error:
            found[name] = str(error)
    return found


def main() -> None:
    case, folder = sys.argv[1:]
    found = {"compare": compare, "refused": refused}[case](Path(folder))
    if torch.distributed.get_rank() == 0:
        print("found", json.dumps(found))
    torch.distributed.destroy_process_group()
