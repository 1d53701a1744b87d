"""Trained models on disk: each in a directory that is complete or not there, trained once."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quotient_manifolds.files import write_text


@dataclass(frozen=True)
class Scores:
    """Mean cross-entropy (nats) and share of wrong answers, on training and on test examples."""

    train_loss: float
    train_error: float
    test_loss: float
    test_error: float

    @property
    def error_gap(self) -> float:
        return self.test_error - self.train_error

    @property
    def loss_gap(self) -> float:
        return self.test_loss - self.train_loss


def kept_scores(directory: Path, made_by: Mapping[str, Any]) -> Scores | None:
    """Those of the model in `directory`, if it is complete, made by this, and its weights are those that were scored.

    made_by: JSON, everything that decides the weights and that the name of the directory does not say.
    """
    try:
        record = json.loads((directory / "training.json").read_text(encoding="utf-8"))
        alike = all(record[key] == value for key, value in made_by.items())
        return Scores(**record["scores"]) if alike and record["weights_sha256"] == digest(directory) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(directory: Path, made_by: Mapping[str, Any], make: Callable[[Path], Scores], *, work: Path) -> Scores:
    """Calls `make`, which writes a model to an empty folder in `work` and scores it; when complete, it is moved.

    So `directory` is never half-written.
    """
    unfinished = work / f".unfinished-{directory.name}-{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        scores = make(unfinished)
        record = {**made_by, "scores": asdict(scores), "weights_sha256": digest(unfinished)}
        (unfinished / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        directory.parent.mkdir(parents=True, exist_ok=True)
        if directory.exists() and kept_scores(directory, made_by) is None:
            shutil.rmtree(directory)  # damaged; if it reads now, another process finished the same model meanwhile
        if not directory.exists():
            os.replace(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return scores


def digest(directory: Path) -> str:
    """A hash of a model's configuration and weights."""
    files = [directory / "config.json", directory / "model.safetensors"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows with the same keys, as CSV."""
    text = io.StringIO()
    every = list(rows)
    writer = csv.DictWriter(text, fieldnames=list(every[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(every)
    write_text(path, text.getvalue())


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one CPU thread.

    Tensors this small gain little from more, lose up to tenfold where other programs keep the cores busy, and round
    differently with every number of threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
