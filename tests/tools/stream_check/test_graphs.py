"""That the passes of blocks can be captured as graphs, that the check finds what cannot, and that the plan counts their memory."""

from __future__ import annotations

from functools import cache

import pytest
from megatron_llama.train.setup.graph_memory import graph_bytes
from megatron_llama.train.setup.memory import MemoryPlan, peak_of
from megatron_llama.train.setup.resolve import resolve
from tools.stream_check.__main__ import graphs_line, graphs_status, main
from tools.stream_check.events import Access, Alloc, Event, Line, Memory, Signal, Site, Wait
from tools.stream_check.graph_faults import FAULTS, Found, plant_in_graphs
from tools.stream_check.graphs import HOST, OUTSIDE, SYNC, UNJOINED, GraphResult, Problem, _uncapturable, graph_layouts, graph_result_of

SOME = ("optim_grads_params", "1f1b, pipeline rank 1, optim", "recompute full, 1f1b, sp")
PLANNED = ("no_shard", "tp", "recompute selective", "recompute full", "interleaved, pipeline rank 1, optim")
QUICK = ("a block reads a number", "microbatches share buffers")
SITE = Site("megatron_llama/a.py", 1)
THREAD, OWN, OTHER = Line("thread MainThread", is_thread=True), Line("own", is_thread=False), Line("other", is_thread=False)
result_of = cache(graph_result_of)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SOME else [pytest.mark.soak if number % 3 else pytest.mark.long])
        for number, name in enumerate(graph_layouts())
    ],
)
def test_the_passes_of_blocks_are_graphs(name: str) -> None:
    found = result_of(name)
    assert found.is_sound, [*found.problems, *found.races]
    steps, blocks = graph_layouts()[name].steps - 1, found.graphs
    assert found.replays >= 2 * steps and blocks >= 2


def test_layouts_are_left_out_for_a_reason() -> None:
    names = graph_layouts()
    assert len(names) > 160 and {"documents", "lora", "cp", "zb-h1, pipeline rank 0, optim", "frozen embedding"}.isdisjoint(names)
    assert {"sp", "fp16", "tied", "optim_grads", "exact offload, optim", "muon, optim", "averaged weights, optim", "gpipe, pipeline rank 1, optim"} <= names.keys()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in FAULTS])
def test_planted_faults_are_found(name: str) -> None:
    found = plant_in_graphs(name)
    assert found.reported.startswith(found.expected), found


@pytest.mark.long
@pytest.mark.parametrize("name", PLANNED)
def test_the_plan_counts_the_memory_of_graphs(name: str) -> None:
    """Pools hold no more than what is planned for blocks, and at least half of it: the rest is for evaluations and for copies."""
    layout = graph_layouts()[name]
    config = resolve(layout.config, layout.world_size)
    plan = MemoryPlan(config, layout.world_size)
    rank = layout.rank // (layout.world_size // config.parallel.pipeline_model_parallel_size)
    asked = config.parallel.recompute_granularity, plan.recompute_layers()
    kept = [plan.kept_by_blocks(stage, *asked) for stage in range(plan.partition.stages)]
    planned = peak_of(plan.schedule.ranks[rank], kept, kept) + graph_bytes(plan, rank, *asked)
    assert planned / 2 < result_of(name).pool_bytes <= planned


def signal(line: Line, token: int) -> Signal:
    return Signal(THREAD, SITE, line, token)


def wait(line: Line, token: int | None) -> Wait:
    return Wait(THREAD, SITE, line, token)


def access(line: Line, buffer: int = 0) -> Access:
    return Access(THREAD, SITE, line, "work", buffer, 0, 8, writes=True)


FORK: list[Event] = [signal(OWN, 1), wait(OTHER, 1), access(OTHER)]


@pytest.mark.parametrize(
    ("events", "kinds"),
    [
        ([access(OWN), *FORK, signal(OTHER, 2), wait(OWN, 2), access(OWN)], []),
        ([*FORK], [UNJOINED]),
        ([*FORK, signal(OTHER, 2), access(OTHER), wait(OWN, 2)], [UNJOINED]),
        ([access(OTHER)], [OUTSIDE, UNJOINED]),
        ([wait(OWN, 7)], [OUTSIDE]),
        ([wait(OWN, None)], [OUTSIDE]),
        ([signal(OWN, 1), wait(THREAD, 1)], [SYNC]),
        ([access(THREAD)], [HOST]),
        ([Alloc(THREAD, SITE, THREAD, 5, 8, Memory.PINNED, ""), access(OWN, 5)], [HOST]),
    ],
)
def test_what_a_device_cannot_capture(events: list[Event], kinds: list[str]) -> None:
    memories = {event.buffer: event.memory for event in events if isinstance(event, Alloc)}
    assert [problem.kind for problem in _uncapturable(events, OWN, memories)] == kinds


def test_results_are_printed_and_decide(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--graphs", "one process", "--jobs", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "graphs 6, replays 24, problems 0, layouts 1, planted faults found 0 of 0"
    sound = GraphResult("a", 2, 4, 100, (), (), 0.0)
    harmed = GraphResult("b", 2, 4, 100, (Problem(SYNC, SITE, "a value"),), (), 0.0)
    idle = GraphResult("c", 0, 0, 0, (), (), 0.0)
    found, missed = Found("f", SYNC, "said"), Found("g", SYNC, "")
    assert graphs_status([sound], [found]) == 0
    assert all(graphs_status([result], [fault]) == 1 for result, fault in ((harmed, found), (idle, found), (sound, missed)))
    assert graphs_line([sound, harmed], [found, missed]) == "graphs 4, replays 8, problems 1, layouts 2, planted faults found 1 of 2"
    with pytest.raises(SystemExit):
        main(["--graphs", "documents"])
