"""What ``tools/bench_align.py`` writes: its pairs, its ratios, and what a short measurement leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from megatron_llama.data.corpus import docstring_pairs
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.tune.preference.align_config import AlignConfig
from megatron_llama.tune.preference.dataset import read_pairs
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.sft_config import SFTConfig
from tools.bench_align import SIDES, TEMPLATE, BenchConfig, Turn, ratios, report, write_materials

from tests.launcher import ROOT
from tools import bench_align

SMALL = {"rounds": 2, "steps": 1, "warmup": 1, "pairs": 2, "seq_length": 256, "hidden_size": 128, "num_layers": 1, "vocab_size": 1000}


@pytest.mark.long
@pytest.mark.parametrize("even", [False, True])
def test_every_pair_fits_and_even_ones_fill_their_samples(even: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # All of the standard library takes seconds to read.
    monkeypatch.setattr(bench_align, "docstring_pairs", lambda: islice(docstring_pairs(), 300))
    options = BenchConfig(**SMALL, even=even)
    write_materials(options, tmp_path)
    tokenizer = ChatTokenizer(load_tokenizer(tmp_path / "hf"), TEMPLATE)
    found = read_pairs([tmp_path / "pairs.jsonl"], tokenizer, SFTConfig(), AlignConfig(), options.seq_length)
    assert not found.problems and not found.truncated and len(found) == (8 if even else 32)
    lengths = {len(ids) for ids in found.ids}
    assert max(lengths) <= options.seq_length // 2 and (lengths == {options.seq_length // 2}) is even


def test_times_are_those_of_a_pair() -> None:
    """Ours has trained on twice as many pairs in the same time, then on as many in half of it, and a quarter of the processor's."""
    turns = {"ours": [Turn(4.0, 4.0, 16, 0.69), Turn(2.0, 1.0, 8, 0.69)], "trl": [Turn(4.0, 4.0, 8, 0.69), Turn(4.0, 4.0, 8, 0.69)]}
    assert ratios(turns, "seconds") == [0.5, 0.5] and ratios(turns, "cpu_seconds") == [0.5, 0.25]
    *_, clock, processor = report(BenchConfig(rounds=2, steps=1), turns)
    assert (clock, processor) == ("ours / TRL by clock: 0.500 (0.500 to 0.500)", "ours / TRL by processor: 0.375 (0.250 to 0.500)")


@pytest.mark.long
def test_a_short_measurement(tmp_path: Path) -> None:
    words = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, str(ROOT / "tools" / "bench_align.py"), *words, "--json", str(tmp_path / "found.json")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert f"ours / TRL by clock: {found['ratios']['seconds']:.3f} (" in printed
    for side in SIDES:
        assert len(found["turns"][side]) == 2 and all(turn["seconds"] > 0 < turn["pairs"] for turn in found["turns"][side])
