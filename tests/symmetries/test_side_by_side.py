"""The script that measures the finder: what it calls found and false, and that it goes on where it was stopped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries.groups import GL, Gauge, Part, Rows, Slot, Symmetry, Translation, Wire
from tests.nets.kinds import KINDS
from tests.nets.sets import SETS, Example, varied
from tests.symmetries import finders, side_by_side
from tests.symmetries.finders import measured
from tests.symmetries.side_by_side import Table, main

WRITER = Slot(Rows.along("0.weight", (4, 3), axis=0), torch.arange(4), writes=True)
READER = Slot(Rows.along("1.weight", (2, 4), axis=1), torch.arange(4), writes=False)
BOTH, ONE = (Gauge(Wire(slots, channels=4), GL(4)) for slots in ((WRITER, READER), (WRITER,)))
SHIFT = Translation((Part(Rows.along("1.weight", (2, 4), axis=0)),))


def two_maps() -> Example:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)).eval()
    x = torch.randn(2, 5, 3)
    return Example(model, x, varied(x))


@pytest.mark.parametrize(
    ("symmetries", "dimensions", "holds"),
    [([BOTH], 14, True), ([ONE], 12, False), ([BOTH, SHIFT], 20, False), ([], 0, True)],
)
def test_found_is_a_rank_and_false_what_changes_on_unseen_inputs(
    monkeypatch: pytest.MonkeyPatch, symmetries: list[Symmetry], dimensions: int, holds: bool
) -> None:
    """GL(4) between maps of rank 2 at most moves 20 numbers less the 6 of their product."""
    found = SimpleNamespace(symmetries=symmetries, refused=["a"], largest=1e-14, smallest=0.1)
    monkeypatch.setattr(finders, "find", lambda *_: found)
    row = measured(two_maps())
    assert row["found"] == dimensions
    assert (row["false"] < 1e-12) == holds == (row["worst"] == "")
    assert (row["refused"], row["gap"]) == (1, "1.0e-14 | 1.0e-01")


def test_what_the_finder_finds_is_true() -> None:
    row = measured(two_maps())
    assert row["found"] == 14
    assert row["false"] < 1e-12


def test_unseen_inputs_have_other_lengths_and_sizes_of_pictures() -> None:
    words = {"input_ids": torch.randint(5, 40, (3, 6)), "attention_mask": torch.ones(3, 6, dtype=torch.long)}
    found = varied(words)
    assert {tuple(each["input_ids"].shape) for each in found.values()} == {(3, 6), (3, 3), (3, 12), (3, 7)}
    assert all(bool((each["attention_mask"] == 1).all()) for name, each in found.items() if name != "padded")
    assert int(found["padded"]["attention_mask"].sum()) < 18
    assert (2, 1, 9, 9) in {tuple(each.shape) for each in varied(torch.randn(2, 1, 8, 8)).values()}


def test_rows_that_a_table_has_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def row(self: object, each: str, name: str, doubted: bool) -> dict[str, Any]:
        made.append(name)
        return {"set": each, "name": name, "kernel": 8, "new_found": 4, "new_false": "0.1", "new_seconds": "1"}

    monkeypatch.setattr(side_by_side.Worker, "row", row)
    out = tmp_path / "table.csv"
    for every in ("20", "10"):
        main(["--set", "kinds", "--every", every, "--out", str(out)])
    assert made == [*[*KINDS][::20], *[*KINDS][10::20]]
    table = Table(out)
    table.rows["kinds", made[0]] |= {"old_found": 5, "old_seconds": "1"}
    table.add({"set": "kinds", "name": made[0], "new_found": 3, "new_seconds": 1.0})
    assert table.rows["kinds", made[0]]["more"] == -2
    assert table.rows["kinds", made[0]]["new_false"] == ""
    table.write()
    *_, line = Table(out).summary()
    assert line.split(" | ")[3:8] == ["5", "19", "1 (-2)", "0", "4"]


def test_each_set_has_models_of_other_names() -> None:
    for name in ("nets", "kinds", "programs", "random", "types", "breadth"):
        names = SETS[name].names()
        assert len({*names}) == len(names) > 40
