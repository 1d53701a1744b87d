"""The demonstration, small: the data, the zoo and what is kept of it, and one run from start to end."""

from __future__ import annotations

import functools
import itertools
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner

from quotient_manifolds import demo
from quotient_manifolds.cli.app import cli
from quotient_manifolds.compare import Comparison
from quotient_manifolds.demo.digits import Digits, load_digits, shifted
from quotient_manifolds.demo.zoo import (
    ARCHITECTURE,
    RECORD,
    TrainingRecipe,
    draw_recipe,
    each_finished,
    train,
    train_zoo,
)
from quotient_manifolds.load import load_model

SMALL = ARCHITECTURE | {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
RECIPES = {name: draw_recipe(index, steps=2) for index, name in enumerate("abc")}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_digits(train_points=40)


@pytest.fixture(scope="module")
def data(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    digits.write(folder)
    return folder / "train.npz"


# ---- the data


def test_split_is_stratified_and_disjoint(digits: Digits) -> None:
    assert digits.train_labels.bincount(minlength=10).tolist() == [4] * 10
    assert len(digits.train_labels) + len(digits.test_labels) == 1797
    images = torch.cat([digits.train_images, digits.test_images])
    assert len(images.unique(dim=0)) == 1797  # scikit-learn's digits are all different: no point is on both sides
    assert digits.train_images.mean().abs() < 1e-6
    assert abs(float(digits.train_images.std()) - 1) < 1e-6
    with pytest.raises(ValueError, match="between 20 and 1697, found 3"):
        load_digits(train_points=3)


def test_shifted_images_are_cut_out_of_a_padded_one(digits: Digits) -> None:
    images = digits.train_images[:20]
    moved = shifted(images, 1, -7.0, torch.Generator().manual_seed(0))
    seen = set()
    for before, after in zip(images[:, 0], moved[:, 0], strict=True):
        padded = torch.full((10, 10), -7.0)
        padded[1:9, 1:9] = before
        windows = {(i, j): padded[i : i + 8, j : j + 8] for i, j in itertools.product(range(3), range(3))}
        matches = [offset for offset, window in windows.items() if torch.equal(window, after)]
        assert matches
        seen.add(matches[0])
    assert len(seen) > 3


def test_data_that_is_there_stays_untouched(digits: Digits, tmp_path: Path) -> None:
    digits.write(tmp_path)
    before = (tmp_path / "train.npz").stat().st_mtime_ns
    digits.write(tmp_path)
    assert (tmp_path / "train.npz").stat().st_mtime_ns == before
    replace(digits, train_images=-digits.train_images).write(tmp_path)
    with np.load(tmp_path / "train.npz", allow_pickle=False) as points:
        assert np.array_equal(points["images"], -digits.train_images.numpy())
        assert np.array_equal(points["labels"], digits.train_labels.numpy())


# ---- the zoo and what is kept of it


def zoo(
    folder: Path, data: Path, recipes: Mapping[str, TrainingRecipe] = RECIPES, **settings: object
) -> dict[str, Weights]:
    train_zoo(folder, recipes, data, **{"architecture": SMALL, **settings})  # type: ignore[arg-type]
    return {
        name: {key: value.clone() for key, value in load_model(folder / name).state_dict().items()} for name in recipes
    }  # clones: not views of the file


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def times(folder: Path) -> dict[str, int]:
    return {each.parent.name: each.stat().st_mtime_ns for each in folder.glob("*/model.safetensors")}


def test_recipes_differ_and_do_not_depend_on_how_many_are_drawn() -> None:
    assert len({draw_recipe(index) for index in range(24)}) == 24
    assert draw_recipe(7) == draw_recipe(7)
    assert draw_recipe(7) != draw_recipe(7, seed=1)


def test_training_is_deterministic_learns_and_leaves_the_global_generator_alone(digits: Digits) -> None:
    images, labels = digits.train_images, digits.train_labels
    recipe = TrainingRecipe(0.004, 0.01, batch_size=16, label_smoothing=0.1, shift=1, steps=30, seed=0)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first, second = train(recipe, images, labels), train(recipe, images, labels)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert same(first.state_dict(), second.state_dict())
    assert not first.training
    for other in (replace(recipe, seed=1), replace(recipe, shift=0), replace(recipe, label_smoothing=0.0)):
        assert not same(first.state_dict(), train(other, images, labels).state_dict())
    untrained = train(replace(recipe, learning_rate=1e-12), images, labels)
    with torch.no_grad():
        learned, before = (
            float(torch.nn.functional.cross_entropy(model(pixel_values=images).logits, labels))
            for model in (first, untrained)
        )
    assert learned < before - 0.5


def test_workers_train_the_same_models(tmp_path: Path, data: Path) -> None:
    alone, together = zoo(tmp_path / "1" / "models", data), zoo(tmp_path / "2" / "models", data, workers=2)
    assert all(same(alone[name], together[name]) for name in RECIPES)


def test_an_interrupt_of_workers_is_an_interrupt() -> None:
    """Not a broken pool: Ctrl-C reaches all processes of a terminal at once."""
    with pytest.raises(KeyboardInterrupt):
        list(each_finished([functools.partial(signal.raise_signal, signal.SIGINT)] * 2, 2))


def test_models_that_are_there_are_not_trained_again(tmp_path: Path, data: Path) -> None:
    told: list[tuple[str, int, int]] = []
    zoo(tmp_path / "models", data)
    before = times(tmp_path / "models")
    zoo(tmp_path / "models", data, progress=lambda *report: told.append(report))
    assert (times(tmp_path / "models"), told) == (before, [("training", 3, 3)])
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def test_models_of_other_settings_are_replaced(tmp_path: Path, data: Path) -> None:
    folder, one = tmp_path / "models", {"a": RECIPES["a"]}
    found = [
        zoo(folder, data, one),
        zoo(folder, data, {"a": replace(RECIPES["a"], weight_decay=0.5)}),
        zoo(folder, data, one, architecture=SMALL | {"intermediate_size": 16}),
    ]
    load_digits(train_points=40, seed=1).write(tmp_path)
    found.append(zoo(folder, tmp_path / "train.npz", one))
    assert not any(same(one["a"], other["a"]) for one, other in itertools.combinations(found, 2))


@pytest.mark.parametrize("damage", ["no record", "record cut", "weights cut", "weights changed", "no weights"])
def test_a_damaged_model_is_never_mistaken_for_a_finished_one(tmp_path: Path, data: Path, damage: str) -> None:
    folder = tmp_path / "models"
    before, made = zoo(folder, data), times(folder)
    record, weights = folder / "b" / RECORD, folder / "b" / "model.safetensors"
    if damage == "no record":
        record.unlink()
    elif damage == "record cut":
        record.write_bytes(record.read_bytes()[:50])
    elif damage == "weights cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "weights changed":
        weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    else:
        weights.unlink()
    again, remade = zoo(folder, data), times(folder)
    assert {name for name in made if remade[name] != made[name]} == {"b"}
    assert same(again["b"], before["b"])


def test_an_interrupted_zoo_goes_on_where_it_stopped(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"

    def stop_at_first(what: str, finished: int, total: int) -> None:
        if finished == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        zoo(folder, data, progress=stop_at_first)
    made = times(folder)
    assert list(made) == ["a"]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # after the weights are written, before the record
        patch.setattr("quotient_manifolds.demo.zoo.digest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            zoo(tmp_path / "other", data)
    assert {each.name for each in tmp_path.iterdir()} == {"models"}
    leftover = tmp_path / ".unfinished-b"  # of a process that was killed
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    zoo(folder, data)
    assert times(folder).items() > made.items()
    assert {each.name for each in tmp_path.iterdir()} == {"models"}


# ---- one run


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TRAIN_POINTS", 24)
    short = functools.partial(demo.prepare, training_steps=2)
    monkeypatch.setattr("quotient_manifolds.demo.prepare", short)


@pytest.mark.usefixtures("tiny")
def test_the_command_trains_moves_and_compares(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    words = ["demo", "--out", str(out), "--models", "2", "--workers", "1", "--seed", "3"]
    shown = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    found = Comparison.load(out / "comparison.json")
    assert [row.checkpoint for row in found.rows] == ["vit-00", "vit-01"]
    assert found.known == (8, 8)
    assert "Kendall" in shown.stdout
    said = shown.stdout.replace("\n", "")
    for page in ("orbit.html", "report.html"):
        assert str(out / page) in said
        assert (out / page).read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    rates = pd.read_csv(out / "scores.csv").set_index("checkpoint")["learning_rate"]
    assert rates.to_dict() == {f"vit-{index:02}": draw_recipe(index, seed=3).learning_rate for index in range(2)}


def test_bad_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for words in (["--out", str(tmp_path), "--models", "1"], ["--out", str(tmp_path / "file")]):
        assert CliRunner().invoke(cli, ["demo", *words, "--quiet"]).exit_code == 2
    with pytest.raises(ValueError, match="at least 2 models, found models=1"):
        demo.prepare(tmp_path, models=1)
