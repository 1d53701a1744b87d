"""Fixtures of the tests of loading."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.image_files import paint


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    root = tmp_path / "pictures"
    for i, name in enumerate(["wolf/2.png", "wolf/10.png", "cat/b.PNG", "cat/a.bmp", "ox/deep/1.ppm"]):
        paint(root / name, seed=i)
    (root / "cat" / "notes.txt").write_text("no picture")
    (root / "cat" / ".hidden.png").write_text("no picture")
    (root / ".cache").mkdir()
    (root / "README").write_text("no class")
    return root
