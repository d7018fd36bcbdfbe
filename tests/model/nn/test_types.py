"""What every rank holds of every tensor between the layers, and of every gradient: one table, checked by value.

The types of an axis are those of ``tests/model/nn/types.py``; a cell is `type of the value / type of its gradient`. Types of the two axes are
independent: with both, the parts of the tensor-parallel ranks make up the part of a context-parallel rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from tests.harness import Cluster
from tests.model.nn.types import Values, WrongType, check, observe
from tests.parallel.cases import Layout

TABLE = """
                                 | tp          | tp sp       | tp sp, shared kv        | cp
embed_tokens out                 | R    / R    | S(0) / S(0) | S(0)      / S(0)        | Z / Z
rotary cos                       | R    / -    | R    / -    | R         / -           | Z / -
block in                         | R    / R    | S(0) / S(0) | S(0)      / S(0)        | Z / Z
block in, delta                  | R    / R    | S(0) / S(0) | S(0)      / S(0)        | Z / Z
input_layernorm in               | R    / R    | S(0) / S(0) | S(0)      / S(0)        | Z / Z
input_layernorm out              | R    / R    | S(0) / S(0) | S(0)      / S(0)        | Z / Z
qkv_proj in                      | R    / R    | S(0) / S(0) | S(0)      / S(0)        | Z / Z
q_proj out                       | S(2) / S(2) | S(2) / S(2) | S(2)      / S(2)        | Z / Z
k_proj out                       | S(2) / S(2) | S(2) / S(2) | S(2) of R / S(2) of P   | Z / Z
v_proj out                       | S(2) / S(2) | S(2) / S(2) | S(2) of R / S(2) of P   | Z / Z
o_proj in                        | S(2) / S(2) | S(2) / S(2) | S(2)      / S(2)        | Z / Z
o_proj terms                     | P    / -    | P    / -    | P         / -           | Z / -
o_proj out                       | R    / R    | S(0) / S(0) | S(0)      / S(0)        | Z / Z
post_attention_layernorm in      | R    / R    | S(0) / S(0) | S(0)      / S(0)        | Z / Z
post_attention_layernorm out     | R    / R    | S(0) / S(0) | S(0)      / S(0)        | Z / Z
gate_up_proj in                  | R    / R    | S(0) / S(0) | S(0)      / S(0)        | Z / Z
gate_proj out                    | S(2) / S(2) | S(2) / S(2) | S(2)      / S(2)        | Z / Z
up_proj out                      | S(2) / S(2) | S(2) / S(2) | S(2)      / S(2)        | Z / Z
down_proj in                     | S(2) / S(2) | S(2) / S(2) | S(2)      / S(2)        | Z / Z
down_proj terms                  | P    / -    | P    / -    | P         / -           | Z / -
down_proj out                    | R    / R    | S(0) / S(0) | S(0)      / S(0)        | Z / Z
block out                        | R    / R    | S(0) / S(0) | S(0)      / S(0)        | Z / Z
block out, delta                 | R    / R    | S(0) / S(0) | S(0)      / S(0)        | Z / Z
norm in                          | R    / R    | S(0) / S(0) | S(0)      / S(0)        | Z / Z
norm out                         | R    / R    | S(0) / S(0) | S(0)      / S(0)        | Z / Z
lm_head out                      | S(2) / S(2) | S(2) / S(2) | S(2)      / S(2)        | Z / Z
token loss                       | R    / R    | R    / R    | R         / R           | Z / Z
loss                             | R    / R    | R    / R    | R         / R           | P / R

