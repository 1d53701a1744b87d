"""Hold the version, and what numbers mean, in one place: the build reads it from here without importing torch."""

from __future__ import annotations

VERSION = "0.1.0"

MEANING = 4
"""What the measures mean: raised whenever a number of one model changes, so that no stored one passes for a new one."""
