"""Symmetries are found and proved once for a model that is measured several times, and the numbers are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.geometry import Adaptive, KnownSymmetries, Quotient
from quotient_manifolds.sharpness import GradientNorm, Measure, WorstCase, cross_entropy
from tests.classifiers import Batch, Classifier, shaken
from tests.counters import recorded_runs


def doubled_loss(model: nn.Module, batch: Batch) -> Tensor:
    return 2 * cross_entropy(model, batch)


@pytest.fixture(scope="module")
def subject() -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    model = shaken(Classifier(), 0.3)
    return model, [(torch.randn(2, 3, 4, dtype=torch.float64), torch.arange(2) + 1)]


MEASURES: list[Measure] = [
    WorstCase(Quotient("inv"), 0.1, steps=2),
    WorstCase(Quotient("inv"), 0.2, steps=2),
    WorstCase(Quotient("mix"), 0.1, steps=2),
    GradientNorm(Quotient("inv", symmetries="paper")),
    GradientNorm(Adaptive()),
]


def test_all_measures_of_a_model_need_one_run(subject: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = subject
    alone = [measure.of(model, cross_entropy, batches) for measure in MEASURES]
    runs, known = recorded_runs(monkeypatch), KnownSymmetries()
    assert [measure.of(model, cross_entropy, batches, known=known) for measure in MEASURES] == alone
    assert len(runs) == 1


def test_another_loss_batch_or_model_is_a_run_of_its_own(
    subject: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = subject
    runs, known, measure = recorded_runs(monkeypatch), KnownSymmetries(), GradientNorm(Quotient("inv"))
    others = [
        (model, doubled_loss, batches),
        (model, cross_entropy, [(2 * batches[0][0], batches[0][1])]),
        (shaken(Classifier(), 0.3), cross_entropy, batches),
    ]
    for each in [(model, cross_entropy, batches), *others]:
        assert measure.of(*each, known=known) == measure.of(*each)
    assert len(runs) == 2 * 4


def test_what_fails_is_not_kept(subject: tuple[Any, ...]) -> None:
    model, batches = subject
    known, calls = KnownSymmetries(), []

    def failing(model: nn.Module, batch: Batch) -> Tensor:
        calls.append(1)
        raise ValueError("out of order")

    symmetries = known.found(model, cross_entropy, batches[0], "all")
    for _ in range(2):
        calls.clear()
        with pytest.raises(ValueError, match="out of order"):
            known.verified(model, failing, batches, symmetries)
        assert calls
