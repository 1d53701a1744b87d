"""Train a small zoo of vision transformers, show its symmetries, and compare it."""

from __future__ import annotations

from quotient_manifolds.demo.story import Chapter, tell
from quotient_manifolds.demo.zoo import one_thread, prepare

__all__ = ["Chapter", "one_thread", "prepare", "tell"]
