"""What overlaps in a step with the optimizer on the host, shown by the order of events on the bench's modelled device; the bench's figures
and bounds."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.parse import parse
from megatron_llama.config.schema import Config
from megatron_llama.config.sections import config_sections
from megatron_llama.engine.offload.exact import UPDATING, ExactOffload, Speculation
from megatron_llama.engine.offload.zenflow.rule import APPLYING
from megatron_llama.errors import ConfigError
from tools.bench_offload import Bench, BenchOffloadConfig, main, resolved
from tools.offload.catalogue import MODES, Numbers
from tools.offload.modelled import Speeds
from tools.offload.others import PEERS
from tools.offload.ours import Ours

HOST = torch.device("cpu")
LAYERS, MICROBATCHES, STEPS = 3, 2, 3
PATIENCE_SECONDS = 60.0
FORWARD, BACKWARD = ("forward model.layers.0.input_layernorm", "backward model.layers.0.input_layernorm.weight")
"""The first layer begins."""
Rule = tuple[Callable[[str], bool], Callable[[], bool]]


def small() -> Config:
    """The bench's own model, with fewer layers and microbatches."""
    config = resolved(parse([], (*config_sections(), BenchOffloadConfig), aliases=MEGATRON), HOST)
    training = replace(config.training, global_batch_size=MICROBATCHES)
    return replace(config, model=replace(config.model, num_hidden_layers=LAYERS), training=training)


