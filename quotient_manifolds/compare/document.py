"""YAML as plain values that know their lines, so that whatever is wrong can be said with its line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, final

import yaml

Place = tuple[str | int, ...]  # keys and indices from the top of the document

TAG = "tag:yaml.org,2002:"
LARGEST = 10_000_000  # bytes; a spec of a thousand checkpoints has a hundredth of it
DEEPEST = 32  # collections inside each other; a spec has four
SYNTAX = (  # of the core schema of YAML 1.2: kind, what it looks like, and its first letters
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
)


@final
class _Loader(yaml.SafeLoader):
    """1e-3 is a number, and yes, 1:30 and 2024-01-01 are text: the library's own YAML 1.1 has it the other way."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Without aliases, a few of which can stand for billions of nodes, and not so deep that recursion ends."""
        event = self.peek_event()
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(
                None, None, f"*{event.anchor} is an alias; write out what it stands for", event.start_mark
            )
        if self.depth > DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"nested deeper than {DEEPEST} levels", event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def whole_number(self, node: Any) -> int:
        """010 is ten; a number that no setting can take is refused before Python spends time on its digits."""
        text = str(self.construct_scalar(node))
        if len(text) > 100:
            raise yaml.constructor.ConstructorError(
                None, None, f"a number of {len(text)} digits, which no setting can take", node.start_mark
            )
        return int(text)

    def plain_tag(self, node: Any) -> str:
        """What a node is where nobody says so with a tag."""
        return str(self.resolve(type(node), getattr(node, "value", None), (True, False)))


for _kind, _pattern, _first in SYNTAX:
    _Loader.add_implicit_resolver(TAG + _kind, re.compile(f"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor(f"{TAG}int", _Loader.whole_number)


@final
@dataclass(frozen=True)
class Document:
    """What a file holds (mappings with keys of text, lists, scalars), and the line of every key and item in it."""

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
        if path.is_file() and path.stat().st_size > LARGEST:
            raise ValueError(f"{path} is no spec: it has more than {LARGEST} bytes.")
        loader = _Loader(path.read_text(encoding="utf-8"))
        try:
            node = loader.get_single_node()
            walk = _Walk(path, loader)
            if node is not None:
                walk.note(node, ())
            return Document(path, None if node is None else loader.construct_document(node), walk.lines)
        finally:
            loader.dispose()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = "a tab, where YAML indents with spaces" if "'\\t'" in str(error.problem) else error.problem
        raise ValueError(f"{path}, line {mark.line + 1 if mark else 1}: not valid YAML ({why}).") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error


@final
@dataclass(frozen=True)
class _Walk:
    """Over all nodes of a document, noting their lines and refusing what plain values do not need."""

    path: Path
    loader: _Loader
    lines: dict[Place, int] = field(default_factory=dict)

    def note(self, node: Any, place: Place) -> None:
        if node.tag not in (f"{TAG}str", self.loader.plain_tag(node)):
            raise self._wrong(node, f"the tag {node.tag.replace(TAG, '!!')} has no use here; leave it out")
        if node.id == "mapping":
            self._note_keys(node, place)
        elif node.id == "sequence":
            for index, value in enumerate(node.value):
                here = (*place, index)
                self.lines[here] = value.start_mark.line + 1
                self.note(value, here)

    def _note_keys(self, node: Any, place: Place) -> None:
        for key, value in node.value:
            if key.id != "scalar":
                raise self._wrong(key, "a key must be text")
            key.tag = f"{TAG}str"  # as it is written: no key here is a number
            here = (*place, key.value)
            if here in self.lines:
                raise self._wrong(key, f"{key.value} is given again (first in line {self.lines[here]})")
            self.lines[here] = key.start_mark.line + 1
            self.note(value, here)

    def _wrong(self, node: Any, why: str) -> ValueError:
        return ValueError(f"{self.path}, line {node.start_mark.line + 1}: {why}.")
