"""Generation with rotary scalings and windows beyond the original context and the window, against transformers and against a pass over
everything.

Weights of std 0.1: at std 0.02 attention is so flat that what is tested would hide below rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.mesh import Mesh
from megatron_llama.model.generate import Reader, Sampling, generate_batch
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import Stage, build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.model.nn.attention import ScoreRule
from megatron_llama.model.rope import longest_sequence
from torch import Tensor

from tests.parallel.cases import token_ids
from tests.torch_twin import hf_model

CONTEXT, LONGEST = 64, 96
MODEL = ModelConfig(
    vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=LONGEST, initializer_range=0.1,
)  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + 0.7 * pair for pair in range(8)],
    "original_max_position_embeddings": CONTEXT,
}


MIXED = ("sliding_attention", "full_attention")
CASES: Mapping[str, ModelConfig] = {
    "linear": replace(MODEL, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "dynamic": replace(MODEL, rope_scaling={"rope_type": "dynamic", "factor": 3.0}),
    "yarn": replace(MODEL, rope_scaling=YARN),
    "yarn with mscale": replace(MODEL, rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 0.4, "truncate": False}),
    "longrope": replace(MODEL, rope_scaling=LONGROPE),
    "windows": replace(MODEL, sliding_window=24),
    "windows in some layers": replace(MODEL, sliding_window=24, layer_types=MIXED),
    "windows and longrope": replace(MODEL, rope_scaling=LONGROPE, sliding_window=24),
}
"""What generation computes of most of them is the subject of ``tests/model/families``."""
FIELDS = {"query_pre_attn_scalar": 64.0, "attn_logit_softcapping": 0.5, "rope_local_base_freq": 100.0}
GEMMA = replace(MODEL, sliding_window=24, layer_types=MIXED, **FIELDS)
LENGTH = 160


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers warns that our small factors do not fit our small contexts."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def ours(model: ModelConfig) -> Stage:
    config, mesh = Config(model=model), Mesh.single()
    [stage] = build_stages(config, mesh).values()
    source = InitialWeights(1234, model.initializer_range)
    load_stages([stage], rank_specs(config, mesh), source, dtype=torch.float32, device=mesh.device)
    return stage


def logits_of(stage: Stage, tokens: Tensor) -> Tensor:
    """[s, vocab] of one sequence, read at once."""
    with torch.no_grad():
        return stage(tokens.unsqueeze(-1), stage.positions(len(tokens), torch.device("cpu")))[:, 0, :300]


@pytest.mark.long
@pytest.mark.parametrize("name", ["dynamic", "yarn with mscale"])
def test_text_is_huggingfaces(name: str) -> None:
    """200 greedy tokens from a prompt within every limit, and some from one beyond."""
    stage, tokens = ours(CASES[name]), token_ids(LENGTH)
    for length, new_tokens in ((40, 200), (LENGTH, 20)):
        # Anew: with dynamic scaling transformers' model remembers the longest sequence it has seen.
        twin = hf_model(CASES[name]).eval()
        twin.generation_config.update(eos_token_id=None, bos_token_id=None, pad_token_id=0)
        options = {"max_new_tokens": new_tokens, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        made = twin.generate(tokens[None, :length], **options)
        reader, new, own, furthest = Reader(stage), tokens[:length].tolist(), list[int](), 0.0
        for step in made.logits:
            logits = reader.read([new])[0]
            furthest = max(furthest, float((logits - step[0]).abs().max()))
            new = [int(logits.argmax())]
            own += new
        assert own == made.sequences[0, length:].tolist() and len(own) == new_tokens
        assert furthest < 2e-4


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["dynamic", "windows in some layers", "windows and longrope"])
def test_a_batch_gives_every_prompt_its_own_text(name: str) -> None:
    """Prompts of different lengths, which cross the limits at different times."""
    stage = ours(CASES[name])
    sampling = Sampling(max_new_tokens=70, temperature=0.0, top_k=0, top_p=1.0)
    tokens = token_ids(LENGTH).tolist()
    prompts = [tokens[:3], tokens[5:45], tokens[20:80]]

    def texts(some: list[list[int]]) -> list[list[Any]]:
        found: list[list[Any]] = [[] for _ in some]
        for number, token in generate_batch(stage, some, sampling, stops=frozenset(), seed=0):
            found[number].append(token)
        return found

    together = texts(prompts)
    assert together == [texts([prompt])[0] for prompt in prompts]
    assert [len(text) for text in together] == ([71, 71, 71] if name == "dynamic" else [71, 57, 37])


@pytest.mark.parametrize("model", [CASES["longrope"], CASES["windows and longrope"], GEMMA], ids=["longrope", "windows", "capped"])
def test_a_chat_goes_back(model: ModelConfig) -> None:
    """Logits after going back, within and beyond what the cache remembers, are those of a pass over everything."""
    stage, tokens = ours(model), token_ids(LENGTH).tolist()
    reader = Reader(stage)
    for start, stop in ((0, 20), (15, 60), (60, 90), (80, 85), (10, 100), (100, 101), (101, 130)):
        reader.truncate(start) if start else None
        assert reader.lengths == ([start] if start else [])
        found = reader.read([tokens[start:stop]])[0]
        assert (found - logits_of(stage, torch.tensor(tokens[:stop]))[-1]).abs().max() < 1e-4


def test_text_ends_where_the_model_is_good_for_no_more() -> None:
    """transformers goes on; a scaling that is not entered in max_position_embeddings counts."""
    for name, longest in (("linear", LONGEST), ("dynamic", 3 * LONGEST), ("yarn", 4 * CONTEXT), ("longrope", LONGEST)):
        assert longest_sequence(CASES[name].rope_scaling, LONGEST) == longest
    assert longest_sequence(YARN, 5 * CONTEXT) == 5 * CONTEXT and longest_sequence(None, LONGEST) == LONGEST


def test_a_sliding_layer_keeps_its_window() -> None:
    """To the byte: keys and values of a window less one position, however long the text is."""
    reader = Reader(ours(CASES["windows in some layers"]))
    token = 2 * MODEL.num_key_value_heads * MODEL.head_dim * 4
    tokens = token_ids(LENGTH).tolist()
    reader.read([tokens[:10]])
    assert reader._cache.nbytes == 2 * 10 * token
    reader.read([tokens[10:90]])
    assert reader._cache.nbytes == (90 + 23) * token
    for place in range(90, 120):
        reader.read([tokens[place : place + 1]])
    assert reader._cache.nbytes == (2 * 90 + 23) * token, "full layers grow twofold"


@pytest.mark.tries("query_pre_attn_scalar", "attn_logit_softcapping", "rope_local_base_freq")
def test_each_layer_has_its_rule_and_table() -> None:
    """What Gemma has beside windows: each field shows in the logits, and sliding layers rotate by their own base."""
    model = GEMMA
    stage, tokens = ours(model), token_ids(LENGTH)
    assert stage.scores == {0: ScoreRule(0.125, 24, 0.5), 1: ScoreRule(0.125, 0, 0.5)}
    logits = logits_of(stage, tokens)
    for name in (*FIELDS, "sliding_window"):
        assert (logits_of(ours(replace(model, **{name: 0})), tokens) - logits).abs().max() > 1e-2, name
    sliding = replace(model, layer_types=())
    same = replace(sliding, rope_theta=100.0, rope_local_base_freq=0.0)
    assert torch.equal(logits_of(ours(sliding), tokens), logits_of(ours(same), tokens))
