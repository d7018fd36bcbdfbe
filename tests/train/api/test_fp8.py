"""--fp8 of a whole run: files, lines and bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megatron_llama as ml
import pytest
import torch
from megatron_llama.errors import ConfigError
from megatron_llama.model.nn.fp8.support import EMULATED
from safetensors.torch import load_file

from tests.refused import refused

Options = Mapping[str, Any]
TILES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}


@pytest.fixture(scope="module")
def in_fp8(options: Options) -> Options:
    return {**options, **TILES, "bf16": True, "fp8": "blockwise", "log_interval": 1}


@pytest.mark.long
def test_a_run_resumes_with_the_same_bits_and_says_that_it_is_emulated(in_fp8: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its checkpoint holds what that of a run in bf16 does: from it a run goes on in either."""
    whole = ml.train(in_fp8, train_iters=4).losses
    said = capsys.readouterr().out
    assert EMULATED in said and "layers 1 to 1 multiply in FP8 (blockwise)" in said
    bf16 = ml.train(in_fp8, train_iters=4, fp8="none").losses
    assert EMULATED not in capsys.readouterr().out
    kept = {"save": tmp_path / "run", "save_interval": 2, "lr_decay_iters": 4}
    first = ml.train(in_fp8, **kept, train_iters=2).losses
    last = ml.train(in_fp8, **kept, train_iters=4, load=tmp_path / "run", export_hf=tmp_path / "hf").losses
    assert {**first, **last} == ml.train(in_fp8, train_iters=4, lr_decay_iters=4).losses
    assert whole[1] != bf16[1] and abs(whole[1] - bf16[1]) < 0.01 * bf16[1]
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}


def test_a_run_that_cannot_be_in_fp8_is_refused_before_it_begins(in_fp8: Options) -> None:
    with pytest.raises(ConfigError) as error:
        ml.train(in_fp8, bf16=False)
    assert refused(error.value).where == "--fp8 blockwise"
