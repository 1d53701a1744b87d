"""How much of the fibre of small models is found."""

from __future__ import annotations

from studies.fibres.study import Fibres, Row, load, run, tables

__all__ = ["Fibres", "Row", "load", "run", "tables"]
