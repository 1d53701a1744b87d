"""The command line as a process: quick help, exit codes, terminals and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quotient_manifolds import load
from quotient_manifolds.version import VERSION
from tests.command_line import call, refused


def test_version_and_help() -> None:
    assert call("--version").output == f"quotient-manifolds, version {VERSION}\n"
    shown = call("inspect", "--help").output
    for words in ("Exit codes:", "--seed", "--device", "--quiet", "--out"):
        assert words in shown


def python(code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    environment = {**os.environ, **settings}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environment)


def test_help_needs_no_torch() -> None:
    done = python(
        "import sys\nfrom click.testing import CliRunner\nfrom quotient_manifolds.cli.app import cli\n"
        "for words in [], *([name] for name in cli.commands):\n"
        "    assert CliRunner().invoke(cli, [*words, '--help']).exit_code == 0\n"
        "print('torch' in sys.modules)"
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_absent_click_gives_one_sentence() -> None:
    done = python("import sys; sys.modules['click'] = None; import quotient_manifolds.cli as c; c.main()")
    assert done.returncode == 2
    assert done.stderr == 'The command line needs click and rich: pip install "quotient-manifolds[cli]".\n'


def test_a_terminal_that_knows_ascii_alone() -> None:
    table = "Table('t', 'modèles', ['modèle'], [['é']])"
    done = python(
        f"from quotient_manifolds.cli.align import *; common.show('à', {table})", PYTHONIOENCODING="ascii:strict"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {"à", "modèles", "é"} <= set(done.stdout.split())


def test_ctrl_c_while_importing_leaves_with_2(tmp_path: Path) -> None:
    """By a module that stands for torch."""
    (tmp_path / "torch.py").write_text(f"import os; os.kill(os.getpid(), {int(signal.SIGINT)})")
    code = "import sys; sys.argv[1:] = ['inspect', 'x']; import quotient_manifolds.cli as c; c.main()"
    done = python(code, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert (done.returncode, done.stderr.rstrip().splitlines()[-1]) == (2, "Error: Interrupted")
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_measuring_leaves_with_2(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quotient_manifolds.compare.run_comparison", interrupted)
    words = ("measure", f"{mine}:encoder", "--data", f"{mine}:batches", "--radius", 1)
    refused(call(*words, "--quiet"), "Interrupted: nothing is kept")
    refused(call(*words, "--quiet", "--out", "out"), "the same command resumes from there")


def test_a_defect_is_a_traceback_and_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load_model", lambda _: 1 / 0)
    shown = call("inspect", "x")
    assert (shown.exit_code, type(shown.exception)) == (1, ZeroDivisionError)
