"""Read labelled text from JSONL, CSV and TSV files, with errors that name the line."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from quotient_manifolds.files import expanded
from quotient_manifolds.load.labelled_examples import Labels, check_label, new_label
from quotient_manifolds.messages import brief, shown

COLUMNS = ("text", "text_pair", "label")
TEXT_SUFFIXES = (".jsonl", ".csv", ".tsv")
PLAIN_SUFFIX = ".txt"
LONGEST = 10_000_000  # characters of a line: one that has more is no example


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
    {"entailment": 1, ...} or the new class of 0, 1, .... Raises ValueError naming the file and the line: no examples,
    a missing column, a text that is no string, a label that is no integer (or has no class) or not in
    0 ... num_labels - 1.
    """
    found = []
    for example in read_examples(file, labels=labels, columns=columns):
        where = f"{shown(file)}, line {example.line}"
        label = new_label(example.label, None, where)
        check_label(label, num_labels, where)
        found.append(replace(example, label=label))
    return found


def read_examples(
    file: str | Path,
    *,
    labels: Labels | None = None,
    columns: Mapping[str, str] | None = None,
    first: int | None = None,
) -> list[LabelledText]:
    """Return every example, or so many of the first; the rest of the file is then not read.

    Without `labels`, a label that is a word stays that word.
    """
    path = expanded(file)
    names = {column: (columns or {}).get(column, column) for column in COLUMNS}
    records = list(itertools.islice(_records(path, names["label"]), first))
    if not records:
        raise ValueError(f"{shown(path)} is empty: expected lines with a text and a label.")
    given = set(columns or ())
    return [_example(path, line, record, names, given, labels) for line, record in records]


def read_texts(
    file: str | Path, *, pairs: bool = False, columns: Mapping[str, str] | None = None
) -> Iterator[tuple[int, str, str | None]]:
    """Yield the line, the text and, of `pairs`, the text_pair of every example; lines behind it are not read yet.

    Of a .txt file every line that is not blank is a text. Raises ValueError as `read_text_labels` does; a label is
    neither needed nor read.
    """
    path = expanded(file)
    names = {column: (columns or {}).get(column, column) for column in COLUMNS}
    line = 0
    for line, record in _records(path, ""):
        text, pair = record.get(names["text"]), record.get(names["text_pair"]) if pairs else None
        for column, value in (("text", text), *((("text_pair", pair),) if pairs else ())):
            if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
                raise ValueError(
                    f"{shown(path)}, line {line}: {names[column]!r} must be a text, found {brief(value)}; give columns "
                    "if it is called otherwise."
                )
        yield line, str(text), pair
    if not line:
        raise ValueError(f"{shown(path)} is empty: expected lines with a text.")


def read_plain(path: Path) -> str:
    """Return all of a .txt file, its lines each within the limit. Raises ValueError if it is not there or not UTF-8."""
    if not path.is_file():
        raise ValueError(f"There is no data file {shown(path)}.")
    try:
        text = "".join(_lines(path))
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{shown(path)} cannot be read as UTF-8 text: {error}.") from error
    if not text.strip():
        raise ValueError(f"{shown(path)} is empty: expected text.")
    return text


def _records(path: Path, label_column: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the lines of a file and what they hold by column."""
    suffix = path.suffix.lower()
    if suffix not in (*TEXT_SUFFIXES, PLAIN_SUFFIX):
        raise ValueError(f"Expected data in a .jsonl, .csv or .tsv file, found {shown(path)}.")
    if not path.is_file():
        raise ValueError(f"There is no data file {shown(path)}.")
    try:
        if suffix == PLAIN_SUFFIX:
            yield from ((line, {"text": text.strip()}) for line, text in enumerate(_lines(path), 1) if text.strip())
        else:
            yield from _jsonl_records(path) if suffix == ".jsonl" else _table_records(path, label_column)
    except csv.Error as error:
        raise ValueError(f"{shown(path)} cannot be read as a table: {error}.") from error
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{shown(path)} cannot be read as UTF-8 text: {error}.") from error


def _example(
    path: Path,
    line: int,
    record: Mapping[str, Any],
    names: Mapping[str, str],
    given: set[str],
    labels: Labels | None,
) -> LabelledText:
    where = f"{shown(path)}, line {line}"
    for column in COLUMNS:
        if record.get(names[column]) is None and (column != "text_pair" or column in given):
            raise ValueError(
                f"{where}: no {names[column]!r}; expected the columns {names['text']} and {names['label']} "
                f"({names['text_pair']} too for pairs)."
            )
    text, pair, label = (record.get(names[column]) for column in COLUMNS)
    if not isinstance(text, str) or not isinstance(pair, str | None):
        raise ValueError(f"{where}: text and text_pair must be strings, found {brief(text)} and {brief(pair)}.")
    if any("\ud800" <= letter <= "\udfff" for letter in f"{text}{pair or ''}"):
        raise ValueError(f"{where}: the text is not valid Unicode (it has half of a pair of surrogates).")
    word = isinstance(label, str) and labels is None
    return LabelledText(text, pair, str(label) if word else new_label(label, labels, where), line)


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines, none of them longer than an example can be."""
    with path.open(encoding="utf-8-sig", newline="") as stream:
        for number in itertools.count(1):
            line = stream.readline(LONGEST + 1)
            if not line:
                return
            if len(line) > LONGEST:
                raise ValueError(f"{shown(path)}, line {number} has more than {LONGEST} characters: no example has.")
            yield line


def _jsonl_records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, content in enumerate(_lines(path), start=1):
        if not content.strip():
            continue
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{shown(path)}, line {line}: not valid JSON ({error}).") from error
        if not isinstance(record, dict):
            raise ValueError(
                f"{shown(path)}, line {line}: expected an object with text and label, found {type(record).__name__}."
            )
        yield line, record


def _table_records(path: Path, label_column: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the rows of a .csv file (quoted where needed) or of a .tsv file (never quoted)."""
    tabs = path.suffix.lower() == ".tsv"
    style: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {}
    reader = csv.DictReader(_lines(path), **style)
    for record in reader:
        if None in record:  # where DictReader puts what is left over
            raise ValueError(
                f"{shown(path)}, line {reader.line_num}: more fields than columns; quote a text with commas."
            )
        label = record.get(label_column) or ""  # text, as everything in such files, until it reads as an integer
        is_integer = re.fullmatch(r"\s*-?\d{1,400}\s*", label)
        yield reader.line_num, {**record, label_column: int(label)} if is_integer else record
