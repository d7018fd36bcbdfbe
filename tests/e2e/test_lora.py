"""Low-rank additions from the command line: trained beside a frozen model, resumed, and given to PEFT and transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from megatron_llama.cli import main
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.product import DP2_PARAMS, ONE, SEQ_LENGTH, TP2, Product, Refuse, assert_same_state, column, contents, log, state, words

SHAPE = dict.fromkeys(("hidden_size", "intermediate_size", "num_layers", "num_attention_heads", "num_query_groups"))
LORA = {"lora_rank": 4, "lora_alpha": 12, "lora_target_modules": ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")}


@dataclass(frozen=True)
class Adapted:
    """A model, and a run that trained additions to it."""

    base: Path
    run: Path
    adapter: Path
    merged: Path


@pytest.fixture(scope="module")
def adapted(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp("adapted")
    base = folder / "base"
    product.train(train_iters=4, lr_decay_iters=4, lr=1e-2, export_hf=base)
    made = Adapted(base, folder / "run", folder / "adapter", folder / "merged")
    options = {**SHAPE, **LORA, "init_from_hf": base, "train_iters": 4, "eval_interval": 4, "lr": 2e-2, "save_interval": 2}
    product.train(TP2, save=made.run, export_hf=made.merged, **options)
    product.run("export", "--load", made.run, "--output", made.adapter, "--adapter").ok()
    return made


def logits(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids.unsqueeze(0)).logits[0]
    return found


@pytest.mark.tries("lora_rank", "lora_alpha", "lora_target_modules")
@pytest.mark.long
def test_a_run_leaves_for_peft_and_for_transformers(product: Product, adapted: Adapted) -> None:
    """PEFT's model with our additions, and transformers' with our merged weights, have the loss that training has measured."""
    from peft import PeftModel

    base, merged = (AutoModelForCausalLM.from_pretrained(folder) for folder in (adapted.base, adapted.merged))
    ids = torch.tensor(AutoTokenizer.from_pretrained(adapted.adapter)(product.texts[1])["input_ids"])[:SEQ_LENGTH]
    plain = logits(base, ids)
    additions = logits(PeftModel.from_pretrained(base, adapted.adapter), ids)
    torch.testing.assert_close(logits(merged, ids), additions, rtol=0, atol=1e-5)
    assert (additions - plain).abs().max() > 0.1
    settings = json.loads((adapted.adapter / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (4, 12, str(adapted.base))
    assert set(settings["target_modules"]) == set(LORA["lora_target_modules"])  # type: ignore[call-overload]
    data = ("--data-path", product.data, "--split", "90,10,0", "--seq-length", SEQ_LENGTH, "--micro-batch-size", 8, "--eval-iters", 10)
    trained = log(adapted.run)[-1]["validation_loss"]
    for source in (("--init-from-hf", adapted.merged), ("--load", adapted.run)):
        printed = product.run("evaluate", *source, *data).ok().out
        assert float(printed.split("lm loss value:")[1].split()[0]) == pytest.approx(trained, rel=1e-6)


@pytest.mark.long
def test_merging_the_exported_adapter_is_exporting_the_run(product: Product, adapted: Adapted, tmp_path: Path) -> None:
    said = product.run("merge", adapted.base, tmp_path / "a", "--adapter", adapted.adapter).ok().out
    assert said.startswith(f"merged {adapted.base} and {adapted.adapter} (rank 4) into {tmp_path / 'a'} (float32, ")
    product.run("merge", adapted.run, tmp_path / "b").ok()
    for folder in (tmp_path / "a", tmp_path / "b"):
        merged, exported = (load_file(path / "model.safetensors") for path in (folder, adapted.merged))
        assert merged.keys() == exported.keys() and all(torch.equal(merged[name], exported[name]) for name in merged)
        assert (folder / "tokenizer.json").is_file()


def test_neither_the_base_nor_somebody_elses_adapter_is_replaced(adapted: Adapted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even with --overwrite the base, which is an export itself."""
    adapter = shutil.copytree(adapted.adapter, tmp_path / "adapter")
    again = ["export", "--load", str(adapted.run), "--adapter", "--output", str(adapter)]
    assert main(again) == 0
    save_file(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.safetensors", {"format": "pt"})
    onto_base = ["export", "--load", str(adapted.run), "--output", str(adapted.base), "--overwrite"]
    before = contents(adapter), contents(adapted.base)
    for command, says in ((again, "got a model that no export of this"), (onto_base, "got the folder from which the run took its weights")):
        capsys.readouterr()
        assert main(command) == 1 and says in capsys.readouterr().err
    assert (contents(adapter), contents(adapted.base)) == before
    assert main([*again, "--overwrite"]) == 0


def test_an_adapter_with_another_tokenizer_is_not_merged(adapted: Adapted, layouts: Path, refuse: Refuse, tmp_path: Path) -> None:
    shutil.copytree(adapted.adapter, tmp_path / "adapter")
    shutil.copy(layouts / "unigram" / "tokenizer.json", tmp_path / "adapter")
    (tmp_path / "adapter" / "SHA256SUMS").unlink()
    said = refuse(["merge", adapted.base, tmp_path / "out", "--adapter", tmp_path / "adapter"], code=1)
    assert said.startswith(f"error: {tmp_path}/adapter: got a tokenizer in which token ")
    assert f"expected the ids of {adapted.base}; give the model that the adapter was trained on" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_resuming_changes_no_bit_and_another_layout_little(product: Product, adapted: Adapted, tmp_path: Path) -> None:
    options = {**SHAPE, **LORA, "train_iters": 4, "eval_interval": 4, "lr": 2e-2}
    product.train(TP2, save=tmp_path / "same", load=adapted.run / "iter_0000002", **options)
    assert_same_state(tmp_path / "same" / "iter_0000004", adapted.run / "iter_0000004")
    product.train(DP2_PARAMS, save=tmp_path / "other", load=adapted.run / "iter_0000002", **options)
    assert column(tmp_path / "other", "lm_loss") == pytest.approx(column(adapted.run, "lm_loss")[2:], rel=1e-6)


@pytest.mark.long
def test_other_additions_are_refused_unless_begun_anew(product: Product, adapted: Adapted, tmp_path: Path) -> None:
    for changes, says in (
        ({}, "lora_rank 4 (here 0); lora_alpha 12 (here 16); lora_target_modules"),
        ({**LORA, "lora_alpha": 8}, "lora_alpha 12 (here 8), expected the same as in this run; give --lora-rank 4 --lora-alpha 12"),
    ):
        ended = product.start(ONE, save=tmp_path / "x", load=adapted.run, train_iters=5, **SHAPE, **changes).wait()
        assert ended.codes == (1,) and says in ended.err, ended.err
    # The additions so far become part of the frozen model, and new ones begin at zero.
    run = {**SHAPE, "train_iters": 1, "eval_interval": 1, "lora_rank": 2}
    product.train(ONE, save=tmp_path / "anew", load=adapted.run, finetune=True, **run)
    assert log(tmp_path / "anew")[0]["validation_loss"] == pytest.approx(log(adapted.run)[-1]["validation_loss"], rel=1e-6)
    weights = state(tmp_path / "anew" / "iter_0000001")
    assert weights["model.layers.0.self_attn.k_proj.lora_A.weight"].shape == (2, 64)


@pytest.mark.long
def test_tuning_on_examples_trains_additions_alone(product: Product, adapted: Adapted, tmp_path: Path) -> None:
    """Planned, then packed and tensor-parallel; and what comes out talks."""
    examples = [{"prompt": text[:20], "completion": text[20:60]} for text in product.texts[:60]]
    (tmp_path / "examples.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    options = {"init_from_hf": adapted.base, "train_data": tmp_path / "examples.jsonl", "packing": True, "seq_length": 64, "train_iters": 2}
    options |= {"lora_rank": 2, "lora_target_modules": ("q_proj", "down_proj"), "micro_batch_size": 1, "global_batch_size": 4, "lr": 1e-2}
    options |= {"save": tmp_path / "run", "neftune_noise_alpha": 5, "log_interval": 1, **TP2.options}
    planned = product.run("sft", *words({**options, "dry_run": True, "world_size": 2})).ok().out
    assert ", 2,560 trained in 16 tensors (low-rank additions, rank 2); " in planned
    product.launcher.run(["sft", *words(options)], 2).ok()
    weights = state(tmp_path / "run" / "iter_0000002")
    assert len([name for name in weights if name.startswith("optimizer.exp_avg.")]) == 16
    assert weights["model.layers.3.mlp.down_proj.lora_B.weight"].abs().max() > 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"r": 8}, "q_proj.lora_A.weight: got (4, 64), expected shape (8, 64)"),
        ({"use_dora": True, "bias": "all"}, "use_dora: got True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: got pissa, expected a start that leaves the model's own weights as they are"),
        ({"rank_pattern": {"q_proj": 4}, "layer_replication": [[0, 2], [1, 4]]}, "layer_replication: got [[0, 2], [1, 4]], expected nothing"),
        ({"target_modules": "all-linear"}, "target_modules: got all-linear"),
        ({"target_modules": ["q_proj"]}, "v_proj.lora_A.weight: got a tensor, expected none of this name"),
        ({"peft_type": "IA3"}, "peft_type: got IA3, expected LORA"),
    ],
    ids=str,
)
def test_an_adapter_of_another_kind_is_not_merged(adapted: Adapted, tmp_path: Path, changes: dict[str, object], says: str) -> None:
    from megatron_llama.checkpoint.model_folders.formats import open_model
    from megatron_llama.checkpoint.model_folders.peft.adapter import CONFIG, WEIGHTS, PeftAdapter
    from megatron_llama.errors import CheckpointError

    (tmp_path / WEIGHTS).write_bytes((adapted.adapter / WEIGHTS).read_bytes())
    (tmp_path / CONFIG).write_text(json.dumps({**json.loads((adapted.adapter / CONFIG).read_text()), **changes}))
    with pytest.raises(CheckpointError) as error:
        PeftAdapter(tmp_path, open_model(adapted.base).model)
    assert says in str(error.value)


@pytest.mark.long
def test_exporting_an_adapter_that_is_not_there(product: Product, adapted: Adapted, tmp_path: Path) -> None:
    product.run("convert", adapted.base, tmp_path / "native", "--to", "native").ok()
    ended = product.run("export", "--load", tmp_path / "native", "--output", tmp_path / "out", "--adapter")
    assert ended.codes == (1,) and "got no low-rank additions" in ended.err
    ended = product.run("merge", adapted.base, tmp_path / "out")
    assert ended.codes == (2,) and "got a model without low-rank additions" in ended.err
