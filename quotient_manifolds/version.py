"""Define the version of the package and of its measures; the build reads this file without importing torch."""

from __future__ import annotations

VERSION = "0.1.0"

MEANING = 5
"""The version of the measures, increased whenever a measured value changes, so that no outdated value is reused."""
