"""The reference of preference tuning: TRL's trainers in fp32 on one CPU thread, on batches that the test names.

``train_with_trl`` runs cases in a process of its own, because transformers' Trainer leaves its marks in the environment of the process,
and imports take longer than the cases. What a run came to is a ``Record``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from megatron_llama.checkpoint.model_folders.hf.writer import export_hf
from megatron_llama.config.schema import LoraConfig, ModelConfig
from megatron_llama.data.corpus import docstring_pairs, python_documentation
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.plan.lora import adapter_shapes
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tests.launcher import ROOT
from tests.parallel.cases import OPTIMIZER as USUAL
from tests.parallel.cases import AdaptedWeights
from tests.torch_twin import adamw, drawn

PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ':\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
"""Ends with the end token: ORPO's and CPO's trainers append one where none is."""
MODEL = ModelConfig(
    vocab_size=1000, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.05,
)  # fmt: skip

OPTIMIZER = replace(USUAL, lr=5e-4, adam_eps=1e-6)
"""An epsilon above the rounding of a gradient: with a smaller one an element that is all rounding makes a full step, in any run."""


@dataclass(frozen=True)
class Case:
    """One training with TRL."""

    method: str
    """One of ``align``."""
    steps: tuple[tuple[tuple[int, ...], ...], ...]
    """The examples of each microbatch of each step, by their numbers in the file."""
    options: Mapping[str, float | bool] = field(default_factory=dict)
    """Of AlignConfig."""
    mismatched: tuple[int, ...] = ()
    """kto: for each example the one whose completion stands in its place in the estimate of the KL term. Default: TRL's own rotation."""
    lora: int = 0
    """Rank of low-rank additions, which are in ``adapters`` of the folder."""


@dataclass(frozen=True)
class Record:
    """What a training came to."""

    numbers: Mapping[str, tuple[float, ...]]
    """By TRL's names, for each step: the mean over its microbatches. ``loss`` and ``grad_norm``, before clipping, among them."""
    gradients: Mapping[str, Tensor]
    """Of the first step, before clipping, by HuggingFace's names."""
    weights: Mapping[str, Tensor]
    """After the last step."""
    examples: tuple[Mapping[str, tuple[int, ...]], ...]
    """The token ids that TRL made of each example."""


def write_tokenizer(folder: Path, vocab_size: int = MODEL.vocab_size) -> None:
    """A byte-level BPE of real text as HuggingFace has it, with a chat template, and a padding token of its own: TRL's reward trainer
    takes the last token that is not padding."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    special = [PAD, BEGIN, END]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": vocab_size - len(special), "initial_alphabet": alphabet, "show_progress": False}
    library.train_from_iterator(islice(python_documentation(), 40), trainers.BpeTrainer(**options))
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    assert library.get_vocab_size() == vocab_size
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def model_of(method: str, model: ModelConfig = MODEL) -> ModelConfig:
    """The model that a method begins with."""
    if method != "reward":
        return model
    return replace(model, num_labels=1, pad_token_id=model.vocab_size - 3)


def weights_of(model: ModelConfig) -> InitialWeights:
    """What all runs begin with."""
    return InitialWeights(1234, model.initializer_range)


def write_models(folder: Path, model: ModelConfig = MODEL, *, lora: int = 0) -> None:
    """A drawn LLaMA with its tokenizer, as HuggingFace has it, in ``folder``, the same as a reward model beside it in ``FOLDER-reward``,
    and low-rank additions of this rank in both."""
    pad = model.vocab_size - 3
    for method, target in (("dpo", folder), ("reward", Path(f"{folder}-reward"))):
        own = replace(model_of(method, model), bos_token_id=pad + 1, eos_token_id=pad + 2)
        export_hf(target, own, weights_of(own), "float32")
        write_tokenizer(target, own.vocab_size)
        shapes = adapter_shapes(own, LoraConfig(lora_rank=lora)) if lora else {}
        torch.save({name: drawn(AdaptedWeights(), name, shape) for name, shape in shapes.items()}, target / "adapters.pt")


@cache
def signatures() -> tuple[tuple[str, list[str]], ...]:
    """All of the standard library takes seconds to read."""
    return tuple((question, answer.split()) for question, answer in docstring_pairs() if len(question) < 40)


def talks(count: int) -> Iterator[tuple[str, str, str]]:
    """Signatures of the standard library, each with the first words of its documentation and of another function's: TRL has sums over
    the tokens of an answer in fp32, whose rounding grows with their number."""
    found = signatures()
    stride = len(found) // (2 * count)
    made = 0
    for number in range(len(found)):
        question, words = found[number * stride]
        others = found[(number * stride + 7) % len(found)][1]
        chosen, rejected = " ".join(words[: 2 + number % 5]), " ".join(others[: 3 + number % 4])
        if not rejected.startswith(chosen):  # such pairs are refused where they are equal
            made += 1
            yield question, chosen, rejected
        if made == count:
            return


def write_pairs(file: Path, count: int) -> None:
    """Pairs in TRL's format, as conversations."""
    lines = []
    for question, answer, other in talks(count):
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in (answer, other))
        lines.append(json.dumps({"prompt": [{"role": "user", "content": question}], "chosen": chosen, "rejected": rejected}))
    file.write_text("\n".join(lines) + "\n")


