"""A full factorial zoo of vision transformers on MNIST."""

from __future__ import annotations

from studies.mnist.zoo import load, ranked, run, tables

__all__ = ["load", "ranked", "run", "tables"]
