"""The records that the results are read from; one that is not there yet is None."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

from studies.ascents import Ascents
from studies.diagonal import DiagonalStudy
from studies.results.settings import DiagonalZoo
from studies.results.zoos import ModelZoo
from studies.toy import Toy
from studies.zoos.study import load_record


@final
@dataclass(frozen=True)
class Records:
    """Hold what the studies left in a folder."""

    ascents: Ascents | None
    toy: Toy | None
    diagonal: DiagonalZoo | None
    vit: ModelZoo | None
    bert: ModelZoo | None

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
            _models(folder, "vit"),
            _models(folder, "bert"),
        )

    @cached_property
    def zoos(self) -> dict[str, ModelZoo | None]:
        return {"vit": self.vit, "bert": self.bert}


def _models(folder: Path, key: str) -> ModelZoo | None:
    return ModelZoo(key, load_record(folder / key)[0]) if (folder / key).is_dir() else None
