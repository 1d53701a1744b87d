"""A full factorial zoo of vision transformers on MNIST."""

from __future__ import annotations

from studies.mnist.zoo import figure, load, ranked, run, tables

__all__ = ["figure", "load", "ranked", "run", "tables"]
