"""Say of each model whose fibre is not found whole, or is doubted, what the rest is."""

from __future__ import annotations

from typing import Final

REASONS: Final[dict[str, str]] = {}
"""By the name of the model; one or two sentences."""
