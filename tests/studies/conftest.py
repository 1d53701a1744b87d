"""Invented sentences in place of those that the studies fetch."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from studies.zoos import data as sentences

GOOD, BAD = ("a fine film", "warm, funny and true", "we loved it"), ("dull", "a waste of time", "the plot is a mess")
LONG = "so " * 40 + "long"


def packed(files: dict[str, bytes]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return written.getvalue()


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source distribution of invented sentences: forty clear and short ones a source, and some that are not."""
    rows = []
    for number in range(20):
        rows += [(2.5, f"{GOOD[number % 3]} {number}"), (-2.0, f"{BAD[number % 3]} {number}")]
    rows += [(0.4, "hard to say"), (3.0, LONG), (1.0, "just clear"), (-3.0, "a fine film 0")]  # the last is a repeat
    text = "".join(f"{place}\t{rating}\t{said}\n" for place, (rating, said) in enumerate(rows)).encode()
    files = {f"hutto_ICWSM_2014/{name}_GroundTruth.txt": text for name in sentences.SOURCES.values()}
    content = packed({sentences.INNER: packed(files)})
    monkeypatch.setattr(sentences, "SHA256", hashlib.sha256(content).hexdigest())
    file = tmp_path / sentences.ARCHIVE
    file.write_bytes(content)
    return file
