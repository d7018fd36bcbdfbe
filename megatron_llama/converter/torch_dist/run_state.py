"""The entries of ``common.pt`` with which Megatron-LM goes on: arguments, options of the optimizer,
the position of the learning rate."""

from __future__ import annotations

from typing import Any

from megatron_llama.checkpoint.model_folders.optimizer_state import OptimizerState
from megatron_llama.config.batch_ramp import with_decay
from megatron_llama.config.schema import TrainingConfig

SAME_OPTIMIZER = (
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_wsd_decay_style",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
    "lr_warmup_iters",
    "lr_warmup_samples",
)
NONE_WITHOUT = (
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "lr_warmup_fraction",
)
"""Options of the optimizer that Megatron-LM has under the same names; of the latter it has None for
those that are not given."""
SAME_TRAINING = ("seq_length", "micro_batch_size", "global_batch_size", "seed")


SAME_ROUTER_LOSSES = ("none", "seq_aux_loss")
"""Values of --moe-router-load-balancing-type that train the same in Megatron-LM. Its
``global_aux_loss`` counts the microbatches up to the present one."""


def training_args(state: OptimizerState) -> dict[str, Any]:
    """Return the arguments of the run, by Megatron-LM's names."""
    optimizer = state.config.optimizer
    training = state.config.training
    data = state.config.data
    return {
        "optimizer": "adam",
        **{name: getattr(optimizer, name) for name in SAME_OPTIMIZER},
        **{name: getattr(optimizer, name) or None for name in NONE_WITHOUT},
        "lr_warmup_init": 0.0,
        "start_weight_decay": optimizer.weight_decay,
        "end_weight_decay": optimizer.weight_decay,
        "weight_decay_incr_style": "constant",
        **{name: getattr(training, name) for name in SAME_TRAINING},
        "rampup_batch_size": list(map(str, training.rampup_batch_size)) or None,
        "train_iters": training.train_iters or None,
        "train_samples": training.train_samples or None,
        "data_path": list(data.data_path) or None,
        "split": data.split,
        "iteration": state.iteration,
        "consumed_train_samples": state.consumed_samples,
        "skipped_train_samples": 0,
        "use_distributed_optimizer": True,
        "ckpt_format": "torch_dist",
        "dist_ckpt_optim_fully_reshardable": True,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "no_save_optim": None,
        # There are no random states. Megatron would ask for them if its layout is that of the args.
        "no_save_rng": True,
    }


def router_loss_args(training: TrainingConfig) -> dict[str, Any]:
    """Return the arguments of the losses of routers that Megatron-LM has, too."""
    kind = training.moe_router_load_balancing_type
    is_same = kind in SAME_ROUTER_LOSSES
    return {
        "moe_router_load_balancing_type": kind if is_same else "none",
        "moe_aux_loss_coeff": training.moe_aux_loss_coeff if is_same else 0.0,
        "moe_z_loss_coeff": training.moe_z_loss_coeff or None,
    }


def optimizer_entries(state: OptimizerState, *, ep: int) -> dict[str, Any]:
    """Return the entries ``optimizer`` and ``opt_param_scheduler``. With an expert-parallel size
    ``ep`` above 1, experts have an optimizer of their own, of matrices alone."""
    optimizer = state.config.optimizer
    group = {
        "is_expert_parallel": False,
        "default_config": True,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "lr": state.lr if state.lr is not None else optimizer.lr,
        # For TransformerEngine's and Apex' Adam; torch's always corrects.
        "bias_correction": True,
        "betas": (optimizer.adam_beta1, optimizer.adam_beta2),
        "eps": optimizer.adam_eps,
        "step": state.step,
    }
    # Megatron finds a group by its multipliers: matrices decay, vectors do not.
    groups = [
        {**group, "wd_mult": times, "weight_decay": times * optimizer.weight_decay}
        for times in (1.0, 0.0)
    ]
    optimizers = [_optimizer_entry(groups)]
    if ep > 1:
        optimizers.append(_optimizer_entry([{**groups[0], "is_expert_parallel": True}]))
    return {
        "optimizer": dict(enumerate(optimizers)) if ep > 1 else optimizers[0],
        "opt_param_scheduler": scheduler_state(state),
    }


def _optimizer_entry(groups: list[dict[str, Any]]) -> dict[str, Any]:
    return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}


def scheduler_state(state: OptimizerState) -> dict[str, Any]:
    """Return the state of ``OptimizerParamScheduler``, which counts samples."""
    training = state.config.training
    optimizer = with_decay(state.config.optimizer, training)
    if optimizer.lr_decay_samples:
        now = state.consumed_samples
        decay = optimizer.lr_decay_samples
        warmup: float = optimizer.lr_warmup_samples
        total = training.train_samples
    else:
        # With a batch that does not grow, a schedule in iterations is one in samples.
        batch = training.global_batch_size
        now = state.iteration * batch
        decay = optimizer.lr_decay_iters * batch
        warmup = optimizer.lr_warmup_iters * batch
        total = training.train_iters * batch
    return {
        "max_lr": optimizer.lr,
        "lr_warmup_steps": warmup or optimizer.lr_warmup_fraction * decay,
        "num_steps": now,
        "lr_decay_style": optimizer.lr_decay_style,
        "lr_decay_steps": decay,
        "min_lr": optimizer.min_lr,
        "start_wd": optimizer.weight_decay,
        "end_wd": optimizer.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": total,
    }
