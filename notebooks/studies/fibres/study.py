"""Certify model after model, each in a process of its own and within a time limit, and go on where a run stopped."""

from __future__ import annotations

import multiprocessing
import re
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import final

import torch

from quotient_manifolds.load import Certificate
from quotient_manifolds.progress import Progress
from quotient_manifolds.version import VERSION
from studies.records import read_record, save_record

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
class Fibres:
    """Hold all rows; `save` and `load` are inverse to each other."""

    rows: tuple[Row, ...]
    command: str
    version: str
    torch: str
    transformers: str

    def save(self, path: Path) -> None:
        save_record(path, self)

    @classmethod
    def load(cls, path: Path) -> Fibres:
        return read_record(cls, path)


def study_fibres(out: Path, models: Sequence[str], *, command: str = "", progress: Progress | None = None) -> Fibres:
    """Certify the models of these names; OUT/rows holds one file for each that is done, by which a run goes on."""
    import transformers

    folder = out / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for index, name in enumerate(models):
        if progress is not None:
            progress(f"fibres, {name}", index, len(models))
        path = folder / f"{re.sub(r'[^a-z0-9]+', '_', name.lower())}.json"
        if not path.exists():
            save_record(path, _apart(name))
        rows.append(read_record(Row, path))
    if progress is not None:
        progress("fibres", len(models), len(models))
    return Fibres(tuple(rows), command, VERSION, torch.__version__, transformers.__version__)


def _apart(name: str) -> Row:
    """Return the row of a model from a process of its own, which is ended when its time is over."""
    from studies.fibres.cases import kind_of

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["studies.fibres.cases", "transformers"])
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_row, args=(name, theirs))
    began = time.perf_counter()
    process.start()
    theirs.close()
    try:
        row: Row = mine.recv() if mine.poll(SECONDS) else _failed(name, f"it takes longer than {SECONDS:g} seconds")
    except EOFError:
        row = _failed(name, "its process ended")
    finally:
        process.kill()
        process.join()
    return Row(**{**vars(row), "seconds": round(time.perf_counter() - began, 1), "kind": kind_of(name)})


def _send_row(name: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pipe.send(row_of(name))


def row_of(name: str) -> Row:
    """Return the row of a model, computed here; a failure is told in it."""
    from studies.fibres.cases import certificate

    try:
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
