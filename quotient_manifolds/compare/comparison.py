"""Hold the results of a comparison in five tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from quotient_manifolds.files import write_text
from quotient_manifolds.sharpness.ascent import KEPT
from quotient_manifolds.sharpness.result import CONVERGED
from quotient_manifolds.statistics import FEW_MODELS, Correlation, Kind, tau_deviation

FORMAT = 3  # the version of comparison.json
NUMBERS = {  # columns of numbers, by table: missing numbers are NaN, also if a whole column is missing
    "measures": ("radius",),
    "values": ("mean", "standard_error", "batches", "seconds", "reach", "relative_gap", "promise_kept"),
    "rankings": ("value", "low", "high", "p_value", "p_holm"),
}
COLUMNS = {
    "values": ("checkpoint", "label", *NUMBERS["values"], "beyond_reach", "not_converged", "rounded"),
    "rankings": ("measure", "against", "given", *(each.name for each in fields(Correlation)), "p_holm"),
    "failures": ("checkpoint", "what", "message"),
}
TABLES = ("measures", "scores", *COLUMNS)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Hold the results of a comparison; `save` and `load` are inverse to each other.

    - measures, by label: `measure`, `geometry`, `radius` (NaN: none), `family` (the label without the radius), the
      settings of the geometry as `geometry.NAME`, and all other settings as `settings.NAME`.
    - scores, by checkpoint: a column for each score.
    - values, a row for each measure of a checkpoint that is known on all batches: `checkpoint`, `label`, `mean` over
      batches, its `standard_error` (NaN for a deterministic measure on one batch), the number of `batches`, the
      `seconds` they took, `reach` (the largest relative speed of truncated geodesics), `beyond_reach` (whether, on some
      batch, truncated geodesics may be far from exact ones), `relative_gap` (the share of the increase that one more
      step of the ascent promises), `promise_kept` (the smallest increase over radius times gradient norm),
      `not_converged` (by one of these two, the maximum may be larger), `rounded` (the loss changes so little that
      rounding may dominate).
    - rankings, a row for each correlation of a `measure` with a score (`against`): `given` (the hyperparameter held
      fixed, "" for none), the fields of `Correlation`, and `p_holm`, the p-value corrected by Holm's method over all
      correlations of its kind. Partial correlations are a kind of their own.
    - failures: `checkpoint`, `what` could not be measured ("": anything), and the `message`.

    notes: caveats to the numbers, such as how many texts were truncated. command: the command that repeats the
    comparison. measured_now: the number of values (measure and batch) that the call itself measured; not saved.
    """

    spec: str
    version: str
    command: str
    measures: pd.DataFrame
    scores: pd.DataFrame
    values: pd.DataFrame
    rankings: pd.DataFrame
    failures: pd.DataFrame
    notes: tuple[str, ...] = ()
    measured_now: int = 0

    @property
    def labels(self) -> list[str]:
        """Return the labels of all measures."""
        return list(self.measures.index)

    @property
    def known(self) -> tuple[int, int]:
        """Return the number of known values (a measure of a checkpoint), and the number of all values."""
        return len(self.values), len(self.scores) * len(self.measures)

    def frame(self, column: str = "mean") -> pd.DataFrame:
        """Return a row for each checkpoint: its scores, then one column of `values` for each measure; NaN: unknown."""
        wide = self.values.pivot(index="checkpoint", columns="label", values=column)
        return self.scores.join(wide.reindex(index=self.scores.index, columns=pd.Index(self.labels)))

    def ranking(self, kind: Kind = "kendall-b") -> pd.DataFrame:
        """Return the correlations of one kind, without partial correlations."""
        return self.rankings[(self.rankings["kind"] == kind) & (self.rankings["given"] == "")]

    @property
    def asked(self) -> pd.DataFrame:
        """Return the rows of `rankings` that decide: Kendall's partial coefficients, or the plain ones without them."""
        kendall = self.rankings[self.rankings["kind"] == "kendall-b"]
        partial = kendall[kendall["given"] != ""]
        return partial if len(partial) else kendall

    @property
    def cautions(self) -> list[str]:
        """Return a sentence for each reason to read some values, or correlations, with care."""
        said: list[str] = []
        for label in self.labels:
            values = self.values[self.values["label"] == label]
            reach = values["reach"][values["beyond_reach"]]
            problems = {
                f"not converged (one more step promises over {CONVERGED:.0%} of the increase, or it is under "
                f"{KEPT:.0%} of radius times gradient norm, so maxima may be larger): take more steps, a smaller "
                "radius, or restarts": values["not_converged"].sum(),
                f"beyond the reach of truncated geodesics (relative speed up to {reach.max():.3g}): take a smaller "
                "radius, or geodesic: exact": len(reach),
                "near rounding: take a larger radius, or dtype: float64": values["rounded"].sum(),
            }
            said += [f"{label}, {some} of {len(values)} values {words}." for words, some in problems.items() if some]
        defined = self.rankings[self.rankings["value"].notna()]
        if (fewest := defined["models"].min()) < FEW_MODELS:
            deviation = f"tau has standard deviation {tau_deviation(int(fewest)):.2f} under the null hypothesis"
            said.append(f"Correlations over few models: with {fewest:g} models, {deviation}.")
        return said

    def failure_groups(self) -> list[tuple[str, str, str]]:
        """Return checkpoints, what failed on them ("": all), and why; failures with one reason form one group."""
        by_checkpoint = self.failures.groupby(["checkpoint", "message"], sort=False)["what"].agg("; ".join)
        groups = by_checkpoint.reset_index().groupby(["what", "message"], sort=False)["checkpoint"].agg(list)
        return [(listing(names), what, why) for (what, why), names in groups.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON; `from_dict` is the inverse."""
        record = {"format": FORMAT, "spec": self.spec, "version": self.version, "command": self.command}
        frames = {name: getattr(self, name) for name in TABLES}
        tables = {
            name: {"name": frame.index.name, **frame.astype(object).where(frame.notna(), None).to_dict("split")}
            for name, frame in frames.items()
        }
        return {**record, **tables, "notes": list(self.notes)}

    def save(self, path: str | Path) -> None:
        """Write comparison.json, atomically."""
        write_text(Path(path), json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """Read comparison.json, given by its path or its directory. Raises ValueError for any other file."""
        file = Path(path) / "comparison.json" if Path(path).is_dir() else Path(path)
        try:
            return cls.from_dict(json.loads(file.read_text(encoding="utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{file} must hold a comparison. Found {type(error).__name__}: {error}") from error

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Comparison:
        """Return the comparison from `record`, the content of comparison.json. Raises ValueError for another format."""
        if record.get("format") != FORMAT:
            raise ValueError(f"A comparison must be of format {FORMAT}. Found {record.get('format')!r}; compare again")
        tables = {name: _table(name, **record[name]) for name in TABLES}
        return cls(record["spec"], record["version"], record["command"], **tables, notes=tuple(record["notes"]))


def listing(names: Sequence[str], most: int = 3) -> str:
    """Return the names in one line; only the first `most`, and a count, if there are more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def table(name: str, rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return the rows as a table of a comparison; it has all columns even without rows."""
    frame = pd.DataFrame(list(rows), columns=list(COLUMNS[name]))
    return frame.astype(dict.fromkeys(NUMBERS.get(name, ()), "float64"))


def _table(table: str, name: str | None, index: list[Any], columns: list[str], data: list[list[Any]]) -> pd.DataFrame:
    """Return a table from `to_dict`: numbers as float64, flags as bool, other columns as pandas infers them."""
    kind = object if table == "measures" else None  # integers stay integers in columns with missing settings
    cells = [[math.nan if cell is None else cell for cell in row] for row in data]
    names = None if name is None else pd.Index(index, name=name)
    frame = pd.DataFrame(cells, index=names, columns=columns, dtype=kind)
    empty = [column for column in frame if table == "scores" and frame[column].isna().all()]
    return frame.astype(dict.fromkeys((*NUMBERS.get(table, ()), *empty), "float64"))