embed_tokens.weight              | S(0) / S(0) | S(0) / S(0) | S(0)      / S(0)        | R / P
input_layernorm.weight           | R    / R    | R    / P    | R         / P           | R / P
q_proj.weight                    | S(0) / S(0) | S(0) / S(0) | S(0)      / S(0)        | R / P
k_proj.weight                    | S(0) / S(0) | S(0) / S(0) | S(0) of R / S(0) of P   | R / P
v_proj.weight                    | S(0) / S(0) | S(0) / S(0) | S(0) of R / S(0) of P   | R / P
o_proj.weight                    | S(1) / S(1) | S(1) / S(1) | S(1)      / S(1)        | R / P
post_attention_layernorm.weight  | R    / R    | R    / P    | R         / P           | R / P
gate_proj.weight                 | S(0) / S(0) | S(0) / S(0) | S(0)      / S(0)        | R / P
up_proj.weight                   | S(0) / S(0) | S(0) / S(0) | S(0)      / S(0)        | R / P
down_proj.weight                 | S(1) / S(1) | S(1) / S(1) | S(1)      / S(1)        | R / P
norm.weight                      | R    / R    | R    / P    | R         / P           | R / P
lm_head.weight                   | S(0) / S(0) | S(0) / S(0) | S(0)      / S(0)        | R / P
"""
"""An `in` has the gradient through its layer alone; `block in` is the residual stream, `block in, delta` what the norm of the block adds to it. `terms` are what a row-parallel layer sums.
`-`: no gradient is seen here. An empty cell: no such point in this mode, except that cp stands beside any layer of its own."""


BASE = Layout(layers=2, fp64=True, documents=True)


@dataclass(frozen=True)
class Mode:
    """A layout and its columns of the table."""

    layout: Layout
    columns: dict[str, str]
    copies: int = 1
    """Tensor-parallel neighbours with the same key/value head."""


MODES = {
    "tp": Mode(replace(BASE, tp=2), {"tp": "tp"}),
    "tp sp": Mode(replace(BASE, tp=2, sp=True), {"tp": "tp sp"}),
    "tp sp, shared kv": Mode(replace(BASE, tp=4, sp=True), {"tp": "tp sp, shared kv"}, copies=2),
    "cp all_gather": Mode(replace(BASE, cp=2), {"cp": "cp"}),
    "cp ring": Mode(replace(BASE, cp=4, cp_comm="ring"), {"cp": "cp"}),
    "tp sp, cp": Mode(replace(BASE, tp=2, sp=True, cp=2), {"tp": "tp sp", "cp": "cp"}),
}


@dataclass(frozen=True)
class Case:
    """One tensor of one mode: a value or a gradient."""

    what: str
    kinds: dict[str, str]
    """Declared, by axis."""
    ranks: list[torch.Tensor]
    expected: torch.Tensor


@dataclass(frozen=True)
class Observed:
    """What all ranks of a mode saw, beside the single process."""

    mode: Mode
    ranks: list[tuple[Values, Values]]
    single: tuple[Values, Values]

    def check(self, case: Case, kinds: dict[str, str]) -> None:
        """Raises WrongType unless the tensor is of these types."""
        check(kinds, case.ranks, case.expected, tp=self.mode.layout.tp, copies=self.mode.copies)

    def cases(self) -> Iterator[Case]:
        """Every value in the order of the forward pass, then every gradient in that of backward: the first that is wrong is the cause."""
        declared = table()
        for side, what in enumerate(("value", "gradient")):
            for name, expected in ((name, self.single[side][name]) for name in self.ranks[0][side]):
                kinds = {axis: declared[column][row_of(name)][side] for axis, column in self.mode.columns.items()}
                yield Case(f"{what} of {name}", kinds, [rank[side][name] for rank in self.ranks], expected)


def table() -> dict[str, dict[str, tuple[str, str]]]:
    """(type of the value, type of the gradient) by column and row."""
    head, *rows = ([cell.strip() for cell in line.split("|")] for line in TABLE.strip("\n").splitlines() if line)
    cells = {column: {row[0]: row[i] for row in rows if row[i]} for i, column in enumerate(head) if i}
    return {column: {row: _pair(cell) for row, cell in found.items()} for column, found in cells.items()}


def _pair(cell: str) -> tuple[str, str]:
    value, gradient = (kind.strip() for kind in cell.split("/"))
    return value, gradient


def row_of(point: str) -> str:
    """The row of a point: `model.layers.1.self_attn.q_proj out` is in `q_proj out`."""
    return re.sub(r"^model\.layers\.\d+ ", "block ", re.sub(r"^(model\.)?(layers\.\d+\.)?((self_attn|mlp)\.)?(?!layers)", "", point))


@pytest.fixture(scope="module")
def single(cluster: Cluster) -> tuple[Values, Values]:
    found: tuple[Values, Values] = cluster.run(1, observe, BASE)[0]
    return found


@pytest.fixture(scope="module", params=MODES)
def observed(cluster: Cluster, request: pytest.FixtureRequest, single: tuple[Values, Values]) -> Observed:
    mode = MODES[request.param]
    return Observed(mode, cluster.run(mode.layout.world_size, observe, mode.layout), single)


def test_the_table_covers_every_point(observed: Observed) -> None:
    declared = table()
    for values, gradients in observed.ranks:
        for column in observed.mode.columns.values():
            assert {row_of(name) for name in values} == set(declared[column])
            with_gradient = {row for row, (_, gradient) in declared[column].items() if gradient != "-"}
            assert {row_of(name) for name in gradients} == with_gradient


def test_every_tensor_is_of_its_declared_type(observed: Observed) -> None:
    wrong = []
    for case in observed.cases():
        try:
            observed.check(case, case.kinds)
        except WrongType as error:
            wrong.append(f"{case.what}: {error}")
    assert not wrong, "\n".join(wrong)


def test_no_tensor_is_of_any_other_type(observed: Observed) -> None:
    """The control: whichever entry of the table is changed to whichever other type, on either axis, the check fails."""
    fitting, refused = [], set()
    for case in observed.cases():
        for axis, kind in case.kinds.items():
            for other in _others(kind, case.expected.dim(), observed.mode.copies):
                try:
                    observed.check(case, case.kinds | {axis: other})
                    fitting.append(f"{case.what} on {axis}: {kind} and {other} both fit")
                except WrongType:
                    refused.add((kind, other))
    assert not fitting, "\n".join(fitting)
    declared = {kind for case in observed.cases() for kind in case.kinds.values()}
    assert {kind for kind, _ in refused} == declared and {("P", "R"), ("R", "P")} & refused


def _others(kind: str, dims: int, copies: int) -> list[str]:
    shards = [f"S({dim})" for dim in range(max(1, dims))]
    shared = [f"{shard} of {inner}" for shard in shards for inner in "RP"] if copies > 1 else []
    return [other for other in ("R", "P", "Z", *shards, *shared) if other != kind]
