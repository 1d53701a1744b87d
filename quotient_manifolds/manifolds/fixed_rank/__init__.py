"""Represent pairs (G, H) of full column rank under GL(h), of which only the product G H^T matters.

`manifold` is the geoopt manifold, `space` its horizontal space in orthonormal coordinates, factored once, `lower_rank`
where the rank of G H^T is below h; `second_order` the second-order geodesics with their adjoint, `geodesics`, `exact`
and `rank_one` the exact ones. `log` finds the geodesic that leads to a given point.
"""

from quotient_manifolds.manifolds.fixed_rank.manifold import FixedRankQuotient

__all__ = ["FixedRankQuotient"]