class Journal(list[str]):
    """Events in their order. Some are held until others have happened: if these depend on them, that never ends, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self.rules: list[Rule] = []
        """Which events are held, and until when."""

    def append(self, text: str) -> None:
        with self._changed:
            for held, over in self.rules:
                if held(text) and not self._changed.wait_for(over, PATIENCE_SECONDS):
                    raise TimeoutError(f"{text}: what it is held for does not happen without it")
            super().append(text)
            self._changed.notify_all()


class Run:
    """Some steps of a mode on a device and a host that take no time."""

    def __init__(self, name: str) -> None:
        mode = next(mode for mode in MODES if mode.name == name)
        self.ours = Ours(mode, small(), HOST, Speeds(0.0, 0.0, 0.0, 1))
        self.journal = self.ours.recorder.events = Journal()
        layout = self.ours.engine.bucket_plan
        self.order = [str(bucket) for bucket in layout.forward_order]
        self.bucket = {placed.spec.name: str(bucket.index) for bucket in layout.buckets for placed in bucket.placements}
        self.later = {
            self.bucket[name] for name in self.bucket if name.startswith(("model.layers.1.", "model.layers.2.")) and "norm" not in name
        }
        """Buckets of the matrices behind the first layer."""

    def seen(self, text: str) -> int:
        return self.journal.count(text)

    @property
    def step(self) -> int:
        """The one whose last microbatch has not come to the first layer's backward pass."""
        return self.seen(BACKWARD) // MICROBATCHES

    def hold_backward(self, over: Callable[[], bool]) -> None:
        """In the last microbatch of each step the first layer's backward pass begins when ``over``."""
        self.journal.rules.append((lambda text: text == BACKWARD and self.seen(text) % MICROBATCHES == MICROBATCHES - 1, over))

    def hold_last_weights(self) -> None:
        """What the end of the model needs comes to the device when the next step has begun to compute."""
        last = f"to device {self.order[-1]}"
        self.journal.rules.append(
            (lambda text: text == last and self.seen(last) < STEPS - 1, lambda: self.seen(FORWARD) > MICROBATCHES * (self.seen(last) + 1))
        )

    def go(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self.ours.step()
        self.ours.close()

    def places(self, text: str) -> list[int]:
        return [place for place, found in enumerate(self.journal) if found == text]

    @property
    def arrivals(self) -> list[str]:
        return [text.removeprefix("to device ") for text in self.journal if text.startswith("to device ")]

    @property
    def speculation(self) -> Speculation:
        (rule,) = [rule for rule in self.ours.engine.rules.distinct if isinstance(rule, ExactOffload)]
        return rule.speculation

    def check_weights_come_first(self) -> None:
        """Nothing is computed with weights that are still on their way: each half of a layer begins when the one before has computed."""
        halves = [
            (f"model.layers.{layer}.{norm}", f"model.layers.{layer}.{part}.weight")
            for layer in range(LAYERS)
            for norm, part in (("input_layernorm", "self_attn.qkv_proj"), ("post_attention_layernorm", "mlp.gate_up_proj"))
        ]
        for (_, weight), (following, _) in pairwise(halves):
            comes, begins = (self.places(f"to device {self.bucket[weight]}"), self.places(f"forward {following}")[::MICROBATCHES])
            assert len(comes) == STEPS == len(begins)
            assert all(before < after for before, after in zip(comes[:-1], begins[1:], strict=True)), weight


def test_with_clipping_gradients_leave_during_backward_and_updates_run_beside_the_next_forward_pass() -> None:
    run, updates = Run("exact"), list[int]()
    run.hold_backward(lambda: all(run.seen(f"to host {bucket}") > run.step for bucket in run.later))
    run.hold_backward(lambda: not updates.append(run.seen(UPDATING)))  # type: ignore[func-returns-value]
    run.hold_last_weights()
    run.go()
    assert run.arrivals == STEPS * run.order, "what is needed first comes first"
    assert updates == [step * len(run.order) for step in range(STEPS)], "no update begins before the norm"
    run.check_weights_come_first()


def test_without_clipping_buckets_are_updated_during_backward() -> None:
    run = Run("exact, no clipping")
    run.hold_backward(lambda: run.seen(UPDATING) >= run.step * len(run.order) + len(run.later))
    run.go()
    assert run.seen(UPDATING) == len(run.arrivals) == STEPS * len(run.order)
    run.check_weights_come_first()


def test_without_clipping_a_host_that_is_late_does_first_what_is_needed_first() -> None:
    """The update that it has begun, then those of the next forward pass in their order, which waits for none of the later ones."""
    run = Run("exact, no clipping")
    count = len(run.order)

    def behind_the_first_layer(text: str) -> bool:
        """In each step, beside the first weights that come: but not in the last one."""
        way, _, bucket = text.rpartition(" ")
        step, place = divmod(len(run.arrivals), count)
        return way == "to device" and bucket in run.later and place > 0 and step < STEPS - 1

    run.journal.rules += [
        # The first update of a step ends when the training thread has asked for everything.
        (
            lambda text: text == UPDATING and run.seen(text) % count == 0,
            lambda: run.seen(f"gather {run.order[-1]}") > 1 + run.seen(UPDATING) // count,
        ),
        (behind_the_first_layer, lambda: run.seen(FORWARD) > MICROBATCHES * (1 + len(run.arrivals) // count)),
    ]
    run.go()
    for step in range(STEPS):
        begun, *others = run.arrivals[step * count : (step + 1) * count]
        assert others == [bucket for bucket in run.order if bucket != begun]
    run.check_weights_come_first()


@pytest.mark.parametrize("misses", [False, True], ids=["hits", "misses"])
def test_speculation_updates_during_backward_and_sends_nothing_before_the_norm(misses: bool) -> None:
    run = Run("exact, speculation misses" if misses else "exact, speculation hits")
    run.hold_backward(lambda: run.seen(UPDATING) >= run.step * len(run.order) + len(run.later) + run.speculation.redone)
    run.hold_last_weights()
    run.go()
    assert run.arrivals == STEPS * run.order
    tried = run.speculation.redone if misses else run.speculation.kept
    assert tried >= STEPS * len(run.later) and run.speculation.kept * run.speculation.redone == 0
    assert run.seen(UPDATING) == STEPS * len(run.order) + run.speculation.redone, "what was right is not done again"
    run.check_weights_come_first()


def test_zenflow_updates_beside_the_next_window_and_sends_weights_at_its_end() -> None:
    """The first step updates everything and chooses columns, the next four are a window."""
    run = Run("zenflow")
    buckets = len(run.order) - 1  # norms have no columns
    run.journal.rules.append(
        (lambda text: text == APPLYING and buckets <= run.seen(text) < 2 * buckets, lambda: run.seen(BACKWARD) > 5 * MICROBATCHES)
    )
    run.go(10)
    starts = [*run.places(FORWARD)[::MICROBATCHES], len(run.journal)]
    applied, sent = (
        [sum(starts[step] < place < starts[step + 1] for place in run.places(text)) for step in range(9)]
        for text in (APPLYING, "to device others")
    )
    assert sent == [buckets, 0, 0, 0, 0, 0, 0, 0, buckets]
    assert applied[0] == buckets <= sum(applied[5:]) and not any(applied[1:5])


def test_bounds_are_those_worked_out_for_a_7b_model() -> None:
    """400 TFLOP/s, 55 GB/s of the bus, 100 GB/s of memory, four microbatches of 4096 tokens; in seconds of a microbatch."""
    size, compute = 6.74e9, 0.414
    numbers = Numbers(4, compute / 3, compute * 2 / 3, bus=4 * size / 55e9, update=30 * size / 100e9, narrow=2)
    found = {mode.name: mode.bound(numbers) / 4 for mode in MODES} | {peer.name: peer.bound(numbers) / 4 for peer in PEERS}
    expected = {
        "no offload": 0.41, "exact": 0.88, "exact, no clipping": 0.82, "exact, speculation hits": 0.82,
        "exact, speculation misses": 0.88,
    }
    expected |= {"DeepSpeed ZeRO-Offload": 1.27, "torchao CPUOffloadOptimizer": 0.92, "blocking": 1.10}
    assert {name: round(found[name], 2) for name in expected} == expected
    faster = replace(numbers, update=numbers.update / 2)
    assert round(PEERS[1].bound(faster) / 4, 2) == 0.61


@pytest.mark.long
def test_the_bench_prints_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    contenders = ("no offload", "blocking", "exact", "DeepSpeed ZeRO-Offload")
    words = ["--rounds", "1", "--steps", "1", "--warmup", "1", "--compute-ms", "20", "--update-ms", "12", "--copy-ms", "6", "--contenders"]
    main([*words, *contenders, "--json", str(path)])
    found, printed = json.loads(path.read_text()), capsys.readouterr().out
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == list(contenders[:3]) and list(found["absent"]) == [contenders[3]]
    assert all(name in printed for name in contenders) and "modelled device" in printed
    assert found["machine"]["update"] == 0.012
    bounds = {name: (row["step_ms_bound"], row["update_ms_bound"], row["bus_bytes_bound"]) for name, row in rows.items()}
    assert {name: tuple(round(value, 3) for value in values) for name, values in bounds.items()} == {
        "no offload": (80.0, 0.0, 0.0),
        "blocking": (104.0, 12.0, 8.0),
        "exact": (85.333, 12.0, 8.0),
    }
    blocking = rows["blocking"]
    assert blocking["bus_bytes"] == pytest.approx(8.0, abs=0.001) and blocking["update_ms"] > 9
    assert rows["no offload"]["ratio"] == 1.0
    assert blocking["idle"] * blocking["step_ms"] > 20, "what copies and updates take, less what waits make up for"


@pytest.mark.long
def test_who_stops_the_bench_gets_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second round, in which one contender has had its turn: only the first counts."""
    path, turn, turns = tmp_path / "rows.json", Bench._turn, iter(range(10))

    def stopped(bench: Bench, name: str) -> None:
        if next(turns) == 3:
            raise KeyboardInterrupt
        turn(bench, name)

    monkeypatch.setattr(Bench, "_turn", stopped)
    words = [
        "--steps", "1", "--warmup", "1", "--compute-ms", "1", "--update-ms", "1", "--copy-ms", "1", "--contenders", "no offload",
        "exact",
    ]
    main([*words, "--json", str(path)])
    assert [(row["name"], row["ratio"] is not None) for row in json.loads(path.read_text())["rows"]] == [
        ("no offload", True),
        ("exact", True),
    ]


def test_a_contender_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="--contenders: got nobody, expected of no offload, blocking"):
        main(["--contenders", "nobody"])
