"""Models and data that the tests of the command line share."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.command_line import MINE, TEXTS
from tests.nets import hugging_face


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that no test may change."""
    return hugging_face.bert_classifier(tmp_path_factory.mktemp("bert") / "bert")


@pytest.fixture
def spoilable(bert: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(bert, tmp_path / "bert"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": text, "label": int(word == "POS")}) + "\n" for text, word in TEXTS))
    return file


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of a user in the working directory; its name is new each time, for modules are imported once."""
    name = f"mine_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return name
