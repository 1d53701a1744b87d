"""A zoo of BERTs fine-tuned to tell good film reviews from bad ones."""

from __future__ import annotations

from studies.sentiment.zoo import figure, load, ranked, run, tables

__all__ = ["figure", "load", "ranked", "run", "tables"]
