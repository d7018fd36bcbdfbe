"""Reference scores: those of transformers in every layout, kept in a file that nothing else is mistaken for."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.config.schema import CheckpointConfig, Config
from megatron_llama.data.loader import Batch
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.errors import CheckpointError, DataError, TrainingError, UserError
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.train.setup.inputs import Ready
from megatron_llama.train.setup.start import find_start
from megatron_llama.tune.preference import references
from megatron_llama.tune.preference.align_config import AlignConfig
from megatron_llama.tune.preference.objective import completion_logps
from megatron_llama.tune.preference.reference import (
    REFERENCE,
    ReferencedSamples,
    Scored,
    Scores,
    read_scores,
    reference_scores,
    write_scores,
)
from megatron_llama.tune.preference.references import Reference, digest_of, first_weights, reference_of, reference_runtime, with_references
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from torch import Tensor

from tests.harness import Cluster
from tests.parallel.cases import SEQ_LENGTH, Layout, initial_weights, token_ids, trainer
from tests.torch_twin import hf_model

SINGLE = Place(0, 1, 0)
SAMPLES, COMPLETIONS = 7, 4
PROMPT = 4


@dataclass(frozen=True)
class Texts:
    """Samples of real text, a pair or two in each, every half a document of its own. Each half is a prompt of 4 tokens and a completion.
    Every second sample has its completions' numbers backwards, and two of all completions are in no sample."""

    judged: bool = False
    """There are mismatched completions, too."""
    logps: NDArray[np.float64] | None = None
    kl_logps: NDArray[np.float64] | None = None
    start: int = 0

    @property
    def completions(self) -> int:
        return SAMPLES * 3 + 3

    def __len__(self) -> int:
        return SAMPLES

    def identity(self) -> dict[str, Any]:
        return {"pairs": self.completions // 2, "digest": self.digest()}

    def digest(self) -> str:
        return f"{self.start:04}"

    def numbers(self, index: int) -> Sequence[int]:
        first = 3 * index + index % 2
        return range(first, first + 4) if index % 2 == 0 else range(first + 1, first - 1, -1)

    def ids(self, number: int) -> Tensor:
        """Prompt and completion."""
        length = PROMPT + 2 + number % 3
        return token_ids(self.start + number * 40 + length)[-length:]

    def batch(self, indices: Sequence[int]) -> Batch:
        found = self._batch(indices, self.logps)
        return replace(found, mismatched=replace(self, start=self.start + 2000)._batch(indices, self.kl_logps)) if self.judged else found

    def _batch(self, indices: Sequence[int], references: NDArray[np.float64] | None) -> Batch:
        tokens, labels, positions = (torch.zeros(SEQ_LENGTH, len(indices), dtype=torch.int64) for _ in range(3))
        ids, documents = (torch.zeros(SEQ_LENGTH, len(indices), dtype=torch.int32) for _ in range(2))
        kinds, logps = torch.zeros(COMPLETIONS, len(indices), dtype=torch.int8), torch.zeros(COMPLETIONS, len(indices), dtype=torch.float64)
        for row, index in enumerate(indices):
            at = 0
            for place, number in enumerate(self.numbers(index)):
                text = self.ids(number)
                part = slice(at, at + len(text) - 1)
                tokens[part, row], labels[part, row] = text[:-1], text[1:]
                positions[part, row], documents[part, row] = torch.arange(len(text) - 1), place
                ids[at + PROMPT - 1 : at + len(text) - 1, row] = place + 1
                kinds[place, row] = 1 + place % 2
                if references is not None:
                    logps[place, row] = float(references[number])
                at += len(text) - 1
            documents[at:, row], positions[at:, row] = COMPLETIONS, torch.arange(SEQ_LENGTH - at)
        return Batch(
            tokens,
            labels,
            position_ids=positions,
            document_ids=documents,
            completion_ids=ids,
            completion_kinds=kinds,
            reference_logps=None if references is None else logps,
        )

    def with_references(self, logps: NDArray[np.float64], kl_logps: NDArray[np.float64] | None) -> Texts:
        return replace(self, logps=logps, kl_logps=kl_logps)


def numbers_of(texts: Texts) -> list[int]:
    """Of the completions that are in a sample."""
    return sorted(number for index in range(len(texts)) for number in texts.numbers(index))


def scores_of(place: Place, layout: Layout, texts: Texts, folder: Path | None = None) -> Scores:
    """The scores with the initial weights, or with those that a checkpoint begins anew with."""
    config = layout.sized()
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    source: WeightSource = initial_weights()
    if folder is not None:
        config = replace(config, checkpoint=CheckpointConfig(load=str(folder), finetune=True))
        source = first_weights(config, find_start(config.checkpoint))
    with reference_runtime(config, mesh, source, samples=len(texts)) as runtime:
        return reference_scores(
            partial(completion_logps, runtime),
            texts,
            mesh,
            micro_batch_size=config.training.micro_batch_size,
            microbatches=layout.microbatches,
        )


@cache
def alone(*, judged: bool = False) -> Scores:
    return scores_of(SINGLE, Layout(), Texts(judged))


def same(one: Scores, other: Scores) -> bool:
    """Bit for bit."""
    ours, theirs = one.arrays(), other.arrays()
    return ours.keys() == theirs.keys() and all(values.tobytes() == theirs[name].tobytes() for name, values in ours.items())


def test_scores_are_those_of_transformers() -> None:
    texts, model = Texts(judged=True), hf_model(Layout().config().model, torch.float64)
    for found, source in ((alone(judged=True).logps, texts), (alone(judged=True).mismatched, Texts(start=2000))):
        assert found is not None
        for number in numbers_of(texts):
            ids = source.ids(number)
            with torch.no_grad():
                logps = model(ids[None, :-1]).logits[0].log_softmax(-1)
            expected = logps.gather(1, ids[1:, None])[PROMPT - 1 :].sum().item()
            assert found[number] == pytest.approx(expected, rel=1e-6)
        assert np.isnan(np.delete(found, numbers_of(texts))).all()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(microbatches=4),
        Layout(tp=2, sp=True, microbatches=2),
        Layout(pp=2, microbatches=4),
        Layout(cp=2),
        Layout(dp=2, strategy="optim_grads_params", microbatches=2),
        *(
            pytest.param(layout, marks=pytest.mark.long)
            for layout in (
                Layout(pp=2, virtual=2, microbatches=2, schedule="zb-v"),
                Layout(cp=2, cp_comm="ring", microbatches=2),
                Layout(dp=4, strategy="no_shard", microbatches=2),
                Layout(tp=2, pp=2, dp=2, sp=True, strategy="optim_grads"),
            )
        ),
    ],
    ids=lambda layout: layout.name,
)
def test_every_layout_gives_the_scores_of_one_process(cluster: Cluster, layout: Layout) -> None:
    found = cluster.run(layout.world_size, scores_of, layout, Texts(judged=True))
    again = cluster.run(layout.world_size, scores_of, layout, Texts(judged=True))
    assert all(same(one, found[0]) for one in (*found, *again))
    for name, values in alone(judged=True).arrays().items():
        np.testing.assert_allclose(found[0].arrays()[name], values, rtol=1e-6, equal_nan=True)


