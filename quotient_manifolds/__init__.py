"""Quotient manifolds of neural network symmetries, and sharpness that does not change along them."""

from __future__ import annotations

from quotient_manifolds.version import VERSION as __version__

__all__ = ["__version__"]
