"""Count what is done behind the scenes."""

from __future__ import annotations

from typing import Any

import pytest

from quotient_manifolds.symmetries.wires.run import Run


def recorded_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that is as long as runs of models were recorded from here on."""
    runs: list[int] = []
    made = Run.__init__

    def noted(self: Run, *args: Any) -> None:
        runs.append(1)
        made(self, *args)

    monkeypatch.setattr(Run, "__init__", noted)
    return runs
