"""The table of rules: for every ATen operation, what it allows the channels that it takes."""

from quotient_manifolds.symmetries.wires.rules import (
    complex_numbers,
    functions,
    linear,
    norms,
    products,
    reductions,
    sums,
    ties,
    views,
)

__all__ = ["complex_numbers", "functions", "linear", "norms", "products", "reductions", "sums", "ties", "views"]
