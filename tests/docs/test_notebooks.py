"""Every notebook runs from top to bottom, and is committed in the form a teacher needs, with the outputs of one run.

The solutions to its exercises run too, after its cells.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FAST = "QUOTIENT_MANIFOLDS_FAST"  # set: notebooks whose full run takes long run on something small
# What a notebook leaves behind, before the next one runs in the same process: names, the default dtype, filters.
FORGET = "import torch, warnings\ntorch.set_default_dtype(torch.float32)\nwarnings.resetwarnings()\n%reset -f"
LARGEST = 1_500_000  # bytes
CODE = re.compile(r"^```python\n(?!# not run by the tests\n)(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLDED = re.compile(r"^<details><summary>(\d)\. [^<]+</summary>\n\n.+?\n\n</details>$", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^\|.*\|\n(?:\|.*\|(?:\n|\Z))+", re.MULTILINE)
ABSOLUTE = re.compile(r"(?<![\w.)/])/\w[\w.-]*/[\w.-]|\b[A-Z]:\\\w")

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


@pytest.fixture(scope="module")
def kernel() -> Iterator[KernelManager]:
    """One process for all notebooks: to import torch and transformers takes longer than most cells."""
    manager = KernelManager()
    manager.start_kernel(cwd=NOTEBOOKS[0].parent, env={**os.environ, "MPLBACKEND": "agg", FAST: "1"})
    yield manager
    manager.shutdown_kernel(now=True)


@every_notebook
@pytest.mark.filterwarnings("ignore")  # those of the machinery that runs notebooks
def test_it_runs_and_so_do_the_solutions(path: Path, kernel: KernelManager) -> None:
    notebook = read(path)
    forget, *solutions = map(nbformat.v4.new_code_cell, [FORGET, *CODE.findall(notebook.cells[-1].source)])
    notebook.cells = [forget, *notebook.cells, *solutions]
    client = NotebookClient(notebook, timeout=300, km=kernel)
    try:
        client.execute()
    finally:
        client.kc.stop_channels()


@every_notebook
def test_it_needs_the_package_and_its_records_alone(path: Path) -> None:
    """A notebook that is downloaded by itself runs; what 4 and 6 read lies beside them."""
    code = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "code")
    assert not re.search(r"^\s*(?:from|import) (?:studies|tests)\b", code, re.MULTILINE)


def test_a_first_lesson_without_geometry_is_offered() -> None:
    page = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    first = page.partition("\n|")[0]
    assert "(8_what_an_orbit_is_good_for.ipynb)" in first


@every_notebook
def test_its_outputs_are_those_of_one_run_without_complaint(path: Path) -> None:
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for output in outputs(cells):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text
        assert not ABSOLUTE.search(text(output)), text(output)
    assert path.stat().st_size < LARGEST


@every_notebook
def test_it_ends_with_exercises_and_a_folded_solution_to_each(path: Path) -> None:
    *_, last, solutions = read(path).cells
    title, *exercises = re.split(r"\n+\d\. ", last.source)
    assert title == "## Exercises"
    assert exercises
    assert FOLDED.findall(solutions.source) == [str(place + 1) for place in range(len(exercises))]


@every_notebook
def test_it_says_that_a_fast_run_differs(path: Path) -> None:
    first, *cells = read(path).cells
    if any(FAST in cell.source for cell in cells if cell.cell_type == "code"):
        assert FAST in first.source


@every_notebook
def test_words_follow_every_figure(path: Path) -> None:
    cells = read(path).cells
    drawn = [place for place, cell in enumerate(cells) if any(map(is_figure, outputs([cell])))]
    assert drawn
    assert {cells[place + 1].cell_type for place in drawn} == {"markdown"}


@every_notebook
def test_rows_of_a_table_have_as_many_cells_as_its_head(path: Path) -> None:
    """A bar inside a formula ends a cell too, and then there is no table: \\lvert and \\rvert do not."""
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            for table in TABLE.findall(cell.source):
                assert len({line.count("|") for line in table.splitlines()}) == 1, table


def test_they_are_numbered_in_order_and_listed() -> None:
    assert [path.name.partition("_")[0] for path in NOTEBOOKS] == list("123456789")
    page = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in NOTEBOOKS if f"]({path.name})" not in page] == []


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def outputs(cells: list[Any]) -> Iterator[Any]:
    return (output for cell in cells for output in cell.get("outputs", ()))


def is_figure(output: Any) -> bool:
    data = output.get("data", {})
    return any(kind.startswith("image/") for kind in data) or "<svg" in data.get("text/html", "")


def text(output: Any) -> str:
    """What an output says in words; no pictures."""
    data = {kind: value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")}
    return "\n".join(["".join(output.get("text", "")), *map(str, data.values())])
