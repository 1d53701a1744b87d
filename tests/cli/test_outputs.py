"""Outputs are tried before the work begins, and every failure to write is one sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quotient_manifolds import files
from quotient_manifolds.load import load_model
from quotient_manifolds.plots import path_figure
from tests.command_line import call, refused
from tests.nets import hugging_face
from tests.nets.lora_files import random_lora

DIRECTORIES: dict[str, tuple[Any, ...]] = {
    "move": ("move", "BERT", "OUT"),
    "descend": ("descend", "BERT", "--for", "sparsity", "--steps", 1, "--out", "OUT"),
    "align": ("align", "BERT", "BERT", "--out", "OUT"),
    "merge": ("merge", "A", "OUT"),
}
FILES: dict[str, tuple[Any, ...]] = {
    "inspect": ("inspect", "BERT", "--out", "OUT"),
    "orbit": ("orbit", "BERT", "--out", "OUT"),
    "a figure of orbit": ("orbit", "BERT", "--figure", "OUT.svg"),
    "a figure of align": ("align", "BERT", "BERT", "--data", "DATA", "--out", "NEW", "--figure", "OUT.svg"),
}


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder in which nothing can be made: not by root either, to whom permissions mean nothing."""
    if os.geteuid():
        folder = tmp_path / "closed"
        folder.mkdir(mode=0o555)
        yield folder
        folder.chmod(0o755)
    else:
        if not Path("/proc/self").is_dir():
            pytest.skip("root may write everywhere")
        yield Path("/proc")


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file can be longer than so many bytes: what a full disk does to those who write, by the operating system."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def words(arguments: tuple[Any, ...], bert: Path, here: Path, out: Path) -> list[str]:
    named = {"BERT": bert, "A": here / "A", "DATA": here / "data.jsonl", "NEW": here / "new", "OUT": out}
    return [str(named.get(each, each)).replace("OUT", str(out)) for each in arguments]


