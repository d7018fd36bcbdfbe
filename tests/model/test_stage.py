"""A pipeline stage is the model with fewer layers: what it announces, what it masks."""

from __future__ import annotations

import torch

from megatron_llama.mesh import Mesh
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import Stage
from megatron_llama.model.load import load_stage
from megatron_llama.params import stage_units
from tests.parallel.cases import MODEL, token_ids
from tests.test_params import paper_mesh

CPU = torch.device("cpu")


def loaded(mesh: Mesh) -> Stage:
    stage = Stage(MODEL, mesh, sequence_parallel=False)
    load_stage(stage, InitialWeights(5, 0.1), dtype=torch.float32)
    return stage


def test_every_unit_is_announced_once_in_forward_order_before_it_runs() -> None:
    for stages in (1, 2, 4):
        for index in range(stages):
            stage = loaded(paper_mesh(1, 0, stages, index))
            used: list[int] = []
            stage.on_use = used.append
            x = token_ids(12).view(6, 2) if index == 0 else torch.randn(6, 2, MODEL.hidden_size)
            stage(x, stage.positions(6, CPU))
            assert used == list(range(len(stage_units(MODEL, stages=stages, stage=index))))


def test_stages_in_a_row_are_the_model() -> None:
    ids = token_ids(20).view(10, 2)
    whole = loaded(paper_mesh(1, 0, 1, 0))
    expected = whole(ids, whole.positions(10, CPU))
    x = ids
    for index in range(4):
        stage = loaded(paper_mesh(1, 0, 4, index))
        x = stage(x, stage.positions(10, CPU))
    assert torch.equal(x, expected)


def test_no_position_sees_the_future() -> None:
    stage, ids = loaded(Mesh.single()), token_ids(16).view(16, 1)
    changed = ids.clone()
    changed[9] = (changed[9] + 1) % MODEL.vocab_size
    before, after = (stage(x, stage.positions(16, CPU)) for x in (ids, changed))
    assert torch.equal(before[:9], after[:9])
    assert bool((before[9:] != after[9:]).any(-1).all())


def test_masked_documents_equal_documents_on_their_own() -> None:
    """Two documents packed into one sample, with positions that restart, against each of them alone."""
    stage, ids, first = loaded(Mesh.single()), token_ids(16).view(16, 1), 6
    places = torch.cat((torch.arange(first), torch.arange(16 - first))).unsqueeze(-1)
    numbers = (torch.arange(16) >= first).int()
    mask = (numbers[:, None] == numbers[None, :]).tril().view(1, 1, 16, 16)
    packed = stage(ids, stage.positions(16, CPU, places, mask))
    alone = [stage(part, stage.positions(part.shape[0], CPU)) for part in (ids[:first], ids[first:])]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)
    # Rotary attention sees distances only: under the mask the restart changes nothing, without it it does.
    masked, restarted, plain = (stage(ids, stage.positions(16, CPU, *options)) for options in ((None, mask), (places, None), (None, None)))
    torch.testing.assert_close(masked, packed, rtol=1e-5, atol=1e-5)
    assert min(float((one - other).abs().max()) for one, other in ((packed, plain), (packed, restarted), (restarted, plain))) > 1e-2
