"""The demonstration, small: the zoo and its cache, the records, and one run from start to end."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from scipy import stats

from quotient_manifolds.experiments import DemoResult, run_demo
from quotient_manifolds.experiments.digits import Digits, load_digits, shifted
from quotient_manifolds.experiments.zoo import ARCHITECTURE, Recipe, TrainedModel, draw_recipe, score, train, train_zoo
from quotient_manifolds.files import write_text

SMALL = ARCHITECTURE | {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
RECIPES = [draw_recipe(index, steps=2) for index in range(3)]
TINY: dict[str, Any] = {
    "models": 5,
    "steps": 2,
    "batches": 2,
    "batch_size": 12,
    "train_points": 40,
    "training_steps": 3,
    "scales": (0.1, 10.0),
    "resamples": 50,
}


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_digits(train_points=40)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DemoResult, list[tuple[str, int, int]]]:
    out, reports = tmp_path_factory.mktemp("demo"), []
    result = run_demo(out, **TINY, progress=lambda *report: reports.append(report))
    return out, result, reports


# ---- the data


def test_split_is_stratified_and_disjoint(digits: Digits) -> None:
    assert len(digits.train_labels) == 40
    assert digits.train_labels.bincount(minlength=10).tolist() == [4] * 10
    assert len(digits.train_labels) + len(digits.test_labels) == 1797
    images = torch.cat([digits.train_images, digits.test_images])
    assert len(images.unique(dim=0)) == 1797  # scikit-learn's digits are all different: no point is on both sides
    assert digits.train_images.mean().abs() < 1e-6
    assert abs(float(digits.train_images.std()) - 1) < 1e-6


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


def test_batches_are_disjoint_training_points(digits: Digits) -> None:
    first, second = digits.training_batches(2, 20)
    joined = torch.cat([first["pixel_values"], second["pixel_values"]])
    assert torch.equal(joined, digits.train_images)
    with pytest.raises(ValueError, match="at most 40 points"):
        digits.training_batches(3, 20)
    with pytest.raises(ValueError, match="between 20 and 1697, found 3"):
        load_digits(train_points=3)


# ---- the zoo and its cache


def weights(model: TrainedModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.load().state_dict().items()}  # not views of the file


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def zoo(cache: Path, digits: Digits, **settings: object) -> list[TrainedModel]:
    return train_zoo(RECIPES, digits, cache, architecture=SMALL, **settings)  # type: ignore[arg-type]


def test_recipes_differ_and_do_not_depend_on_how_many_are_drawn() -> None:
    assert len({draw_recipe(index) for index in range(24)}) == 24
    assert draw_recipe(7) == draw_recipe(7)
    assert draw_recipe(7) != draw_recipe(7, seed=1)


def test_training_is_deterministic_learns_and_leaves_the_global_generator_alone(digits: Digits) -> None:
    recipe = Recipe(0.004, 0.01, batch_size=16, label_smoothing=0.1, shift=1, steps=30, seed=0)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first, second = train(recipe, digits), train(recipe, digits)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert same(first.state_dict(), second.state_dict())
    assert not first.training
    for other in (replace(recipe, seed=1), replace(recipe, shift=0), replace(recipe, label_smoothing=0.0)):
        assert not same(first.state_dict(), train(other, digits).state_dict())
    untrained = train(replace(recipe, learning_rate=1e-12), digits)
    assert score(first, digits).train_loss < score(untrained, digits).train_loss - 0.5


def test_cached_models_are_not_trained_again(tmp_path: Path, digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    first = zoo(tmp_path, digits)
    assert [model.reused for model in first] == [False] * 3
    monkeypatch.setattr("quotient_manifolds.experiments.zoo.train", None)  # calling it would fail
    second = zoo(tmp_path, digits)
    assert [model.reused for model in second] == [True] * 3
    assert [model.scores for model in second] == [model.scores for model in first]
    assert [model.recipe for model in second] == RECIPES
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(model.directory.name for model in first)


def test_other_settings_are_other_models(tmp_path: Path, digits: Digits) -> None:
    (model,) = train_zoo(RECIPES[:1], digits, tmp_path, architecture=SMALL)
    others = (
        (replace(RECIPES[0], weight_decay=0.5), digits, SMALL),
        (RECIPES[0], load_digits(train_points=40, seed=1), SMALL),
        (RECIPES[0], digits, SMALL | {"intermediate_size": 16}),
    )
    for recipe, data, architecture in others:
        (other,) = train_zoo([recipe], data, tmp_path, architecture=architecture)
        assert not other.reused
        assert other.directory != model.directory


@pytest.mark.parametrize("damage", ["no record", "record cut", "weights cut", "weights changed", "no weights"])
def test_a_damaged_model_is_never_mistaken_for_a_finished_one(tmp_path: Path, digits: Digits, damage: str) -> None:
    model = zoo(tmp_path, digits)[1]
    before = weights(model)
    record, data = model.directory / "training.json", model.directory / "model.safetensors"
    if damage == "no record":
        record.unlink()
    elif damage == "record cut":
        record.write_bytes(record.read_bytes()[:50])
    elif damage == "weights cut":
        data.write_bytes(data.read_bytes()[:-100])
    elif damage == "weights changed":
        data.write_bytes(data.read_bytes()[:-1] + bytes([data.read_bytes()[-1] ^ 1]))
    else:
        data.unlink()
    again = zoo(tmp_path, digits)
    assert [found.reused for found in again] == [True, False, True]
    assert same(weights(again[1]), before)


def test_an_interrupted_zoo_goes_on_where_it_stopped(
    tmp_path: Path, digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_at_second(what: str, finished: int, total: int) -> None:
        if finished == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        zoo(tmp_path, digits, progress=stop_at_second)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # after the weights are written, before the record
        patch.setattr("quotient_manifolds.experiments.kept.digest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_zoo(RECIPES[1:], digits, tmp_path / "other", architecture=SMALL)
    assert list((tmp_path / "other").iterdir()) == []
    leftover = tmp_path / ".unfinished-of-a-killed-process"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert [model.reused for model in zoo(tmp_path, digits)] == [True, False, False]


# ---- one run


def test_a_run_writes_everything_and_loads_again(demo: tuple[Path, DemoResult, object]) -> None:
    out, result, _ = demo
    assert DemoResult.load(out) == DemoResult.load(out / "records.json") == result
    assert (out / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert {path.suffix for path in out.iterdir()} <= {"", ".html", ".json", ".csv"}
    models = pd.read_csv(out / "models.csv")
    assert models["model"].tolist() == [model.name for model in result.models]
    assert models["mix_sharpness"].tolist() == [model.sharpness["mix"].mean for model in result.models]
    for _, row in pd.read_csv(out / "correlations.csv").iterrows():
        expected = stats.kendalltau(models[f"{row['measure']}_sharpness"], models[row["gap"]]).statistic
        assert row["value"] == pytest.approx(expected, nan_ok=True)
    assert len(pd.read_csv(out / "orbit.csv")) == 2 * 3 * 2


def test_a_run_measures_what_it_says(demo: tuple[Path, DemoResult, object]) -> None:
    _, result, _ = demo
    assert [measure.key for measure in result.measures] == ["euclidean", "adaptive", "inv", "mix"]
    assert {pair.verdict for pair in result.pairs} == {"proved"}
    assert len(result.pairs) == 6
    assert all(value.mean > 0 for model in result.models for value in model.sharpness.values())
    assert all(value.standard_error is not None for model in result.models for value in model.sharpness.values())
    for row in result.orbit:
        if row.measure == "adaptive":
            assert abs(row.ratio - 1) > 0.05
        else:
            assert abs(row.ratio - 1) < (1e-6 if row.dtype == "float64" else 2e-2)
        assert row.loss_after == pytest.approx(row.loss_before, rel=1e-9 if row.dtype == "float64" else 1e-3)
    assert {key: len(losses) for key, losses in result.curves.items()} == dict.fromkeys(
        ["euclidean", "adaptive", "inv", "mix"], 3
    )


def test_progress_is_told_in_order_and_to_the_end(
    demo: tuple[Path, DemoResult, list[tuple[str, int, int]]],
) -> None:
    _, _, reports = demo
    for stage, told in itertools.groupby(reports, key=lambda report: report[0]):
        finished, totals = zip(*((done, total) for _, done, total in told), strict=True)
        assert list(finished) == sorted(finished), stage
        assert set(totals) == {finished[-1]}
    assert len({stage for stage, _, _ in reports}) == 4


def test_a_second_run_trains_nothing_and_finds_the_same(
    demo: tuple[Path, DemoResult, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, first, _ = demo
    monkeypatch.setattr("quotient_manifolds.experiments.zoo.train", None)
    second = run_demo(tmp_path, **TINY, cache=out / "zoo", command="as before")
    assert (first.provenance.trained, second.provenance.trained) == (5, 0)
    assert replace(second, provenance=first.provenance) == first
    assert second.provenance.command == "as before"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"models": 1}, "at least 2 models, found models=1"),
        ({"dtype": "float16"}, "one of float32, float64, found 'float16'"),
        ({"steps": 0}, "steps must be at least 1, found 0"),
        ({"radius": -1.0}, "positive and finite, found -1.0"),
        ({"scales": ()}, "at least one"),
        ({"batches": 9}, "at most 40 points"),
    ],
)
def test_settings_without_sense_are_refused_before_training(
    tmp_path: Path, wrong: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_demo(tmp_path, **(TINY | wrong))
    assert not (tmp_path / "zoo").exists()


# ---- records


def test_records_refuse_what_json_cannot_hold_and_what_they_did_not_write(
    demo: tuple[Path, DemoResult, object], tmp_path: Path
) -> None:
    _, result, _ = demo
    file = tmp_path / "records.json"
    result.save(file)
    kept = file.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(result, noise=math.nan).save(file)
    assert file.read_text(encoding="utf-8") == kept
    file.write_text(json.dumps(result.to_dict() | {"format": 99}), encoding="utf-8")
    with pytest.raises(ValueError, match="format 2, found 99"):
        DemoResult.load(file)
    for broken in (kept[:100], "[]", '{"format": 2}'):
        file.write_text(broken, encoding="utf-8")
        with pytest.raises(ValueError, match="does not hold records of the demonstration"):
            DemoResult.load(file)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "page.html"
    write_text(file, "old")

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("quotient_manifolds.files.os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(file, "new")
    assert file.read_text(encoding="utf-8") == "old"
