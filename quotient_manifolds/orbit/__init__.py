"""Use the symmetry orbit of a model: choose a representative, align two models."""

from quotient_manifolds.orbit.descend import Descent, descend_orbit
from quotient_manifolds.orbit.group import Group, GroupElement
from quotient_manifolds.orbit.objectives import RoundingError, Sparsity, WeightObjective

__all__ = ["Descent", "Group", "GroupElement", "RoundingError", "Sparsity", "WeightObjective", "descend_orbit"]
