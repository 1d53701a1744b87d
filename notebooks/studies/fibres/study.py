"""How much of the fibre of small models is found: of model types of Hugging Face, and of models written by hand."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from functools import partial
from pathlib import Path

import torch

from quotient_manifolds.messages import Progress
from studies.common import Record, Tables, read_record, resume, table, write_record
from studies.fibres.cases import FAST, certificate, kind_of, names

SECONDS = 120.0  # of one model, at most


def run(out: Path, *, fast: bool, command: str, progress: Progress) -> Record:
    """Certify all models and write OUT/fibres.json; OUT/rows holds one file for each, from which a run continues."""
    import transformers

    cells = {name: partial(_apart, name) for name in (FAST if fast else names())}
    rows = resume(out / "rows", cells, what="fibres", progress=progress)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return write_record(out / "fibres.json", {"rows": rows, **versions}, command)


def load(folder: Path) -> Record:
    """Read the record in a folder."""
    return read_record(folder / "fibres.json")


def _apart(name: str) -> Record:
    """Return the row of a model from a process of its own, which is killed after `SECONDS`."""
    began = time.perf_counter()
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        try:
            row = pool.apply_async(row_of, (name,)).get(SECONDS)
        except multiprocessing.TimeoutError:
            row = {"name": name, "failure": f"no certificate within {SECONDS:g} seconds"}
    return {"kind": kind_of(name), "seconds": round(time.perf_counter() - began, 1), **row}


def row_of(name: str) -> Record:
    """Return what the certificate of a model says, or why there is none (failure).

    dimension: of the fibre; near: what only the eps of norms breaks. found: dimensions by family; shared: of them, what
    two families have in common. unreached: dimensions that no input reaches. missing: the rest of dimension, None under
    a doubt; places: how much of it lies in which parameters. outside: symmetries that hold on some inputs only. doubts:
    what speaks against the dimension.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = certificate(name)
    except Exception as error:  # of any model
        return {"name": name, "failure": " ".join(f"{type(error).__name__}: {error}".split())}
    return {
        "name": name,
        "failure": "",
        "parameters": found.fibre.parameters,
        "dimension": found.fibre.dimension,
        "near": found.fibre.near,
        "found": dict(found.found.families),
        "shared": found.shared,
        "unreached": found.unreached,
        "missing": found.missing,
        "places": dict(found.places),
        "outside": found.outside,
        "doubts": found.fibre.doubts,
    }


def tables(record: Record) -> Tables:
    """Return the counts by kind of model, what is not found, and a row for every model."""
    rows = record["rows"]
    counted = [row for row in rows if not row["failure"]]
    groups = {kind: [row for row in counted if row["kind"] == kind] for kind in dict.fromkeys(r["kind"] for r in rows)}
    counts = [
        [
            kind,
            f"{sum(row['missing'] == 0 for row in own)} of {len(own)}",
            *(f"{sum(row[each] or 0 for row in own):,}" for each in ("dimension", "missing")),
        ]
        for kind, own in {**groups, "all": counted}.items()
    ]
    missing = [[row["name"], str(row["missing"]), f"{row['dimension']:,}"] for row in counted if row["missing"]]
    columns = ["Model", "Parameters", "Fibre", "Near", "Found", "Not reached", "Not found", "By family", "Doubts"]
    return {
        "counts": table(["Kind", "Complete", "Dimensions", "Not found"], counts),
        "missing": table(["Model", "Not found", "Of"], missing),
        "models": table(columns, [_model(row) for row in rows]),
    }


def _model(row: Record) -> list[str]:
    if row["failure"]:
        return [row["name"], *[""] * 7, row["failure"]]
    found = sum(row["found"].values()) - row["shared"]
    counts = (row["parameters"], row["dimension"], row["near"], found, row["unreached"], row["missing"])
    families = [f"{name} {size}" for name, size in row["found"].items()]
    twice = [f"twice {-row['shared']}"] if row["shared"] else []
    doubts = [*row["doubts"], *(f"{name} holds on some inputs only" for name in row["outside"])]
    said = ["?" if number is None else str(number) for number in counts]
    return [row["name"], *said, ", ".join([*families, *twice]), "; ".join(doubts)]