@pytest.mark.parametrize("arguments", [*DIRECTORIES.values(), *FILES.values()], ids=[*DIRECTORIES, *FILES])
def test_no_work_for_a_place_that_cannot_be_written(
    arguments: tuple[Any, ...], bert: Path, texts: Path, closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is loaded would be a defect here, which ends with 1."""
    random_lora(texts.parent / "A", {"a": 2}, 0)
    for reader in ("cli.subject.load_model", "load.load_model", "merge.read_lora"):
        monkeypatch.setattr(f"quotient_manifolds.{reader}", lambda *_, **__: 1 / 0)
    shown = call(*words(arguments, bert, texts.parent, closed / "out"))
    refused(shown, "Cannot write", str(closed / "out"))
    assert sorted(each.name for each in texts.parent.iterdir() if each != closed) == ["A", "data.jsonl"]


@pytest.mark.parametrize(
    ("name", "room"), [("move", 0), ("move", 2000), ("descend", 2000), ("merge", 0), ("inspect", 0)]
)
def test_a_full_disk_is_one_sentence(
    name: str, room: int, bert: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for small files, safetensors fails, by an error of its own."""
    random_lora(texts.parent / "A", {"a": 2}, 0)
    monkeypatch.chdir(texts.parent)
    before = sorted(texts.parent.iterdir())
    with full_disk(room):
        shown = call(*words((DIRECTORIES | FILES)[name], bert, texts.parent, Path("out")))
    refused(shown, "Cannot write out", "File too large")
    assert sorted(texts.parent.iterdir()) == before


def test_a_full_disk_where_a_record_is_written_leaves_no_half_of_a_model(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """orbit.json is part of the directory: without it there is none."""
    write = Path.write_text

    def full(path: Path, *how: Any, **more: Any) -> int:
        if "orbit.json" in path.name:
            raise OSError(28, "No space left on device", str(path))
        return write(path, *how, **more)

    monkeypatch.setattr(Path, "write_text", full)
    refused(call(*words(DIRECTORIES["descend"], bert, tmp_path, tmp_path / "out")), "No space left", "out")
    assert [*tmp_path.iterdir()] == []


LIBRARY: dict[str, Callable[[Path], object]] = {
    "text": lambda path: files.write_text(path, "a" * 5000),
    "a figure": lambda path: path_figure([0.0, 1.0], {"a": [1.0, 2.0]}).save(path),
}


@pytest.mark.parametrize("write", LIBRARY.values(), ids=list(LIBRARY))
def test_what_python_writes_fails_with_the_path(write: Callable[[Path], object], tmp_path: Path) -> None:
    with full_disk(100), pytest.raises(OSError, match=r"Cannot write .*out\.svg: File too large"):
        write(tmp_path / "out.svg")
    assert [*tmp_path.iterdir()] == []


class DiskError(Exception):
    """What a library of its own kind raises."""


@pytest.mark.parametrize("error", [DiskError("I/O error"), RuntimeError("Symlink loop"), OSError(5, "I/O error")])
def test_whatever_is_raised_while_writing_is_an_os_error_with_the_path(error: Exception) -> None:
    with (
        pytest.raises(OSError, match=r"Cannot write there: (I/O error|Symlink loop)") as caught,
        files.writing("there"),
    ):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [AttributeError("defect"), BrokenPipeError()])
def test_a_defect_and_a_reader_who_has_left_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, files.writing("there"):
        raise error
    assert caught.value is error


def test_a_link_to_itself(mine: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    what = ("measure", f"{mine}:encoder", "--data", f"{mine}:batches", "--radius", 0.1)
    refused(call(*what, "--out", tmp_path / "loop"), "loop")
    refused(call("inspect", f"{mine}:layer", "--inputs", f"{mine}:inputs", "--out", tmp_path / "loop"), "loop")
    refused(call("move", hugging_face.gpt2(tmp_path / "gpt2"), tmp_path / "loop"), "loop")
    assert (tmp_path / "loop").is_symlink()


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="a system without names for pipes")
def test_a_pipe_and_a_device_are_written_as_they_are(mine: str) -> None:
    """As in `--out /dev/stdout | cat`: a link that leads to no name."""
    given = ("inspect", f"{mine}:layer", "--inputs", f"{mine}:inputs", "--quiet", "--out")
    end, begin = os.pipe()
    shown = call(*given, f"/dev/fd/{begin}")
    os.close(begin)
    with os.fdopen(end) as pipe:
        assert json.loads(pipe.read())["model"] == f"{mine}:layer", shown.output
    assert (shown.exit_code, shown.output) == (0, "")
    if Path("/dev/full").exists():
        shown = call(*given, "/dev/full")
        assert (shown.exit_code, shown.output) == (2, "Error: Cannot write /dev/full: No space left on device\n")


def test_names_as_long_as_they_may_be(tmp_path: Path) -> None:
    """In bytes; one that is longer is refused before any work."""
    for name in ("é" * 125, "a" * 250):
        files.write_text(tmp_path / f"{name}.csv", "a")
        with files.new_directory(tmp_path / name) as fresh:
            (fresh / "model").write_text("a")
    assert len([*tmp_path.iterdir()]) == 4
    with pytest.raises(OSError, match="Cannot write"):
        files.check_new(tmp_path / ("a" * 300))
    with pytest.raises(OSError, match="Cannot write"):
        files.check_file(tmp_path / ("a" * 300))


def test_trying_leaves_nothing_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")
    (tmp_path / "there").chmod(0o600)
    os.utime(tmp_path / "there", (1, 1))
    for name in ("there", "new"):
        files.check_file(tmp_path / name)
    files.check_new(tmp_path / "new")
    assert [*tmp_path.iterdir()] == [tmp_path / "there"]
    assert ((tmp_path / "there").read_text(), (tmp_path / "there").stat().st_mtime) == ("kept", 1)
    with pytest.raises(OSError, match="it is a directory"):
        files.check_file(tmp_path)


def test_what_is_written_loads(bert: Path, tmp_path: Path) -> None:
    assert call(*words(DIRECTORIES["descend"], bert, tmp_path, tmp_path / "out")).exit_code == 0
    assert json.loads((tmp_path / "out" / "orbit.json").read_text())["for"] == "sparsity"
    load_model(tmp_path / "out")


def test_reports_are_tried_before_anything_is_measured(
    mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    monkeypatch.setattr("quotient_manifolds.compare.run.with_radii", lambda *_: 1 / 0)
    what = ("measure", f"{mine}:encoder", "--data", f"{mine}:batches", "--radius", 0.1, "--out", tmp_path / "out")
    refused(call(*what), "Cannot write", "report.html: it is a directory")
