"""Every communicator that a run uses is made at the start, in one order on all ranks; and what NCCL is told of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron_llama.config.schema import Config, ParallelConfig
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.object_collectives import all_gather_object, on_rank0, raise_error_on_all_ranks
from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.launch import join as joining
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.launch.network import GLOO_LAZY
from megatron_llama.model.plan.params import partition_of
from megatron_llama.schedule import Op, forward_only, link_of, schedule_named
from megatron_llama.schedule.actions import RECEIVES, SENDS

from tests.harness import Cluster
from tests.launch.communicators import Group, Imagined, Options, Use, noted, waits_of
from tests.launch.test_mesh import AXES, Case

GPU = torch.device("cuda", 0)
GRIDS = [
    Case(dp=3, cp=2, tp=2, kv_heads=4),
    Case(cp=4),
    Case(tp=4, kv_heads=2, dp=2, strategy="optim_grads_params"),
    Case(pp=3, dp=2, tp=2, tied=True),
    Case(pp=5, schedule="gpipe"),
    Case(pp=2, schedule="interleaved", virtual=2, tied=True),
    Case(pp=4, schedule="interleaved", virtual=2, tied=True),
    Case(pp=4, schedule="zb-v", dp=2),
    Case(pp=4, schedule="zb-h1", tp=2),
]
grids = pytest.mark.parametrize("case", GRIDS, ids=lambda case: " ".join(f"{k}={v}" for k, v in vars(case).items() if v != getattr(Case(), k)))


def built(config: Config, rank: int, world_size: int, device: torch.device = GPU) -> tuple[Mesh, Imagined]:
    """The mesh of one rank, and what it asked torch.distributed for. No process but this one is there, and no GPU."""
    asked = Imagined(rank, world_size=world_size)
    with noted(asked), mock.patch.object(devices, "synchronize"), mock.patch.object(torch, "zeros"):
        return build_mesh(config, rank=rank, world_size=world_size, device=device), asked


def axes_of(mesh: Mesh) -> dict[str, Axis]:
    return {name: axis for name in AXES if (axis := getattr(mesh, name)) is not None and axis.size > 1}


def group_of(axis: Axis) -> Group:
    assert isinstance(axis.group, Group)
    return axis.group


def spread(config: Config, comm: Any) -> Config:
    """With a type of context parallelism, in pairs where there are groups."""
    sizes = (2, config.parallel.context_parallel_size // 2) if comm == "a2a+p2p" else ()
    return replace(config, parallel=replace(config.parallel, cp_comm_type=comm, hierarchical_context_parallel_sizes=sizes))


@pytest.mark.parametrize("comm", ["all_gather", "ring", "a2a", "a2a+p2p"])
@grids
def test_nobody_waits_forever_at_the_start(case: Case, comm: str) -> None:
    """Each rank's uses are walked in order, and each waits until all its ranks have come: NCCL's rule for a first use."""
    config = spread(case.config, comm)
    every = [built(config, rank, case.world_size) for rank in range(case.world_size)]
    assert waits_of([asked.uses for _, asked in every]) == {}
    for mesh, asked in every:
        assert len(asked.uses) == len(set(asked.uses)), "each once"
        reduced = {use.group for use in asked.uses if use.operation == "all_reduce"}
        pipelines = {axis.group for name, axis in axes_of(mesh).items() if name.startswith("pp")}
        wanted = {group_of(axis).group_name for axis in axes_of(mesh).values() if axis.group not in pipelines}
        assert reduced == wanted | {"world"}
        rings = {use.ranks for use in asked.uses if use.operation == "ring"}
        exchanges = {use.ranks for use in asked.uses if use.operation == "all_to_all"}
        ranks, first = mesh.cp.ranks, mesh.cp.rank
        if mesh.cp.size == 1:
            assert rings == exchanges == set()
        elif comm in ("all_gather", "ring"):
            assert rings == ({ranks} if comm == "ring" else set()) and exchanges == set()
        elif comm == "a2a" or mesh.cp.size == 2:
            assert rings == set() and exchanges == {ranks}
        else:
            assert rings == {ranks[first % 2 :: 2]} and exchanges == {ranks[first // 2 * 2 :][:2]}


def test_an_order_that_differs_between_ranks_is_seen() -> None:
    """The check above can fail: of four ranks two, diagonally, take their groups in the other order."""
    programs = [built(Case(tp=2, dp=2).config, rank, 4)[1].uses for rank in range(4)]
    assert waits_of(programs) == {}
    for program in (programs[0], programs[3]):
        program[1], program[2] = program[2], program[1]
    assert set(waits_of(programs)) == {0, 1, 2, 3}


@grids
def test_every_pair_of_a_schedule_is_connected(case: Case) -> None:
    """The links of all actions, training with 1 to 9 microbatches and evaluation, against the messages at the start."""
    for rank in range(case.world_size):
        mesh, asked = built(case.config, rank, case.world_size)
        connected = {use for use in asked.uses if use.operation == "message"}
        assert used_by_schedules(mesh, case) == connected, rank


def test_a_hang_report_names_the_communicator_that_is_being_made() -> None:
    """What the recorder says that this rank waits for, at each first use and while each group is made."""
    recorder, said = Recorder(), list[str]()

    def saying(call: Callable[..., Any]) -> Callable[..., Any]:
        def said_and_done(*args: Any, **options: Any) -> Any:
            said.extend(str(wait.what) for wait in recorder.waits.values())
            return call(*args, **options)

        return said_and_done

    asked = Imagined(1, world_size=2)
    for name in ("new_group", "all_reduce", "isend", "irecv"):
        setattr(asked, name, saying(getattr(asked, name)))
    with noted(asked), mock.patch.object(devices, "synchronize"), mock.patch.object(torch, "zeros"):
        build_mesh(Case(pp=2, tied=True).config, rank=1, world_size=2, device=GPU, recorder=recorder)
    made = [f"the ranks of {name}" for name in ("pp", "pp_backward", "embedding")]
    assert said == [*made, "the ranks of world", "the ranks of embedding", "rank 0 on pp", "rank 0 on pp_backward"]
    assert recorder.waits == {}


def used_by_schedules(mesh: Mesh, case: Case) -> set[Use]:
    name, pp, placement = case.schedule, mesh.pp.size, partition_of(case.config).placement
    counts = [m for m in range(1, 10) if name != "interleaved" or m % pp == 0]
    schedules = [
        *(schedule_named(name, ranks=pp, microbatches=m, virtual=case.virtual) for m in counts),
        *(forward_only(placement, m) for m in range(1, 10)),
    ]
    used = set()
    for schedule in schedules:
        for action in schedule.ranks[mesh.pp.rank]:
            if action.op in (*SENDS, *RECEIVES):
                op, sender, receiver = link_of(action, placement)
                axis = mesh.link(sender, receiver, backward=op is Op.SEND_BACKWARD)
                used.add(Use(group_of(axis).group_name, (axis.ranks[sender], axis.ranks[receiver]), "message"))
    return used


def told(config: Config) -> dict[str, tuple[bool, int | None]]:
    """Of each axis: whether its stream has priority, and its largest number of thread blocks."""
    mesh, asked = built(config, 0, 16)
    assert {group.backend for group in asked.groups} == {"nccl"}, "no group opens gloo's sockets"
    found = {}
    for name, axis in axes_of(mesh).items():
        options = group_of(axis).options
        assert options is not None and options._timeout == group_of(axis).timeout == timedelta(minutes=10, seconds=30)
        found[name] = (options.is_high_priority_stream, getattr(options.config, "max_ctas", None))
    return found


PIPELINE = ("pp", "pp_backward", "pp_return", "pp_backward_return")


@pytest.mark.tries("high_priority_stream_groups", "nccl_pp_max_ctas")
@pytest.mark.parametrize(
    ("groups", "ctas", "high"),
    [
        (("tp", "cp", "dp"), 4, {"tp", "kv", "cp", "dp", "dp_gather"}),
        (("none",), 0, set()),
        (("tp", "pp"), 2, {"tp", "kv", *PIPELINE}),
        ((), 4, set()),
        (ParallelConfig().high_priority_stream_groups, ParallelConfig().nccl_pp_max_ctas, {"tp", "kv", "cp", "dp", "dp_gather"}),
    ],
)
def test_what_nccl_is_told_of_each_axis(groups: Sequence[str], ctas: int, high: set[str]) -> None:
    case = Case(pp=2, cp=2, tp=4, kv_heads=2, schedule="interleaved", virtual=2, tied=True)
    parallel = replace(case.config.parallel, high_priority_stream_groups=tuple(groups), nccl_pp_max_ctas=ctas)
    found = told(replace(case.config, parallel=parallel))
    expected = {"tp", "kv", "cp", "dp", "dp_gather", *PIPELINE, "embedding"}
    assert found == {name: (name in high, ctas or None if name in PIPELINE else None) for name in expected}


@pytest.mark.parametrize(("given", "found"), [(None, "32"), ("1", "1")])
def test_streams_have_queues_of_their_own(given: str | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ``shard`` asks which device is its. A user who has set the variable has decided."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    joining.launched_device()
    assert os.environ[name] == found


def test_a_host_has_gloo_alone() -> None:
    _, asked = built(Case(pp=2, dp=2, tied=True).config, 0, 4, torch.device("cpu"))
    assert asked.groups and {(group.backend, group.options) for group in asked.groups} == {(None, None)}


def sockets() -> set[str]:
    """Open sockets of this process, by their numbers in the kernel."""
    links = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            links.add(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the listing's own
            continue
    return {link for link in links if link.startswith("socket:")}


def sockets_of_a_group(place: Place, lazy: bool) -> int:
    """How many sockets a gloo group of all ranks has added after collectives of objects."""
    before = sockets()
    with mock.patch.dict(os.environ, {GLOO_LAZY: str(int(lazy))}):
        group = dist.new_group(backend="gloo")
    world = Axis("world", place.rank, tuple(range(place.world_size)), group, Recorder())
    for index in range(3):
        assert all_gather_object(place.rank + index, world) == [rank + index for rank in range(place.world_size)]
    assert on_rank0(lambda: "a path", world) == "a path"
    raise_error_on_all_ranks(None, world)
    return len(sockets() - before)


def test_values_of_the_host_need_few_sockets(cluster: Cluster) -> None:
    """Eight ranks: two neighbours for a gather, three for a broadcast of the binomial tree, some of which are the same."""
    assert min(cluster.run(8, sockets_of_a_group, False)) >= 7
    assert max(cluster.run(8, sockets_of_a_group, True)) <= 1 + 2 + 3, "one that listens, and connections"


def test_a_device_makes_gloo_connect_late() -> None:
    """The group of all ranks is asked for with both backends, with the variable set before, and for scalars on a GPU."""
    asked = dict[str, object]()

    def init(backend: str, *, pg_options: Options | None, **options: object) -> None:
        ctas = pg_options and (pg_options.config.max_ctas, pg_options.is_high_priority_stream)
        asked.update(backend=backend, lazy=os.environ.get(GLOO_LAZY), ctas=ctas)

    place, store = Place(0, 2, 0), mock.Mock()
    for device in (GPU, torch.device("cpu")):
        with (
            mock.patch.dict(os.environ),
            mock.patch.multiple(joining, open_store=mock.DEFAULT, meet=mock.Mock(return_value=store), choose_interface=lambda *_: None),
            mock.patch.multiple(joining, require_master=mock.DEFAULT),
            mock.patch.object(devices, "accelerator", return_value=device),
            mock.patch.object(dist, "init_process_group", init),
            mock.patch.object(dist, "ProcessGroupNCCL", Imagined.ProcessGroupNCCL, create=True),
        ):
            os.environ.pop(GLOO_LAZY, None)
            os.environ["PYTORCH_ALLOC_CONF"] = ""
            with pytest.raises(AttributeError):  # nobody has joined
                joining.join(Config().parallel, place)[0].group.size()  # type: ignore[union-attr]
        assert asked == ({"backend": "cpu:gloo,cuda:nccl", "lazy": "1", "ctas": (1, False)} if device == GPU else {"backend": "gloo", "lazy": None, "ctas": None})
