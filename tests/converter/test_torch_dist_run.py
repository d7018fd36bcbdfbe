"""What a run of Megatron-LM is refused for, and what is said of one that goes on; of folders written here, without megatron."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.checkpoint.model_folders.optimizer_state import OptimizerState
from megatron_llama.config.schema import Config, DataConfig, OptimizerConfig, TrainingConfig
from megatron_llama.converter.torch_dist.optimizer import open_optimizer, run_options
from megatron_llama.converter.torch_dist.reader import TorchDistReader
from megatron_llama.converter.torch_dist.saved_run import sample_lines
from megatron_llama.errors import CheckpointError
from megatron_llama.train.setup.take_over import update_lines

from tests.checkpoint.model_folders.test_hf import tensors
from tests.converter.converting import config, hf_folder
from tests.converter.torch_dist import arguments, model_tensors, save

GROUP: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 3}
RUN: dict[str, Any] = {"consumed_train_samples": 12, "lr": 1e-3, "train_iters": 6, "global_batch_size": 4}
NORM = "decoder.final_layernorm.weight"


def opened(folder: Path, spoilt: float = 0.0) -> TorchDistReader:
    """A model in bf16, with the state of the shape fully_reshardable. ``spoilt`` is added to the master of the last norm,
    which is a little more than the weight."""
    hf = {name: tensor.bfloat16() for name, tensor in tensors(hf_folder(folder / "hf", vocab_size=250)).items()}
    args = arguments(config(folder / "hf"), **RUN)
    model = model_tensors(hf, args, local=False, keys="stacked")
    more = {
        f"optimizer.state.{state}.{name}": tensor.float() for state in ("param", "exp_avg", "exp_avg_sq") for name, tensor in model.items()
    }
    more[f"optimizer.state.param.{NORM}"] = more[f"optimizer.state.param.{NORM}"] * 1.0001 + spoilt
    return TorchDistReader(save(folder / "megatron", hf, args, more=more), None, 250)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> TorchDistReader:
    return opened(tmp_path_factory.mktemp("run"))


def state_of(reader: TorchDistReader, monkeypatch: pytest.MonkeyPatch, optimizer: dict[str, Any], /, **args: Any) -> OptimizerState:
    whole = {"optimizer": {"param_groups": [GROUP]}, "param_state_sharding_type": "fully_reshardable", **optimizer}
    monkeypatch.setattr(reader.checkpoint, "common", {**reader.checkpoint.common, "optimizer": whole})
    monkeypatch.setattr(reader.checkpoint, "args", {**reader.checkpoint.args, **args})
    return open_optimizer(reader)


def test_goes_on(reader: TorchDistReader, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(reader, monkeypatch, {}, rampup_batch_size=["2", "2", "8"], data_path=["a"])
    assert (state.step, state.iteration, state.consumed_samples, state.lr) == (3, 3, 12, 1e-3)
    counted = state_of(reader, monkeypatch, {"optimizer": {"param_groups": [{**GROUP, "step": torch.tensor([3.0])}]}})
    assert counted.step == 3


def groups(*given: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {"param_groups": [{**GROUP, **group} for group in given]}}


FINITE = "expected a finite number of 0 or more"
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"use_precision_aware_optimizer": True}, "args use_precision_aware_optimizer: got True, expected False: a save without it"),
    ({}, {"weight_decay_incr_style": "cosine"}, "args weight_decay_incr_style: got cosine, expected constant"),
    ({}, {"decoupled_weight_decay": False}, "args decoupled_weight_decay: got False, expected True: AdamW"),
    ({}, {"optimizer": "muon"}, "args optimizer: got muon, expected adam"),
    ({}, {"decoupled_lr": 1e-4}, "args decoupled_lr: got 0.0001, expected None"),
    ({}, {"consumed_train_samples": None}, "consumed_train_samples: got None, expected a number"),
    (
        {"optimizer": {"param_groups": [{"lr": 1e-3, "momentum": 0.9, "step": 3}]}}, {},
        "param_groups 0: got no betas, eps, weight_decay, expected the options of Adam",
    ),
    (groups({"amsgrad": True}), {}, "param_groups 0 amsgrad: got True, expected False"),
    (groups({"lr_mult": 0.1}), {}, "lr_mult: got 0.1, expected 1: one learning rate for all"),
    (groups({"decoupled_weight_decay": False}), {}, "decoupled_weight_decay: got False, expected True: AdamW"),
    (groups({}, {"eps": 1e-6}), {}, "param_groups eps: got 1e-06 and 1e-08, expected the same in all groups"),
    (groups({}, {"step": 2}), {}, "step: got 2 and 3, expected one count of updates"),
    ({"grad_scaler": {}}, {}, "grad_scaler: got the loss scale of a run in fp16, expected a run in bf16 or fp32"),
    ({"param_state_sharding_type": "fsdp_dtensor"}, {}, "param_state_sharding_type: got fsdp_dtensor"),
    ({"param_state_sharding_type": "fully_sharded_model_space"}, {}, "sharding_type: got fully_sharded_model_space"),
    ({"optimizer": {0: {}, 1: {}}}, {}, "param_groups: got none, expected those of Adam"),
    (groups({"betas": 0.9}), {}, "param_groups 0 betas: got 0.9, expected two numbers"),
    (groups({"lr": None}), {}, f"param_groups 0 lr: got None, {FINITE}"),
    (groups({"weight_decay": [1]}), {}, f"param_groups 0 weight_decay: got [1], {FINITE}"),
    (groups({"eps": "x"}), {}, f"param_groups 0 eps: got 'x', {FINITE}"),
    (groups({"step": "x"}), {}, "step: got 'x', expected a whole number"),
    ({"optimizer": {"param_groups": 5}}, {}, "param_groups: got none, expected those of Adam"),
    ({"param_state_sharding_type": [1]}, {}, "param_state_sharding_type: got [1], expected fully_reshardable"),
    ({"optimizer": {"param_groups": [GROUP], "state": {"common_step": float("inf")}}}, {}, "step: got inf, expected a whole number"),
]  # fmt: skip
"""What the common part says of the optimizer, and the arguments."""


@pytest.mark.parametrize(("optimizer", "args", "says"), REFUSED, ids=[says.partition(", expected")[0] for *_, says in REFUSED])
def test_other_optimizers_are_refused(
    optimizer: dict[str, Any], args: dict[str, Any], says: str, reader: TorchDistReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError) as error:
        state_of(reader, monkeypatch, optimizer, **args)
    assert says in str(error.value) and "take its weights alone: --finetune" in str(error.value)


def test_masters_of_another_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=f"got other values than those of {NORM}, expected the fp32 masters"):
        state_of(opened(tmp_path, spoilt=1.0), monkeypatch, {})


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"data_path": 3}, "args data_path: got 3, expected a list"),
        ({"rampup_batch_size": ["a"]}, r"args rampup_batch_size: got ['a'], expected whole numbers"),
        ({"train_iters": "x"}, "args train_iters: got 'x', expected a whole number"),
    ],
)
def test_arguments_of_wrong_types(args: dict[str, Any], says: str, reader: TorchDistReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the optimizer is opened, and where the samples are said without it."""
    with pytest.raises(CheckpointError) as error:
        state_of(reader, monkeypatch, {}, **args)
    assert says in str(error.value)
    with pytest.raises(CheckpointError) as error:
        list(sample_lines({**RUN, **args}, 12, Config()))
    assert says in str(error.value)


