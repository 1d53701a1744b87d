"""How much of the fibre of small models is found: of model types of Hugging Face, and of models written by hand."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import final

import torch

from quotient_manifolds.load import Certificate
from quotient_manifolds.progress import Progress
from quotient_manifolds.report import Table
from quotient_manifolds.version import VERSION
from studies.common import Saves, numbers, resume
from studies.fibres.cases import FAST, certificate, kind_of, names

SECONDS = 120.0  # of one model, at most


@final
@dataclass(frozen=True)
class Row:
    """Hold what the certificate of one model says, or why there is none.

    dimension: of the fibre; near: what only the eps of norms breaks. found: dimensions by family; shared: of them, what
    two families have in common. unreached: dimensions that no input reaches. missing: the rest of dimension, None under
    a doubt; places: how much of it lies in which parameters. outside: symmetries that hold on some inputs only. doubts:
    what speaks against the dimension.
    """

    name: str
    kind: str
    seconds: float
    failure: str = ""
    parameters: int = 0
    dimension: int = 0
    near: int | None = None
    found: dict[str, int] | None = None
    shared: int = 0
    unreached: int = 0
    missing: int | None = 0
    places: dict[str, float] | None = None
    outside: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Return whether what is found is all there is."""
        return not self.failure and self.missing == 0


@final
@dataclass(frozen=True)
class Fibres(Saves):
    """Hold all rows."""

    rows: tuple[Row, ...]
    command: str
    version: str
    torch: str
    transformers: str


def run(out: Path, *, fast: bool, command: str, progress: Progress) -> Fibres:
    """Certify all models and write OUT/fibres.json; OUT/rows holds one file for each, from which a run continues."""
    import transformers

    cells = {name: partial(_apart, name) for name in (FAST if fast else names())}
    rows = resume(out / "rows", Row, cells, what="fibres", progress=progress)
    found = Fibres(rows, command, VERSION, torch.__version__, transformers.__version__)
    found.save(out / "fibres.json")
    return found


def load(folder: Path) -> Fibres:
    """Read the record in a folder."""
    return Fibres.load(folder / "fibres.json")


def _apart(name: str) -> Row:
    """Return the row of a model from a process of its own, which is killed after `SECONDS`."""
    began = time.perf_counter()
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        try:
            row = pool.apply_async(row_of, (name,)).get(SECONDS)
        except multiprocessing.TimeoutError:
            row = _failed(name, f"no certificate within {SECONDS:g} seconds")
    return replace(row, seconds=round(time.perf_counter() - began, 1), kind=kind_of(name))


def row_of(name: str) -> Row:
    """Return the row of a model; a failure is part of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _row(name, certificate(name))
    except Exception as error:  # of any model
        return _failed(name, " ".join(f"{type(error).__name__}: {error}".split()))


def _failed(name: str, why: str) -> Row:
    return Row(name, "", 0.0, failure=why)


def _row(name: str, found: Certificate) -> Row:
    return Row(
        name=name,
        kind="",
        seconds=0.0,
        parameters=found.fibre.parameters,
        dimension=found.fibre.dimension,
        near=found.fibre.near,
        found=dict(found.found.families),
        shared=found.shared,
        unreached=found.unreached,
        missing=found.missing,
        places=dict(found.places),
        outside=found.outside,
        doubts=found.fibre.doubts,
    )


def tables(found: Fibres) -> list[Table]:
    """Return the counts by kind of model, what is not found, and a row for every model."""
    kinds = dict.fromkeys(row.kind for row in found.rows)
    groups = {kind: [row for row in found.rows if row.kind == kind and not row.failure] for kind in kinds}
    groups["all"] = [row for row in found.rows if not row.failure]
    counts = [
        [
            kind,
            f"{sum(row.equal for row in rows)} of {len(rows)}",
            f"{sum(row.dimension for row in rows):,}",
            f"{sum(row.missing or 0 for row in rows):,}",
        ]
        for kind, rows in groups.items()
    ]
    missing = [[row.name, f"{row.missing}", f"{row.dimension:,}"] for row in found.rows if row.missing]
    models = [[row.name, *_numbers(row), _families(row), _doubts(row)] for row in found.rows]
    columns = ["Model", "Parameters", "Fibre", "Near", "Found", "Not reached", "Not found", "By family", "Doubts"]
    return [
        numbers("counts", "", ["Kind", "Complete", "Dimensions", "Not found"], counts),
        numbers("missing", "", ["Model", "Not found", "Of"], missing),
        Table("models", "", columns, models, [False, *[True] * 6, False, False]),
    ]


def _numbers(row: Row) -> list[str]:
    if row.failure:
        return [""] * 6
    found = sum((row.found or {}).values()) - row.shared
    counts = (row.parameters, row.dimension, row.near, found, row.unreached, row.missing)
    return ["?" if number is None else str(number) for number in counts]


def _families(row: Row) -> str:
    twice = [f"twice {-row.shared}"] if row.shared else []
    return ", ".join([*(f"{name} {size}" for name, size in (row.found or {}).items()), *twice])


def _doubts(row: Row) -> str:
    outside = (f"{name} holds on some inputs only" for name in row.outside)
    return row.failure or "; ".join([*row.doubts, *outside])
