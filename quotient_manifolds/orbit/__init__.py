"""Use the symmetry orbit of a model: choose a representative, align two models."""

from quotient_manifolds.orbit.align import Alignment, align, quotient_distance, same_function
from quotient_manifolds.orbit.descend import Descent, descend_orbit
from quotient_manifolds.orbit.group import Group, GroupElement
from quotient_manifolds.orbit.objectives import RoundingError, Sparsity, WeightObjective
from quotient_manifolds.orbit.path import PathLosses, loss_along_path

__all__ = [
    "Alignment",
    "Descent",
    "Group",
    "GroupElement",
    "PathLosses",
    "RoundingError",
    "Sparsity",
    "WeightObjective",
    "align",
    "descend_orbit",
    "loss_along_path",
    "quotient_distance",
    "same_function",
]
