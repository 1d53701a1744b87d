"""The records that the results are read from; one that is not there yet is None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from quotient_manifolds.compare import Comparison
from studies.ascents import Ascents
from studies.diagonal import DiagonalStudy
from studies.records import read_record
from studies.results.earlier import FOLDER, TITLES
from studies.results.settings import DiagonalZoo
from studies.results.transformers import mnist_zoo, sentiment_zoo
from studies.results.zoo_tables import Zoo
from studies.toy import Toy
from studies.zoos.convergence import Convergence
from studies.zoos.study import COMPARISON, load_record

ZOOS = ("mnist", "sentiment")


@final
@dataclass(frozen=True)
class Records:
    """Hold what the studies left in a folder.

    mnist: the zoo of vision transformers. sentiment: the BERTs that differ by seed alone, and those of a design.
    converged: how far their ascents had come, by zoo. earlier: zoos whose code is gone, by key.
    """

    ascents: Ascents | None
    toy: Toy | None
    diagonal: DiagonalZoo | None
    mnist: Zoo | None
    sentiment: tuple[Zoo, Zoo] | None
    converged: Mapping[str, Convergence]
    earlier: Mapping[str, Comparison]

    @classmethod
    def load(cls, folder: Path) -> Records:
        """Read a folder. Raises ValueError if it is not there, or for a record that no study wrote."""
        if not folder.is_dir():
            raise ValueError(f"{folder} must be the folder of records that the studies wrote. Found no such folder")
        mnist, sentiment = (_zoo(folder / key) for key in ZOOS)
        converged = {key: folder / key / "convergence.json" for key in ZOOS}
        ascents, toy, diagonal = (folder / f"{name}.json" for name in ("ascents", "toy", "diagonal"))
        return cls(
            Ascents.load(ascents) if ascents.exists() else None,
            Toy.load(toy) if toy.exists() else None,
            DiagonalZoo(DiagonalStudy.load(diagonal)) if diagonal.exists() else None,
            None if mnist is None else mnist_zoo(mnist),
            None if sentiment is None else (sentiment_zoo(sentiment, "seeds"), sentiment_zoo(sentiment, "settings")),
            {key: read_record(Convergence, file) for key, file in converged.items() if file.exists()},
            {key: load_record(folder / FOLDER / key)[0] for key in TITLES if (folder / FOLDER / key).is_dir()},
        )


def _zoo(folder: Path) -> Comparison | None:
    return load_record(folder)[0] if (folder / COMPARISON).exists() else None
