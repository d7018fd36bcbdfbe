"""A run of Megatron-Core with which a run here can go on, and the differences of its samples."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_llama.checkpoint.model_folders.optimizer_state import OptimizerState
from megatron_llama.checkpoint.model_folders.torch_dist.folder import TorchDistFolder
from megatron_llama.config.batch_ramp import run_samples
from megatron_llama.config.parse import flag
from megatron_llama.config.schema import Config, ModelConfig, TrainingConfig
from megatron_llama.converter.torch_dist.optimizer import (
    has_optimizer,
    open_optimizer,
    position,
    router_losses,
    run_options,
)
from megatron_llama.converter.torch_dist.reader import TorchDistReader

OTHER_SAMPLES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "dataloader_type": (None, "single"),
        "fim_data": (None, False),
        "mock_data": (None, False),
        "sft": (None, False),
        "train_data_path": (None,),
        "data_args_path": (None,),
        "per_split_data_args_path": (None,),
        "mid_level_dataset_surplus": (None, 0.005),
        "phase_transition_iterations": (None,),
    }
)
"""Arguments of Megatron-LM, with the values for which --megatron-data-order reads its samples."""

OTHER_LOSSES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "hidden_dropout": (None, 0.0),
        "attention_dropout": (None, 0.0),
        "calculate_per_token_loss": (None, False),
        "lr_warmup_init": (None, 0.0),
    }
)
"""Arguments of Megatron-LM, with the values for which its updates equal those made here."""
MASKS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
"""Options of documents within a sample."""


def saved_run(folder: Path) -> MegatronRun | None:
    """Return the run that a folder holds; None if it holds weights alone. Raises
    CheckpointError."""
    run = MegatronRun(folder)
    return run if has_optimizer(run.opened) else None


class MegatronRun:
    """A folder with the optimizer's state (a ``SavedRun``)."""

    def __init__(self, folder: Path) -> None:
        """Read the folder's arguments and index. Raises CheckpointError."""
        self._folder = folder
        self.opened = TorchDistFolder(folder)

    @property
    def args(self) -> Mapping[str, Any]:
        return self.opened.args

    def position(self) -> tuple[int, int]:
        return position(self.opened)

    def optimizer(self, model: ModelConfig, ignored: Collection[str]) -> OptimizerState:
        reader = TorchDistReader(self._folder, None, 0, tokens=model.vocab_size, ignored=ignored)
        return open_optimizer(reader)

    def sample_lines(self, consumed: int, config: Config) -> Iterator[str]:
        return sample_lines(self.args, consumed, config)


def sample_lines(args: Mapping[str, Any], consumed: int, config: Config) -> Iterator[str]:
    """Yield lines that tell the sample that Megatron-LM would have read next, by its arguments, and
    the one that comes here."""
    theirs = run_options(args)
    before: Any
    total = run_samples(theirs.training)
    yield (
        f"Megatron-LM would read sample {consumed:,} of {total:,} next, in its order of --seed "
        f"{theirs.training.seed} and --seq-length {theirs.training.seq_length}"
        + (
            ""
            if config.data.megatron_data_order
            else ": --megatron-data-order reads it; without, the order is another"
        )
    )
    for name, allowed in OTHER_LOSSES.items():
        if args.get(name) not in allowed:
            yield f"warning: Megatron-LM had {flag(name)} {args[name]}: its updates were others"
    for name in MASKS:
        before = args.get(name)
        now = getattr(config.data, name)
        if before is not None and before != now:
            yield f"warning: {flag(name)} was {before} in Megatron-LM, and is {now}"
    yield from _router_lines(args, config.training)
    if not config.data.megatron_data_order:
        return
    where = "warning: --megatron-data-order"
    for name, allowed in OTHER_SAMPLES.items():
        if args.get(name) not in allowed:
            yield f"{where}: Megatron-LM had {flag(name)} {args[name]}: its samples were others"
    compared = [
        (flag(name), getattr(theirs.training, name), getattr(config.training, name))
        for name in ("seed", "seq_length")
    ]
    compared += [("samples of the run", total, run_samples(config.training))]
    if theirs.data.data_path:
        compared += [
            ("--split", theirs.data.split, config.data.split),
            ("--data-path", " ".join(theirs.data.data_path), " ".join(config.data.data_path)),
        ]
    for option, before, now in compared:
        if before != now:
            same = ", unless this is the same dataset" if option == "--data-path" else ""
            yield f"{where}: {option} was {before} and is {now}: the samples are others{same}"


def _router_lines(args: Mapping[str, Any], training: TrainingConfig) -> Iterator[str]:
    """Yield warnings of routers that were trained or computed otherwise."""
    kind, coefficient, z_loss = router_losses(args)
    now = (training.moe_router_load_balancing_type, training.moe_aux_loss_coeff)
    if (kind, coefficient) != now:
        before, after = (
            name if name == "none" else f"{name} x {weight}"
            for name, weight in ((kind, coefficient), now)
        )
        yield (
            f"warning: --moe-router-load-balancing-type was {before} in Megatron-LM, and is {after}"
        )
    if z_loss != training.moe_z_loss_coeff:
        yield (
            f"warning: --moe-z-loss-coeff was {z_loss} in Megatron-LM, and is "
            f"{training.moe_z_loss_coeff}"
        )
    if args.get("num_experts") and args.get("bf16") and not args.get("moe_router_dtype"):
        yield (
            "warning: Megatron-LM computed routers in bf16, and here they are in fp32: some tokens "
            "may have other experts"
        )
