"""What is decided before the first step: by whom, how often, and what each rank says if it is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Never
from unittest.mock import patch

import megatron_llama as ml
import pytest
import torch
from megatron_llama.config.schema import CheckpointConfig, Config
from megatron_llama.errors import CheckpointError, ConfigError, DataError, UserError
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.prove.pool import Place
from megatron_llama.train.api import train
from megatron_llama.train.api.common.options import read_options
from megatron_llama.train.api.train import SECTIONS
from megatron_llama.train.setup import start
from megatron_llama.train.setup.deciders import CONFIGURATION, OUTPUTS, SAMPLES, TEXT, use_own_machine
from megatron_llama.train.setup.draft import By, Decider, Draft, Need
from megatron_llama.train.setup.driver import decide
from megatron_llama.train.setup.processes import Processes, imagined_processes

from tests.harness import Cluster
from tests.launcher import free_port, torchrun

Options = Mapping[str, Any]
RUN = (*CONFIGURATION, *TEXT, *SAMPLES, *OUTPUTS)


@contextmanager
def counted_look_ups() -> Iterator[list[str | None]]:
    """What this process looks for of --load."""
    looked_for: list[str | None] = []
    look_up = start.named_start

    def counted(options: CheckpointConfig) -> start.Start | None:
        looked_for.append(options.load)
        return look_up(options)

    with patch.object(start, "named_start", counted):
        yield looked_for


def looks_for_its_start(place: Place, options: Options, folder: Path) -> tuple[list[str | None], int]:
    with counted_look_ups() as looked_for:
        result = ml.train(options, save=folder, load="auto")
    return looked_for, result.iteration


@pytest.mark.long
def test_the_start_is_looked_up_once_by_rank_0(cluster: Cluster, options: Options, tmp_path: Path) -> None:
    """In a run that finds nothing, and in one that goes on."""
    for steps in (2, 4):
        found = cluster.run(2, looks_for_its_start, {**options, "train_iters": steps}, tmp_path / "run")
        assert found == [(["auto"], steps), ([], steps)]


def trained_beside_another(place: Place, options: Options, folder: Path, newer: Path) -> list[int]:
    """The steps of a run whose start another run removes as soon as it is found, having saved ``newer``."""
    look_up = start.named_start

    def found(given: CheckpointConfig) -> start.Start | None:
        known = look_up(given)
        if newer.exists():
            shutil.rmtree(folder)
            newer.rename(folder)
        return known

    with patch.object(start, "named_start", found):
        return list(ml.train(options, save=folder, load="auto", train_iters=4).losses)


@pytest.mark.long
def test_a_start_that_is_removed_once_it_is_found_is_looked_up_again(cluster: Cluster, options: Options, tmp_path: Path) -> None:
    """By another run that still saves there, and keeps only its newest checkpoints."""
    folder, newer = tmp_path / "run", tmp_path / "newer"
    checkpoint = ml.train(options, save=folder, train_iters=1).checkpoint
    assert checkpoint is not None
    shutil.copytree(folder, newer)
    ml.train(options, save=newer, load="auto", train_iters=2)
    shutil.rmtree(newer / checkpoint.name)
    assert cluster.run(2, trained_beside_another, {**options, "log_interval": 1}, folder, newer) == [[3, 4]] * 2


@pytest.mark.long
def test_a_dry_run_looks_it_up_once(options: Options, tmp_path: Path) -> None:
    ml.train(options, save=tmp_path / "run", train_iters=1)
    with counted_look_ups() as looked_for:
        assert ready(options, load=tmp_path / "run", save=tmp_path / "run").state.iteration == 1
    assert looked_for == [str(tmp_path / "run")]


def refused_on_each(place: Place, options: Options, hidden: Path | None) -> tuple[str, bool]:
    """The error of a run on this rank, and whether it is one of all ranks; rank 1 does not see the folder ``hidden``."""
    exists = Path.exists

    def seen(path: Path, **named: Any) -> bool:
        return exists(path, **named) and not (place.rank == 1 and path == hidden)

    with patch.object(Path, "exists", seen), pytest.raises(UserError) as caught:
        ml.train(options)
    return str(caught.value), caught.value.everywhere


@pytest.mark.long
def test_a_checkpoint_that_one_rank_does_not_see(cluster: Cluster, options: Options, tmp_path: Path) -> None:
    checkpoint = ml.train(options, save=tmp_path / "run", train_iters=1).checkpoint
    assert checkpoint is not None
    said = (
        f"rank 1: --load {checkpoint}: got no such folder on this machine, expected the folder that rank 0 has found; "
        "put it where all machines see it under this name, or copy it to each of them"
    )
    before = sorted((tmp_path / "run").rglob("*"))
    found = cluster.run(2, refused_on_each, {**options, "load": str(tmp_path / "run"), "save": str(tmp_path / "run")}, checkpoint)
    assert found == [(said, True)] * 2
    assert sorted((tmp_path / "run").rglob("*")) == before, "rank 0, which has refused nothing, leaves the folder to others"


def group(by: By, error: str, refusing: Sequence[int]) -> Decider:
    """A decider that refuses on some ranks, and notes on the others that it was asked."""

    def decide_or_refuse(draft: Draft) -> Draft:
        if draft.processes.world.rank in refusing:
            raise DataError(error)
        return replace(draft, notes=(*draft.notes, error))

    return Decider(Need.FILES, by, decide_or_refuse, ("notes",))


def decided(place: Place, options: Options, groups: Sequence[tuple[By, Sequence[int]]]) -> object:
    """What a rank raises, or has noted, of deciders called a, b, c."""
    world = build_mesh(Config(), rank=place.rank, world_size=place.world_size, device=torch.device("cpu")).world
    deciders = [group(by, name, refusing) for name, (by, refusing) in zip("abc", groups, strict=True)]
    try:
        return decide(replace(drafted(options), processes=Processes(world, world.size, ())), deciders).notes
    except DataError as error:
        return str(error), error.everywhere


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([(By.RANK_0, ()), (By.EACH_RANK, ()), (By.RANK_0, ())], [("a", "b", "c")] * 3),
        ([(By.EACH_RANK, [2]), (By.RANK_0, [0]), (By.EACH_RANK, [1])], [("rank 2: a", True)] * 3),
        ([(By.EACH_RANK, ()), (By.RANK_0, [0]), (By.EACH_RANK, [1, 2])], [("b", True)] * 3),
        ([(By.EACH_RANK, [0, 1, 2]), (By.RANK_0, ()), (By.EACH_RANK, ())], [("a", True)] * 3),
        ([(By.RANK_0, ()), (By.EACH_RANK, [1, 2]), (By.RANK_0, ())], [("rank 1: b (2 of 3 ranks failed)", True)] * 3),
    ],
)
def test_the_first_refusal_of_the_list_counts(groups: object, expected: object, cluster: Cluster, options: Options) -> None:
    """As if the ranks had agreed after each decider; and what rank 0 fills alone, all have."""
    assert cluster.run(3, decided, options, groups) == expected


def test_what_rank_0_refuses_all_raise(cluster: Cluster, options: Options, tmp_path: Path) -> None:
    found = cluster.run(3, refused_on_each, {**options, "load": str(tmp_path / "none"), "global_batch_size": 6}, None)
    assert found[0][0].startswith(f"--load {tmp_path}/none: got no such folder, ") and found == [(found[0][0], True)] * 3


MODEL_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def refused_with_own_weights(place: Place, options: Options, folders: Sequence[Path]) -> str:
    """The error of a run whose ranks have their first weights each in a folder of its own."""
    with pytest.raises(CheckpointError) as caught:
        ml.train(options, init_from_hf=folders[place.rank])
    return str(caught.value)


@pytest.mark.long
def test_first_weights_of_another_model_on_one_rank(cluster: Cluster, options: Options, tmp_path: Path) -> None:
    """Their tensors would be taken for parts of those of rank 0's model."""
    folders = [tmp_path / f"of_{layers}" for layers in (2, 3)]
    for layers, folder in zip((2, 3), folders, strict=True):
        ml.train(options, num_hidden_layers=layers, train_iters=1, export_hf=folder)
    rest = {name: value for name, value in options.items() if name not in MODEL_FIELDS}
    said = (
        f"rank 1: --init-from-hf {folders[1]}: got num_hidden_layers 3, and rank 0 2, expected the same on all machines; "
        "put it where all machines see it, or copy the same one to each of them"
    )
    assert cluster.run(2, refused_with_own_weights, rest, folders) == [said] * 2


