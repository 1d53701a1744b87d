"""The table of rules: for every ATen operation, what it allows the channels that it takes."""

from quotient_manifolds.symmetries.wires.rules import functions, linear, norms, products, reductions, sums, ties, views

__all__ = ["functions", "linear", "norms", "products", "reductions", "sums", "ties", "views"]
