"""Represent pairs (G, H) of full column rank under GL(h), of which only the product G H^T matters.

`manifold` is the geoopt manifold, `space` its horizontal space in orthonormal coordinates, factored once;
`second_order` the second-order geodesics with their adjoint, `geodesics` and `rank_one` the exact ones. `alignment`
brings two points near each other and bounds their distance, `procrustes_mean` averages aligned points, and from there
`logarithm` finds the geodesic that leads to a given point, by `shooting`.
"""

from quotient_manifolds.manifolds.fixed_rank.manifold import FixedRankQuotient

__all__ = ["FixedRankQuotient"]