@pytest.mark.long
def test_another_checkpoint_on_one_rank(options: Options, tmp_path: Path) -> None:
    """What a rank reads of a checkpoint is held against what rank 0 has read."""
    ml.train(options, save=tmp_path / "run", train_iters=1)
    draft = decide(drafted(options, load=tmp_path / "run", save=tmp_path / "run"), CONFIGURATION)
    assert isinstance(draft.source, bytes)
    with pytest.raises(CheckpointError, match="another checkpoint on this machine"):
        start.refuse_other_words("--load there", draft.source, draft.source.replace(b"1", b"2"))


def met(*given: object) -> Never:
    raise AssertionError("it waits for the other process")


def test_wrong_words_are_refused_before_the_processes_meet(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is alone says what is wrong, and does not wait for the others."""
    for name, value in torchrun(2, free_port())(0).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train, "join", met)
    for more, says in (({}, "--tensor-model-parallel-size: got 3"), ({"load": "somewhere", "lr": -1.0}, "--lr: got -1.0")):
        with pytest.raises(ConfigError, match=says):
            ml.train({**options, **more}, tensor_model_parallel_size=3)


def drafted(options: Options, **more: Any) -> Draft:
    return Draft(read_options(dict(options), more, SECTIONS), imagined_processes(1, 0, are_here=True))


def ready(options: Options, **more: Any) -> Draft:
    return decide(drafted(options, **more), RUN)


def test_deciders_fill_what_they_say(options: Options, tmp_path: Path) -> None:
    """And a whole run leaves nothing undecided."""
    draft = drafted(options, save=str(tmp_path / "run"))
    filled = set()
    for decider in RUN:
        before, draft = draft, decide(draft, [decider])
        changed = {item.name for item in fields(Draft) if getattr(before, item.name) is not getattr(draft, item.name)}
        assert changed <= {*decider.fills, "seen"}, decider
        filled |= {*decider.fills}
    assert filled == {item.name for item in fields(Draft)} - {"parsed", "processes", "needs_data", "missing", "held", "seen"}


def test_words_about_a_machine_are_those_of_its_own_rank(options: Options) -> None:
    first = decide(drafted(options, profile_dir="of_rank_0", data_cache_path="there"), CONFIGURATION)
    own = use_own_machine.decide(replace(drafted(options, profile_dir="own", data_cache_path="here"), config=first.config))
    assert (own.config.log.profile_dir, own.config.data.data_cache_path) == ("own", "here")


def refusing(error: UserError, need: Need = Need.FILES, *fills: str) -> Decider:
    def refuse(draft: Draft) -> Draft:
        raise error

    return Decider(need, By.RANK_0, refuse, fills)


@pytest.mark.parametrize(
    ("deciders", "said"),
    [
        ([refusing(DataError("one")), refusing(CheckpointError("two"))], "one\ntwo"),
        ([refusing(DataError("one"), Need.FILES, "config"), refusing(CheckpointError("two"))], "one"),
        ([refusing(DataError("one")), refusing(CheckpointError("two"), Need.FILES, "config")], "one"),
    ],
)
def test_refusals_that_stand_on_nothing_are_said_together(deciders: Sequence[Decider], said: str, options: Options) -> None:
    with pytest.raises(DataError) as caught:
        decide(drafted(options), deciders)
    assert str(caught.value) == said


def test_what_only_another_machine_must_have_is_missing_and_not_refused(options: Options) -> None:
    deciders = [refusing(ConfigError("a package"), Need.MACHINE), *CONFIGURATION]
    there = replace(drafted(options), processes=imagined_processes(1, 0, are_here=False))
    assert decide(there, deciders).missing == ("a package",)
    with pytest.raises(ConfigError, match="a package"):
        decide(drafted(options), deciders)
