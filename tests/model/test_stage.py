"""A pipeline stage is the model with fewer layers: what it announces, what it masks."""

from __future__ import annotations

import torch

from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import Stage, build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.params import Partition, stage_units, whole_model
from tests.parallel.cases import MODEL, Layout, token_ids
from tests.test_params import even, paper_mesh, paper_stage, specs_of

CPU = torch.device("cpu")


def loaded(partition: Partition, index: int) -> Stage:
    stage = paper_stage(MODEL, partition, index)
    load_stages([stage], specs_of(stage_units(MODEL, partition, index)), InitialWeights(5, 0.1), dtype=torch.float32, device=CPU)
    return stage


def whole() -> Stage:
    return loaded(whole_model(MODEL), 0)


def test_every_unit_is_announced_once_in_forward_order_before_it_runs() -> None:
    for stages in (1, 2, 4):
        for index in range(stages):
            stage = loaded(even(MODEL.num_hidden_layers, stages), index)
            used: list[int] = []
            stage.on_use = used.append
            x = token_ids(12).view(6, 2) if index == 0 else torch.randn(6, 2, MODEL.hidden_size)
            stage(x, stage.positions(6, CPU))
            assert used == list(range(len(stage_units(MODEL, even(MODEL.num_hidden_layers, stages), index))))


def test_stages_in_a_row_are_the_model() -> None:
    ids = token_ids(20).view(10, 2)
    alone = whole()
    expected = alone(ids, alone.positions(10, CPU))
    for partition in (even(4, 4), Partition((range(1), range(1, 2), range(2, 4)), (0, 1, 2))):
        x = ids
        for index in range(partition.stages):
            stage = loaded(partition, index)
            x = stage(x, stage.positions(10, CPU))
        assert torch.equal(x, expected)


def test_a_tied_head_is_the_embedding_when_both_ends_are_here() -> None:
    config = Layout(pp=2, virtual=2, schedule="zb-v", tied=True).config()
    mesh = paper_mesh(1, 0, 2, 0)
    stages = build_stages(config, mesh)
    assert list(stages) == [0, 3] and not stages[3].is_first and stages[3].is_last
    load_stages(stages.values(), rank_specs(config, mesh), InitialWeights(5, 0.1), dtype=torch.float32, device=CPU)
    assert stages[3].head_weight is stages[0].get_parameter("model.embed_tokens.weight")
    assert [name for name, _ in stages[3].named_parameters() if "embed" in name or "lm_head" in name] == []
    assert list(build_stages(config, paper_mesh(1, 0, 2, 1))) == [1, 2]
    apart = build_stages(Layout(pp=2, tied=True).config(), paper_mesh(1, 0, 2, 1))
    assert apart[1].head_weight is apart[1].get_parameter("lm_head.weight")


def test_no_position_sees_the_future() -> None:
    stage, ids = whole(), token_ids(16).view(16, 1)
    changed = ids.clone()
    changed[9] = (changed[9] + 1) % MODEL.vocab_size
    before, after = (stage(x, stage.positions(16, CPU)) for x in (ids, changed))
    assert torch.equal(before[:9], after[:9])
    assert bool((before[9:] != after[9:]).any(-1).all())


def test_masked_documents_equal_documents_on_their_own() -> None:
    """Two documents packed into one sample, with positions that restart, against each of them alone."""
    stage, ids, first = whole(), token_ids(16).view(16, 1), 6
    places = torch.cat((torch.arange(first), torch.arange(16 - first))).unsqueeze(-1)
    numbers = (torch.arange(16) >= first).int()
    documents = numbers.unsqueeze(-1)
    packed = stage(ids, stage.positions(16, CPU, places, documents))
    alone = [stage(part, stage.positions(part.shape[0], CPU)) for part in (ids[:first], ids[first:])]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)
    # Rotary attention sees distances only: under the mask the restart changes nothing, without it it does.
    masked, restarted, plain = (
        stage(ids, stage.positions(16, CPU, *options)) for options in ((None, documents), (places, None), (None, None))
    )
    torch.testing.assert_close(masked, packed, rtol=1e-5, atol=1e-5)
    assert min(float((one - other).abs().max()) for one, other in ((packed, plain), (packed, restarted), (restarted, plain))) > 1e-2
