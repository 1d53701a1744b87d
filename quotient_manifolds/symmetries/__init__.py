"""The continuous symmetries of a model's attention: found as data, proved by moving along them."""

from quotient_manifolds.symmetries.batch import prove_on_batch
from quotient_manifolds.symmetries.biases import Translation, key_bias, value_output_bias, without_biases
from quotient_manifolds.symmetries.bottleneck import bottleneck
from quotient_manifolds.symmetries.counting import Conditioning, Count, count_symmetries, singular_values
from quotient_manifolds.symmetries.declare import attention_layout
from quotient_manifolds.symmetries.find import HOW_TO, LAYOUTS, MATCHERS, Symmetries, find_symmetries
from quotient_manifolds.symmetries.found import Found, Matcher
from quotient_manifolds.symmetries.layout import Layout, Obstacle, Place, Rotary
from quotient_manifolds.symmetries.lora import ADAPTER, lora
from quotient_manifolds.symmetries.mlp import neurons
from quotient_manifolds.symmetries.move import balance, random_move
from quotient_manifolds.symmetries.pair import Factor, Params, Part, Refused, Span, SymmetricPair
from quotient_manifolds.symmetries.prove import Evaluate, PairProof, Proof, output_change, prove_symmetries

__all__ = [
    "ADAPTER",
    "HOW_TO",
    "LAYOUTS",
    "MATCHERS",
    "Conditioning",
    "Count",
    "Evaluate",
    "Factor",
    "Found",
    "Layout",
    "Matcher",
    "Obstacle",
    "PairProof",
    "Params",
    "Part",
    "Place",
    "Proof",
    "Refused",
    "Rotary",
    "Span",
    "SymmetricPair",
    "Symmetries",
    "Translation",
    "attention_layout",
    "balance",
    "bottleneck",
    "count_symmetries",
    "find_symmetries",
    "key_bias",
    "lora",
    "neurons",
    "output_change",
    "prove_on_batch",
    "prove_symmetries",
    "random_move",
    "singular_values",
    "value_output_bias",
    "without_biases",
]
