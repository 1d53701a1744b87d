"""Name the one way in which long work says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Take what is being done, how many of its units are finished, and how many there are in all."""
