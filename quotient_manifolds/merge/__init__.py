"""Merge LoRA adapters by what they add to the weights, which no choice of their factors changes."""

from __future__ import annotations

from quotient_manifolds.merge.adapters import merge_adapters
from quotient_manifolds.merge.merged import MergedAdapter, MergedModule

__all__ = ["MergedAdapter", "MergedModule", "merge_adapters"]
