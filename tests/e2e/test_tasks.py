"""``evaluate --tasks``: lm-evaluation-harness with a checkpoint, in any layout, against its own model ``hf`` with the export."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from tests.e2e.product import CP2, DP2_PARAMS, PP2, TP2, Layout, Product, words
from tests.tools.test_constraints import ROOT, TOOLS, brought

pytestmark = pytest.mark.lm_eval

ROWS = 24
COMMON = (" the", ",", ".", "\n", " ", " a", "s", " of", " to")
KINDS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{[answer] + others}}"
doc_to_target: 0
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "endings": """
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: perplexity
  - metric: acc
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
""",
}
RAW = """
def all_of_it(doc, results):
    return {"answers": [list(result) if isinstance(result, tuple) else [result] for result in results]}


def kept(items):
    return items
"""
"""A metric that is all that the model has said."""


@dataclass(frozen=True)
class Material:
    """A checkpoint, its export, tasks, and what lm-evaluation-harness's own model makes of them."""

    run: Path
    hf: Path
    tasks: Path
    expected: dict[str, Any]

    def files(self, *names: str) -> list[str]:
        """The YAML files of some tasks, and of the same with all that the model says."""
        return [str(self.tasks / f"{name}.yaml") for task in names for name in (task, f"{task}_raw")]


def rows(texts: Sequence[str]) -> list[dict[str, object]]:
    """Texts in two: some behind a space, some behind nothing, behind a begin token, or behind more than the model can read."""
    found = []
    for number, text in enumerate(texts):
        middle = text.index(" ", len(text) // 2)
        context = (text[max(0, middle - 60) : middle], "", "<s>" + text[:20], text[: middle + 1])[number % 4]
        others = [other[-30:] for other in (texts[number - 1], texts[number - 7])]
        # What a model that has learned little expects everywhere is among the first ones.
        answer = (*COMMON, *[text[middle + number % 2 :][: 2 + number]] * ROWS)[number]
        found.append({"context": context, "answer": answer, "others": others, "text": text[:300]})
    return found


@pytest.fixture(scope="module")
def material(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Material:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("tasks")
    product.train(DP2_PARAMS, save=folder / "run", train_iters=20, lr_decay_iters=20, lr=1e-2, export_hf=folder / "hf")
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(product.texts[:ROWS])))
    (tasks / "raw.py").write_text(RAW)
    for name, kind in KINDS.items():
        data = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tasks / 'rows.jsonl'}\ntest_split: test\n"
        (tasks / f"{name}.yaml").write_text(f"task: {name}\n{data}{kind}")
        raw = "process_results: !function raw.all_of_it\nmetric_list:\n  - metric: answers\n    aggregation: !function raw.kept\n"
        (tasks / f"{name}_raw.yaml").write_text(f"include: {name}.yaml\ntask: {name}_raw\n{raw}    higher_is_better: true\n")
    made = Material(folder / "run", folder / "hf", tasks, {})
    manager = TaskManager(include_defaults=False)
    arguments = f"pretrained={made.hf},dtype=float32"
    found = simple_evaluate("hf", arguments, made.files(*KINDS), batch_size=1, device="cpu", task_manager=manager, log_samples=False)
    return Material(made.run, made.hf, made.tasks, found["results"])


def answers(results: dict[str, Any], task: str) -> list[list[list[float]]]:
    """By row and request: the log-likelihood, and whether it is the most likely text."""
    found: list[list[list[float]]] = results[f"{task}_raw"]["answers,none"]
    return found


@pytest.mark.parametrize(
    "layout",
    [Layout(1, {"micro_batch_size": 5}), TP2, PP2, CP2, Layout(2, {"micro_batch_size": 2})],
    ids=["one process", "tp2 sp", "pp2", "cp2", "dp2"],
)
def test_every_layout_says_what_hf_says(layout: Layout, product: Product, material: Material, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    given = {"load": material.run, "tasks": tuple(material.files(*KINDS)), "output": output, **layout.options}
    ran = product.launcher.run(["evaluate", *words(given)], layout.processes)
    assert set(ran.codes) == {0} and not any(ran.errs[1:] + ran.outs[1:]), ran.err
    results = json.loads(output.read_text())["results"]
    furthest = 0.0
    for task in KINDS:
        pairs = zip(answers(results, task), answers(material.expected, task), strict=True)
        each = [pair for row in pairs for pair in zip(*row, strict=True)]
        assert len(each) == ROWS * (3 if task == "choices" else 1)
        for (found, *greedy), (expected, *likeliest) in each:
            assert greedy == likeliest and expected < -1
            furthest = max(furthest, abs(found - expected) / max(1.0, abs(expected)))
        for metric, value in material.expected[task].items():
            assert results[task][metric] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), metric
    assert furthest < 1e-6  # found: 1.5e-7; theirs are sums in fp32
    assert any(greedy for row in answers(results, "endings") for _, greedy in row)
    stderr = f"{material.expected['choices']['acc_norm_stderr,none']:.6g}"
    assert re.search(rf"choices +0 +acc_norm +\S+ +{re.escape(stderr)}\n", ran.out), ran.out
    assert "requests lost the beginning: the model reads 32 tokens" in ran.out


