"""Reads the optimizer's state in ``torch_dist`` folders: fp32 masters, both moments, and the facts
about the run that are stored beside them.

Megatron-Core writes it in three shapes. Two have the model's own keys and shapes behind a prefix
(``optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight``): the distributed optimizer's
``fully_reshardable``, and the state that is written without it. The third, the distributed
optimizer's ``dp_reshardable``, is its memory unchanged; ``flat_buckets`` reads it.

With expert parallelism experts have an optimizer of their own: ``common.pt`` has the options of
both, numbered, and their tensors are named alike.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from megatron_llama.checkpoint.container import COPY_AGAIN
from megatron_llama.checkpoint.model_folders.optimizer_state import STATES, OptimizerState
from megatron_llama.checkpoint.model_folders.torch_dist.folder import TorchDistFolder
from megatron_llama.checkpoint.storage import refuse
from megatron_llama.config.fields import shown
from megatron_llama.config.limits import LARGEST_INTEGER, LARGEST_REAL
from megatron_llama.config.schema import Config, DataConfig, OptimizerConfig, TrainingConfig
from megatron_llama.converter.torch_dist.flat_buckets import FlatBuckets
from megatron_llama.converter.torch_dist.masters import require_masters
from megatron_llama.converter.torch_dist.names import StoredSource
from megatron_llama.converter.torch_dist.reader import TorchDistReader
from megatron_llama.converter.torch_dist.run_state import SAME_ROUTER_LOSSES
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.errors import CheckpointError, UserError, describe

FLAT = "dp_reshardable"
MASTERS: Mapping[str | None, str] = MappingProxyType(
    {None: "fp32_param", "fully_reshardable": "param", FLAT: "param"}
)
"""Names of the fp32 masters, by the way in which the distributed optimizer is sharded; None:
without it."""
GROUP_STATE = re.compile(r"(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_")
WEIGHTS_ALONE = "take its weights alone: --finetune, or convert --to hf"
SAVE_RESHARDABLE = f"save it with --dist-ckpt-optim-fully-reshardable, or {WEIGHTS_ALONE}"


def has_optimizer(opened: TorchDistFolder) -> bool:
    """Whether a folder holds an optimizer's state."""
    return "optimizer" in opened.common


def open_optimizer(reader: TorchDistReader) -> OptimizerState:
    """Open the optimizer's state of a folder that has one. Raises CheckpointError with all problems
    that keep a run from going on with it."""
    opened = reader.checkpoint
    with _reading(f"{opened.common_file}"):
        sharding, known = _known(opened, has_experts=reader.model.num_experts > 0)
    return replace(known, sources=_sources(reader, sharding))


def _known(opened: TorchDistFolder, *, has_experts: bool) -> tuple[str | None, OptimizerState]:
    """Return the kind of sharding of the state, and the state without its sources. Raises
    CheckpointError."""
    container = opened.container
    where = f"{opened.common_file} optimizer"
    chained = next((name for name in container.tensors if name.startswith("chained_")), None)
    common = opened.common.get("optimizer")
    parts = _parts(common) if has_experts else [common]
    if has_experts and all(isinstance(part, dict) and _sharding(part) == FLAT for part in parts):
        chained = None  # their buffers
    if chained is not None or not all(isinstance(part, dict) for part in parts):
        got = "the state of several optimizers" if chained is not None else "none"
        raise CheckpointError(where, got=got, expected="the state of one Adam", do=WEIGHTS_ALONE)
    shardings = [_sharding(part) for part in parts]
    sharding = shardings[0]
    same = all(other == sharding for other in shardings)
    if not isinstance(sharding, str | None) or sharding not in MASTERS or not same:
        expected = ", ".join(name for name in MASTERS if name is not None)
        raise CheckpointError(
            f"{where} param_state_sharding_type",
            got=sharding if same else " and ".join(map(str, shardings)),
            expected=expected,
            do=SAVE_RESHARDABLE,
        )
    states = list(parts)
    if sharding == FLAT:
        names = sorted(name for name in container.objects if _is_group_state(name))
        # Megatron-Core saves each object in a list of one.
        states = [state for name in names for state in container.load_object(name)]
    scales = [name for name in container.objects if name.endswith(".grad_scaler/shard_0_1")]
    groups = [group for state in states for group in _param_groups(state)]
    problems = list(_group_problems(where, groups, has_experts=has_experts))
    problems += list(_argument_problems(opened.args, f"{opened.common_file} args"))
    if scales or any("grad_scaler" in state for state in (*parts, *states)):
        problems.append(
            describe(
                f"{where} grad_scaler",
                got="the loss scale of a run in fp16",
                expected="a run in bf16 or fp32",
                do=WEIGHTS_ALONE,
            )
        )
    counts = [count for state in states for count in _step_counts(state)]
    wrong = [count for count in counts if not _is_whole(count)]
    steps = {int(count) for count in counts if _is_whole(count)}
    if wrong:
        problems.append(_type_problem(f"{where} step", wrong[0], WHOLE))
    elif len(steps) != 1:
        got = " and ".join(map(str, sorted(steps))) or "no count"
        problems.append(
            describe(f"{where} step", got=got, expected="one count of updates", do=WEIGHTS_ALONE)
        )
    problems += list(_position_problems(opened))
    refuse(f"{opened.folder}: a run cannot go on with this optimizer:", problems)
    iteration, consumed_samples = position(opened)
    return sharding, OptimizerState(
        {},
        step=steps.pop(),
        iteration=iteration,
        consumed_samples=consumed_samples,
        lr=next((float(group["lr"]) for group in groups if "lr" in group), None),
        config=_with_groups(run_options(opened.args, f"{opened.common_file} args"), groups),
    )


