"""The model and the batches that most tests of measures use."""

from __future__ import annotations

import pytest
import torch

from tests.nets.classifiers import Batch, Classifier
from tests.nets.net import shaken


@pytest.fixture
def model() -> Classifier:
    return shaken(Classifier().double(), 0.5)


@pytest.fixture
def batches() -> list[Batch]:
    return [(torch.randn(4, 3, 4, dtype=torch.float64), torch.randint(0, 3, (4,))) for _ in range(3)]
