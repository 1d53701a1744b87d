"""Count what is done behind the scenes."""

from __future__ import annotations

from typing import Any

import pytest

from quotient_manifolds.symmetries.charges.finder import Finder


def recorded_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that is as long as symmetries of models were sought from here on."""
    runs: list[int] = []
    made = Finder.__init__

    def noted(self: Finder, *args: Any) -> None:
        runs.append(1)
        made(self, *args)

    monkeypatch.setattr(Finder, "__init__", noted)
    return runs
