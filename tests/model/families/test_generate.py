"""Greedy text of each family: transformers' token for token, over more tokens than a window and than the original context."""

from __future__ import annotations

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.engine.mesh import Mesh
from megatron_llama.model.generate import Reader
from megatron_llama.model.llama import build_stages
from megatron_llama.model.load import load_stages, rank_specs

from tests.model.families.twins import TWINS, DrawnWeights
from tests.parallel.cases import token_ids

PROMPT, TOKENS = 17, 200
"""The prompt is longer than windows and shorter than phi3's original context, which the text crosses."""


@pytest.mark.long
@pytest.mark.tries("sliding_window", "layer_types", "partial_rotary_factor")
@pytest.mark.parametrize("family", TWINS)
def test_greedy_text_is_that_of_transformers(family: str) -> None:
    """Step by step the same logits, too: greedy text of small models repeats itself."""
    config, mesh = Config(model=TWINS[family].ours), Mesh.single()
    [stage] = build_stages(config, mesh).values()
    load_stages([stage], rank_specs(config, mesh), DrawnWeights(config.model), dtype=torch.float32, device=mesh.device)
    prompt = token_ids(PROMPT)
    twin = TWINS[family].hf_model().eval()
    twin.generation_config.update(eos_token_id=None, bos_token_id=None, pad_token_id=0)
    made = twin.generate(prompt[None], max_new_tokens=TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True)
    reader, new, own, furthest = Reader(stage), prompt.tolist(), list[int](), 0.0
    for step in made.logits:
        logits = reader.read([new])[0]
        furthest = max(furthest, float((logits - step[0]).abs().max()))
        new = [int(logits.argmax())]
        own += new
    assert own == made.sequences[0, PROMPT:].tolist() and len(own) == TOKENS
    assert furthest < 2e-4
