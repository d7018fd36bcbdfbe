"""--compile: the same numbers but for roundings; and what happens where nothing can be compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.engine.mesh import Mesh
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn import compiled
from megatron_llama.model.nn.compiled import MAX_SHAPES, MIN_ELEMENTS, Compiled, chosen_ops
from megatron_llama.model.nn.host.ops import HOST

from tests.model.families.twins import FamilyLayout
from tests.parallel.cases import trainer


@dataclass(frozen=True)
class WithCompiler(FamilyLayout):
    """A layout with --compile."""

    def config(self) -> Config:
        """See Layout."""
        config = super().config()
        return replace(config, training=replace(config.training, compile=True))


@pytest.mark.tries("compile")
@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", ("add_norm", "norm_backward", "rotate", "rotate_back", "swiglu_backward")),
        ("gemma3", ("add_norm", "norm_backward", "norm_heads", "norm_heads_backward", "geglu_backward")),
        ("qwen3_moe", ("add_norm", "norm_backward", "norm_heads", "norm_heads_backward", "swiglu_backward")),
    ],
)
def test_a_compiled_step_is_the_plain_one_but_for_roundings(family: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3 has norms of heads, 1 + w and another gate; in a model with experts the rows of all of them are one tensor, of the same shape in
    each step."""
    monkeypatch.setattr(compiled, "MIN_ELEMENTS", 1)
    plain, fast = (trainer(Place(0, 1, 0), layout(family=family)) for layout in (FamilyLayout, WithCompiler))
    ops = fast.stages[0].options.ops
    assert ops is not HOST and plain.stages[0].options.ops is HOST
    for step in range(2):
        (loss, norm), (expected, expected_norm) = fast.step(step), plain.step(step)
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)
        assert float(norm) == pytest.approx(float(expected_norm), rel=2e-5)
    used = [getattr(ops, name) for name in names]
    assert all(isinstance(one, Compiled) and one._known for one in used)
    # A dense block and one with experts.
    assert len(used[-1]._known) == (2 if family == "qwen3_moe" else 1)


def test_without_a_compiler_there_is_one_line_and_everything_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no C++ compiler\nwas found")

    monkeypatch.setattr(torch, "compile", broken)
    assert chosen_ops(Mesh.single(), compiled=True) is HOST
    assert capsys.readouterr().out == " warning: --compile does nothing: no C++ compiler\n"
    assert chosen_ops(Mesh.single(), compiled=False) is HOST
    assert capsys.readouterr().out == ""


def test_small_tensors_and_ever_new_shapes_run_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text samples have a new length with every token: each would be compiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    seen = list[str]()

    def note(name: str) -> Any:
        return lambda x: seen.append(name)

    function = Compiled(note("plain"), note("compiled"))
    function(torch.empty(MIN_ELEMENTS - 1))
    for extra in range(MAX_SHAPES + 2):
        function(torch.empty(MIN_ELEMENTS + extra))
    function(torch.empty(MIN_ELEMENTS))
    assert seen == ["plain", *["compiled"] * MAX_SHAPES, "plain", "plain", "compiled"]
