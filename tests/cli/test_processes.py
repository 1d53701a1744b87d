"""The command line as a process: quick help, exit codes, pipes, terminals and Ctrl-C."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import quotient_manifolds.cli
from quotient_manifolds.version import VERSION
from tests.command_line import FAST, call, run


def test_version_and_help() -> None:
    assert call("--version").output == f"quotient-manifolds, version {VERSION}\n"
    for command in ("inspect", "measure"):
        shown = call(command, "--help").output
        for words in ("Exit codes:", "--seed", "--device", "--dtype", "--quiet", "--out"):
            assert words in shown, (command, words)


@pytest.mark.parametrize(
    "arguments", [("inspect",), ("measure", "somewhere"), ("nothing",), ("inspect", "x", "--seed", "-1")]
)
def test_usage_errors_leave_with_2(arguments: tuple[str, ...]) -> None:
    assert call(*arguments).exit_code == 2


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["measure", "--help"], ["inspect", "--help"]])
def test_help_needs_no_torch(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv[1:] = {arguments}\nimport quotient_manifolds.cli as c\n"
        "try: c.main()\nexcept SystemExit as left: code = left.code\n"
        "print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "0 False"


def test_absent_click_gives_one_sentence() -> None:
    code = "import sys; sys.modules['click'] = None; import quotient_manifolds.cli as c; c.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == 'The command line needs click and rich: pip install "quotient-manifolds[cli]".\n'


def test_a_defect_is_not_mistaken_for_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("quotient_manifolds.cli.app.cli", broken)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(SystemExit) as left:
        quotient_manifolds.cli.main()
    assert left.value.code == 70
    assert "ZeroDivisionError: a defect" in capsys.readouterr().err


def test_a_defect_of_ours_is_no_bad_input(monkeypatch: pytest.MonkeyPatch, bert: Path) -> None:
    from quotient_manifolds import symmetries

    monkeypatch.setattr(symmetries, "count_symmetries", lambda *_: (_ for _ in ()).throw(ZeroDivisionError("a defect")))
    monkeypatch.setattr("quotient_manifolds.messages._PACKAGE", Path(__file__).parents[2])
    shown = call("inspect", bert)
    assert isinstance(shown.exception, ZeroDivisionError)


def test_a_reader_who_leaves(bert: Path) -> None:
    for arguments in (["--help"], ["inspect", str(bert)]):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "quotient_manifolds", *arguments]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=100)
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, "")


def test_a_terminal_that_knows_ascii_alone(bert: Path, texts: Path, tmp_path: Path) -> None:
    model = shutil.copytree(bert, tmp_path / "modèle")
    how = ("--data", texts, "--geometry", "mix:0.1", *FAST)
    done = run("measure", model, *how, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "mod?le" in done.stdout
    done = run("inspect", tmp_path / "où", env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"})
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("Error: ")


INTERRUPTED_WHILE_MEASURING = """
import os, signal, sys, threading, torch
import quotient_manifolds.cli
from quotient_manifolds import sharpness as measure
ascend = measure.WorstCase.of

def interrupted(*args, **kwargs):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    return ascend(*args, **kwargs)

measure.WorstCase.of = interrupted
torch.set_num_threads(1)
quotient_manifolds.cli.main()
"""


def test_ctrl_c_leaves_with_130_and_no_result(bert: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    long = ["--data", texts, "--radius", 0.1, "--steps", 10**6, "--metric", "inv", "--out", out]
    command = [sys.executable, "-c", INTERRUPTED_WHILE_MEASURING, "measure", bert, *long]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().endswith("Interrupted.")
    assert done.stdout == ""
    assert [file.name for file in tmp_path.iterdir()] == ["data.jsonl"]


def test_ctrl_c_while_importing(tmp_path: Path) -> None:
    """A module that stands for torch interrupts its own import."""
    (tmp_path / "torch.py").write_text(
        f"import os; os.kill(os.getpid(), {int(signal.SIGINT)})\nimport time; time.sleep(9)"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = run("measure", "m", "--data", "d", "--radius", "1", env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