def saved_adapters(layout: Layout, folder: Path) -> None:
    """A checkpoint of a run whose low-rank additions are not zero."""
    run = trainer(SINGLE, layout)
    native.save(folder, run.optimizer, run.mesh, TrainState(1, 8), layout.sized())


def test_the_reference_of_low_rank_additions_is_their_base(tmp_path: Path) -> None:
    layout = Layout(lora=4)
    saved_adapters(layout, tmp_path)
    assert same(scores_of(SINGLE, layout, Texts(), tmp_path), alone())
    # Without the additions' options the run begins with what both make together.
    merged = scores_of(SINGLE, Layout(), Texts(), tmp_path).logps[numbers_of(Texts())]
    assert (merged != alone().logps[numbers_of(Texts())]).all()
    config = replace(layout.sized(), checkpoint=CheckpointConfig(load=str(tmp_path), finetune=True))
    world = Mesh.single().world
    assert reference_of(config, find_start(config.checkpoint), world) == Reference(digest_of(config, initial_weights(), world), resumed=False)


def test_scores_that_are_not_finite_are_refused() -> None:
    def score(batches: Sequence[Batch]) -> list[Tensor]:
        found = [torch.full((COMPLETIONS, batch.tokens.shape[1]), -1.5, dtype=torch.float64) for batch in batches]
        found[0][1, 0] = torch.nan
        return found

    with pytest.raises(TrainingError, match=r"2 of 22 that are not finite"):
        reference_scores(score, Texts(), Mesh.single(), micro_batch_size=4)


