"""Pictures, and a causal model with a tokenizer, for tests of data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import transformers
from numpy.typing import NDArray
from torch import nn

from quotient_manifolds.load import load_model
from tests import hugging_face

PLAIN = nn.Flatten()  # a model that takes one tensor


def pictures(dtype: str = "uint8", *, channels: int = 3) -> NDArray[Any]:
    """(5, channels, 6, 4)"""
    return np.random.default_rng(0).integers(0, 256, (5, channels, 6, 4)).astype(dtype)


def causal_model(folder: Path) -> Path:
    """A GPT-2 with the tokenizer of `hugging_face`."""
    model: Any = load_model(hugging_face.gpt2(folder / "made"))
    model.save_pretrained(folder / "causal")
    vocabulary = {token: i for i, token in enumerate(hugging_face.VOCABULARY)}
    transformers.BertTokenizerFast(vocab=vocabulary).save_pretrained(folder / "causal")
    return folder / "causal"
