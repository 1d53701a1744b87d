"""The demonstration, small: the data, the zoo and what is kept of it, and one run from start to end."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner

from quotient_manifolds.cli.app import cli
from quotient_manifolds.compare import Comparison
from quotient_manifolds.demo import Chapter, story, zoo
from quotient_manifolds.demo.zoo import ARCHITECTURE, Points, TrainingRecipe, draw_recipe, load_digits, write_digits
from quotient_manifolds.files import write_text
from quotient_manifolds.load import load_model
from quotient_manifolds.report import Table

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
SMALL = ARCHITECTURE | SIZES
RECIPES = {name: draw_recipe(index, steps=2) for index, name in enumerate("abc")}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def digits() -> tuple[Points, Points]:
    return load_digits(40)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_digits(folder, train_points=40)
    return folder / "train.npz"


def test_split_is_stratified_and_disjoint(digits: tuple[Points, Points]) -> None:
    (train, labels), (test, _) = digits
    assert labels.bincount(minlength=10).tolist() == [4] * 10
    images = torch.cat([train, test])
    assert len(images.unique(dim=0)) == 1797  # scikit-learn's digits are all different: no point is on both sides
    assert train.mean().abs() < 1e-6
    assert abs(float(train.std()) - 1) < 1e-6


def trained(
    folder: Path, data: Path, recipes: Mapping[str, TrainingRecipe] = RECIPES, **settings: object
) -> dict[str, Weights]:
    zoo.train_zoo(folder, recipes, data, **{"architecture": SMALL, **settings})  # type: ignore[arg-type]
    return {
        name: {key: value.clone() for key, value in load_model(folder / name).state_dict().items()} for name in recipes
    }  # clones: not views of the file


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def times(folder: Path) -> dict[str, int]:
    return {each.parent.name: each.stat().st_mtime_ns for each in folder.glob("*/model.safetensors")}


def test_training_is_deterministic_learns_and_leaves_the_global_generator_alone(digits: tuple[Points, Points]) -> None:
    images, labels = digits[0]
    recipe = TrainingRecipe(0.004, 0.01, batch_size=16, label_smoothing=0.1, shift=1, steps=4, seed=0)
    train = functools.partial(zoo.train, images=images, labels=labels, architecture=SMALL)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first, second = train(recipe), train(recipe)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert same(first.state_dict(), second.state_dict())
    for other in (replace(recipe, seed=1), replace(recipe, shift=0), replace(recipe, label_smoothing=0.0)):
        assert not same(first.state_dict(), train(other).state_dict())
    logits = train(replace(recipe, steps=30), architecture=ARCHITECTURE)(pixel_values=images).logits
    assert torch.nn.functional.cross_entropy(logits, labels) < 1.8  # at random weights about 2.3


def test_jobs_are_done_in_workers_too() -> None:
    jobs = [functools.partial(pow, 2, exponent) for exponent in range(5)]
    assert zoo.run_jobs(jobs, 2) == zoo.run_jobs(jobs, 1) == [1, 2, 4, 8, 16]


def test_models_of_other_settings_are_replaced(tmp_path: Path, data: Path) -> None:
    folder, one = tmp_path / "models", {"a": RECIPES["a"]}
    found = [
        trained(folder, data, one),
        trained(folder, data, {"a": replace(RECIPES["a"], weight_decay=0.5)}),
        trained(folder, data, one, architecture=SMALL | {"intermediate_size": 16}),
    ]
    write_digits(tmp_path, train_points=40, seed=1)
    found.append(trained(folder, tmp_path / "train.npz", one))
    assert not any(same(one["a"], other["a"]) for one, other in itertools.combinations(found, 2))


def test_an_interrupted_zoo_resumes(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        trained(folder, data, progress=lambda what, done, total: done == 1 and patch.setattr(zoo, "train", interrupted))
    made = times(folder)
    assert list(made) == ["a"]
    trained(folder, data)
    assert times(folder).items() > made.items()
    finished = times(folder)
    trained(folder, data)
    assert times(folder) == finished
    assert {each.name for each in folder.iterdir()} == set(RECIPES)


def told(*_: object) -> list[Chapter]:
    """What is shown of two models, which has a test of its own."""
    return [Chapter("A heading", "A sentence.", table=Table("t", "A caption", ["a", "b"], [["c", "1"]]))]


def test_an_orbit_and_a_certificate_say_what_was_found(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(story, "STEPS", 3)
    monkeypatch.setattr(story, "SCALES", (0.1, 10.0))
    monkeypatch.setattr(story, "certify", functools.partial(story.certify, hidden_size=4, intermediate_size=3))
    trained(tmp_path / "models", data, {"a": RECIPES["a"]}, architecture=SMALL)
    with np.load(data) as points:
        images, labels = (torch.from_numpy(points[name][:8]) for name in ("images", "labels"))
    model = load_model(tmp_path / "models" / "a").double()
    orbit = story.orbit_chapter(model, {"pixel_values": images.double(), "labels": labels})
    assert "<img" in orbit.figure
    assert float(re.search(r"at most (\S+) of its size", orbit.sentence)[1]) < 1e-9  # type: ignore[index]
    assert float(re.search(r"inv and mix change by at most (\S+)\.", orbit.sentence)[1]) < 1e-6  # type: ignore[index]
    found = story.certificate_chapter(model)
    assert found.heading == "Symmetries are complete"


def test_the_command_trains_moves_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quotient_manifolds.demo.tell", told)
    monkeypatch.setattr(
        zoo, "write_text", lambda path, text: write_text(path, text.replace("mix]}", "mix], steps: 2, radius: 0.1}"))
    )
    monkeypatch.setattr(zoo, "TRAIN_POINTS", 24)
    monkeypatch.setattr(zoo, "ARCHITECTURE", SMALL)
    monkeypatch.setattr(zoo, "draw_recipe", functools.partial(draw_recipe, steps=2))
    out = tmp_path / "demo"
    words = ["demo", "--out", str(out), "--models", "5", "--workers", "1", "--seed", "3"]
    shown = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    found = Comparison.load(out / "comparison.json")
    assert list(found.scores.index) == [f"vit-{index:02}" for index in range(5)]
    assert found.known == (20, 20)
    assert "Measures over the checkpoints" in shown.stdout
    assert len(found.rankings) > 0
    assert str(out / "report.html") in shown.stdout.replace("\n", "")
    page = (out / "report.html").read_text(encoding="utf-8")
    for words in ("<!DOCTYPE html>", "A heading", "A caption", "All correlations", "5 models"):
        assert words in page, words
    rates = pd.read_csv(out / "scores.csv").set_index("checkpoint")["learning_rate"]
    assert rates.to_dict() == {f"vit-{index:02}": draw_recipe(index, seed=3).learning_rate for index in range(5)}
