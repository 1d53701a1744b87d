"""Declare the data options once, for `DataSource`, for specs and for the command line.

This module does not import torch, so that the command line prints its help at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quotient_manifolds.check import check_integer, check_one_of

TEXT, ARRAYS = "text", "npz"  # the two formats
PLAIN = ".txt"
SUFFIXES = (".jsonl", ".csv", ".tsv", PLAIN)
COLUMNS = ("text", "text_pair", "label")
CLASSIFICATION, CAUSAL = "classification", "causal"  # tasks: predict a label, or the next token

Labels = Mapping[str, int]  # the class of each label, by its text in the data


@dataclass(frozen=True)
class Option:
    """Describe a data option.

    kind: the smallest value of an integer, the choices of a word, or the types (key, value) of a mapping; else None.
    help, flag, metavar: for the command line, which offers the options that have a help text. only: the format to which
    the option applies, if not to both.
    """

    kind: int | tuple[str, ...] | tuple[type, type] | None = None
    help: str = ""
    flag: str = ""
    metavar: str | None = None
    only: str | None = None

    def check(self, name: str, value: Any, source: object, data_format: str) -> None:
        """Raise ValueError unless the option can have this value, for a source of this format."""
        if isinstance(self.kind, int):
            check_integer(name, value, self.kind)
        elif self.is_mapping and not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a mapping. Found {value!r}")
        elif self.kind and not self.is_mapping:
            check_one_of(name, value, self.kind)
        if self.only not in (None, data_format):
            raise ValueError(f"{name} must be left out for {data_format} data. Found {value!r} for {source}")

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.kind, tuple) and isinstance(self.kind[0], type)


_COLUMN, _CLASS, _SEED = f"{'|'.join(COLUMNS)} NAME", "NAME CLASS", "SEED"
_LENGTH = "Tokens kept of a text.  [default: 128, or the positions of the model, if fewer]"
_TASK = "Whether a model of text predicts a label or the next token, which needs no labels.  [default: classification]"
OPTIONS: dict[str, Option] = {
    "batch_size": Option(1, "Number of examples in a batch.  [default: 32]"),
    "max_batches": Option(1),
    "max_examples": Option(1, "Largest number of examples.  [default: all]", "--examples"),
    "seed": Option(0, "Seed to draw examples with.  [default: the first examples]", "--draw", _SEED),
    "max_length": Option(1, _LENGTH, only=TEXT),
    "tokenizer": Option(only=TEXT),
    "task": Option((CLASSIFICATION, CAUSAL), _TASK, only=TEXT),
    "columns": Option((str, str), "Name of a column in DATA; may be repeated.", "--column", _COLUMN, only=TEXT),
    "labels": Option((str, int), "Class of a label in DATA; may be repeated.", "--label", _CLASS),
    "mean": Option(only=ARRAYS),
    "std": Option(only=ARRAYS),
}
"""The data options by name, in the order in which the command line lists them."""
