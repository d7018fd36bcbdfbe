"""Rotary scalings and windows against transformers: logits of prompts longer than the original context and than the window, and greedy
text that grows beyond them, token for token.

Weights of std 0.1: at std 0.02 attention is so flat that what is tested would hide below rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=LONGEST,
    initializer_range=0.1,
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + 0.7 * pair for pair in range(8)],
    "original_max_position_embeddings": CONTEXT,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": CONTEXT,
}


@dataclass(frozen=True)
class Case:
    """A model of ours, and what transformers has to be told to have the same one."""

    model: ModelConfig
    kind: str = "Llama"
    """The family of transformers whose code has the feature."""
    also: Mapping[str, Any] | None = None


def scaled(scaling: dict[str, Any], **changes: Any) -> ModelConfig:
    return replace(MODEL, rope_scaling=scaling, **changes)


HALF = {name: value[:4] if isinstance(value, list) else value for name, value in LONGROPE.items()}
MIXED = ("sliding_attention", "full_attention")
CASES: Mapping[str, Case] = {
    "linear": Case(scaled({"rope_type": "linear", "factor": 4.0})),
    "llama3": Case(scaled(LLAMA3)),
    "dynamic": Case(scaled({"rope_type": "dynamic", "factor": 3.0})),
    "yarn": Case(scaled(YARN)),
    "yarn with mscale": Case(scaled(YARN | {"mscale": 1.0, "mscale_all_dim": 0.4, "truncate": False})),
    "longrope": Case(scaled(LONGROPE), "Phi3"),
    "longrope of a part of each head": Case(scaled(HALF, partial_rotary_factor=0.5), "Phi3"),
    "a part of each head": Case(replace(MODEL, partial_rotary_factor=0.5), "Phi3"),
    "windows": Case(replace(MODEL, sliding_window=24), "Mistral"),
    "windows longer than the prompt": Case(replace(MODEL, sliding_window=170), "Mistral"),
    "windows in some layers": Case(
        replace(MODEL, sliding_window=24, layer_types=MIXED), "Qwen2", {"use_sliding_window": True, "layer_types": list(MIXED)}
    ),
    "windows and yarn": Case(scaled(YARN, sliding_window=24), "Mistral"),
    "windows and longrope": Case(scaled(LONGROPE, sliding_window=24), "Phi3"),
}
cases = pytest.mark.parametrize("name", CASES)
LENGTH = 160


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers warns that our small factors do not fit our small contexts."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def theirs(case: Case) -> Any:
    """transformers' model of the case with LLaMA's initial weights; what else the family has is zero."""
    import transformers

    model = case.model
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    options = {name: getattr(model, name) for name in names} | {"sliding_window": model.sliding_window or None} | dict(case.also or {})
    rope = {"rope_type": "default", **(model.rope_scaling or {}), "rope_theta": model.rope_theta}
    if model.partial_rotary_factor < 1:
        rope["partial_rotary_factor"] = options["partial_rotary_factor"] = model.partial_rotary_factor
    if rope["rope_type"] == "longrope":
        options["original_max_position_embeddings"] = CONTEXT
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = getattr(transformers, f"{case.kind}Config")(**options, **ends, rope_parameters=rope, attn_implementation="eager")
    twin = getattr(transformers, f"{case.kind}ForCausalLM")(config)
    weights = hf_model(replace(model, rope_scaling=None)).state_dict()
    if case.kind == "Phi3":
        for layer in range(model.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            for fused, parts in (("self_attn.qkv", ("q", "k", "v")), ("mlp.gate_up", ("gate", "up"))):
                room = fused.split(".")[0]
                rows = [weights.pop(f"{prefix}{room}.{part}_proj.weight") for part in parts]
                weights[f"{prefix}{fused}_proj.weight"] = torch.cat(rows)
    missing, unexpected = twin.load_state_dict(weights, strict=False)
    assert not unexpected and all(name.endswith(".bias") for name in missing)
    for name, parameter in twin.named_parameters():
        if name in missing:
            torch.nn.init.zeros_(parameter)
    return twin.eval()


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


def plain(model: ModelConfig) -> ModelConfig:
    return replace(model, rope_scaling=None, partial_rotary_factor=1.0, sliding_window=0, layer_types=())


@pytest.mark.long
@pytest.mark.tries("sliding_window", "layer_types", "partial_rotary_factor")
@cases
def test_logits_and_text_are_huggingfaces(name: str) -> None:
    """Of a prompt beyond every limit; and 200 greedy tokens, from a prompt within every limit and from one beyond."""
    case = CASES[name]
    stage, twin = ours(case.model), theirs(case)
    tokens = token_ids(LENGTH)
    with torch.no_grad():
        expected = twin(tokens[None]).logits[0]
    assert expected.std() > 0.3
    found = logits_of(stage, tokens)
    assert (found - expected).abs().max() < 1e-4
    if name != "windows longer than the prompt":
        assert (logits_of(ours(plain(case.model)), tokens) - expected).abs().max() > 1e-2, "the bound sees what is tested"
    for length, new_tokens in ((40, 200), (LENGTH, 20)):
        # Anew: with dynamic scaling transformers' model remembers the longest sequence it has seen.
        made = theirs(case).generate(
            tokens[None, :length],
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        reader, new, own, furthest = Reader(stage), tokens[:length].tolist(), list[int](), 0.0
        for step in made.logits:
            logits = reader.read([new])[0]
            furthest = max(furthest, float((logits - step[0]).abs().max()))
            new = [int(logits.argmax())]
            own += new
        assert own == made.sequences[0, length:].tolist() and len(own) == new_tokens
        assert furthest < 2e-4


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["dynamic", "longrope", "windows", "windows in some layers", "windows and longrope"])
def test_a_batch_gives_every_prompt_its_own_text(name: str) -> None:
    """Prompts of different lengths, which cross the limits at different times."""
    stage = ours(CASES[name].model)
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


@pytest.mark.parametrize("name", ["longrope", "windows", "windows and longrope"])
def test_a_chat_goes_back(name: str) -> None:
    """Logits after going back, within and beyond what the cache remembers, are those of a pass over everything."""
    stage, tokens = ours(CASES[name].model), token_ids(LENGTH).tolist()
    reader = Reader(stage)
    for start, stop in ((0, 20), (15, 60), (60, 90), (80, 85), (10, 100), (100, 101), (101, 130)):
        reader.truncate(start) if start else None
        assert reader.lengths == ([start] if start else [])
        found = reader.read([tokens[start:stop]])[0]
        assert (found - logits_of(stage, torch.tensor(tokens[:stop]))[-1]).abs().max() < 1e-4


def test_text_ends_where_the_model_is_good_for_no_more() -> None:
    """transformers goes on; a scaling that is not entered in max_position_embeddings counts."""
    for name, longest in (("linear", LONGEST), ("dynamic", 3 * LONGEST), ("yarn", 4 * CONTEXT), ("longrope", LONGEST)):
        assert longest_sequence(CASES[name].model.rope_scaling, LONGEST) == longest
    assert longest_sequence(YARN, 5 * CONTEXT) == 5 * CONTEXT and longest_sequence(None, LONGEST) == LONGEST


def test_a_sliding_layer_keeps_its_window() -> None:
    """To the byte: keys and values of a window less one position, however long the text is."""
    case = CASES["windows in some layers"]
    reader = Reader(ours(case.model))
    token = 2 * MODEL.num_key_value_heads * MODEL.head_dim * 4
    tokens = token_ids(LENGTH).tolist()
    reader.read([tokens[:10]])
    assert reader._cache.nbytes == 2 * 10 * token
    reader.read([tokens[10:90]])
    assert reader._cache.nbytes == (90 + 23) * token
    for place in range(90, 120):
        reader.read([tokens[place : place + 1]])
    assert reader._cache.nbytes == (2 * 90 + 23) * token, "full layers grow twofold"


GEMMA = {"query_pre_attn_scalar": 64.0, "attn_logit_softcapping": 0.5, "rope_local_base_freq": 100.0}


@pytest.mark.tries("query_pre_attn_scalar", "attn_logit_softcapping", "rope_local_base_freq")
def test_each_layer_has_its_rule_and_table() -> None:
    """What Gemma has beside windows: each field shows in the logits, and sliding layers rotate by their own base."""
    model = replace(MODEL, sliding_window=24, layer_types=MIXED, **GEMMA)
    stage, tokens = ours(model), token_ids(LENGTH)
    assert stage.scores == {0: ScoreRule(0.125, 24, 0.5), 1: ScoreRule(0.125, 0, 0.5)}
    logits = logits_of(stage, tokens)
    for name in (*GEMMA, "sliding_window"):
        assert (logits_of(ours(replace(model, **{name: 0})), tokens) - logits).abs().max() > 1e-2, name
    sliding = replace(model, layer_types=())
    same = replace(sliding, rope_theta=100.0, rope_local_base_freq=0.0)
    assert torch.equal(logits_of(ours(sliding), tokens), logits_of(ours(same), tokens))


def test_capped_scores_in_generation() -> None:
    """Of layers with and without a window: as if everything were read at once."""
    model = replace(MODEL, sliding_window=24, layer_types=MIXED, **GEMMA)
    stage, tokens = ours(model), token_ids(LENGTH).tolist()
    reader = Reader(stage)
    for start, stop in ((0, 10), (10, 11), (11, 70), (70, 71)):
        found = reader.read([tokens[start:stop]])[0]
        assert (found - logits_of(stage, torch.tensor(tokens[:stop]))[-1]).abs().max() < 1e-4
