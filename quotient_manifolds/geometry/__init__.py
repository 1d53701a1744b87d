"""Provide one tangent space over all parameters of a model, in orthonormal coordinates, for three geometries.

A tangent vector is held as coordinates z, a dict of blocks, such that its metric norm is the l2 norm of z over all
blocks. So the ball of every geometry is a round ball, one projected ascent serves them all, and a standard Gaussian
in z is isotropic in the metric.

Every parameter that requires a gradient is measured; frozen parameters are not changed. A symmetric pair must be
measured as a whole or not at all: with one side frozen the ball would not be invariant, so this is an error.
"""

from quotient_manifolds.geometry.elementwise import Adaptive, Euclidean
from quotient_manifolds.geometry.geometry import Geometry
from quotient_manifolds.geometry.known import KnownSymmetries
from quotient_manifolds.geometry.pair_block import Gradients, PairBlock
from quotient_manifolds.geometry.parameters import measured_parameters
from quotient_manifolds.geometry.quotient import GEOMETRY_OPTIONS, Quotient, as_geometry
from quotient_manifolds.geometry.tangent_space import Norm, ShardedSpace, TangentSpace

__all__ = [
    "GEOMETRY_OPTIONS",
    "Adaptive",
    "Euclidean",
    "Geometry",
    "Gradients",
    "KnownSymmetries",
    "Norm",
    "PairBlock",
    "Quotient",
    "ShardedSpace",
    "TangentSpace",
    "as_geometry",
    "measured_parameters",
]
