"""Turn the docstrings of the package, which are plain text with formulas, into Markdown for the reference pages."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`[^`]+`|(?<=\n\n)(?: {4}.*(?:\n|\Z))+)")


def as_markdown(text: str) -> str:
    """Return the text with its examples fenced, and with signs escaped that are formulas and not Markdown.

    >>> as_markdown("Return `x[0]` of <x, y>.\\n\\n>>> 1 + 1\\n2")
    'Return `x[0]` of &lt;x, y>.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```'
    >>> as_markdown("From z_old:\\n\\n    z_new = P(z) < 1\\n\\nwith z_new")  # an indented block is shown as it is
    'From z\\\\_old:\\n\\n    z_new = P(z) < 1\\n\\nwith z\\\\_new'
    """
    pieces, end = [], 0
    for example in EXAMPLE.finditer(text):
        pieces += [_escaped(text[end : example.start()]), f"```pycon\n{example[0]}\n```"]
        end = example.end()
    return "".join([*pieces, _escaped(text[end:])])


def _escaped(prose: str) -> str:
    """Escape everything but what is between backticks or in an indented block."""
    halves = CODE.split(prose)
    halves[::2] = (re.sub(r"([\[\]*_|])", r"\\\1", each).replace("<", "&lt;") for each in halves[::2])
    return "".join(halves)


class Docstrings(griffe.Extension):
    """Prepare every docstring when its object is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Replace the docstring by Markdown."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
