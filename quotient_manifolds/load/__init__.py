"""Models and labelled text from disk: never by unpickling, never from the network, errors in one sentence."""

from __future__ import annotations

from quotient_manifolds.load.huggingface import first_line, tokenised_batches
from quotient_manifolds.load.inputs import example_inputs
from quotient_manifolds.load.models import call_object, load_model, load_object
from quotient_manifolds.load.text import LabelledText, read_text_labels

__all__ = [
    "LabelledText",
    "call_object",
    "example_inputs",
    "first_line",
    "load_model",
    "load_object",
    "read_text_labels",
    "tokenised_batches",
]