def _parts(common: Any) -> list[Any]:
    """Return the entries of each optimizer. Several are numbered."""
    if isinstance(common, dict) and common and all(type(key) is int for key in common):
        return [common[number] for number in sorted(common)]
    return [common]


def _sharding(part: Any) -> Any:
    return part.get("param_state_sharding_type")


def position(opened: TorchDistFolder) -> tuple[int, int]:
    """Return the iteration after which a checkpoint was saved, and the samples consumed until then.
    Raises CheckpointError if Megatron-LM has not saved them."""
    refuse(f"{opened.folder}: a run cannot go on from it:", list(_position_problems(opened)))
    return int(opened.common["iteration"]), int(opened.args["consumed_train_samples"])


def _position_problems(opened: TorchDistFolder) -> Iterator[str]:
    for where, content, name in (
        (opened.common_file, opened.common, "iteration"),
        (f"{opened.common_file} args", opened.args, "consumed_train_samples"),
    ):
        value = content.get(name)
        if type(value) is not int or not 0 <= value <= LARGEST_INTEGER:
            yield describe(
                f"{where} {name}",
                got=shown(value),
                expected="a number, as Megatron-LM saves it",
                do=WEIGHTS_ALONE,
            )


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """A section in which any error becomes a CheckpointError: entries of another type than
    Megatron's, which no check has found by name, fail where they are first read."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        got = f"a value that is none ({type(error).__name__}: {error})"
        raise CheckpointError(
            where, got=got, expected="the entries of Megatron-LM", do=COPY_AGAIN
        ) from error


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # Apex and TransformerEngine may count steps in a tensor.
        return value.numel() == 1 and math.isfinite(value.item())
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and int(value) == value and 0 <= value <= LARGEST_INTEGER


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _is_rate(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= LARGEST_REAL


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_pair(value: Any) -> bool:
    return _is_list(value) and len(value) == 2 and all(map(_is_share, value))


def _is_ramp(value: Any) -> bool:
    # Megatron-LM keeps the numbers as they were written.
    return _is_list(value) and all(_is_whole(number) or str(number).isdecimal() for number in value)


WHOLE = "a whole number of 0 or more"
RATE = "a finite number of 0 or more"
SHARE = "a number from 0 to 1"
TYPES: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        WHOLE: _is_whole,
        RATE: _is_rate,
        SHARE: _is_share,
        "two numbers from 0 to 1": _is_pair,
        "whole numbers": _is_ramp,
        "a list": _is_list,
        "a name": lambda value: isinstance(value, str),
        "True or False": lambda value: isinstance(value, bool),
    }
)
GROUP_TYPES: Mapping[str, str] = MappingProxyType(
    {"betas": "two numbers from 0 to 1", "eps": RATE, "weight_decay": RATE, "lr": RATE}
)
ARGUMENT_TYPES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("lr", "min_lr", "clip_grad", "weight_decay", "adam_eps"), RATE),
        **dict.fromkeys(("adam_beta1", "adam_beta2"), SHARE),
        "lr_warmup_fraction": RATE,
        "moe_z_loss_coeff": RATE,
        **dict.fromkeys(("lr_decay_style", "lr_wsd_decay_style", "split"), "a name"),
        **dict.fromkeys(("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"), WHOLE),
        **dict.fromkeys(("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples"), WHOLE),
        **dict.fromkeys(("seq_length", "micro_batch_size", "global_batch_size", "seed"), WHOLE),
        **dict.fromkeys(("train_iters", "train_samples"), WHOLE),
        "rampup_batch_size": "whole numbers",
        "data_path": "a list",
        **dict.fromkeys(("reset_position_ids", "reset_attention_mask"), "True or False"),
        **dict.fromkeys(("eod_mask_loss", "bf16"), "True or False"),
    }
)
"""Types of the entries with which a run goes on; TYPES has their checks, by these names."""


def _type_problem(where: str, value: Any, expected: str) -> str:
    return describe(where, got=f"{value!r}"[:80], expected=expected, do=WEIGHTS_ALONE)


def _option_problems(args: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield the arguments that are of another type than Megatron-LM's."""
    for name, expected in ARGUMENT_TYPES.items():
        value = args.get(name)
        if value is not None and not TYPES[expected](value):
            yield _type_problem(f"{where} {name}", value, expected)


