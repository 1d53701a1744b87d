"""Measure the finder of symmetries, row by row: what it finds, what is false, and the cost.

    python -m tests.symmetries.side_by_side --set nets kinds --out table.csv --processes 2
    python -m tests.symmetries.side_by_side --set programs --first 300 --redo --out table.csv
    python -m tests.symmetries.side_by_side --set nets --only "rms.*" --every 3 --out some.csv
    python -m tests.symmetries.side_by_side --summary --out table.csv

Rows that the table has are not made again, so a run goes on where it was stopped. Columns that begin with "old" are a
record of the finder before this one, which is gone; those that begin with "new" are made here:

| column | what it is |
|---|---|
| kernel | parameters minus the rank of the Jacobian, the dimension of the fibre; none for large models |
| found | the rank of all tangents; the sum of dimensions for large models |
| false | the largest relative change of outputs on unseen inputs after one random move by all symmetries |
| worst | the input on which it is largest, if it is no rounding |
| refused | how many symmetries were looked at and refused |
| passes | seconds over those of a forward and backward pass of the batch |
| gap | the largest charge that was kept and the smallest that was refused, as the finder tells it |
| more | dimensions that this finder finds and the one before did not |
"""

from __future__ import annotations

import argparse
import csv
import math
import multiprocessing
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import Pool
from pathlib import Path
from queue import SimpleQueue
from statistics import median, quantiles
from typing import Any

import torch
from rich.progress import track
from torch import nn

from quotient_manifolds.symmetries import find_symmetries
from tests.nets.sets import SETS, chosen
from tests.symmetries.finders import Row, kernel, measured

COLUMNS = (
    *("set", "name", "parameters", "kernel", "old_found", "old_false", "old_worst", "old_seconds", "old_refused"),
    *("new_found", "new_false", "new_worst", "new_seconds", "new_refused", "new_passes", "new_gap", "more"),
    *("old_error", "new_error"),
)


# ---- rows