def test_some_questions_behind_examples(product: Product, material: Material, tmp_path: Path) -> None:
    output = tmp_path / "folder" / "results.json"
    given = {"init_from_hf": material.hf, "tasks": material.files("choices")[0], "limit": 0.25, "num_fewshot": 2, "output": output}
    ran = product.run("evaluate", *words(given))
    assert ran.codes == (0,), ran.err
    assert re.search(r"choices +2 +acc ", ran.out), ran.out
    found = json.loads(output.read_text())
    assert found["n-samples"]["choices"] == {"original": ROWS, "effective": ROWS // 4} and found["n-shot"] == {"choices": 2}
    assert found["config"]["model"] == str(material.hf)


def test_results_are_printed_also_where_no_file_can_be_written(product: Product, material: Material) -> None:
    file = material.tasks / "rows.jsonl"
    ran = product.run("evaluate", *words({"load": material.run, "tasks": material.files("choices")[0], "limit": 2, "output": file / "x.json"}))
    assert ran.codes == (1,) and f"error: {file}: got File exists, expected to write it" in ran.err
    assert re.search(r"choices +0 +acc ", ran.out), ran.out


GENERATED = "task: made\n{data}output_type: generate_until\ndoc_to_text: '{{{{context}}}}'\ndoc_to_target: '{{{{answer}}}}'\n"


@pytest.mark.parametrize(
    ("task", "options", "says"),
    [
        ("made", {}, "got the task made, whose output_type is generate_until, expected one that asks for log-likelihoods"),
        ("gone", {}, "gone.yaml: got FileNotFoundError"),
        (
            "choices",
            {"num_fewshot": ROWS + 1},
            f"--num-fewshot: got {ROWS + 1}, expected at most {ROWS}, as many examples as the task endings has",
        ),
        ("texts", {"seq_length": 4}, "tokens to score, expected at most 4; raise --seq-length"),
    ],
)
def test_what_cannot_be_run_is_one_error_of_all_ranks(
    task: str, options: dict[str, object], says: str, product: Product, material: Material
) -> None:
    texts = (material.tasks / "texts.yaml").read_text()
    data = texts.partition("task: texts\n")[2].partition("output_type")[0]
    (material.tasks / "made.yaml").write_text(GENERATED.format(data=data))
    (material.tasks / "gone.yaml").write_text(texts.replace("rows.jsonl", "gone.jsonl"))
    files = tuple(material.tasks / f"{name}.yaml" for name in ("endings", task))
    ran = product.launcher.run(["evaluate", *words({"load": material.run, **options, "tasks": files})], 2)
    assert set(ran.codes) == {1} and ran.errs[1] == "", ran.err
    assert ran.errs[0].count("error: ") == 1 and says in ran.errs[0].partition("error: ")[2], ran.err
    assert "Traceback" not in ran.err


def test_a_fault_in_the_code_of_a_task_ends_all_ranks(product: Product, material: Material, tmp_path: Path) -> None:
    (tmp_path / "raw.py").write_text("def all_of_it(doc, results):\n    return {'answers': 1 / 0}\n\n\ndef kept(items):\n    return items\n")
    for name in ("texts.yaml", "texts_raw.yaml"):
        (tmp_path / name).write_text((material.tasks / name).read_text())
    ran = product.launcher.run(["evaluate", "--load", material.run, "--tasks", tmp_path / "texts_raw.yaml"], 2)
    assert set(ran.codes) == {1}, ran.err
    assert "ZeroDivisionError" in ran.errs[0] and "rank 0: got an error" in ran.errs[1]


def test_the_versions_are_pinned() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    found: dict[str, str] = {}
    brought("lm_eval", frozenset(), found)
    assert len(found) > 40
    assert {name: version for name, version in found.items() if name not in TOOLS and pinned.get(name) != version} == {}
