"""The zoo of vision transformers on MNIST: its data, its training, its radii, and one small run from start to end."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from ruamel.yaml import YAML
from torch.nn import functional as F

from studies import mnist, pilots
from studies.__main__ import study
from studies.common import load
from studies.mnist import FAST, FULL, TARGET, Recipe, train
from studies.zoos.data import CLASSES, load_mnist, training_set
from studies.zoos.zoo import score_of, spec_text

SMALL = FAST.architecture


def test_no_image_is_for_training_and_for_testing_and_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, test = load_mnist()
    assert (pool.images.shape, test.images.shape) == ((2000, 1, 28, 28), (3000, 1, 28, 28))
    assert float(pool.images.mean()) == pytest.approx(0, abs=1e-4)
    assert float(pool.images.std()) == pytest.approx(1, abs=1e-4)
    assert torch.cdist(pool.images[:50].flatten(1), test.images.flatten(1)).min() > 0
    assert set(test.labels.tolist()) == set(range(CLASSES))
    monkeypatch.setattr("studies.zoos.data.SHA256_OF_IMAGES", "other")
    with pytest.raises(ValueError, match=r"must have the SHA-256 other\. Found"):
        load_mnist()


def test_training_sets_are_nested_and_as_noisy_as_asked() -> None:
    pool, _ = load_mnist()
    clean, some, more = (training_set(pool, points=2000, noise=noise, seed=1) for noise in (0.0, 0.2, 0.4))
    few = training_set(pool, points=100, noise=0.4, seed=1)
    assert torch.equal(few.images, more.images[:100])
    assert torch.equal(few.labels, more.labels[:100])
    wrong_some, wrong_more = (each.labels != clean.labels for each in (some, more))
    assert float(wrong_some.float().mean()) == pytest.approx(0.2, abs=0.03)
    assert float(wrong_more.float().mean()) == pytest.approx(0.4, abs=0.03)
    assert not bool((wrong_some & ~wrong_more).any())
    turned = (more.labels - clean.labels)[wrong_more] % CLASSES
    assert torch.bincount(turned, minlength=CLASSES)[1:].min() > 50  # every other class takes its part


def test_training_stops_where_the_loss_is_low_enough() -> None:
    pool, _ = load_mnist()
    some = training_set(pool, points=32, noise=0.0, seed=0)
    recipe = Recipe(32, 0.0, 0, 1e-2, 0.0, seed=0)
    state = torch.get_rng_state()
    model, steps = train(recipe, some.images, some.labels, SMALL | {"hidden_size": 32, "intermediate_size": 64})
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    with torch.no_grad():
        assert float(F.cross_entropy(model(pixel_values=some.images).logits, some.labels)) < TARGET
    assert 0 < steps < 2000
    again, same = train(recipe, some.images, some.labels, SMALL | {"hidden_size": 32, "intermediate_size": 64})
    assert same == steps
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert train(recipe, some.images, some.labels, SMALL, most=20)[1] == 20


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_scores_are_expectations_over_noisy_labels(noise: float) -> None:
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(400, CLASSES, generator=draw), torch.randint(CLASSES, (400,), generator=draw)
    found = score_of(logits, labels, noise)
    losses, errors = [], []
    for _ in range(400):
        turns = torch.randint(1, CLASSES, (400,), generator=draw)
        noisy = torch.where(torch.rand(400, generator=draw) < noise, (labels + turns) % CLASSES, labels)
        losses.append(float(F.cross_entropy(logits, noisy)))
        errors.append(float((logits.argmax(1) != noisy).double().mean()))
    assert found.loss == pytest.approx(sum(losses) / len(losses), abs=1e-5 if noise == 0 else 0.01)
    assert found.error == pytest.approx(sum(errors) / len(errors), abs=1e-9 if noise == 0 else 0.004)
    others = [torch.cat([row[:label], row[label + 1 :]]).max() for row, label in zip(logits, labels, strict=True)]
    margins = logits[torch.arange(400), labels] - torch.stack(others)
    assert found.margin == pytest.approx(float(margins.double().quantile(0.1)))


@pytest.mark.parametrize(("key", "files"), [("mnist", FULL.specs), ("sentiment", ["sentiment"])])
def test_the_radii_of_a_spec_are_those_that_the_pilots_chose(key: str, files: list[str]) -> None:
    found, text = load("pilots")[key], "".join(map(spec_text, files))
    entries = [each for each in YAML(typ="safe").load(text)["measures"] if each["measure"].endswith("worst-case")]
    assert len(entries) > 8
    with pytest.raises(ValueError, match=r"median of 0\.02 must lie between those of measured radii"):
        pilots.radii({"rises": found["rises"][-1:]}, "mix")
    for each in entries:
        name = "adaptive linf" if each.get("norm") == "linf" else each["geometry"]
        if isinstance(each["radius"], list):
            assert tuple(each["radius"]) == pilots.radii(found, name)
        else:
            assert each["radius"] in (pilots.reaching(found, name), pilots.radii(found, name)[1])


def test_a_small_run_measures_every_model_on_its_own_images_and_a_second_run_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(set(FULL.recipes.values())) == 216
    arguments = ["mnist", "--fast", "--out", str(tmp_path), "--quiet"]
    done = CliRunner().invoke(study, arguments)
    assert done.exit_code == 0, done.output
    found = mnist.load(tmp_path)
    comparison = found.comparison
    assert set(comparison.scores.index) == set(FAST.recipes)
    assert comparison.known == (12, 12)
    parts = [tmp_path / name for name in ("points64-noise0-seed1", "points64-noise0.4-seed1")]
    assert len({(part / "train.npz").read_bytes() for part in parts}) == 2
    scores = comparison.scores
    assert (scores["error_gap"] - (scores["test_error"] - scores["train_error"])).abs().max() < 1e-12
    (ascent,) = found.record["climbs"]
    assert ascent["measure"] == "adaptive worst-case sharpness, steps 4, radius 0.5"
    assert all(0 < ascent["value"] < more * (1 + 1e-6) for more in ascent["more"])
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/models/*/*")}
    monkeypatch.setattr("studies.mnist.train", None)  # calling it would fail
    done = CliRunner().invoke(study, arguments)
    assert (done.exit_code, done.output) == (0, "")
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/models/*/*")} == before
    pd.testing.assert_frame_equal(mnist.load(tmp_path).comparison.values, comparison.values)
