"""YAML as plain values that know their lines, so that whatever is wrong can be said with its line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import yaml

Place = tuple[str | int, ...]  # keys and indices from the top of the document


@final
@dataclass(frozen=True)
class Document:
    """What a file holds (mappings, lists and scalars), and the line of every key and item in it."""

    path: Path
    content: Any
    lines: dict[Place, int]

    def line(self, place: Sequence[str | int]) -> int:
        """The line of a key or item; of what holds it if there is none."""
        for length in range(len(place), 0, -1):
            if tuple(place[:length]) in self.lines:
                return self.lines[tuple(place[:length])]
        return 1


def read_yaml(path: Path) -> Document:
    """Raises ValueError, one sentence with the line, for a file that is no YAML or gives a key twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        lines: dict[Place, int] = {}
        if node is not None:
            _note_lines(node, (), lines, path)
        content = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ValueError(f"{path}, line {mark.line + 1 if mark else 1}: not valid YAML ({error.problem}).") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    finally:
        loader.dispose()
    return Document(path, content, lines)


def _note_lines(node: Any, place: Place, lines: dict[Place, int], path: Path) -> None:
    if node.id == "mapping":
        for key, value in node.value:
            here = (*place, key.value)
            if here in lines:
                raise ValueError(
                    f"{path}, line {key.start_mark.line + 1}: {key.value} is given again (first in line {lines[here]})."
                )
            lines[here] = key.start_mark.line + 1
            _note_lines(value, here, lines, path)
    elif node.id == "sequence":
        for index, value in enumerate(node.value):
            here = (*place, index)
            lines[here] = value.start_mark.line + 1
            _note_lines(value, here, lines, path)
