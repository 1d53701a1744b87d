"""The command line as a process: quick help, exit codes, pipes, terminals and Ctrl-C."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quotient_manifolds.version import VERSION
from tests.command_line import FAST, call, run


def test_version_and_help() -> None:
    assert call("--version").output == f"quotient-manifolds, version {VERSION}\n"
    for command in ("inspect", "measure", "orbit"):
        shown = call(command, "--help").output
        for words in ("Exit codes:", "--seed", "--device", "--quiet", "--out"):
            assert words in shown, (command, words)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.parametrize("arguments", [["--help"], ["measure", "--help"], ["inspect", "--help"]])
def test_help_needs_no_torch(arguments: list[str]) -> None:
    done = python(
        f"import sys; sys.argv[1:] = {arguments}\nimport quotient_manifolds.cli as c\n"
        "try: c.main()\nexcept SystemExit as left: code = left.code\n"
        "print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    assert done.stderr.strip() == "0 False"


def test_absent_click_gives_one_sentence() -> None:
    done = python("import sys; sys.modules['click'] = None; import quotient_manifolds.cli as c; c.main()")
    assert done.returncode == 2
    assert done.stderr == 'The command line needs click and rich: pip install "quotient-manifolds[cli]".\n'


def test_a_defect_is_a_traceback_and_1() -> None:
    done = python(
        "import sys, quotient_manifolds.load as l; sys.argv[1:] = ['inspect', 'x']\n"
        "l.load_model = lambda _: 1 / 0\nimport quotient_manifolds.cli as c; c.main()"
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


def test_a_reader_who_leaves(bert: Path) -> None:
    for arguments in (["--help"], ["inspect", str(bert)]):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "quotient_manifolds", *arguments]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=100)
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_that_knows_ascii_alone(bert: Path, texts: Path, tmp_path: Path) -> None:
    model = shutil.copytree(bert, tmp_path / "modèle")
    how = ("--data", texts, "--geometry", "mix:0.1", *FAST)
    done = run("measure", model, *how, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "mix" in done.stdout


@pytest.mark.parametrize("moment", ["while measuring", "while importing"])
def test_ctrl_c_leaves_with_2(moment: str, bert: Path, texts: Path, tmp_path: Path) -> None:
    interrupt = f"import os; os.kill(os.getpid(), {int(signal.SIGINT)})\nimport time; time.sleep(9)"
    if moment == "while importing":  # by a module that stands for torch
        (tmp_path / "torch.py").write_text(interrupt)
        data = "d"
    else:
        data = "stopping:batches"
        (tmp_path / "stopping.py").write_text(f"def batches():\n    {interrupt.replace(chr(10), chr(10) + '    ')}")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    words = ("measure", bert, "--data", data, "--radius", 1)
    done = run(*words, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 2, done.stderr
    assert done.stderr.rstrip().endswith("Error: Interrupted.")
    assert "Traceback" not in done.stderr
