"""Make batches of labeled text, of text for a language model, or of images in arrays."""

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

from quotient_manifolds.data_options import (
    ARRAYS,
    CAUSAL,
    CLASSIFICATION,
    COLUMNS,
    OPTIONS,
    PLAIN,
    SUFFIXES,
    TEXT,
    Labels,
)
from quotient_manifolds.files import expanded
from quotient_manifolds.load.huggingface import has_tokenizer, tokenizer_files
from quotient_manifolds.load.images import check_channels, normalization, prepare, read_images, read_labels
from quotient_manifolds.load.models import Checkpoint, call_object, load_object
from quotient_manifolds.load.text import Batches, chunked, class_of, drawn, known_classes, read_examples
from quotient_manifolds.load.tokens import TextEncoder, causal_batches, check_task, encoded
from quotient_manifolds.symmetries.example_inputs import accepted_by


@dataclass(frozen=True)
class DataSource:
    """Describe the batches that a zoo is measured on: the first rows of a data set, or random ones.

    path: a .jsonl, .csv or .tsv file of text, or a .npz file with the arrays `images` and `labels`.
    batch_size: number of examples in a batch; the last may be smaller.
    max_batches, max_examples: largest number of batches and of examples; None for all.
    seed: draws examples without replacement; None for the first ones.
    labels: the class of each label in the data, {"entailment": 1, ...}.

    For text only:
    max_length: tokens kept of a text; by default 128, or the number of positions of the model if smaller.
    tokenizer: a directory in place of the checkpoint's.
    columns: names of the columns text, text_pair and label in the file.
    task: "classification" (predict a label) or "causal" (predict the next token). Causal data need no labels and may be
    a .txt file, see `causal_batches`.

    For images only:
    mean, std: one number for each channel, or one for all, of values in 0 ... 1; or mean = "clip", "imagenet" or "none"
    (values unchanged).

    Raises ValueError for a value that is out of range, or an option that has no meaning for the data.
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
            raise ValueError(f"Data must be in a {', '.join(SUFFIXES)} or .npz file. Found {self.path}")
        for name, option in OPTIONS.items():
            if (value := getattr(self, name)) is not None:
                option.check(name, value, self.path, self.kind)
        if suffix == PLAIN and (self.task != CAUSAL or self.columns is not None):
            raise ValueError(
                f"{self.path} must have the task {CAUSAL} (--task {CAUSAL}) and no columns, as it has no labels. "
                f"Found task {self.task} and columns {self.columns}"
            )
        if self.task == CAUSAL and self.labels is not None:
            raise ValueError(f"labels must be left out for the task {self.task}. Found {self.labels!r}")
        if unknown := sorted(set(self.columns or ()) - set(COLUMNS)):
            raise ValueError(f"columns must name some of {', '.join(COLUMNS)}. Found {unknown[0]!r}")
        normalization(self.mean, self.std)

    @property
    def kind(self) -> str:
        """Return the format that the suffix of the path states, "text" or "npz"."""
        return ARRAYS if Path(self.path).suffix.lower() == ".npz" else TEXT

    def batches(self, model: nn.Module, checkpoint: Checkpoint | None = None) -> Batches:
        """Return batches for `cross_entropy`, in a list with `notes`, such as the number of truncated texts.

        A batch is a dict of keywords and "labels" if the model's forward has the keyword input_ids or pixel_values, or
        if it is a Hugging Face model that passes keywords on; else a pair (inputs, labels).

        Raises ValueError, naming the file and the line or row, for content that cannot be read, labels that the model
        does not have, and pixels without a known normalization.
        """
        path, homes = expanded(self.path), _directories(model, checkpoint)
        config: Any = getattr(model, "config", None)
        if self.task == CAUSAL:
            encoder = TextEncoder(self._tokenizer_directory(model, homes), config, self.max_length)
            rows: Any = {"columns": self.columns, "batch_size": self.batch_size, "most": self._most, "seed": self.seed}
            tokens, notes = causal_batches(path, encoder, model, **rows)
            return Batches([_batch(model, "input_ids", each, each.pop("labels")) for each in tokens], notes)
        labels, where, examples = self._labels()
        chosen = drawn(len(labels), self._most, self.seed)
        count, names = known_classes(model)
        classes = torch.tensor([class_of(labels[row], where(row), self.labels, count, names) for row in chosen])
        if self.kind == ARRAYS:
            keyword, notes, images = "pixel_values", [], read_images(path, len(labels))
            normalize, chunks = normalization(self.mean, self.std), chunked(chosen, self.batch_size)
            inputs = [{keyword: prepare(images[chunk], normalize, homes, path)} for chunk in chunks]
            check_channels(model, inputs[0][keyword], path)
        else:
            check_task(model, CLASSIFICATION)
            keyword, home = "input_ids", self._tokenizer_directory(model, homes)
            inputs, notes = encoded([examples[row] for row in chosen], home, config, self.batch_size, self.max_length)
        labeled = zip(inputs, classes.split(self.batch_size), strict=True)
        return Batches([_batch(model, keyword, *each) for each in labeled], notes)

    def check(self) -> None:
        """Raise ValueError, naming the line or row, for unreadable content and for labels that no model has.

        `batches` checks words, whose classes only a model's configuration knows.
        """
        if self.task == CAUSAL:
            texts = read_examples(expanded(self.path), columns=self.columns, needed=("text",))
            list(islice(texts, self._most))
            return
        labels, where, _ = self._labels()
        for row in drawn(len(labels), self._most, self.seed):
            if self.labels is not None or not isinstance(labels[row], str):
                class_of(labels[row], where(row), self.labels)

    def fingerprint(self) -> str:
        """Return a hash of the options and of path, size and modification times of every file, without reading them."""
        files = [expanded(self.path)]
        if self.tokenizer is not None:
            files += sorted(tokenizer_files(expanded(self.tokenizer)))
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True, default=str).encode())
        for file in files:
            try:
                stat = file.stat()
            except OSError as error:
                raise ValueError(f"There is no file {file} to take data from") from error
            times = f"{stat.st_mtime_ns} {stat.st_ctime_ns}"
            digest.update(f"{file.absolute()} {stat.st_size} {times} {stat.st_ino}\n".encode())
        return digest.hexdigest()

    def _labels(self) -> tuple[Sequence[int | str], Callable[[int], str], Sequence[Any]]:
        """Return the label of every row as written in the data, the location of a row, and the examples of text."""
        path = expanded(self.path)
        if self.kind == ARRAYS:
            return read_labels(path), lambda row: f"{path}, row {row}", ()
        first = self._most if self.seed is None else None  # the rest of the file is not read
        examples = list(islice(read_examples(path, columns=self.columns), first))
        return [each.label for each in examples], lambda row: f"{path}, line {examples[row].line}", examples

    def _tokenizer_directory(self, model: nn.Module, homes: Sequence[Path]) -> Path:
        if self.tokenizer is not None:
            return expanded(self.tokenizer)
        home = next(filter(has_tokenizer, homes), None) or next(iter(homes), None)
        if home is None:
            raise ValueError(
                f"{self.path} needs a tokenizer. Found none: {type(model).__name__} was not loaded from a directory; "
                "give the directory of one"
            )
        return home

    @property
    def _most(self) -> int | None:
        """Return the largest number of examples; None for all."""
        in_batches = None if self.max_batches is None else self.max_batches * self.batch_size
        return min((most for most in (in_batches, self.max_examples) if most is not None), default=None)


@dataclass(frozen=True)
class BatchFunction:
    """Provide the batches that package.module:function, a function without arguments, returns, for any model.

    task: "causal" for models that predict the next token. The function is called in every run, because nothing shows
    whether its result has changed.
    """

    reference: str
    task: str | None = None

    def batches(self, model: nn.Module, checkpoint: Checkpoint | None = None) -> list[Any]:
        """Call the function. Raises ValueError if it raises or returns no batches."""
        batches = list(call_object(self.reference, "a function that returns batches"))
        if not batches:
            raise ValueError(f"{self.reference} must return at least one batch. Found none")
        return batches

    def fingerprint(self) -> str:
        """Return a value that no other call returns."""
        return uuid.uuid4().hex


def data_of(path: str, settings: Mapping[str, Any], base: Path = Path()) -> DataSource | BatchFunction:
    """Return the data in a file, or of a function package.module:function, whose only setting is the task.

    base: the directory that paths are relative to. Raises ValueError for other settings of a function, and all errors
    of `DataSource`.
    """
    if ":" in path and not (base / path).exists():
        if unused := sorted(settings.keys() - {"task"}):
            raise ValueError(f"{unused[0]} must be left out for the batches of {path}. Found {settings[unused[0]]!r}")
        load_object(path, "a function that returns batches")
        return BatchFunction(path, settings.get("task"))
    return DataSource(base / expanded(path), **settings)


def _directories(model: nn.Module, checkpoint: Checkpoint | None) -> list[Path]:
    """Return the directories that the model was loaded from."""
    of_the_model = [*getattr(model, "directories", ()), getattr(model, "name_or_path", None)]
    places = [*of_the_model, None if checkpoint is None else checkpoint.path]
    return [Path(place) for place in dict.fromkeys(places) if place and Path(place).is_dir()]


def _batch(model: nn.Module, keyword: str, inputs: dict[str, Tensor], labels: Tensor) -> Any:
    """Return inputs and labels in the form that the signature of the model's forward asks for."""
    parameters = accepted_by(model)
    if keyword in parameters:
        return {**{name: value for name, value in inputs.items() if name in parameters}, "labels": labels}
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if passes_on and getattr(model, "config", None) is not None:
        return {**inputs, "labels": labels}
    return inputs[keyword], labels