def run_options(args: Mapping[str, Any], where: str = "common.pt args") -> Config:
    """Return the options of a run by Megatron-LM's arguments; missing ones have their defaults. The
    model's are not filled in. Raises CheckpointError naming the arguments of another type."""
    with _reading(where):
        refuse(f"{where} are not those of Megatron-LM:", list(_option_problems(args, where)))
        return _options(args)


def _options(args: Mapping[str, Any]) -> Config:

    def given(*names: str) -> dict[str, Any]:
        # Megatron's None stands for an option that is not given.
        return {name: args[name] for name in names if args.get(name) is not None}

    optimizer = OptimizerConfig(
        **given("lr", "min_lr", "clip_grad", "lr_decay_style", "lr_wsd_decay_style"),
        **given("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"),
        **given("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples"),
        **given("lr_warmup_fraction", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps"),
    )
    sizes = given("seq_length", "micro_batch_size", "global_batch_size", "rampup_batch_size")
    kind, coefficient, z_loss = router_losses(args)
    if kind in SAME_ROUTER_LOSSES:
        sizes |= {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": coefficient}
        sizes |= {"moe_z_loss_coeff": z_loss}
    if "rampup_batch_size" in sizes:
        sizes["rampup_batch_size"] = tuple(map(int, sizes["rampup_batch_size"]))
    training = TrainingConfig(
        **sizes, **given("train_iters", "train_samples", "seed"), bf16=bool(args.get("bf16"))
    )
    data = DataConfig(
        **given("reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
        data_path=tuple(map(str, args.get("data_path") or ())),
        split=str(args.get("split") or DataConfig.split).replace(" ", ""),
        megatron_data_order=True,
    )
    return Config(optimizer=optimizer, training=training, data=data)


def router_losses(args: Mapping[str, Any]) -> tuple[str, Any, float]:
    """Return the kind of the loss that loads experts equally, its coefficient, and that of the
    z-loss, by Megatron-LM's arguments. It has lists for several kinds."""
    z_loss = float(args.get("moe_z_loss_coeff") or 0.0)
    coefficient = args.get("moe_aux_loss_coeff") or 0.0
    weights = coefficient if isinstance(coefficient, list | tuple) else [coefficient]
    if not args.get("num_experts"):
        return "none", 0.0, 0.0
    if not any(weights):
        return "none", 0.0, z_loss
    kinds = args.get("moe_router_load_balancing_type")
    kind = " ".join(map(str, kinds)) if isinstance(kinds, list | tuple) else str(kinds)
    return kind, coefficient, z_loss


def _with_groups(config: Config, groups: Sequence[Mapping[str, Any]]) -> Config:
    """Return the options with those that the optimizer has used."""
    beta1, beta2 = groups[0]["betas"]
    optimizer = replace(
        config.optimizer,
        weight_decay=max(float(group["weight_decay"]) for group in groups),
        adam_beta1=float(beta1),
        adam_beta2=float(beta2),
        adam_eps=float(groups[0]["eps"]),
    )
    return replace(config, optimizer=optimizer)


def _sources(reader: TorchDistReader, sharding: str | None) -> Mapping[str, WeightSource]:
    """Return the source of each of STATES, after all checks that need no values. Raises
    CheckpointError."""
    container = reader.checkpoint.container
    if sharding == FLAT:
        flat = FlatBuckets(reader)
        return {
            state: StoredSource(
                flat, reader.weights, f"{MASTERS[FLAT] if state == 'master' else state}."
            )
            for state in STATES
        }
    prefixes = {state: f"optimizer.state.{state}." for state in STATES}
    prefixes["master"] = f"optimizer.state.{MASTERS[sharding]}."
    keys = list(dict.fromkeys(weight.key for weight in reader.weights))
    full_precision = all(container.tensors[key].dtype == torch.float32 for key in keys)
    if sharding is None and full_precision:
        # Weights in fp32 are their own masters.
        prefixes["master"] = ""
    wanted = [prefix + key for prefix in prefixes.values() for key in keys]
    container.require(wanted)
    problems = []
    for prefix in prefixes.values():
        for key in keys:
            shape = container.tensors[prefix + key].shape
            if shape != container.tensors[key].shape:
                problems.append(
                    describe(
                        f"{reader.folder} {prefix}{key}",
                        got=f"shape {shape}",
                        expected=container.tensors[key].shape,
                        do=WEIGHTS_ALONE,
                    )
                )
    refuse(f"{reader.folder}: the optimizer's state is of another model:", problems)
    if prefixes["master"]:
        require_masters(reader, container, prefixes["master"], do=WEIGHTS_ALONE)
    return {
        state: StoredSource(container, reader.weights, prefix) for state, prefix in prefixes.items()
    }


def _is_group_state(name: str) -> bool:
    """Whether an object holds the options of one data-parallel group's optimizer."""
    return GROUP_STATE.match(name) is not None and ".optimizer/" in name


def _inner(state: Any) -> Mapping[str, Any]:
    """Return the state dict of the torch optimizer within Megatron's."""
    inner = state.get("optimizer", state) if isinstance(state, dict) else {}
    return inner if isinstance(inner, dict) else {}


def _param_groups(state: Any) -> list[Mapping[str, Any]]:
    groups = _inner(state).get("param_groups")
    if not isinstance(groups, list | tuple):
        return []
    return [group for group in groups if isinstance(group, dict)]


def _step_counts(state: Any) -> Iterator[Any]:
    """Yield the counts of updates in a state dict: torch's Adam has one for each parameter, Apex's
    and TransformerEngine's one for each group."""
    inner = _inner(state)
    counted = inner.get("state")
    if isinstance(counted, dict) and "common_step" in counted:
        yield counted["common_step"]
    for group in _param_groups(state):
        if group.get("step") is not None:
            yield group["step"]


def _group_problems(
    where: str, groups: Sequence[Mapping[str, Any]], *, has_experts: bool
) -> Iterator[str]:
    """Yield the options of the parameters' groups that the optimizer here does not have."""
    if not groups:
        yield describe(
            f"{where} param_groups", got="none", expected="those of Adam", do=WEIGHTS_ALONE
        )
    wanted: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
        ("amsgrad", "False", (None, False)),
        ("maximize", "False", (None, False)),
        ("decoupled_weight_decay", "True: AdamW", (None, True)),
        ("lr_mult", "1: one learning rate for all", (None, 1)),
        ("is_decoupled_lr", "False: one learning rate for all", (None, False)),
        ("is_expert_parallel", "False: a dense model", (None, False, has_experts)),
        ("wd_mult", "1 for matrices, 0 for vectors", (None, 0, 1)),
    )
    for number, group in enumerate(groups):
        for name, expected, allowed in wanted:
            if group.get(name) not in allowed:
                yield describe(
                    f"{where} param_groups {number} {name}",
                    got=group[name],
                    expected=expected,
                    do=WEIGHTS_ALONE,
                )
        for name, expected in GROUP_TYPES.items():
            if name in group and not TYPES[expected](group[name]):
                yield _type_problem(f"{where} param_groups {number} {name}", group[name], expected)
        missing = [name for name in ("betas", "eps", "weight_decay") if name not in group]
        if missing:
            yield describe(
                f"{where} param_groups {number}",
                got=f"no {', '.join(missing)}",
                expected="the options of Adam",
                do=WEIGHTS_ALONE,
            )
    for name in ("betas", "eps", "max_lr", "min_lr"):
        values = {str(group.get(name)) for group in groups}
        if len(values) > 1:
            yield describe(
                f"{where} param_groups {name}",
                got=" and ".join(sorted(values)),
                expected="the same in all groups",
                do=WEIGHTS_ALONE,
            )


def _argument_problems(args: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield the arguments of an update that is not computed here."""
    wanted: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
        ("optimizer", "adam", (None, "adam")),
        ("apply_wd_to_qk_layernorm", "False: vectors do not decay", (None, False)),
        ("no_weight_decay_cond_type", "None: matrices decay, vectors do not", (None,)),
        ("decoupled_lr", "None: one learning rate for all", (None,)),
        ("use_megatron_fsdp", "False", (None, False)),
        ("decoupled_weight_decay", "True: AdamW", (None, True)),
        ("weight_decay_incr_style", "constant", (None, "constant")),
        # Its weights are transposed where they are saved; for moments that is not certain.
        ("moe_use_legacy_grouped_gemm", "False", (None, False)),
        # In bf16 its masters are halves of numbers: the weights have the other halves.
        ("use_precision_aware_optimizer", "False: a save without it", (None, False)),
    )
    yield from _option_problems(args, where)
    for name, expected, allowed in wanted:
        if args.get(name) not in allowed:
            yield describe(
                f"{where} {name}", got=args.get(name), expected=expected, do=WEIGHTS_ALONE
            )
