"""How the demonstration's numbers are written for people."""

from __future__ import annotations

from quotient_manifolds.experiments.records import DemoResult, Sharpness
from quotient_manifolds.statistics import Correlation

GAPS = {"error_gap": "gap in error", "loss_gap": "gap in loss"}

NBSP = "\N{NO-BREAK SPACE}"


def minus(text: str) -> str:
    """A real minus sign in front of a negative number."""
    return text.replace("-", "−")


def figure(value: float) -> str:
    """Four significant digits."""
    return f"{value:.4g}"


def change(value: float) -> str:
    """A relative change: its size matters, hardly its digits."""
    return f"{value:.1e}" if 0 < value < 1e-3 or value >= 1e4 else f"{value:.3g}"


def ratio(value: float) -> str:
    """Six decimals near 1, where they tell something; else four significant digits."""
    return f"{value:.6f}" if abs(value - 1) < 0.01 else f"{value:.4g}"


def signed(value: float | None) -> str:
    """A correlation, with a real minus sign."""
    return "undefined" if value is None else minus(f"{value:+.2f}")


def interval(correlation: Correlation, *, tau: bool = True) -> str:
    """tau [low, high], or the interval alone."""
    low, high = correlation.low, correlation.high
    bounds = "no interval" if low is None or high is None else f"[{signed(low)}, {signed(high)}]"
    return f"{signed(correlation.value)} {bounds}" if tau else bounds


def excludes_zero(correlation: Correlation) -> bool:
    low, high = correlation.low, correlation.high
    return low is not None and high is not None and (low > 0 or high < 0)


def with_error(value: Sharpness) -> str:
    """Mean ± standard error."""
    error = "" if value.standard_error is None else f" ± {value.standard_error:.2g}"
    return f"{figure(value.mean)}{error}"


def largest_change(result: DemoResult, key: str, dtype: str) -> float:
    """max over scales of |ratio - 1|."""
    return max(abs(row.ratio - 1) for row in result.orbit if (row.measure, row.dtype) == (key, dtype))


def largest_factor(result: DemoResult, key: str, dtype: str = "float64") -> float:
    """max over scales of ratio or 1 / ratio, whichever is larger."""
    ratios = [row.ratio for row in result.orbit if (row.measure, row.dtype) == (key, dtype)]
    return max(max(ratio, 1 / ratio) for ratio in ratios)
