"""Load models and data from disk: never by unpickling, never from the network, with errors of one sentence."""

from __future__ import annotations

from quotient_manifolds.load.certificate import Certificate, certify
from quotient_manifolds.load.data_source import DataSource
from quotient_manifolds.load.example_inputs import example_inputs, optional_inputs
from quotient_manifolds.load.models import (
    Checkpoint,
    call_object,
    find_checkpoints,
    load_checkpoint,
    load_model,
    load_object,
    load_symmetries,
)
from quotient_manifolds.load.shards import load_shards
from quotient_manifolds.load.small_copy import generic_inputs, make_generic, small_copy
from quotient_manifolds.load.text import Batches, LabelledText, read_text_labels
from quotient_manifolds.load.tokens import tokenised_batches

__all__ = [
    "Batches",
    "Certificate",
    "Checkpoint",
    "DataSource",
    "LabelledText",
    "call_object",
    "certify",
    "example_inputs",
    "find_checkpoints",
    "generic_inputs",
    "load_checkpoint",
    "load_model",
    "load_object",
    "load_shards",
    "load_symmetries",
    "make_generic",
    "optional_inputs",
    "read_text_labels",
    "small_copy",
    "tokenised_batches",
]