SCORED = Scored("5a" * 16, "chatml", Texts().digest(), "float32", Texts().completions, mismatched=True)


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"model": "5b" * 16}, f"reference model: got {'5a' * 16}, expected {'5b' * 16}"),
    ({"template": "llama3"}, "chat template or tokenizer: got chatml, expected llama3"),
    ({"samples": "0001"}, "samples: got 0000, expected 0001"),
    ({"dtype": "bfloat16"}, "dtype of the computation: got float32, expected bfloat16"),
    ({"completions": 20}, "number of completions: got 24, expected 20"),
    ({"mismatched": False}, "scores of mismatched completions: got True, expected False"),
]


def test_a_file_gives_back_every_bit_and_scores_of_something_else_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "scores.safetensors"
    write_scores(path, SCORED, alone(judged=True))
    assert same(read_scores(path, SCORED), alone(judged=True)) and list(tmp_path.iterdir()) == [path]
    assert load_file(path)["logps"].dtype == np.float64
    everything = {name: value for change, _ in OTHERS for name, value in change.items()}
    for change, said in (*OTHERS, (everything, "samples: got 0000")):
        with pytest.raises(DataError) as refused:
            read_scores(path, replace(SCORED, **change))
        assert said in str(refused.value) and "--reference-scores" in str(refused.value) and str(path) in str(refused.value)
        assert str(refused.value).count("got") == len(change)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def rewrite(path: Path, **arrays: NDArray[Any]) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    save_file({**load_file(path), **arrays}, path, metadata)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "header cut": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "json": lambda path: path.write_bytes(b"{}" * 100),
    "flipped value": lambda path: flip(path, -3),
    "flipped length": lambda path: flip(path, 1),
    "foreign": lambda path: save_file(load_file(path), path),
    "no object": lambda path: save_file(load_file(path), path, {"reference_scores": "[1]"}),
    "version": lambda path: save_file(load_file(path), path, {"reference_scores": '{"version": 2}'}),
    "no fields": lambda path: save_file(load_file(path), path, {"reference_scores": '{"version": 1}'}),
    "short": lambda path: rewrite(path, logps=np.zeros(3)),
    "fp32": lambda path: rewrite(path, logps=np.zeros(24, np.float32)),
    "more": lambda path: rewrite(path, more=np.zeros(24)),
}  # type: ignore[dict-item]


def test_a_damaged_or_foreign_file_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "scores.safetensors"
    for name, damage in DAMAGES.items():
        write_scores(path, SCORED, alone(judged=True))
        damage(path)
        with pytest.raises(DataError) as refused:
            read_scores(path, SCORED)
        assert str(path) in str(refused.value) and "delete it" in str(refused.value), name


def test_who_is_killed_while_writing_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scores.safetensors"
    write_scores(path, SCORED, alone(judged=True))
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(os, "replace", lambda *names: os.kill(os.getpid(), signal.SIGKILL))
        write_scores(path, SCORED, Scores(np.zeros(24), np.zeros(24)))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert same(read_scores(path, SCORED), alone(judged=True))


# A run


