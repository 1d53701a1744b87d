"""Labelled text from JSONL, CSV and TSV files, with errors that name the line."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quotient_manifolds.load.labels import Labels, check_label, new_label

COLUMNS = ("text", "text_pair", "label")
TEXT_SUFFIXES = (".jsonl", ".csv", ".tsv")


@dataclass(frozen=True)
class LabelledText:
    """One example of sequence classification: a text or a pair of texts, and the index of its class."""

    text: str
    text_pair: str | None
    label: int


def read_text_labels(
    file: str | Path,
    *,
    num_labels: int | None = None,
    labels: Labels | None = None,
    columns: Mapping[str, str] | None = None,
) -> list[LabelledText]:
    """The examples of a .jsonl, .csv or .tsv file with the columns text, label and, for pairs, text_pair.

    A .tsv file has no quotes. `columns` gives other names of the columns; `labels` the class of each label in the file,
    {"entailment": 1, ...} or the new class of 0, 1, .... Raises ValueError naming the file and the line: no examples,
    a missing column, a text that is no string, a label that is no integer (or has no class) or not in
    0 ... num_labels - 1.
    """
    examples = numbered_examples(file, labels=labels, columns=columns)
    for line, example in examples:
        check_label(example.label, num_labels, f"{file}, line {line}")
    return [example for _, example in examples]


def numbered_examples(
    file: str | Path,
    *,
    labels: Labels | None = None,
    columns: Mapping[str, str] | None = None,
    first: int | None = None,
) -> list[tuple[int, LabelledText]]:
    """(line, example) for each, or for so many of the first; the rest of the file is then not read."""
    path = Path(file)
    if path.suffix.lower() not in TEXT_SUFFIXES:
        raise ValueError(f"Expected data in a .jsonl, .csv or .tsv file, found {path}.")
    if not path.is_file():
        raise ValueError(f"There is no data file {path}.")
    names = {column: (columns or {}).get(column, column) for column in COLUMNS}
    try:
        if path.suffix.lower() == ".jsonl":
            records = list(itertools.islice(_jsonl_records(path), first))
        else:
            records = list(itertools.islice(_table_records(path, names["label"]), first))
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}.") from error
    if not records:
        raise ValueError(f"{path} is empty: expected lines with a text and a label.")
    return [
        (line, _example(record, names, set(columns or ()), labels, f"{path}, line {line}")) for line, record in records
    ]


def _example(
    record: Mapping[str, Any], names: Mapping[str, str], given: set[str], labels: Labels | None, where: str
) -> LabelledText:
    for column in COLUMNS:
        if record.get(names[column]) is None and (column != "text_pair" or column in given):
            raise ValueError(
                f"{where}: no {names[column]!r}; expected the columns {names['text']} and {names['label']} "
                f"({names['text_pair']} too for pairs)."
            )
    text, pair, label = (record.get(names[column]) for column in COLUMNS)
    if not isinstance(text, str) or not isinstance(pair, str | None):
        raise ValueError(f"{where}: text and text_pair must be strings, found {text!r} and {pair!r}.")
    return LabelledText(text, pair, new_label(label, labels, where))


def _jsonl_records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig") as stream:
        for line, content in enumerate(stream, start=1):
            if not content.strip():
                continue
            try:
                record = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {line}: not valid JSON ({error}).") from error
            if not isinstance(record, dict):
                raise ValueError(
                    f"{path}, line {line}: expected an object with text and label, found {type(record).__name__}."
                )
            yield line, record


def _table_records(path: Path, label_column: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows of a .csv file (quoted where needed) or of a .tsv file (never quoted)."""
    tabs = path.suffix.lower() == ".tsv"
    style: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {}
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, **style)
        for record in reader:
            if None in record:  # where DictReader puts what is left over
                raise ValueError(f"{path}, line {reader.line_num}: more fields than columns; quote a text with commas.")
            label = record.get(label_column) or ""  # text, as everything in such files, until it reads as an integer
            is_integer = re.fullmatch(r"\s*-?\d+\s*", label)
            yield reader.line_num, {**record, label_column: int(label)} if is_integer else record
