"""Write results as flat rows, data frames and files that others read."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from quotient_manifolds.compare.unit import Unit
from quotient_manifolds.files import whole
from quotient_manifolds.frames import data_frame

if TYPE_CHECKING:
    import pandas as pd

IDENTITY = ("key", "checkpoint", "measure", "geometry", "radius", "batch")


@final
@dataclass(frozen=True)
class Result:
    """Hold a finished unit, its payload, and the seconds of wall time it took."""

    unit: Unit
    payload: Mapping[str, Any]
    seconds: float


def rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a flat row for each result: identity, `settings.NAME`, seconds, and the payload under its own names.

    Objects inside are flattened with dots; lists are JSON text; every row has the same columns, None where it has no
    such value. A payload's name that is taken by an identity column stands as `payload.NAME`.
    """
    flat = [_row(result) for result in results]
    columns = dict.fromkeys(name for row in flat for name in row)
    return [{name: row.get(name) for name in columns} for row in flat]


def frame(results: Sequence[Result]) -> pd.DataFrame:
    """Return `rows` as a data frame. Raises ImportError without pandas.

    A column of numbers is numeric (whole ones stay whole beside missing values), one that mixes kinds is JSON text.
    """
    return data_frame(rows(results), [*IDENTITY, "seconds"])


def export(results: Sequence[Result], path: Path) -> None:
    """Write .csv (of `rows`), .parquet (of `frame`) or .json (a list of objects, nested as they were kept).

    Floats survive every one of them bit for bit; in .csv None and empty text are both empty. The file is written beside
    and moved, so nobody meets half of it. Raises ValueError for another suffix, ImportError where pandas or pyarrow is
    missing.
    """
    writers: dict[str, Callable[[Sequence[Result], Path], None]] = {
        ".csv": _write_csv,
        ".parquet": _write_parquet,
        ".json": _write_json,
    }
    if path.suffix.lower() not in writers:
        raise ValueError(f"Results are exported as {', '.join(writers)}. Found {path.name!r}")
    with whole(path) as unfinished:
        writers[path.suffix.lower()](results, unfinished)


def _row(result: Result) -> dict[str, Any]:
    identity = {name: getattr(result.unit, name) for name in IDENTITY}
    settings = dict(_flat(result.unit.settings, "settings."))
    own = identity | {"seconds": result.seconds} | settings
    payload = {f"payload.{name}" if name in own else name: value for name, value in _flat(result.payload, "")}
    return identity | settings | payload | {"seconds": result.seconds}


def _flat(mapping: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value


def _write_csv(results: Sequence[Result], path: Path) -> None:
    table = rows(results)
    with path.open("w", encoding="utf-8", newline="") as file:
        names = list(table[0]) if table else [*IDENTITY, "seconds"]
        writer = csv.DictWriter(file, fieldnames=names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


def _write_json(results: Sequence[Result], path: Path) -> None:
    records = [{**asdict(result.unit), "payload": result.payload, "seconds": result.seconds} for result in results]
    path.write_text(json.dumps(records, ensure_ascii=False, allow_nan=False, indent=1) + "\n", encoding="utf-8")


def _write_parquet(results: Sequence[Result], path: Path) -> None:
    table = frame(results)
    try:
        table.to_parquet(path, engine="pyarrow", index=False)
    except ImportError as error:
        raise ImportError(
            'Parquet is written by pyarrow, which is not installed: pip install "quotient-manifolds[compare]", '
            "or export to .csv or .json."
        ) from error