def test_other_losses_are_said() -> None:
    args = {**RUN, "hidden_dropout": 0.1, "attention_dropout": 0.0, "calculate_per_token_loss": True, "eod_mask_loss": True}
    ours = Config(data=DataConfig(reset_position_ids=True))
    assert list(sample_lines({**args, "reset_position_ids": False}, 12, ours))[1:] == [
        "warning: Megatron-LM had --hidden-dropout 0.1: its updates were others",
        "warning: Megatron-LM had --calculate-per-token-loss True: its updates were others",
        "warning: --eod-mask-loss was True in Megatron-LM, and is False",
        "warning: --reset-position-ids was False in Megatron-LM, and is True",
    ]


def test_other_routers_are_said() -> None:
    """A loss without a weight is none. Of one with several kinds all are named."""
    args = {**RUN, "num_experts": 4, "bf16": True, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0}
    same = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01, "moe_router_dtype": "fp32"}
    ours = Config(training=replace(TrainingConfig(), moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.01))
    assert list(sample_lines({**args, **same}, 12, ours))[1:] == []
    assert run_options({**args, **same}).training.moe_aux_loss_coeff == 0.01
    assert list(sample_lines({**args, "moe_z_loss_coeff": 0.001}, 12, ours))[1:] == [
        "warning: --moe-router-load-balancing-type was none in Megatron-LM, and is seq_aux_loss x 0.01",
        "warning: --moe-z-loss-coeff was 0.001 in Megatron-LM, and is 0.0",
        "warning: Megatron-LM computed routers in bf16, and here they are in fp32: some tokens may have other experts",
    ]
    several = {**same, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]}
    [line] = list(sample_lines({**args, **several}, 12, Config()))[1:]
    assert "was aux_loss seq_aux_loss x [0.1, 0.2] in Megatron-LM, and is none" in line


def test_another_schedule_is_said() -> None:
    """Also where the learning rate of the next step is the same."""
    theirs = run_options({**RUN, "lr_decay_style": "cosine", "lr_decay_iters": 10, "lr_warmup_iters": 4, "min_lr": 1e-4})
    state = OptimizerState({}, step=3, iteration=3, consumed_samples=12, lr=None, config=theirs)
    training = TrainingConfig(train_iters=6, global_batch_size=4)
    same = replace(theirs.optimizer, lr_decay_iters=0, lr_decay_samples=40, lr_warmup_iters=0, lr_warmup_samples=16)
    assert list(update_lines(state, Config(optimizer=same, training=training))) == []
    assert list(update_lines(state, Config(optimizer=OptimizerConfig(lr=2e-3, lr_warmup_iters=4), training=training))) == [
        "warning: the schedule of the learning rate: --lr was 0.001 and is 0.002, --lr-decay-style was cosine and is linear, "
        "--min-lr was 0.0001 and is 0.0, --lr-decay-iters was 10 and is 6"
    ]
