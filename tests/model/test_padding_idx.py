"""The row of the padding token is transformers' padding_idx, whatever the file says, and begins as transformers lets it begin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from megatron_llama.config.schema import Config, OptimizerConfig
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import CheckpointError
from megatron_llama.model.hf import model_config_from_hf
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.plan.params import EMBEDDING, padding_idx
from megatron_llama.train.setup.checks.model import token_problems
from torch import Tensor

from tests.model.families.twins import SIZES, TWINS, Twin

ROWS = SIZES["vocab_size"]


def twins(twin: Twin, **fields: Any) -> tuple[int | None, int | None]:
    """The padding_idx of both for a config.json with these fields."""
    config = twin.hf_config(architectures=[twin.architecture], **fields)
    theirs = getattr(transformers, twin.architecture)(config).get_input_embeddings().padding_idx
    return padding_idx(Config(model=model_config_from_hf(config.to_dict(), where="config.json"))), theirs


@pytest.mark.parametrize("family", TWINS)
def test_every_family_has_transformers_padding_idx(family: str) -> None:
    for given, expected in ((None, None), (7, 7), (0, 0), (ROWS - 1, ROWS - 1), (-1, ROWS - 1), (-ROWS, 0)):
        assert twins(TWINS[family], pad_token_id=given) == (expected, expected)
    for outside in (ROWS, -ROWS - 1):
        with pytest.raises(AssertionError, match="Padding_idx must be within num_embeddings"):
            twins(TWINS[family], pad_token_id=outside)
        [problem] = token_problems(replace(TWINS[family].ours, pad_token_id=outside))
        assert problem.startswith(f"--pad-token-id: got {outside}, expected an id")


@pytest.mark.parametrize("family", TWINS)
def test_a_file_without_the_field_means_the_default_of_the_class(family: str) -> None:
    config = TWINS[family].hf_config(architectures=[TWINS[family].architecture])
    fields = {name: value for name, value in config.to_dict().items() if name != "pad_token_id"}
    default = type(config)().pad_token_id
    found = model_config_from_hf(fields, where="config.json").pad_token_id
    assert found == (default if default is None or default < ROWS else None)
    with pytest.raises(CheckpointError, match="pad_token_id"):
        model_config_from_hf({**fields, "pad_token_id": "7"}, where="config.json")


def drawn(config: Config, first: int, rows: int, column: int = 0) -> Tensor:
    shape = (config.model.vocab_size, config.model.hidden_size)
    values = torch.empty(rows, shape[1] - column)
    InitialWeights.of(config)(Rectangle(EMBEDDING, shape, (first, column), (rows, shape[1] - column), 0), values)
    return values


def test_random_weights_begin_with_zeros_in_that_row() -> None:
    config = Config(model=replace(TWINS["llama"].ours, pad_token_id=7))
    without = replace(config, model=replace(config.model, pad_token_id=None))
    whole, plain = drawn(config, 0, ROWS), drawn(without, 0, ROWS)
    assert whole[7].count_nonzero() == 0 and plain[7].count_nonzero() == len(plain[7])
    assert torch.equal(whole[torch.arange(ROWS) != 7], plain[torch.arange(ROWS) != 7])
    assert torch.equal(drawn(config, 5, 4, column=3), whole[5:9, 3:]) and torch.equal(drawn(config, 8, 2), plain[8:10])
    assert torch.equal(drawn(replace(config, optimizer=OptimizerConfig(train_pad_embedding=True)), 0, ROWS), plain)
    theirs = TWINS["llama"].hf_config(pad_token_id=7)
    row = getattr(transformers, TWINS["llama"].architecture)(theirs).get_input_embeddings().weight[7]
    assert row.count_nonzero() == 0
