"""The continuous symmetries of a model's attention: found as data, proved by moving along them."""

from quotient_manifolds.symmetries.attention import Layout, Place
from quotient_manifolds.symmetries.find import LAYOUTS, Symmetries, find_symmetries
from quotient_manifolds.symmetries.move import random_move
from quotient_manifolds.symmetries.pair import Factor, Params, Part, Span, SymmetricPair
from quotient_manifolds.symmetries.prove import PairProof, Proof, prove_symmetries

__all__ = [
    "LAYOUTS",
    "Factor",
    "Layout",
    "PairProof",
    "Params",
    "Part",
    "Place",
    "Proof",
    "Span",
    "SymmetricPair",
    "Symmetries",
    "find_symmetries",
    "prove_symmetries",
    "random_move",
]
