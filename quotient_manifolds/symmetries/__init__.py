"""Find the continuous symmetries of a model, verify them numerically, act by them, and count them."""

from quotient_manifolds.symmetries.certificate import Certificate, certify
from quotient_manifolds.symmetries.counting import Conditioning, Count, count_symmetries
from quotient_manifolds.symmetries.declare import declare_pair
from quotient_manifolds.symmetries.discovery import find_permutations, find_symmetries, propose_symmetries
from quotient_manifolds.symmetries.example_inputs import example_inputs, optional_inputs
from quotient_manifolds.symmetries.fibre import FibreDimension, fibre_dimension
from quotient_manifolds.symmetries.groups import Permutation
from quotient_manifolds.symmetries.outputs import Evaluate, output_change
from quotient_manifolds.symmetries.pair import ADAPTER, BESIDE_ATTENTION, Factor, Params, SymmetricPair
from quotient_manifolds.symmetries.reparameterization import Reparameterization
from quotient_manifolds.symmetries.sharded_outputs import verify_sharded
from quotient_manifolds.symmetries.small_copy import generic_inputs, make_generic, small_copy
from quotient_manifolds.symmetries.strided_view import StridedView
from quotient_manifolds.symmetries.symmetries import (
    HOW_TO,
    Refused,
    Scope,
    Symmetries,
    balance,
    random_representative,
)
from quotient_manifolds.symmetries.verify import (
    SymmetryCheck,
    Verification,
    verify_symmetries,
)

__all__ = [
    "ADAPTER",
    "BESIDE_ATTENTION",
    "HOW_TO",
    "Certificate",
    "Conditioning",
    "Count",
    "Evaluate",
    "Factor",
    "FibreDimension",
    "Params",
    "Permutation",
    "Refused",
    "Reparameterization",
    "Scope",
    "StridedView",
    "SymmetricPair",
    "Symmetries",
    "SymmetryCheck",
    "Verification",
    "balance",
    "certify",
    "count_symmetries",
    "declare_pair",
    "example_inputs",
    "fibre_dimension",
    "find_permutations",
    "find_symmetries",
    "generic_inputs",
    "make_generic",
    "optional_inputs",
    "output_change",
    "propose_symmetries",
    "random_representative",
    "small_copy",
    "verify_sharded",
    "verify_symmetries",
]
