"""Load models and data from disk: never by unpickling, never from the network."""

from __future__ import annotations

from quotient_manifolds.load.data_source import BatchFunction, DataSource, data_of
from quotient_manifolds.load.models import (
    Checkpoint,
    call_object,
    find_checkpoints,
    load_checkpoint,
    load_model,
    load_object,
    load_symmetries,
)
from quotient_manifolds.load.text import Batches

__all__ = [
    "BatchFunction",
    "Batches",
    "Checkpoint",
    "DataSource",
    "call_object",
    "data_of",
    "find_checkpoints",
    "load_checkpoint",
    "load_model",
    "load_object",
    "load_symmetries",
]
