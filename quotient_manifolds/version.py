"""Hold the version in one place: the build reads it from here without importing torch."""

from __future__ import annotations

VERSION = "0.1.0"
