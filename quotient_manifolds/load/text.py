"""Read texts and their labels from .jsonl, .csv, .tsv and .txt files, with errors that name the line."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from quotient_manifolds.files import expanded
from quotient_manifolds.load.batches import Labels, class_of
from quotient_manifolds.messages import brief, first_line

COLUMNS = ("text", "text_pair", "label")
PLAIN = ".txt"
SUFFIXES = (".jsonl", ".csv", ".tsv", PLAIN)


@final
@dataclass(frozen=True)
class LabelledText:
    """Hold one example of sequence classification: a text or a pair of texts, and the index of its class.

    As it stands in a file, the label may be a word that only a model's configuration gives a class.
    """

    text: str
    text_pair: str | None
    label: int | str
    line: int = field(default=0, compare=False, repr=False)  # of the file it was read from


def read_text_labels(
    file: str | Path,
    *,
    num_labels: int | None = None,
    labels: Labels | None = None,
    columns: Mapping[str, str] | None = None,
) -> list[LabelledText]:
    """Read the examples of a .jsonl, .csv or .tsv file with the columns text, label and, for pairs, text_pair.

    A .tsv file has no quotes. `columns` gives other names of the columns; `labels` the class of each label in the file,
    {"entailment": 1, ...}. Raises ValueError naming the file and the line: no examples, a missing column, a text that
    is no string, a label that is no integer (or has no class) or not in 0 ... num_labels - 1.
    """
    return [
        replace(each, label=class_of(each.label, f"{file}, line {each.line}", labels, num_labels))
        for each in read_examples(expanded(file), columns=columns)
    ]


def read_examples(
    path: Path, *, columns: Mapping[str, str] | None = None, needed: Sequence[str] = ("text", "label")
) -> Iterator[LabelledText]:
    """Yield the examples of a file, in order; none is read before it is asked for.

    needed: the columns that must be there, besides those that `columns` names. Raises ValueError as `read_text_labels`
    does, of labels only where there is none.
    """
    names = {column: (columns or {}).get(column, column) for column in COLUMNS}
    wanted = [column for column in COLUMNS if column in (*needed, *(columns or {}))]
    line = 0
    for line, record in _records(path):
        where = f"{path}, line {line}"
        if not isinstance(record, dict):
            raise ValueError(f"{where} must be an object with text and label. Found {type(record).__name__}.")
        if None in record:  # where DictReader puts what is left over
            raise ValueError(f"{where} has more fields than columns. Quote a text with commas.")
        for column in wanted:
            if record.get(names[column]) is None:
                raise ValueError(
                    f"{where}: no {names[column]!r}; expected the columns {names['text']} and {names['label']} "
                    f"({names['text_pair']} too for pairs). Give columns if they are called otherwise."
                )
        text, pair = (record.get(names[column]) for column in COLUMNS[:2])
        if not isinstance(text, str) or not isinstance(pair, str | None):
            raise ValueError(f"{where}: text and text_pair must be strings. Found {brief(text)} and {brief(pair)}.")
        yield LabelledText(text, pair, record.get(names["label"], ""), line)
    if not line:
        raise ValueError(f"{path} must have examples: lines with a text. Found none; it is empty.")


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the lines of a file and what they hold by column; of a .txt file, each line that is not blank."""
    suffix, line = path.suffix.lower(), 0
    if suffix not in SUFFIXES:
        raise ValueError(f"Data must be in a {', '.join(SUFFIXES)} file. Found {path}.")
    if not path.is_file():
        raise ValueError(f"There is no data file {path}.")
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            if suffix in (".jsonl", PLAIN):
                for line, content in enumerate(stream, start=1):
                    if content.strip():
                        yield line, {"text": content.strip()} if suffix == PLAIN else json.loads(content)
            else:
                style: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if suffix == ".tsv" else {}
                reader = csv.DictReader(stream, **style)
                for record in reader:
                    line = reader.line_num
                    yield line, record
    except (ValueError, csv.Error, RecursionError, OSError) as error:
        what = "not valid JSON" if isinstance(error, json.JSONDecodeError) else "not readable as UTF-8 text"
        raise ValueError(f"{path}, line {max(line, 1)}: {what} ({first_line(error)}).") from error
