"""Read labeled examples from .jsonl, .csv, .tsv and .txt files, with errors that name the line; list batches."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from quotient_manifolds.data_options import COLUMNS, PLAIN, SUFFIXES, Labels
from quotient_manifolds.messages import brief, first_line
from quotient_manifolds.symmetries.example_inputs import without_adapters


@final
@dataclass(frozen=True)
class LabeledText:
    """Hold one example of sequence classification: a text or a pair of texts, and its label.

    In a file a label may be a word, whose class the model's configuration knows.
    """

    text: str
    text_pair: str | None
    label: int | str
    line: int = field(default=0, compare=False, repr=False)  # line number in the file


def read_examples(
    path: Path, *, columns: Mapping[str, str] | None = None, needed: Sequence[str] = ("text", "label")
) -> Iterator[LabeledText]:
    """Yield the examples of a .jsonl, .csv, .tsv (without quotes) or .txt file lazily, in order.

    columns: names of text, text_pair and label in the file. needed: columns that the file must have, besides those in
    `columns`. Raises ValueError, naming the file and the line, if there are no examples, a column is missing or
    duplicate, a text is not a string, or a labeled text is empty.
    """
    names = {column: (columns or {}).get(column, column) for column in COLUMNS}
    required = [column for column in COLUMNS if column in (*needed, *(columns or {}))]
    line = 0
    for line, record in _records(path, [*names.values()]):
        where = f"{path}, line {line}"
        if not isinstance(record, dict):
            raise ValueError(f"{where} must be an object with text and label. Found {type(record).__name__}")
        if None in record:  # DictReader puts superfluous fields there
            raise ValueError(f"{where} has more fields than columns; quote a text with commas")
        for column in required:
            if record.get(names[column]) is None:
                raise ValueError(
                    f"{where} must have the columns {names['text']} and {names['label']} ({names['text_pair']} too for "
                    f"pairs). Found no {names[column]!r}; give columns if they have other names"
                )
        text, pair = (record.get(names[column]) for column in COLUMNS[:2])
        if not isinstance(text, str) or not isinstance(pair, str | None):
            raise ValueError(f"{where}: text and text_pair must be strings. Found {brief(text)} and {brief(pair)}")
        if "label" in needed and not text.strip():  # causal data may have empty texts, which have no token to predict
            raise ValueError(f"{where}: the text must not be empty. Found {text!r}; leave out the line")
        yield LabeledText(text, pair, record.get(names["label"], ""), line)
    if not line:
        raise ValueError(f"{path} must have examples: lines with a text. Found none; it is empty")


def _records(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yield the number of each line of a file, and its content by column. Blank lines of .txt and .jsonl are skipped.

    Raises ValueError if a table has one of `columns` twice.
    """
    suffix, line = path.suffix.lower(), 0
    if suffix not in SUFFIXES:
        raise ValueError(f"Data must be in a {', '.join(SUFFIXES)} file. Found {path}")
    if not path.is_file():
        raise ValueError(f"There is no data file {path}")
    repeated: list[str] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            if suffix in (".jsonl", PLAIN):
                for line, content in enumerate(stream, start=1):
                    if content.strip():
                        yield line, {"text": content.strip()} if suffix == PLAIN else json.loads(content)
            else:
                style: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if suffix == ".tsv" else {}
                reader = csv.DictReader(stream, **style)
                header = reader.fieldnames or ()
                repeated = [name for name in columns if header.count(name) > 1]
                for record in () if repeated else reader:
                    line = reader.line_num
                    yield line, record
    except (ValueError, csv.Error, RecursionError, OSError) as error:
        what = "not valid JSON" if isinstance(error, json.JSONDecodeError) else "not readable as UTF-8 text"
        raise ValueError(f"{path}, line {max(line, 1)}: {what} ({first_line(error)})") from error
    if repeated:
        raise ValueError(f"{path} must have each column once. Found {repeated[0]!r} twice")


# ---- rows, classes and batches


@final
class Batches(list[Any]):
    """List batches in order; notes: caveats to any number measured on them, as sentences."""

    def __init__(self, batches: Sequence[Any], notes: Sequence[str] = ()) -> None:
        super().__init__(batches)
        self.notes = list(notes)


def drawn(count: int, most: int | None, seed: int | None) -> list[int]:
    """Return `most` of `count` rows (None: all): the first ones, or with a seed random ones without replacement."""
    if seed is None:
        return list(range(count))[:most]
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:most].tolist()


def chunked(rows: Sequence[Any], size: int) -> list[Any]:
    """Return consecutive slices of `size` rows; the last may be shorter."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def class_of(
    label: Any, where: str, labels: Labels | None = None, count: int | None = None, names: Labels | None = None
) -> int:
    """Return the class of a label: by `labels` if given, else by `names` if it is a word, else the integer itself.

    names: the classes of the model by their names in lower case. Raises ValueError, naming the location `where`, for a
    label without a class, and for a class outside of 0 ... count - 1.
    """
    index = label
    if labels is not None:
        if str(label) not in labels:
            raise ValueError(f"{where}: the label must be one of {', '.join(labels)}. Found {brief(label)}")
        index = labels[str(label)]
    elif isinstance(label, str):
        number = re.fullmatch(r"\s*(-?\d{1,18})\s*", label)
        index = int(number[1]) if number else (names or {}).get(label.strip().casefold(), label)
    if not isinstance(index, int) or isinstance(index, bool):
        words = f" or one of {', '.join(list(names)[:5])}" if names else ""
        raise ValueError(
            f"{where}: the label must be an integer{words}. Found {brief(label)}; give labels, the class of each word"
        )
    if index < 0 or (count is not None and index >= count):
        wanted = "at least 0" if count is None else f"in 0 ... {count - 1}, the classes of the model"
        raise ValueError(f"{where}: the label must be {wanted}. Found {brief(label)}")
    return index


def known_classes(model: nn.Module) -> tuple[int | None, Labels]:
    """Return the number of classes of a Hugging Face classifier, and the class of each name in lower case.

    Other models give (None, {}).
    """
    unwrapped = without_adapters(model)
    config: Any = getattr(unwrapped, "config", None)
    count = getattr(config, "num_labels", None)
    if not type(unwrapped).__name__.endswith("Classification") or not isinstance(count, int):
        return None, {}
    names = getattr(config, "id2label", None) or {}
    return count, {str(name).casefold(): int(number) for number, name in names.items()}
