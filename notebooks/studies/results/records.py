"""The records that the results are read from; one that is not there yet is None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from quotient_manifolds.compare import Comparison
from studies.ascents import Ascents
from studies.diagonal import DiagonalStudy
from studies.results.earlier import FOLDER, TITLES
from studies.results.settings import DiagonalZoo
from studies.toy import Toy
from studies.zoos.study import load_record


@final
@dataclass(frozen=True)
class Records:
    """Hold what the studies left in a folder. earlier: zoos whose code is gone, by key."""

    ascents: Ascents | None
    toy: Toy | None
    diagonal: DiagonalZoo | None
    earlier: Mapping[str, Comparison]

    @classmethod
    def load(cls, folder: Path) -> Records:
        """Read a folder. Raises ValueError if it is not there, or for a record that no study wrote."""
        if not folder.is_dir():
            raise ValueError(f"{folder} must be the folder of records that the studies wrote. Found no such folder")
        ascents, toy, diagonal = (folder / f"{name}.json" for name in ("ascents", "toy", "diagonal"))
        return cls(
            Ascents.load(ascents) if ascents.exists() else None,
            Toy.load(toy) if toy.exists() else None,
            DiagonalZoo(DiagonalStudy.load(diagonal)) if diagonal.exists() else None,
            {key: load_record(folder / FOLDER / key)[0] for key in TITLES if (folder / FOLDER / key).is_dir()},
        )
