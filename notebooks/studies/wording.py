"""How numbers are written for people."""

from __future__ import annotations

GAPS = {"error_gap": "gap in error", "loss_gap": "gap in loss"}

NBSP = "\N{NO-BREAK SPACE}"


def minus(text: str) -> str:
    """Return a real minus sign in front of a negative number."""
    return text.replace("-", "−")


def figure(value: float) -> str:
    """Return four significant digits."""
    return f"{value:.4g}"


def change(value: float) -> str:
    """Return a relative change: its size matters, hardly its digits."""
    return f"{value:.1e}" if 0 < value < 1e-3 or value >= 1e4 else f"{value:.3g}"


def signed(value: float | None) -> str:
    """Return a correlation, with a real minus sign."""
    return "undefined" if value is None else minus(f"{value:+.2f}")


def percent(share: float) -> str:
    """Return a share as whole per cent."""
    return f"{100 * share:.0f}{NBSP}%"
