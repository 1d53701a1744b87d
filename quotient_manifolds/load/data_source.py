"""Describe where batches come from: a data set, whatever its format."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.files import expanded
from quotient_manifolds.load.checkpoints import Checkpoint
from quotient_manifolds.load.example_inputs import accepted_by
from quotient_manifolds.load.huggingface import tokenizer_files
from quotient_manifolds.load.image_arrays import ArrayExamples
from quotient_manifolds.load.images import MODES, FolderExamples
from quotient_manifolds.load.labelled_examples import Batches, Examples, Head, Labels, check_label, check_renaming
from quotient_manifolds.load.language import CAUSAL, LANGUAGE, SEQ2SEQ, LanguageText
from quotient_manifolds.load.preparation import Normalisation
from quotient_manifolds.load.text import COLUMNS, PLAIN_SUFFIX, TEXT_SUFFIXES, read_examples
from quotient_manifolds.load.tokens import TextExamples, tokenizer_of
from quotient_manifolds.messages import shown

CLASSIFICATION = "classification"
FORMATS = {  # and the settings that mean something there
    "text": {"max_length", "tokenizer", "columns", "task"},
    "npz": {"mean", "std"},
    "images": {"size", "channels", "mean", "std"},
}


@dataclass(frozen=True)
class DataSource:
    """Describe the batches that a zoo is measured on: the first rows of a data set, or some drawn at random by a seed.

    path: a .jsonl, .csv or .tsv file, a .npz file, or a folder with a folder of images for each class; `format`
    ("text", "npz", "images") says which where the name does not. max_batches: that many batches of batch_size, the last
    possibly smaller; all if None. max_examples: so many examples at most. labels: the model's classes in place of the
    data's, {"entailment": 1, ...} or the new class of 0, 1, ....

    task: what a model of text has to tell: a label ("classification"), or the tokens of a language model ("causal",
    "masked", "seq2seq"), whose text needs no labels and may be in a .txt file, see `LanguageText`.

    Text: max_length tokens (128, or the positions the model has, if fewer); tokenizer: a directory in place of the
    checkpoint's; columns: what text, text_pair and label are called in the file. Images: size (folders: the shorter
    side is resized to it, then the middle cropped), channels (folders: 1 or 3), mean and std for each channel of values
    in 0 ... 1, or mean = "clip" or "imagenet". The first rows of folders are of the first classes: give a seed.
    """

    path: str | Path
    format: str = "auto"
    batch_size: int = 32
    max_batches: int | None = None
    seed: int | None = None
    labels: Labels | None = None
    max_length: int | None = None
    tokenizer: str | Path | None = None
    columns: Mapping[str, str] | None = None
    size: int | None = None
    channels: int | None = None
    mean: Sequence[float] | str | None = None
    std: Sequence[float] | None = None
    max_examples: int | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a setting that is out of range or means nothing for the format."""
        if self.format not in ("auto", *FORMATS):
            raise ValueError(f"The format must be one of {', '.join(FORMATS)}, found {self.format!r}.")
        for name in ("batch_size", "max_batches", "max_examples", "max_length", "size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, found {value!r}.")
        if self.task not in (None, CLASSIFICATION, *LANGUAGE):
            raise ValueError(f"task must be one of {', '.join((CLASSIFICATION, *LANGUAGE))}, found {self.task!r}.")
        if self.kind == "text" and Path(self.path).suffix.lower() == PLAIN_SUFFIX and not self.is_language:
            raise ValueError(f"{self.path} has no labels: give a task, {', '.join(LANGUAGE)}.")
        if self.kind == "text" and Path(self.path).suffix.lower() == PLAIN_SUFFIX:
            if self.task == SEQ2SEQ:
                raise ValueError(
                    f"The task {SEQ2SEQ} tells text_pair from text: expected a .jsonl, .csv or .tsv file with both "
                    f"columns, found {self.path}."
                )
            if self.columns is not None:
                raise ValueError(
                    f"columns mean nothing for a .txt file ({self.path}), whose lines are text; leave them out."
                )
        if self.task == CAUSAL and self.max_length == 1:
            raise ValueError(
                f"max_length must be at least 2 for the task {CAUSAL}, which tells a token from another, found 1."
            )
        if self.is_language and self.labels is not None:
            raise ValueError(f"labels mean nothing for the task {self.task}; leave them out.")
        for name in sorted(set().union(*FORMATS.values()) - FORMATS[self.kind]):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} means nothing for data of the format {self.kind} ({self.path}); leave it out."
                )
        if self.channels not in (None, *MODES):
            raise ValueError(f"channels must be 1 (grey) or 3 (RGB), found {self.channels!r}.")
        if unknown := sorted(set(self.columns or ()) - set(COLUMNS)):
            raise ValueError(f"columns must name some of {', '.join(COLUMNS)}, found {unknown[0]!r}.")
        check_renaming(self.labels)
        Normalisation.of(self.mean, self.std)

    @property
    def kind(self) -> str:
        """Return the format, as the name of the path tells it where nothing else does."""
        if self.format != "auto":
            return self.format
        suffix = Path(self.path).suffix.lower()
        return "text" if suffix in (*TEXT_SUFFIXES, PLAIN_SUFFIX) else "npz" if suffix == ".npz" else "images"

    @property
    def is_language(self) -> bool:
        """Return whether tokens are to be told, and no labels."""
        return self.task in LANGUAGE

    def batches(self, model: nn.Module, checkpoint: Checkpoint | None = None) -> Batches:
        """Return what cross_entropy takes: dicts of the model's keywords and "labels", or (inputs, labels).

        Dicts for a model whose forward has the keyword input_ids or pixel_values, or is a Hugging Face model that
        passes keywords on; a model that takes one tensor gets that. The answer is a list with `notes`, sentences that
        belong beside what is measured, such as how many texts were cut.

        Raises ValueError naming the file, and the line or row, of what cannot be read, of a label that the model does
        not have, and where nothing says how pixels are normalised.
        """
        if self.is_language:
            path, homes = expanded(self.path), _homes(model, checkpoint)
            tokenizer = None if self.tokenizer is None else expanded(self.tokenizer)
            read, said = self._language().batches(model, tokenizer_of(tokenizer, homes, model, path))
            return Batches([_batch(model, "input_ids", *each) for each in read], **said)
        examples = self._examples()
        rows, head = self._rows(examples), Head.of(model)
        classes = examples.classes(rows, head)
        for row, label in zip(rows, classes, strict=True):
            check_label(label, head.count, examples.where(row))
        chunks = [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
        inputs, made = examples.inputs(chunks, model, _homes(model, checkpoint))
        labels = torch.tensor(classes).split(self.batch_size)
        batches = [_batch(model, examples.keyword, *each) for each in zip(inputs, labels, strict=True)]
        return Batches(batches, examples=len(rows), **made)

    def check(self, num_labels: int | None = None) -> None:
        """Raise ValueError naming the line or row of a label that a head of so many classes (None: any) does not have.

        Words that only a model's configuration can say the class of are left to `batches`.
        """
        if self.is_language:
            self._language().check()
            return
        examples = self._examples()
        for row in self._rows(examples):
            if isinstance(label := examples.labels[row], int):
                check_label(label, num_labels, examples.where(row))

    def fingerprint(self) -> str:
        """Return a hash of all that decides the batches, but for the model's own tokenizer.

        Settings, and path, size and time of change of every file (of images: of those that are measured on, whose
        order tells their classes); the files are not read.
        """
        settings = asdict(self) | {"path": str(expanded(self.path).absolute()), "format": self.kind}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
        for file in self._files():
            try:
                seen = file.stat()
            except OSError as error:
                raise ValueError(f"There is no file {shown(file)} to take data from.") from error
            stamp = f" {seen.st_size} {seen.st_mtime_ns} {seen.st_ctime_ns} {seen.st_ino}\n"
            digest.update(os.fsencode(file.absolute()) + stamp.encode())
        return digest.hexdigest()

    def _files(self) -> list[Path]:
        """Return the files that decide the batches."""
        if self.kind == "images":
            examples = self._examples()
            return [examples.file(row) for row in self._rows(examples)]
        tokenizer = [] if self.tokenizer is None else sorted(tokenizer_files(expanded(self.tokenizer)))
        return [expanded(self.path), *tokenizer]

    def _examples(self) -> Examples:
        path = expanded(self.path)
        normalisation = Normalisation.of(self.mean, self.std)
        if self.kind == "npz":
            return ArrayExamples(path, self.labels, normalisation)
        if self.kind == "images":
            return FolderExamples(path, self.labels, normalisation, size=self.size, channels=self.channels)
        first = self._most if self.seed is None else None
        texts = read_examples(path, labels=self.labels, columns=self.columns, first=first)
        tokenizer = None if self.tokenizer is None else expanded(self.tokenizer)
        return TextExamples(path, texts, tokenizer=tokenizer, max_length=self.max_length, batch_size=self.batch_size)

    def _language(self) -> LanguageText:
        return LanguageText(
            path=expanded(self.path),
            task=str(self.task),
            max_length=self.max_length,
            columns=self.columns,
            batch_size=self.batch_size,
            most=self._most,
            seed=self.seed,
        )

    @property
    def _most(self) -> int | None:
        """Return how many examples are wanted at most; None: all."""
        in_batches = None if self.max_batches is None else self.max_batches * self.batch_size
        return min((most for most in (in_batches, self.max_examples) if most is not None), default=None)

    def _rows(self, examples: Examples) -> list[int]:
        count = len(examples.labels)
        wanted = count if self._most is None else min(count, self._most)
        if self.seed is None:
            return list(range(wanted))
        return torch.randperm(count, generator=torch.Generator().manual_seed(self.seed))[:wanted].tolist()


def _homes(model: nn.Module, checkpoint: Checkpoint | None) -> list[Path]:
    """Return the directories that the model was loaded from: of a converted checkpoint, the conversion's."""
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
