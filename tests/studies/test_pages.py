"""Pages of studies: every table is that of a committed record, and the numbers in the prose stand in one of them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from quotient_manifolds.compare import read_spec
from studies.__main__ import STUDIES, recorded
from studies.common import (
    MARK,
    Estimate,
    csv_files,
    fill_page,
    load,
    markdown,
    resume,
    signed,
    write_record,
)

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path for path in (*ROOT.glob("docs/*.md"), *ROOT.glob("notebooks/*.md")) if MARK.search(path.read_text())
)
TAU = re.compile(r"[+−]\d\.\d\d\b")


@cache
def numbers_of(*studies: str) -> set[str]:
    return {
        number
        for study in studies
        for table in recorded(study).values()
        for cell in table.to_numpy().ravel()
        for number in TAU.findall(str(cell))
    }


def test_pages_are_found() -> None:
    assert {path.name for path in PAGES} >= {"results.md", "fibres.md", "invariance.md", "benchmarks.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_table_is_that_of_its_record(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert fill_page(page, recorded) == text, "run `PYTHONPATH=notebooks python -m studies pages`"
    assert text.count("<!-- table ") == len(MARK.findall(text)), "a mark is not closed, or not on a line of its own"
    for file, rows in csv_files(page, recorded).items():
        assert file.read_text(encoding="utf-8") == rows


@pytest.mark.parametrize("page", ["README.md", "docs/limits.md"])
def test_correlations_in_the_prose_stand_in_the_tables(page: str) -> None:
    assert set(TAU.findall((ROOT / page).read_text(encoding="utf-8"))) <= numbers_of("mnist", "sentiment", "diagonal")


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_every_study_has_a_record_and_tables(name: str) -> None:
    tables = recorded(name)
    assert tables
    assert all(len(table) for table in tables.values())


@pytest.mark.parametrize("name", ["clip_soups.yaml", "bert_mnli.yaml"])
def test_the_specs_of_the_papers_zoos_name_what_belongs_beside_them(name: str) -> None:
    with pytest.raises(ValueError, match="matches nothing"):
        read_spec(ROOT / "notebooks" / "specs" / name)


# ---- what studies have in common


def test_a_table_between_marks_is_replaced_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- table toy x -->\nold\n<!-- end -->\nb\n")
    shown = pd.DataFrame({"m": ["1"], "|t|": ["+0.10"]})
    filled = fill_page(page, lambda study: {"x": shown})
    assert filled == f"a\n<!-- table toy x -->\n{markdown(shown)}<!-- end -->\nb\n"
    assert "| m | \\|t\\| |\n| --- | --- |\n| 1 | +0.10 |\n" in filled
    with pytest.raises(ValueError, match=r"must have a table 'x'\. Found y"):
        fill_page(page, lambda study: {"y": shown})


def test_a_record_lasts_and_holds_finite_numbers_only(tmp_path: Path) -> None:
    write_record(tmp_path / "a" / "x.json", {"rows": [{"a": 1.5, "b": None}]})
    assert load("x", tmp_path / "a") == {"rows": [{"a": 1.5, "b": None}]}
    with pytest.raises(ValueError, match="Out of range float"):
        write_record(tmp_path / "y.json", {"rows": [float("nan")]})
    assert not (tmp_path / "y.json").exists()


def test_an_interrupted_study_continues_and_other_settings_are_refused(tmp_path: Path) -> None:
    made: list[str] = []

    def cell(name: str, fail: bool = False) -> dict[str, int]:
        if fail:
            raise KeyboardInterrupt
        made.append(name)
        return {"length": len(name)}

    def study(fail: bool, settings: object = 1) -> list[int]:
        cells = {"A a": lambda: cell("A a"), "bb": lambda: cell("bb", fail)}
        return [each["length"] for each in resume(tmp_path, cells, what="study", settings=settings)]

    with pytest.raises(KeyboardInterrupt):
        study(fail=True)
    assert study(fail=False) == study(fail=True) == [3, 2]
    assert made == ["A a", "bb"]
    with pytest.raises(ValueError, match="must hold cells of the same settings"):
        study(fail=False, settings=2)


def test_cells_of_one_file_are_refused(tmp_path: Path) -> None:
    rates = {f"rate {rate:.0e}": lambda: [0.0] for rate in (0.1, 10.0)}
    assert len(resume(tmp_path / "a", rates, what="study")) == len(list((tmp_path / "a").glob("rate*"))) == 2
    with pytest.raises(ValueError, match="must differ in letters or digits"):
        resume(tmp_path / "b", {"a": list, "A": list}, what="study")


def test_numbers_are_written_as_they_are() -> None:
    assert (signed(-0.004), signed(0.126), signed(None)) == ("−0.00", "+0.13", "undefined")
    assert str(Estimate(0.5, -0.25, 1.0)) == "+0.50 [−0.25, +1.00]"
    ends = ((0.1, 0.2), (-0.2, -0.1), (-0.1, 0.1), (None, None))
    assert [Estimate(0.0, *each).sign for each in ends] == [1, -1, 0, 0]
