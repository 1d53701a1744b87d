"""The study of vision transformers, small: its data and zoo, one run from start to end, its page and its record."""

from __future__ import annotations

import csv
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from quotient_manifolds.compare import Comparison
from quotient_manifolds.demo.digits import load_digits
from quotient_manifolds.demo.zoo import ARCHITECTURE, TrainingRecipe, train
from quotient_manifolds.geometry import Adaptive, Quotient
from quotient_manifolds.load import load_model
from quotient_manifolds.sharpness import cross_entropy, worst_case_sharpness
from studies.vit.zoo import FAST, few_shot_digits, prepare, related_digits
from studies.zoos.measures import ZooMeasures
from tests.studies.runs import check_mended, check_record, check_second_run, check_written, run, silent

SMALL = ARCHITECTURE | {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
STILL = TrainingRecipe(1e-12, 0.0, batch_size=8, label_smoothing=0.0, shift=0, steps=1, seed=5)


# ---- the data


def clean_rows(images: torch.Tensor) -> list[int]:
    """Which of scikit-learn's digits each image is, shifted or not: the nearest of all, at all nine shifts."""
    whole = load_digits(train_points=756, seed=6)
    known = torch.cat([whole.train_images, whole.test_images])
    padded = F.pad(known, (1, 1, 1, 1), value=float(known.min()))
    shifts = [padded[:, :, i : i + 8, j : j + 8] for i, j in itertools.product(range(3), range(3))]
    nearest = torch.stack([torch.cdist(images.flatten(1), each.flatten(1)) for each in shifts]).amin(0)
    return nearest.argmin(1).tolist()


def test_no_digit_is_in_two_parts() -> None:
    digits, start = few_shot_digits(), related_digits("rotated")
    assert (len(start.train_labels), len(digits.train_labels), len(digits.test_labels)) == (500, 256, 1041)
    turned_back = start.train_images.rot90(-1, (2, 3))
    seen, few, test = map(clean_rows, (turned_back, digits.train_images, digits.test_images))
    assert set(seen) == set(range(500))
    assert np.mean([500 <= row < 756 for row in few]) > 0.97  # noise takes one or the other for its neighbour
    assert np.mean([row >= 756 for row in test]) > 0.97


def test_images_are_shifted_noisy_and_keep_their_labels() -> None:
    digits, whole = few_shot_digits(), load_digits(train_points=756, seed=6)
    clean = whole.train_images[500:]
    assert torch.equal(digits.train_labels, whole.train_labels[500:])
    assert torch.equal(digits.test_labels, whole.test_labels)
    assert float(digits.train_images.min()) == float(whole.train_images.min())
    there = (clean > clean.min() + 0.7) & (clean < clean.max() - 0.7)
    still = (digits.train_images - clean)[(digits.train_images - clean).flatten(1).norm(dim=1) < 4]
    assert 0 < len(still) < 200  # about one in nine has not moved
    mask = there[(digits.train_images - clean).flatten(1).norm(dim=1) < 4]
    assert float(still[mask].std()) == pytest.approx(0.3, abs=0.03)


def test_related_tasks_are_other_tasks() -> None:
    rotated, inverted, paired = (related_digits(name) for name in ("rotated", "inverted", "paired"))
    assert torch.equal(rotated.train_images.rot90(-1, (2, 3)), -inverted.train_images)
    assert torch.equal(paired.train_images, -inverted.train_images)
    assert paired.train_labels.unique().tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(paired.train_labels, inverted.train_labels // 2)


# ---- fine-tuning


def test_fine_tuning_begins_where_the_start_ended_but_for_the_classifier(tmp_path: Path) -> None:
    digits = load_digits(train_points=40)
    data = digits.train_images, digits.train_labels
    train(replace(STILL, learning_rate=0.01, steps=3, seed=1), *data, SMALL).save_pretrained(tmp_path)
    begun = load_model(tmp_path).state_dict()
    tuned, fresh = train(STILL, *data, SMALL, tmp_path).state_dict(), train(STILL, *data, SMALL).state_dict()
    for name, value in tuned.items():
        source = fresh if name.startswith("classifier") else begun
        torch.testing.assert_close(value, source[name], rtol=0, atol=1e-9)
    assert not torch.equal(begun["classifier.weight"], fresh["classifier.weight"])


# ---- one run


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run("vit", tmp_path_factory.mktemp("vit"), "adaptive, radius 0.5")


def test_a_run_writes_a_zoo_that_compare_reads(out: Path) -> None:
    check_written("vit", out)
    with (out / "scores.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["start"] for row in rows] == ["rotated", "inverted", "paired", "rotated"]
    assert len({row["learning_rate"] for row in rows}) == 4


def test_its_numbers_are_those_of_the_library(out: Path) -> None:
    comparison, digits = Comparison.load(out), few_shot_digits()
    model = load_model(out / "models" / "vit-02")
    batches = [
        {"pixel_values": images, "labels": labels}
        for images, labels in zip(digits.train_images.split(128), digits.train_labels.split(128), strict=True)
    ]
    for geometry, radius in ((Adaptive(), 0.5), (Quotient("inv"), 0.1)):
        value = worst_case_sharpness(model, cross_entropy, batches, geometry=geometry, radius=radius).mean
        label = ZooMeasures(comparison).label(geometry, radius)
        assert label is not None
        assert comparison.column(label)[2] == pytest.approx(value, rel=1e-5)
    with torch.no_grad():
        wrong = model(pixel_values=digits.test_images).logits.argmax(-1) != digits.test_labels
    assert comparison.column("test_error")[2] == pytest.approx(float(wrong.double().mean()))


def test_a_second_run_does_nothing_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_second_run("vit", out, "quotient_manifolds.demo.zoo.train", monkeypatch)


def test_a_damaged_copy_is_mended(out: Path) -> None:
    check_mended(out / "models" / "vit-01" / "model.safetensors", lambda: prepare(out, FAST, silent))


def test_the_record_is_the_comparison(out: Path) -> None:
    check_record(out, units=8)