def write_judged(file: Path, count: int) -> None:
    """Single answers for KTO in TRL's format: three good ones to two bad ones."""
    lines = []
    for number, (question, answer, other) in enumerate(talks(count)):
        good = number % 5 in (0, 2, 4)
        completion = [{"role": "assistant", "content": answer if good else other}]
        lines.append(json.dumps({"prompt": [{"role": "user", "content": question}], "completion": completion, "label": good}))
    file.write_text("\n".join(lines) + "\n")


def train_with_trl(model: Path, data: Mapping[str, Path], cases: Sequence[Case], folder: Path) -> list[Record]:
    """Run cases, in a process of its own. ``data``: the file of each method's examples, by method, or ``pairs`` for all others."""
    job = {"model": str(model), "data": {name: str(file) for name, file in data.items()}, "cases": [asdict(case) for case in cases]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(job))
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "HF_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "tests.tune.preference.trl_twin", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return [Record(**fields) for fields in torch.load(folder / "records.pt", weights_only=True)]


_SHARED = ("beta", "simpo_gamma", "desirable_weight", "undesirable_weight", "center_rewards_coefficient")
"""Options that mean the same in both."""


def _trl_options(case: Case) -> dict[str, Any]:
    """What TRL's configuration calls the options of a case."""
    options = {name: case.options[name] for name in _SHARED if name in case.options}
    smoothing, sft = case.options.get("label_smoothing", 0.0), case.options.get("sft_loss_weight", 0.0)
    if case.method in ("dpo", "ipo"):
        losses = {"dpo": "sigmoid_norm" if case.options.get("length_normalization") else "sigmoid", "ipo": "ipo"}
        weights = {losses[case.method]: 1.0}
        if smoothing:
            # Conservative DPO, (1 - e) L(h) + e L(-h), is none of TRL's losses any more, but a sum of two: its "robust" one is
            # ((1 - e) L(h) - e L(-h)) / (1 - 2 e).
            weights = {"sigmoid": 2 * (1 - smoothing), "robust": -(1 - 2 * smoothing)}
            options["label_smoothing"] = smoothing
        if sft:
            weights["sft"] = sft
        options |= {"loss_type": list(weights), "loss_weights": list(weights.values()), "precompute_ref_log_probs": True}
    if case.method == "simpo":
        options |= {"loss_type": "simpo", "cpo_alpha": sft, "beta": options.get("beta", 2.0)}
    if case.method == "kto":
        options |= {"precompute_ref_log_probs": True}
    return options


