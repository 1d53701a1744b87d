"""Pages of the documentation run as doctests: each in an empty folder, and only where what it needs is installed."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when a Hugging Face library is imported
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
import torch

torch.set_num_threads(1)

NEEDS = re.compile(r"<!-- needs: (.+?) -->")  # in a page: the packages beyond the core that its blocks import


def is_missing(page: Path) -> bool:
    names = [name for line in NEEDS.findall(page.read_text(encoding="utf-8")) for name in line.split(", ")]
    return any(find_spec(name) is None for name in names)


HERE = Path(__file__).parent
collect_ignore = [
    *(name for name, needed in (("build_hook.py", "mkdocs"), ("docstrings.py", "griffe")) if not find_spec(needed)),
    *(str(page.relative_to(HERE)) for page in HERE.rglob("*.md") if is_missing(page)),
]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page writes goes where nobody looks, and what it draws does not depend on the page before."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
