"""How much of the fibre of small models is found."""

from __future__ import annotations

from studies.fibres.study import load, run, tables

__all__ = ["load", "run", "tables"]
