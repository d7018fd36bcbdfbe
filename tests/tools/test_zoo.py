"""The zoo: a few of its models, and what it says of differences and of packages that are missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_llama.prove.pool import WorkerError, WorkerPool
from tools.zoo import __main__ as zoo
from tools.zoo.compare import compare
from tools.zoo.training import MODELS, STRATEGIES, Trained, train_by_ddp

from tests.harness import Cluster


@pytest.mark.parametrize("name", ["nanogpt", *(pytest.param(name, marks=pytest.mark.long) for name in ("mixtral", "bert", "whisper", "lora llama"))])
def test_models_of_others_train_as_with_ddp(name: str, cluster: Cluster) -> None:
    compared = compare(cluster, name, 2)
    assert [each.strategy for each in compared] == [*STRATEGIES]
    assert all(each.holds and each.units == 3 + (name == "whisper") for each in compared), compared


def test_the_zoo_is_no_smaller_than_the_documents_say() -> None:
    assert len(MODELS) == 42 and {entry.package for entry in MODELS.values()} == {"", "transformers", "peft", "diffusers", "timm", "torchvision"}
    assert all(entry.units for entry in MODELS.values())


TRAINED = Trained((2.0, 1.0), (1.0,), "bits", 3, {"weight": torch.ones(3), "mean": torch.ones(2)}, frozenset(["weight"]))


class Pool(WorkerPool):
    """Trains in no time: ``sharded`` is what ``shard`` makes, ``exact`` what DDP makes in fp64."""

    def __init__(self, sharded: Trained, exact: Trained = TRAINED) -> None:
        self.sharded, self.exact = sharded, exact

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        if function is train_by_ddp:
            return [self.exact if torch.float64 in args else TRAINED] * world_size
        return [self.sharded] * world_size


FAR = replace(TRAINED, losses=(2.0, 1.00001), values=TRAINED.values | {"weight": torch.tensor([1.0, 1.0, 1.0002])})


def test_differences_are_held_to_the_bounds() -> None:
    assert {each.bound for each in compare(Pool(TRAINED), "nanogpt", 2)} == {"fixed"}
    for wrong, words in (
        (FAR, "BEYOND (loss; fp32 is 0.0e+00 from fp64; weight by 0.2; fp32 is 0 from fp64)"),
        (replace(TRAINED, norms=(1.0001,)), "BEYOND (norm; fp32 is 0.0e+00 from fp64)"),
        (replace(TRAINED, norms=(float("nan"),)), "BEYOND (norm; fp32 is 0.0e+00 from fp64)"),
        (replace(TRAINED, values=TRAINED.values | {"mean": torch.tensor([1.0, 1.1])}), "BEYOND (mean by 1e+02; fp32 is 0 from fp64)"),
    ):
        assert {(each.bound, each.holds) for each in compare(Pool(wrong), "nanogpt", 2)} == {(words, False)}
    doubled = compare(Pool(FAR, exact=FAR), "nanogpt", 2)
    assert {(each.bound, each.holds) for each in doubled} == {("twice fp32's 1.0e-05, 0.0e+00, 2.0e-01", True)}
    apart = Pool(TRAINED)
    apart.run = lambda world, function, *args, **options: [replace(TRAINED, digest=str(rank)) for rank in range(world)]  # type: ignore[method-assign]
    assert {each.bound for each in compare(apart, "nanogpt", 2)} == {"ranks hold different parameters"}


def test_a_training_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(self: WorkerPool, world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        if function is train_by_ddp:
            return [TRAINED] * world_size
        raise WorkerError("failed", {1: "Traceback\nConfigError: units"})

    monkeypatch.setattr(WorkerPool, "run", run)
    assert zoo.main(["nanogpt", "--ranks", "2"]) == 1
    out = capsys.readouterr().out
    assert "| nanogpt | none | 0 | 0 | 2 | nan | nan | nan | BEYOND |" in out
    assert "| nanogpt | | 2 ranks, optim: ConfigError: units |" in out


def test_models_without_their_package_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(MODELS, "nanogpt", replace(MODELS["nanogpt"], package="no_such_package"))
    assert zoo.main(["nanogpt"]) == 1
    assert zoo.main(["nanogpt", "--allow-missing"]) == 0
    assert capsys.readouterr().out.count("| nanogpt | no_such_package | not run: no such package |") == 2
    with pytest.raises(SystemExit):
        zoo.main(["nanogbt"])
    assert "no nanogbt; there are nanogpt, lstm" in capsys.readouterr().err