OPTIONS = AlignConfig()


def inputs_of(config: Config, reference: Reference, texts: Texts, *, validation: Texts | None = None) -> Ready:
    training = ReferencedSamples(texts, reference.digest)
    held_out = None if validation is None else ReferencedSamples(validation, reference.digest)
    start = None if reference.resumed else find_start(config.checkpoint)
    return Ready(config, training, held_out, training.identity(), start, TrainState(0, 0), None, ())


def run(
    folder: Path,
    mesh: Mesh,
    layout: Layout,
    options: AlignConfig = OPTIONS,
    template: str = "chatml",
    checkpoint: CheckpointConfig | None = None,
) -> Ready:
    """What a run reads that begins with the weights of the seed, or with those of ``checkpoint``."""
    config = replace(layout.sized(), checkpoint=checkpoint or CheckpointConfig())
    config = replace(config, model=replace(config.model, initializer_range=0.05), training=replace(config.training, seed=1234))
    start = find_start(config.checkpoint)
    reference = reference_of(config, start, mesh.world)
    inputs = inputs_of(config, reference, Texts(judged=True), validation=Texts(judged=True, start=500))
    return with_references(inputs, reference, options, mesh, template=template, train_file=folder / "pairs.jsonl")


def logps_of(samples: object) -> NDArray[np.float64]:
    assert isinstance(samples, ReferencedSamples) and isinstance(samples.samples, Texts) and samples.samples.logps is not None
    return samples.samples.logps


def refused_runtime(*_: object, **__: object) -> None:
    raise AssertionError("computed once more")


def test_a_run_computes_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(tmp_path, Mesh.single(), Layout(microbatches=2))
    assert np.array_equal(logps_of(first.training), alone(judged=True).logps, equal_nan=True)
    assert not np.array_equal(logps_of(first.validation), logps_of(first.training), equal_nan=True)
    batch = first.training.batch([0])
    assert batch.reference_logps is not None and batch.mismatched is not None and batch.mismatched.reference_logps is not None
    assert batch.reference_logps[:, 0].tolist() == alone(judged=True).logps[:4].tolist()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2 and all(file.name.startswith("pairs.jsonl.") for file in files)
    assert f"reference scores of training: written to {tmp_path}" in (said := capsys.readouterr().out) and "7 of 7 samples" in said
    # Another model, template or sample gives another name: these are not touched.
    before = [file.read_bytes() for file in files]
    run(tmp_path, Mesh.single(), Layout(microbatches=2), template="llama3")
    assert [file.read_bytes() for file in files] == before and len(list(tmp_path.iterdir())) == 4
    monkeypatch.setattr(references, "reference_runtime", refused_runtime)
    again = run(tmp_path, Mesh.single(), Layout(microbatches=2))
    assert np.array_equal(logps_of(again.training), logps_of(first.training), equal_nan=True)


