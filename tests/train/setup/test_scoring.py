"""Texts scored for a program on rank 0: in every layout as transformers scores each alone; errors reach all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_llama.config.schema import ModelConfig
from megatron_llama.errors import DataError, TrainingError
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.train.setup import scoring
from megatron_llama.train.setup.scoring import Ask, Request, Score, Scorer, serve

from tests.harness import Cluster
from tests.parallel.cases import MODEL, SEQ_LENGTH, Layout, token_ids
from tests.pipeline.test_runtime import fixed
from tests.torch_twin import hf_model

TEXTS = 23


def texts() -> list[Request]:
    """Windows of all lengths, of which all, one or some tokens are scored."""
    ids = token_ids(TEXTS * (SEQ_LENGTH + 1)).tolist()
    found = []
    for number in range(TEXTS):
        length = 2 + number * 13 % SEQ_LENGTH
        tokens = ids[number * (SEQ_LENGTH + 1) :][:length]
        found.append(Request(tuple(tokens), (length - 1, 1, length // 2)[number % 3]))
    return found


def scored(place: Place, layout: Layout, model: ModelConfig, requests: Sequence[Request], rows: int = 3) -> list[Score] | None:
    """What a program on rank 0 is told: of some texts, of none, and of the others."""
    config = layout.sized()
    config = replace(config, model=model, training=replace(config.training, micro_batch_size=rows))
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    _, runtime = fixed(config, mesh)
    return serve(lambda ask: ask(requests[:5]) + ask([]) + ask(requests[5:]), Scorer(config, mesh, runtime), mesh)


def expected(model: ModelConfig, request: Request) -> Score:
    with torch.no_grad():
        logits = hf_model(model)(torch.tensor([request.tokens[:-1]])).logits[0].double()[-request.scored :]
    labels = torch.tensor(request.tokens[-request.scored :])
    return Score(logits.log_softmax(-1)[range(len(labels)), labels].sum().item(), bool((logits.argmax(-1) == labels).all()))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tp=2, pp=2, sp=True),
        Layout(pp=2, dp=2),
        Layout(cp=2, dp=2, cp_comm="ring"),
        Layout(pp=2, virtual=2, schedule="zb-v"),
    ],
    ids=lambda layout: layout.name,
)
def test_every_layout_scores_each_text_as_if_it_were_alone(cluster: Cluster, layout: Layout) -> None:
    found, *others = cluster.run(layout.world_size, scored, layout, MODEL, texts())
    assert others == [None] * (layout.world_size - 1)
    for score, request in zip(found, texts(), strict=True):
        right = expected(MODEL, request)
        assert score == (pytest.approx(right.logprob, rel=1e-6, abs=1e-5), right.greedy)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotary_scaling_sees_the_length_of_each_text(cluster: Cluster, kind: str) -> None:
    """And not that of its neighbours, or of the padding."""
    factors: dict[str, Any] = {"factor": 4.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 16}
    model = replace(MODEL, rope_scaling={"rope_type": kind, **factors}, max_position_embeddings=16 if kind == "dynamic" else 32)
    for layout in (Layout(), Layout(tp=2, sp=True)):
        together = cluster.run(layout.world_size, scored, layout, model, texts())[0]
        plain = cluster.run(layout.world_size, scored, layout, replace(model, rope_scaling=None), texts())[0]
        for score, other, request in zip(together, plain, texts(), strict=True):
            right = expected(model, request)
            assert score == (pytest.approx(right.logprob, rel=1e-6, abs=1e-5), right.greedy)
            long = len(request.tokens) - 1 > 16
            assert not long or score != other, "the scaling matters"


def fails(place: Place, case: str) -> str:
    """What is raised on this rank."""
    config = Layout(tp=2).sized()
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    stages, runtime = fixed(config, mesh)

    def program(ask: Ask) -> list[Score]:
        ask(texts())
        raise DataError("the task", got="no text", expected="one", do="add it")

    if case == "weights":
        stages[0].head_weight.data[0, 0] = float("nan")
    with pytest.raises((DataError, TrainingError)) as error:
        serve(program, Scorer(config, mesh, runtime), mesh)
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("program", "DataError: the task: got no text, expected one; add it"),
        ("weights", "TrainingError: the log-likelihood of a text: got nan, expected a finite number"),
    ],
)
def test_an_error_is_that_of_all_ranks(cluster: Cluster, case: str, says: str) -> None:
    found = cluster.run(2, fails, case)
    assert found[0] == found[1] and found[0].startswith(says)


@pytest.mark.long
def test_ranks_meet_while_a_program_takes_its_time(cluster: Cluster) -> None:
    """As often as it takes, and it is told nothing that it has not asked for."""
    assert cluster.run(2, slow)[0] == ("done", True)


def slow(place: Place) -> tuple[str, bool] | None:
    config = Layout(tp=2).sized()
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    _, runtime = fixed(config, mesh)
    scorer = Scorer(config, mesh, runtime)
    meetings = []
    broadcast = scoring.on_rank0

    def counted(*args: Any) -> Any:
        meetings.append(1)
        return broadcast(*args)

    scoring.on_rank0 = counted
    try:

        def program(ask: Ask) -> tuple[str, bool]:
            before = ask(texts())
            already = len(meetings)
            while len(meetings) < already + 2:
                pass
            return "done", ask(texts()) == before

        return serve(program, scorer, mesh)
    finally:
        scoring.on_rank0 = broadcast
