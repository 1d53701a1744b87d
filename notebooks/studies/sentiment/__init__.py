"""A zoo of BERTs fine-tuned to tell good film reviews from bad ones."""

from __future__ import annotations

from studies.sentiment.zoo import load, ranked, run, tables

__all__ = ["load", "ranked", "run", "tables"]
