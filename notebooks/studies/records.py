"""Records of studies: frozen dataclasses that survive a trip through JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from quotient_manifolds.files import write_text

Record = TypeVar("Record")


def save_record(path: Path, record: Any) -> None:
    """Write a dataclass as JSON, whole or not at all; a number that is not finite is an error."""
    write_text(path, json.dumps(asdict(record), indent=1, allow_nan=False) + "\n")


def read_record(kind: type[Record], path: Path) -> Record:
    """Return what `save_record` wrote. Raises ValueError for anything else."""
    return from_json(kind, json.loads(path.read_text(encoding="utf-8")))


def from_json(kind: type[Record], record: Any) -> Record:
    """Return the dataclass of which `record` is what JSON made of it: lists where there were tuples."""
    return TypeAdapter(kind).validate_python(record)
