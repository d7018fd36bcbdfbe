"""--attention-backend fa3: refused by name where FlashAttention 3 cannot run, and run as long as the run that asks for it. The package is a
stand-in that torch takes for it: what its kernels compute is shown by a GPU alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import megatron_llama as ml
import pytest
import torch
from megatron_llama.config.schema import Config, TrainingConfig
from megatron_llama.engine.comm import flash3
from megatron_llama.engine.comm.flash3 import flash3_problem, flash_in_use
from megatron_llama.engine.mesh import Mesh
from megatron_llama.errors import ConfigError
from megatron_llama.model.llama import build_stages
from megatron_llama.train.doctor import features
from megatron_llama.train.setup.checks.run import attention_problems
from megatron_llama.train.setup.deciders import CONFIGURATION
from megatron_llama.train.setup.driver import decide
from megatron_llama.train.setup.processes import imagined_processes

from tests.parallel.cases import Layout
from tests.refused import refused
from tests.train.api.test_setup import drafted

Options = Mapping[str, Any]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host is taken for a GPU of that generation."""
    monkeypatch.setattr(flash3, "is_host", lambda device: False)
    monkeypatch.setattr(flash3, "capability", lambda device: (9, 0))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with the two operators by which torch knows it."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    monkeypatch.setattr(flash3, "find_spec", lambda name: object() if name == "flash_attn_interface" else None)
    library = torch.library.Library("flash_attn_3", "DEF")
    for name in ("fwd", "bwd"):
        library.define(f"{name}(Tensor x) -> Tensor")
    yield
    library._destroy()


class Seen(ml.Callback):
    """What stands for torch's flash attention while a run computes."""

    def __init__(self) -> None:
        self.found = set[str | None]()

    def on_step(self, run: ml.Run, step: ml.Step) -> None:
        self.found.add(flash_in_use())


@pytest.mark.tries("attention_backend")
def test_a_run_computes_with_it_and_leaves_what_was_there(options: Options, hopper: None, package: None) -> None:
    seen, plain = Seen(), Seen()
    losses = ml.train(options, [seen], train_iters=2, bf16=True, attention_backend="fa3").losses
    assert seen.found == {"FA3"} and flash_in_use() is None
    assert ml.train(options, [plain], train_iters=2, bf16=True).losses == losses
    assert plain.found == {None}


def test_a_section_ends_also_by_an_error(hopper: None, package: None) -> None:
    with pytest.raises(ZeroDivisionError), flash3.flash3(CUDA):
        raise ZeroDivisionError
    assert flash_in_use() is None
    with flash3.flash3(CUDA):
        with flash3.flash3(CUDA):
            pass
        assert flash_in_use() == "FA3"
    assert flash_in_use() is None


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    lacks_package = flash3_problem(CUDA)
    assert lacks_package is not None and "got no package with flash_attn_interface" in lacks_package
    monkeypatch.setattr(flash3, "find_spec", lambda name: object())
    assert flash3_problem(CUDA) is None
    monkeypatch.setattr(flash3, "name", lambda device: "NVIDIA B200")
    for generation in ((10, 0), (8, 0)):
        monkeypatch.setattr(flash3, "capability", lambda device, generation=generation: generation)
        other = flash3_problem(CUDA)
        assert other is not None and "got NVIDIA B200, expected a GPU of the Hopper generation; give --attention-backend auto" in other
    monkeypatch.delattr(flash3.torch_attention, "activate_flash_attention_impl")
    old = flash3_problem(CUDA)
    assert old is not None and f"got torch {torch.__version__}" in old
    monkeypatch.delattr(flash3.torch_attention, "current_flash_attention_impl")
    assert flash_in_use() is None


def test_a_package_of_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    """It is there, and its library has no such operators or cannot be loaded."""
    monkeypatch.setattr(flash3, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(ConfigError) as error, flash3.flash3(CUDA):
        pass
    assert refused(error.value).key == "engine.comm.flash3.activate_flash3"
    assert flash_in_use() is None


def test_a_machine_without_it_refuses_the_run_and_not_its_plan(options: Options) -> None:
    asked = {**options, "attention_backend": "fa3", "bf16": True}
    with pytest.raises(ConfigError) as error:
        decide(drafted(asked), CONFIGURATION)
    sentence = refused(error.value)
    assert (sentence.key, sentence.got) == ("engine.comm.flash3.flash3_problem:2", "no GPU")
    there = replace(drafted(asked), processes=imagined_processes(1, 0, are_here=False))
    assert decide(there, CONFIGURATION).missing == (str(error.value),)


def test_stages_are_not_computed_by_another_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Layout(bf16=True).config()
    config = replace(config, training=replace(config.training, attention_backend="fa3"))
    assert build_stages(config, Mesh.single()), "a host computes no flash attention of GPUs"
    with pytest.raises(ConfigError) as error:
        build_stages(config, replace(Mesh.single(), device=CUDA))
    assert refused(error.value).key == "engine.comm.flash3.require_flash3"


@pytest.mark.parametrize(("changed", "head_dim"), [({}, 64), ({"bf16": True}, 12), ({"fp16": True}, 320), ({"fp64": True}, 64)])
def test_what_it_does_not_take_is_refused(changed: Mapping[str, Any], head_dim: int) -> None:
    """It would be computed by other kernels."""
    config = Config(training=TrainingConfig(attention_backend="fa3", **changed))
    [problem] = attention_problems(replace(config, model=replace(config.model, head_dim=head_dim)))
    assert problem.startswith("--attention-backend fa3: got ") and f"--head-dim {head_dim}" in problem
    fine = replace(config, training=replace(config.training, fp64=False, bf16=True), model=replace(config.model, head_dim=128))
    assert list(attention_problems(fine)) == []


def test_doctor_says_whether_it_can_run(hopper: None, package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> str:
        return next(finding.value for finding in features.features() if finding.name == "fa3")

    assert found() == "can run (--attention-backend fa3)"
    monkeypatch.setattr(flash3, "is_host", lambda device: True)
    assert "no GPU" in found()