def test_where_scores_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named file of something else is refused; a place that cannot be written is, before anything is computed."""
    options = replace(OPTIONS, reference_scores=str(tmp_path / "scores.safetensors"))
    run(tmp_path, Mesh.single(), Layout(), options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scores.safetensors", "scores.validation.safetensors"]
    with pytest.raises(DataError, match=r"chat template or tokenizer: got chatml, expected llama3"):
        run(tmp_path, Mesh.single(), Layout(), options, template="llama3")
    monkeypatch.setattr(references, "reference_runtime", refused_runtime)
    for name, said in (("s3://bucket/scores", "got a URL"), (str(tmp_path / "scores.safetensors" / "scores"), "Not a directory")):
        with pytest.raises(UserError, match=said):
            run(tmp_path, Mesh.single(), Layout(), replace(OPTIONS, reference_scores=name))


def begun(folder: Path, layout: Layout, data: dict[str, Any] | None) -> CheckpointConfig:
    """The options of a run that resumes from a checkpoint of one that knew its reference."""
    run = trainer(SINGLE, layout)
    run.step(0)
    native.save(folder, run.optimizer, run.mesh, TrainState(1, 8, data=data), layout.sized())
    return CheckpointConfig(load=str(folder), save=str(folder))


def test_a_resumed_run_reads_the_scores_of_the_weights_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(tmp_path, Mesh.single(), Layout())
    resumes = begun(tmp_path / "save", Layout(), dict(first.identity))
    with monkeypatch.context() as patch:
        patch.setattr(references, "reference_runtime", refused_runtime)
        again = run(tmp_path, Mesh.single(), Layout(), checkpoint=resumes)
    assert again.identity == first.identity and REFERENCE in again.identity
    assert np.array_equal(logps_of(again.training), logps_of(first.training), equal_nan=True)
    [path, _] = kept = sorted(tmp_path.glob("*.safetensors"))
    for file in kept:
        file.unlink()
    with pytest.raises(DataError, match=r"no such file.*--only-reference-scores") as refused:
        run(tmp_path, Mesh.single(), Layout(), checkpoint=resumes)
    assert str(path) in str(refused.value) and first.identity[REFERENCE][:12] in str(refused.value)
    # The folder that the run began with is still named: the scores come back as they were.
    model = hf_model(Layout().config().model)
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    restored = run(tmp_path, Mesh.single(), Layout(), checkpoint=replace(resumes, init_from_hf=str(tmp_path / "model")))
    assert np.array_equal(logps_of(restored.training), logps_of(first.training), equal_nan=True)
    # A folder with other weights does not, and a checkpoint that knows no reference is refused.
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with torch.no_grad():
        next(model.parameters())[1, 1] += 1e-3
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    with pytest.raises(DataError, match=r"model has other weights"):
        run(tmp_path, Mesh.single(), Layout(), checkpoint=replace(resumes, init_from_hf=str(tmp_path / "model")))
    resumes = begun(tmp_path / "unknown", Layout(), Texts().identity())
    with pytest.raises(CheckpointError, match=r"compared with no reference.*--finetune"):
        run(tmp_path, Mesh.single(), Layout(), checkpoint=resumes)


def run_in(place: Place, folder: Path, layout: Layout) -> NDArray[np.float64]:
    mesh = build_mesh(layout.config(), rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    return logps_of(run(folder, mesh, layout).training)


def test_layouts_share_their_files(cluster: Cluster, tmp_path: Path) -> None:
    first = cluster.run(2, run_in, tmp_path, Layout(pp=2, microbatches=2))
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}
    again = cluster.run(2, run_in, tmp_path, Layout(dp=2, strategy="optim_grads_params"))
    assert all(np.array_equal(one, first[0], equal_nan=True) for one in (*first, *again))
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == files


MATTERS = ({"rms_norm_eps": 1e-6}, {"rope_theta": 5e5}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}})
NOTHING = ({"rope_scaling": {"rope_type": "default"}}, {"initializer_range": 0.1}, {"eos_token_id": 7})


def test_the_digest_knows_what_changes_the_scores() -> None:
    config, world = Layout().config(), Mesh.single().world
    digest = digest_of(config, initial_weights(), world)
    for change in (*MATTERS, *NOTHING):
        changed = replace(config, model=replace(config.model, **change))
        assert (digest_of(changed, initial_weights(), world) != digest) is (change in MATTERS), change


def test_files_that_are_no_scores_are_not_read_to_their_end(tmp_path: Path) -> None:
    scored = Scored("m", "t", "s", "float32", 3, mismatched=False)
    with pytest.raises(DataError, match="/dev/zero: got something that is no file"):
        read_scores(Path("/dev/zero"), scored)
    large = tmp_path / "x"
    with open(large, "wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(DataError, match=r"got 8,589,934,592 bytes, expected 1,048,624 at most"):
        read_scores(large, scored)
    header = json.dumps({"__metadata__": {"reference_scores": "[" * 100_000}}).encode()
    large.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DataError, match="a file that is damaged, or another one"):
        read_scores(large, scored)