def _trainer(case: Case, model: str, file: str, folder: str) -> Any:
    """TRL's trainer of a case, with what records it."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental import cpo, orpo

    trainers_of = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "ipo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
        "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig),
        "simpo": (cpo.CPOTrainer, cpo.CPOConfig),
    }
    base, config = trainers_of[case.method]

    class Recorded(base):  # type: ignore[misc, valid-type]
        """With given batches, and what they come to."""

        def get_train_dataloader(self) -> Any:
            batches = [list(batch) for step in case.steps for batch in step]
            loader = torch.utils.data.DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)
            return self.accelerator.prepare(loader)

        def create_optimizer(self, *_: Any) -> torch.optim.Optimizer:
            self.optimizer = adamw(self.model.parameters(), OPTIMIZER)
            return self.optimizer

        def _clip_grad_norm(self, model: Any) -> Tensor:
            if not self.first_gradients:
                self.first_gradients |= {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            return super()._clip_grad_norm(model)  # type: ignore[no-any-return]

        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
            if case.method != "reward":
                return super().compute_loss(model, inputs, *rest, **options)
            # Its log has the margin alone.
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            for half, scores in zip(("chosen", "rejected"), outputs.logits.detach().squeeze(-1).chunk(2), strict=True):
                self._metrics["train"][f"rewards/{half}"].append(scores.mean().item())
            return loss

    kind = AutoModelForSequenceClassification if case.method == "reward" else AutoModelForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(model)
    microbatches = {len(step) for step in case.steps}
    assert len(microbatches) == 1, "Trainer has one number for all steps"
    arguments = config(
        output_dir=folder,
        max_steps=len(case.steps),
        gradient_accumulation_steps=microbatches.pop(),
        per_device_train_batch_size=max(len(batch) for step in case.steps for batch in step),
        **{"learning_rate": OPTIMIZER.lr, "lr_scheduler_type": "constant", "max_grad_norm": OPTIMIZER.clip_grad, "logging_steps": 1},
        **{"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False},
        max_length=None if case.method not in ("orpo", "simpo") else MODEL.max_position_embeddings,
        **_trl_options(case),
    )
    adapted: dict[str, Any] = {}
    if case.lora:
        from peft import LoraConfig as PeftConfig

        lora = LoraConfig(lora_rank=case.lora)
        kept = ["score"] if case.method == "reward" else None
        adapted["peft_config"] = PeftConfig(
            r=lora.lora_rank, lora_alpha=int(lora.lora_alpha), target_modules=list(lora.lora_target_modules), modules_to_save=kept
        )
    with open(file) as lines:
        data = Dataset.from_list([json.loads(line) for line in lines])
    Recorded.first_gradients = {}
    loaded = kind.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    trainer = Recorded(loaded, args=arguments, train_dataset=data, processing_class=tokenizer, **adapted)
    if case.mismatched:
        ids = trainer.train_dataset["completion_ids"]
        own = trainer.train_dataset.remove_columns(["KL_completion_ids", "ref_logps", "ref_KL_logps"])
        own = own.add_column("KL_completion_ids", [ids[other] for other in case.mismatched])
        trainer.train_dataset = trainer._precompute_ref_logps(own, "train", 8)
    if case.lora:
        _load_adapters(trainer.model, Path(model) / "adapters.pt")
    return trainer


def _load_adapters(model: torch.nn.Module, file: Path) -> None:
    """Put the additions that both sides start with into PEFT's model."""
    values = torch.load(file, weights_only=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(values.pop(plain(name)))
    assert not values, sorted(values)


def plain(name: str) -> str:
    """HuggingFace's name of a parameter that PEFT has wrapped."""
    for before, after in (("base_model.model.", ""), (".default", ""), (".base_layer", ""), (".modules_to_save", "")):
        name = name.replace(before, after)
    return name


def _run(case: Case, model: str, file: str, folder: str) -> dict[str, Any]:
    trainer = _trainer(case, model, file, folder)
    columns = [name for name in trainer.train_dataset.column_names if name.endswith(("_ids", "input_ids", "labels"))]
    examples = tuple({name: tuple(row[name]) for name in columns} for row in trainer.train_dataset)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    names = {name for entry in logged for name in entry}
    trained = {plain(n): p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    return {
        "numbers": {name: tuple(float(entry.get(name, "nan")) for entry in logged) for name in names},
        "gradients": {plain(name): gradient for name, gradient in trainer.first_gradients.items()},
        "weights": trained,
        "examples": examples,
    }


def main(folder: Path) -> None:
    """Run the cases of ``job.json``."""
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text())
    records = []
    for case in (Case(**fields) for fields in job["cases"]):
        file = job["data"].get(case.method, job["data"].get("pairs"))
        model = job["model"] if case.method != "reward" else f"{job['model']}-reward"
        records.append(_run(case, model, file, str(folder / "trl")))
    torch.save(records, folder / "records.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
