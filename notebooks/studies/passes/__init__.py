"""How many passes each ascent needs for 99 % of the maximum."""

from __future__ import annotations

from studies.passes.study import Passes, load, run, tables

__all__ = ["Passes", "load", "run", "tables"]
