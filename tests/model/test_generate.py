"""How the next token is drawn, and when generation ends."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.mesh import Mesh
from megatron_llama.model.generate import Reader, Sampling, continue_sequence, generate_batch, sample_token
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import Stage, build_stages
from megatron_llama.model.load import load_stages, rank_specs
from torch import Tensor

GREEDY = Sampling(max_new_tokens=8, temperature=0.0, top_k=0, top_p=1.0)
FREE = dataclasses.replace(GREEDY, temperature=1.0)
MODEL = ModelConfig(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=16,
)  # fmt: skip
PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])


def drawn(sampling: Sampling, times: int = 4000) -> Tensor:
    """Frequencies of the tokens."""
    generator = torch.Generator().manual_seed(5)
    tokens = [sample_token(PROBABILITIES.log(), sampling, generator) for _ in range(times)]
    return torch.bincount(torch.tensor(tokens), minlength=5) / times


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"temperature": 0.0}, [1]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"temperature": 2.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.1}, [1]),
        ({"top_p": 0.84}, [1, 3, 4]),
        ({"top_k": 3, "top_p": 0.7}, [1, 3]),
    ],
    ids=str,
)
def test_only_the_likeliest_are_drawn(changes: dict[str, float], kept: list[int]) -> None:
    expected = torch.zeros(5)
    expected[kept] = (PROBABILITIES[kept].log() / (changes.get("temperature") or 1.0)).softmax(0)
    torch.testing.assert_close(drawn(dataclasses.replace(FREE, **changes)), expected, rtol=0, atol=0.03)


@pytest.fixture(scope="module")
def stage() -> Stage:
    config, mesh = Config(model=MODEL), Mesh.single()
    [built] = build_stages(config, mesh).values()
    load_stages([built], rank_specs(config, mesh), InitialWeights(3, 0.3), dtype=torch.float32, device=mesh.device)
    return built


def new_tokens(stage: Stage, prompt: list[int], sampling: Sampling, eos: int | None = None, seed: int = 0) -> list[int]:
    """After one prompt, without a batch."""
    stops = frozenset() if eos is None else frozenset({eos})
    generator = torch.Generator().manual_seed(seed)
    return list(continue_sequence(Reader(stage), prompt, sampling, stops=stops, generator=generator, longest=MODEL.max_position_embeddings))


def test_every_token_is_the_models_choice_after_the_ones_before(stage: Stage) -> None:
    text = [7, 3, 11, *new_tokens(stage, [7, 3, 11], GREEDY)]
    with torch.no_grad():
        logits = stage(torch.tensor(text).unsqueeze(-1), stage.positions(len(text), torch.device("cpu")))[:, 0, :50]
    assert text[3:] == logits.argmax(-1)[2:-1].tolist() and len(set(text[3:])) > 1


def test_where_generation_ends(stage: Stage) -> None:
    """Before the end token, at the limit, and at the longest sequence; columns that pad the vocabulary are never drawn."""
    whole = new_tokens(stage, [7, 3, 11], GREEDY)
    assert new_tokens(stage, [7, 3, 11], GREEDY, eos=whole[-1]) == whole[: whole.index(whole[-1])]
    assert [len(new_tokens(stage, [1] * length, GREEDY)) for length in (2, 13, 16)] == [8, 3, 0]
    flat = dataclasses.replace(FREE, temperature=100.0)
    assert max(token for seed in range(40) for token in new_tokens(stage, [1], flat, seed=seed)) < 50


PROMPTS = [[7, 3, 11], [1], [9, 9, 9, 9, 9, 9, 2], [7, 3, 11, 40]]


def logits_of_all(stage: Stage, text: list[int]) -> Tensor:
    """[tokens, 50], of one pass over the whole text."""
    with torch.no_grad():
        logits: Tensor = stage(torch.tensor(text).unsqueeze(-1), stage.positions(len(text), torch.device("cpu")))
    return logits[:, 0, :50]


def test_what_was_read_before_counts_as_if_it_were_read_now(stage: Stage) -> None:
    """Several tokens at a time, one at a time, and again after going back: the logits of a pass over everything."""
    text = [7, 3, 11, 4, 4, 49, 0, 23, 8, 30]
    whole, reader = logits_of_all(stage, text), Reader(stage)
    for start, stop in ((0, 3), (3, 4), (4, 7), (7, 8), (8, 10)):
        torch.testing.assert_close(reader.read([text[start:stop]])[0], whole[stop - 1], rtol=0, atol=1e-5)
    reader.truncate(4)
    torch.testing.assert_close(reader.read([text[4:]])[0], whole[-1], rtol=0, atol=1e-5)
    assert whole.std() > 0.3 and (whole[-1] - whole[-2]).abs().max() > 0.1


def test_prompts_of_different_lengths_do_not_see_each_other(stage: Stage) -> None:
    reader, rest = Reader(stage), [[5, 6], [30], [1, 2, 3], [49]]
    for logits, prompt in zip(reader.read(PROMPTS), PROMPTS, strict=True):
        torch.testing.assert_close(logits, logits_of_all(stage, prompt)[-1], rtol=0, atol=1e-5)
    for logits, prompt, more in zip(reader.read(rest), PROMPTS, rest, strict=True):
        torch.testing.assert_close(logits, logits_of_all(stage, prompt + more)[-1], rtol=0, atol=1e-5)
    reader.keep([3, 1])
    for logits, row in zip(reader.read([[8], [9]]), (3, 1), strict=True):
        torch.testing.assert_close(logits, logits_of_all(stage, PROMPTS[row] + rest[row] + [(9, 8)[row == 3]])[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("sampling", [GREEDY, FREE, dataclasses.replace(FREE, top_k=20, top_p=0.8)], ids=["greedy", "free", "limited"])
def test_a_batch_gives_every_prompt_its_own_text(stage: Stage, sampling: Sampling) -> None:
    sampling = dataclasses.replace(sampling, max_new_tokens=12)
    alone = [new_tokens(stage, prompt, sampling, eos=4, seed=3) for prompt in PROMPTS]
    together: list[list[int]] = [[] for _ in PROMPTS]
    done = []
    for number, token in generate_batch(stage, PROMPTS, sampling, stops=frozenset({4}), seed=3):
        assert number not in done
        if isinstance(token, str):
            done.append(number)
        else:
            together[number].append(token)
    assert together == alone and sorted(done) == [0, 1, 2, 3] and len({len(text) for text in alone}) > 1


def test_a_prompt_without_room_is_done_at_once(stage: Stage) -> None:
    found = list(generate_batch(stage, [[1] * 16, [2] * 15], GREEDY, stops=frozenset(), seed=0))
    assert [number for number, _ in found] == [0, 1, 1] and found[0][1] == found[2][1] == "length"


def test_a_token_costs_the_same_however_long_the_text_is(stage: Stage) -> None:
    """Positions that linear layers see: those of new tokens alone."""
    seen: list[int] = []
    hook = stage.model.layers["0"].mlp.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[0]))  # type: ignore[union-attr, index]
    assert len(new_tokens(stage, [7, 3, 11], GREEDY)) == 8
    hook.remove()
    assert seen == [3, 1, 1, 1, 1, 1, 1, 1]
