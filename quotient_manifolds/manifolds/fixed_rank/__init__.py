"""Represent pairs (G, H) of full column rank under GL(h), of which only the product G H^T matters.

`manifold` is the geoopt manifold, `space` its horizontal space in orthonormal coordinates, factored once;
`second_order` the second-order geodesics with their adjoint, `geodesics` and `rank_one` the exact ones, and `logarithm`
finds the one that leads to a given point.
"""

from quotient_manifolds.manifolds.fixed_rank.manifold import FixedRankQuotient

__all__ = ["FixedRankQuotient"]
