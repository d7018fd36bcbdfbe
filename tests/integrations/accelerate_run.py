"""One rank of loops of Accelerate, with its own DDP and with the engine. Rank 0 prints what they made."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from megatron_llama.errors import UserError
from megatron_llama.integrations.accelerate import prepare
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from tests.integrations.models import UNITS, collate, data, model

EPOCHS, ACCUMULATE = 5, 3
"""Ten batches of a rank make four steps of an epoch, the last of one batch: 20 steps."""


def train(sharding: Mapping[str, Any] | None, *, mixed: str = "no", epochs: int = EPOCHS, then: Callable[..., None] = lambda *objects: None, load: Path | None = None) -> Any:
    """The loop of Accelerate's documentation. Returns losses, norms and learning rates; ``then`` gets the objects at the end."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, mixed_precision=mixed)
    lm = model()
    no_decay = [p for p in lm.parameters() if p.dim() < 2]
    groups = [{"params": [p for p in lm.parameters() if p.dim() >= 2]}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * 0.98**step)
    loader = DataLoader(data(40), batch_size=2, shuffle=True, collate_fn=collate, generator=torch.Generator().manual_seed(5))
    objects = (lm, optimizer, loader, scheduler)
    lm, optimizer, loader, scheduler = accelerator.prepare(*objects) if sharding is None else prepare(accelerator, *objects, sharding=sharding)
    found: list[tuple[float, ...]] = []
    if load is not None:
        accelerator.load_state(load)
    for _ in range(epochs):
        losses, norm = [], None
        for batch in loader:
            with accelerator.accumulate(lm):
                loss = lm(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(lm.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                found.append((sum(losses) / len(losses), norm.item(), optimizer.param_groups[0]["lr"]))
                losses = []
        lm.eval()
        with torch.no_grad():
            found.append((accelerator.reduce(lm(**batch).loss, "mean").item(), 0.0, 0.0))
        lm.train()
    then(accelerator, lm, optimizer)
    return found


def compare(folder: Path, strategy: str, mixed: str) -> Any:
    return {"plain": train(None, mixed=mixed), "engine": train({**UNITS, "strategy": strategy}, mixed=mixed)}


def states(folder: Path) -> Any:
    """Unbroken, resumed, and resumed from a state that Accelerate saved without the engine; what models are saved as."""

    def save(kind: str) -> Callable[..., None]:
        def write(accelerator: Any, lm: Any, optimizer: Any) -> None:
            accelerator.save_state(folder / kind)
            accelerator.save_model(lm, folder / f"{kind}-model")
            unwrapped = accelerator.unwrap_model(lm)
            state = accelerator.get_state_dict(lm)
            unwrapped.save_pretrained(folder / f"{kind}-pretrained", is_main_process=accelerator.is_main_process, state_dict=state)
            accelerator.wait_for_everyone()

        return write

    plain = train(None, epochs=2, then=save("plain"))
    engine = train(UNITS, epochs=2, then=save("engine"))
    found = {"plain": plain, "engine": engine, "plain resumed": train(None, load=folder / "plain", epochs=2)}
    for kind in ("engine", "plain"):
        found[f"engine resumed from {kind}"] = train(UNITS, load=folder / kind, epochs=2)
    weights = {
        (kind, name): load_file(folder / f"{kind}-{name}" / "model.safetensors") for kind in ("plain", "engine") for name in ("model", "pretrained")
    }
    found["same names"] = all(weights["plain", name].keys() == weights["engine", name].keys() for name in ("model", "pretrained"))
    found["largest difference"] = max(
        (value - weights["engine", name][key]).abs().max().item() for name in ("model", "pretrained") for key, value in weights["plain", name].items()
    )
    return found


def refused(folder: Path) -> Any:
    """Messages, by what was wrong."""
    found = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except UserError as error:
            found[name] = str(error)

    accelerator = Accelerator(cpu=True)
    lm = model()
    optimizer = torch.optim.AdamW(lm.parameters())
    note("clip", lambda: prepare(accelerator, lm, optimizer, sharding={"clip": 1.0}))
    note("two models", lambda: prepare(accelerator, lm, model(), optimizer, sharding=UNITS))
    other = torch.optim.lr_scheduler.StepLR(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]), 1)
    note("scheduler of another", lambda: prepare(accelerator, lm, optimizer, other, sharding=UNITS))
    lm = model()
    lm, optimizer = prepare(accelerator, lm, torch.optim.AdamW(lm.parameters()), sharding=UNITS)
    accelerator.backward(lm(**collate(data(2))).loss)
    note("max_norm", lambda: accelerator.clip_grad_norm_(lm.parameters(), 0.0))
    note("norm_type", lambda: accelerator.clip_grad_norm_(lm.parameters(), 1.0, norm_type=1))
    note("some parameters", lambda: accelerator.clip_grad_norm_([*lm.parameters()][1:3], 1.0))
    norm = accelerator.clip_grad_norm_(lm.parameters(), float("inf"))
    note("early read", lambda: norm.item())
    note("early comparison", lambda: torch.isfinite(norm))
    found["before"] = repr(norm)
    optimizer.step()
    found["after"] = float(norm)
    return found


def main() -> None:
    case, folder, *arguments = sys.argv[1:]
    found = {"compare": compare, "states": states, "refused": refused}[case](Path(folder), *arguments)
    if torch.distributed.get_rank() == 0:
        print("found", json.dumps(found))
    torch.distributed.destroy_process_group()
