"""Declare the options of data once, for `DataSource`, for specs and for the command line.

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

Labels = Mapping[str, int]  # the class of each label, by how the label is written


@dataclass(frozen=True)
class Option:
    """Describe an option of data.

    least: its least value, if it is an integer. choices: its values, if it is one of a few. entry: types of key and
    value, if it is a mapping. only: the format to which it applies, if not to both. help, usual (the default in words),
    flag and metavar are for the command line, which offers the options that have a help text.
    """

    least: int | None = None
    choices: tuple[str, ...] = ()
    entry: tuple[type, type] | None = None
    only: str | None = None
    help: str = ""
    usual: str = ""
    flag: str = ""
    metavar: str | None = None

    def check(self, name: str, value: Any, source: object, kind: str) -> None:
        """Raise ValueError for a value that the option cannot have, or cannot have for a source of this kind."""
        if self.least is not None:
            check_integer(name, value, self.least)
        if self.entry is not None and not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a mapping. Found {value!r}")
        if self.choices:
            check_one_of(name, value, self.choices)
        if self.only not in (None, kind):
            raise ValueError(f"{name} must be left out for {kind} data. Found {value!r} for {source}")


OPTIONS: dict[str, Option] = {
    "batch_size": Option(1, help="Number of examples in a batch.", usual="32"),
    "max_batches": Option(1),
    "max_examples": Option(1, help="Largest number of examples.", usual="all", flag="--examples"),
    "seed": Option(0, help="Seed to draw examples with.", usual="the first examples", flag="--draw", metavar="SEED"),
    "max_length": Option(
        1, only=TEXT, help="Tokens kept of a text.", usual="128, or the positions of the model, if fewer"
    ),
    "tokenizer": Option(only=TEXT),
    "task": Option(
        choices=(CLASSIFICATION, CAUSAL),
        only=TEXT,
        help="Whether a model of text predicts a label or the next token, which needs no labels.",
        usual=CLASSIFICATION,
    ),
    "columns": Option(
        entry=(str, str),
        only=TEXT,
        help="Name of a column in DATA; may be given several times.",
        flag="--column",
        metavar=f"{'|'.join(COLUMNS)} NAME",
    ),
    "labels": Option(
        entry=(str, int),
        help="Class of a label in DATA; may be given several times.",
        flag="--label",
        metavar="NAME CLASS",
    ),
    "mean": Option(only=ARRAYS),
    "std": Option(only=ARRAYS),
}
"""The options of data by name, in the order in which the command line lists them."""