def row_of(each: str, name: str, doubted: bool) -> Row:
    """Return the columns of a model, if `doubted` that of its kernel, too; what the finder raises is a column."""
    row: Row = {"set": each, "name": name}
    try:
        example = SETS[each].make(name)
        row["parameters"] = sum(w.numel() for w in example.model.parameters() if w.requires_grad)
        row |= {f"new_{column}": _short(value) for column, value in measured(example).items()}
    except Exception as error:  # of any model
        row["new_error"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if doubted and "parameters" in row:
        row["kernel"] = kernel(example)
    return row


def _short(value: Any) -> Any:
    return f"{value:.3g}" if isinstance(value, float) else value


class Worker:
    """A process of its own that makes rows, one after another, and is killed where one takes more than `limit`."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.pool: Pool | None = None

    def row(self, each: str, name: str, doubted: bool) -> Row:
        """Return the columns of a model."""
        if self.pool is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["tests.symmetries.finders"])
            self.pool = context.Pool(1, warm_up)
        try:
            return self.pool.apply_async(row_of, (each, name, doubted)).get(self.limit)
        except multiprocessing.TimeoutError:
            self.close()
            return {"set": each, "name": name, "new_error": f"no answer within {self.limit:g} seconds"}

    def close(self) -> None:
        """End the process."""
        if self.pool is not None:
            self.pool.terminate()
            self.pool = None


def warm_up() -> None:
    """Import what is imported at first use: it is no cost of a row."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    find_symmetries(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).eval(), torch.randn(2, 2))


# ---- the table


class Table:
    """Rows by set and name, written to a file whenever one is added."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, dict[tuple[str, str], Row]()
        if path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                self.rows = {(row["set"], row["name"]): row for row in csv.DictReader(file)}

    def has(self, key: tuple[str, str]) -> bool:
        row = self.rows.get(key, {})
        return bool(row.get("new_seconds") or row.get("new_error"))

    def add(self, row: Row) -> None:
        """Put columns of a row in the place of what they were; more stands if both finders have found something."""
        key = row["set"], row["name"]
        kept = {name: v for name, v in self.rows.get(key, {}).items() if not name.startswith("new_")}
        row = dict.fromkeys(COLUMNS, "") | kept | row
        both = [row[f"{each}_found"] for each in ("new", "old")]
        row["more"] = "" if "" in both else int(both[0]) - int(both[1])
        self.rows[key] = row

    def write(self) -> None:
        order = [*SETS]
        rows = sorted(self.rows.values(), key=lambda row: order.index(row["set"]))
        written = self.path.with_suffix(".part")
        with written.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        written.replace(self.path)

    def summary(self) -> Iterator[str]:
        """Yield a line for each set: totals of rows, dimensions and false ones, and seconds (median, nine of ten)."""
        columns = ("set", "rows", "kernel", "old", "new", "fewer in", "false old", "false new", "errors", "seconds")
        yield "| " + " | ".join(columns) + " |"
        yield "|---" * len(columns) + "|"
        for each in dict.fromkeys(key[0] for key in self.rows):
            rows = [row for row in self.rows.values() if row["set"] == each]
            known = [row for row in rows if row["kernel"] != ""]
            fewer = [row for row in rows if row["more"] != "" and int(row["more"]) < 0]
            both = (self._of(rows, finder, SETS[each].close) for finder in ("old", "new"))
            found, false, errors, seconds = zip(*both, strict=True)
            cells = [each, len(rows), f"{_total(known, 'kernel')} in {len(known)}", *found]
            cells += [f"{len(fewer)} ({_total(fewer, 'more')})", *false]
            yield "| " + " | ".join(map(str, [*cells, "; ".join(errors), "; ".join(seconds)])) + " |"

    def _of(self, rows: Sequence[Row], finder: str, close: float) -> tuple[int, int, str, str]:
        seconds = [float(row[f"{finder}_seconds"]) for row in rows if row[f"{finder}_seconds"] != ""]
        false = [row for row in rows if row[f"{finder}_false"] != "" and not float(row[f"{finder}_false"]) < close]
        errors = sum(row[f"{finder}_error"] != "" for row in rows)
        tenth = quantiles(seconds, n=10)[-1] if len(seconds) > 1 else math.nan
        times = f"{finder} {median(seconds):.2f}, {tenth:.2f}" if seconds else f"{finder} none"
        return _total(rows, f"{finder}_found"), len(false), f"{finder} {errors}", times


def _total(rows: Sequence[Row], column: str) -> int:
    return sum(int(row[column]) for row in rows if row[column] != "")


def main(argv: Sequence[str] | None = None) -> None:
    """Make the rows that the table lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", nargs="+", choices=[*SETS], default=[*SETS][:6], help="default: all but breadth")
    parser.add_argument("--only", nargs="+", default=(), help="regular expressions of names")
    parser.add_argument("--first", type=int, help="of each set, so many models")
    parser.add_argument("--every", type=int, default=1, help="of each set, every so many-th model")
    parser.add_argument("--redo", action="store_true", help="make columns again that the table has")
    parser.add_argument("--seconds", type=float, default=300, help="for a row, at most")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--summary", action="store_true", help="print totals, and run nothing")
    given = parser.parse_args(argv)
    table = Table(given.out)
    if not given.summary:
        run(table, given)
    print("\n".join(table.summary()))


def run(table: Table, given: argparse.Namespace) -> None:
    """Make rows in processes, and write each as soon as it is there."""
    keys = [key for key in chosen(given.set, given.only, given.every, given.first) if given.redo or not table.has(key)]
    wanted = [(*key, not table.rows.get(key, {}).get("kernel")) for key in keys]
    workers, free = [Worker(given.seconds) for _ in range(given.processes)], SimpleQueue[Worker]()
    for worker in workers:
        free.put(worker)

    def made(one: tuple[str, str, bool]) -> Row:
        worker = free.get()
        try:
            return worker.row(*one)
        finally:
            free.put(worker)

    try:
        with ThreadPoolExecutor(given.processes) as threads:
            rows = track(threads.map(made, wanted), "rows", total=len(wanted))
            for row in rows:
                table.add(row)
                table.write()
    finally:
        for worker in workers:
            worker.close()


if __name__ == "__main__":
    main()
