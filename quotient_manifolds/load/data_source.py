"""Describe where batches come from: labelled text, text for a language model, or images in arrays."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.check import check_integer, check_one_of
from quotient_manifolds.files import expanded
from quotient_manifolds.load.huggingface import has_tokenizer, tokenizer_files
from quotient_manifolds.load.images import check_channels, figures, prepared, read_images, read_labels
from quotient_manifolds.load.models import Checkpoint, call_object, load_object
from quotient_manifolds.load.text import (
    COLUMNS,
    PLAIN,
    SUFFIXES,
    Batches,
    Labels,
    class_of,
    drawn,
    known_classes,
    read_examples,
)
from quotient_manifolds.load.tokens import CAUSAL, CLASSIFICATION, TextEncoder, causal_batches, check_task, encoded
from quotient_manifolds.symmetries.example_inputs import accepted_by

SETTINGS = {"text": ("max_length", "tokenizer", "columns", "task"), "npz": ("mean", "std")}  # that mean something there


@dataclass(frozen=True)
class DataSource:
    """Describe the batches that a zoo is measured on: the first rows of a data set, or some drawn at random by a seed.

    path: a .jsonl, .csv or .tsv file of text, or a .npz file with the arrays `images` and `labels`. max_batches: that
    many batches of batch_size, the last possibly smaller; all if None. max_examples: so many examples at most. labels:
    the model's class of each label in the data, {"entailment": 1, ...}.

    task: what a model of text predicts: a label ("classification"), or tokens ("causal"): a language model's text
    needs no labels and may be in a .txt file, see `causal_batches`.

    Text: max_length tokens (128, or the positions the model has, if fewer); tokenizer: a directory in place of the
    checkpoint's; columns: what text, text_pair and label are called in the file. Images: mean and std for each channel
    of values in 0 ... 1, or mean = "clip", "imagenet" or "none" (values as they are).

    Raises ValueError for a setting that is out of range or means nothing for the data.
    """

    path: str | Path
    batch_size: int = 32
    max_batches: int | None = None
    seed: int | None = None
    labels: Labels | None = None
    max_length: int | None = None
    tokenizer: str | Path | None = None
    columns: Mapping[str, str] | None = None
    mean: Sequence[float] | float | str | None = None
    std: Sequence[float] | float | None = None
    max_examples: int | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        suffix = expanded(self.path).suffix.lower()
        if suffix not in (*SUFFIXES, ".npz"):
            raise ValueError(f"Data must be in a {', '.join(SUFFIXES)} or .npz file. Found {self.path}.")
        for name in ("batch_size", "max_batches", "max_examples", "max_length", "seed"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0 if name == "seed" else 1)
        for name in ("labels", "columns"):
            if not isinstance(getattr(self, name), Mapping | None):
                raise ValueError(f"{name} must be a mapping. Found {getattr(self, name)!r}.")
        if self.task is not None:
            check_one_of("task", self.task, (CLASSIFICATION, CAUSAL))
        for name in SETTINGS["npz" if self.kind == "text" else "text"]:
            if getattr(self, name) is not None:
                raise ValueError(f"{name} means nothing for data of the format {self.kind}: {self.path}. Leave it out.")
        if suffix == PLAIN and (self.task != CAUSAL or self.columns is not None):
            raise ValueError(f"A .txt file has no labels and no columns: set the task {CAUSAL} (--task {CAUSAL}).")
        if self.task == CAUSAL and self.labels is not None:
            raise ValueError(f"labels mean nothing for the task {self.task}; leave them out.")
        if unknown := sorted(set(self.columns or ()) - set(COLUMNS)):
            raise ValueError(f"columns must name some of {', '.join(COLUMNS)}. Found {unknown[0]!r}.")
        figures(self.mean, self.std)

    @property
    def kind(self) -> str:
        """Return what the name of the path says: "text" or "npz"."""
        return "npz" if Path(self.path).suffix.lower() == ".npz" else "text"

    def batches(self, model: nn.Module, checkpoint: Checkpoint | None = None) -> Batches:
        """Return what cross_entropy takes, in a list with `notes`, such as how many texts were cut.

        Dicts of keywords and "labels" for a model whose forward has the keyword input_ids or pixel_values, or is a
        Hugging Face model that passes keywords on; (inputs, labels) for a model that takes one tensor.

        Raises ValueError naming the file, and the line or row, of what cannot be read, of a label that the model does
        not have, and where nothing says how pixels are normalised.
        """
        path, homes = expanded(self.path), _homes(model, checkpoint)
        if self.task == CAUSAL:
            how: Any = {"columns": self.columns, "batch_size": self.batch_size, "most": self._most, "seed": self.seed}
            encoder = TextEncoder(self._home(model, homes), getattr(model, "config", None), self.max_length)
            made, notes = causal_batches(path, encoder, model, **how)
            return Batches([_batch(model, "input_ids", each, each.pop("labels")) for each in made], notes)
        found, where, examples = self._labels()
        rows = drawn(len(found), self._most, self.seed)
        count, names = known_classes(model)
        classes = torch.tensor([class_of(found[row], where(row), self.labels, count, names) for row in rows])
        notes, keyword = [], "pixel_values"
        if self.kind == "npz":
            images, given = read_images(path, len(found)), figures(self.mean, self.std)
            chunks = (rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size))
            inputs = [{keyword: prepared(images[chunk], given, homes, path)} for chunk in chunks]
            check_channels(model, inputs[0][keyword], path)
        else:
            check_task(model, CLASSIFICATION)
            home, config, keyword = self._home(model, homes), getattr(model, "config", None), "input_ids"
            inputs, notes = encoded([examples[row] for row in rows], home, config, self.batch_size, self.max_length)
        labelled = zip(inputs, classes.split(self.batch_size), strict=True)
        return Batches([_batch(model, keyword, *each) for each in labelled], notes)

    def check(self) -> None:
        """Raise ValueError naming the line or row of what cannot be read, or of a label that no model has.

        Words that only a model's configuration can say the class of are left to `batches`.
        """
        if self.task == CAUSAL:
            texts = read_examples(expanded(self.path), columns=self.columns, needed=("text",))
            list(islice(texts, self._most))
            return
        found, where, _ = self._labels()
        for row in drawn(len(found), self._most, self.seed):
            if self.labels is not None or not isinstance(found[row], str):
                class_of(found[row], where(row), self.labels)

    def fingerprint(self) -> str:
        """Return a hash of the settings, and of path, size and times of change of every file; none is read."""
        files = [expanded(self.path)]
        if self.tokenizer is not None:
            files += sorted(tokenizer_files(expanded(self.tokenizer)))
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True, default=str).encode())
        for file in files:
            try:
                seen = file.stat()
            except OSError as error:
                raise ValueError(f"There is no file {file} to take data from.") from error
            digest.update(
                f"{file.absolute()} {seen.st_size} {seen.st_mtime_ns} {seen.st_ctime_ns} {seen.st_ino}\n".encode()
            )
        return digest.hexdigest()

    def _labels(self) -> tuple[Sequence[int | str], Callable[[int], str], Sequence[Any]]:
        """Return the label of every row as it stands in the data, the place of a row, and the examples of text."""
        path = expanded(self.path)
        if self.kind == "npz":
            return read_labels(path), lambda row: f"{path}, row {row}", ()
        first = self._most if self.seed is None else None  # the rest of the file is not read
        examples = list(islice(read_examples(path, columns=self.columns), first))
        return [each.label for each in examples], lambda row: f"{path}, line {examples[row].line}", examples

    def _home(self, model: nn.Module, homes: Sequence[Path]) -> Path:
        """Return the directory of the tokenizer."""
        given = None if self.tokenizer is None else expanded(self.tokenizer)
        home = given or next(filter(has_tokenizer, homes), None) or next(iter(homes), None)
        if home is None:
            raise ValueError(
                f"{type(model).__name__} was not loaded from a directory, so there is no tokenizer for {self.path}. "
                "Give the directory of one."
            )
        return home

    @property
    def _most(self) -> int | None:
        """Return how many examples are wanted at most; None: all."""
        in_batches = None if self.max_batches is None else self.max_batches * self.batch_size
        return min((most for most in (in_batches, self.max_examples) if most is not None), default=None)


@dataclass(frozen=True)
class BatchFunction:
    """Take the batches that a function package.module:function of no arguments returns, for models of any kind.

    task: "causal" for models that predict the next token. It is called in every run, for nobody knows what it reads.
    """

    reference: str
    task: str | None = None

    def batches(self, model: nn.Module, checkpoint: Checkpoint | None = None) -> list[Any]:
        """Call the function. Raises ValueError where it raises, or returns no batches."""
        found = list(call_object(self.reference, "a function that returns batches"))
        if not found:
            raise ValueError(f"{self.reference} must return at least one batch. Found none")
        return found

    def fingerprint(self) -> str:
        """Return what no other call returns."""
        return uuid.uuid4().hex


def data_of(path: str, settings: Mapping[str, Any], base: Path = Path()) -> DataSource | BatchFunction:
    """Return the data in a file, or that a function package.module:function makes, which takes no settings but task.

    base: what paths are relative to. Raises ValueError for other settings, and what `DataSource` raises.
    """
    if ":" in path and not (base / path).exists():
        if unused := sorted(settings.keys() - {"task"}):
            raise ValueError(f"{unused[0]} means nothing for batches that {path} makes; leave it out")
        load_object(path, "a function that returns batches")
        return BatchFunction(path, settings.get("task"))
    return DataSource(base / expanded(path), **settings)


def _homes(model: nn.Module, checkpoint: Checkpoint | None) -> list[Path]:
    """Return the directories that the model was loaded from."""
    own = [*getattr(model, "directories", ()), getattr(model, "name_or_path", None)]
    places = [*own, None if checkpoint is None else checkpoint.path]
    return [Path(place) for place in dict.fromkeys(places) if place and Path(place).is_dir()]


def _batch(model: nn.Module, keyword: str, inputs: dict[str, Tensor], labels: Tensor) -> Any:
    parameters = accepted_by(model)
    if keyword in parameters:
        return {**{name: value for name, value in inputs.items() if name in parameters}, "labels": labels}
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if passes_on and getattr(model, "config", None) is not None:
        return {**inputs, "labels": labels}
    return inputs[keyword], labels
