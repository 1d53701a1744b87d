"""A comparison of a small zoo: its numbers, what a rerun measures again, what fails, and what is written."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from click.testing import CliRunner
from click.testing import Result as Done
from torch import nn

from quotient_manifolds.cli.app import cli
from quotient_manifolds.compare import Comparison, Store, StoreError, analysis, worker
from quotient_manifolds.compare.identity import batch_hash, model_hash
from quotient_manifolds.geometry import Adaptive, Euclidean, Quotient
from quotient_manifolds.report import Page
from quotient_manifolds.sharpness import (
    BatchResult,
    Result,
    average_case_sharpness,
    cross_entropy,
    gradient_norm,
    hessian_trace,
    legacy_sharpness,
    normalised_logits,
    top_eigenvalue,
    worst_case_profile,
    worst_case_sharpness,
)
from quotient_manifolds.statistics import correlation
from quotient_manifolds.symmetries import find_symmetries, random_move
from tests import hugging_face
from tests.counters import recorded_runs
from tests.zoos import CLASSES, HEAD, MARK, Plain, save, vit, write_images, write_spec, write_zoo

WORST = "measure: worst-case, geometry: inv, radius: 0.05, steps: 2"
SLOPE = "measure: gradient-norm, geometry: [euclidean, adaptive]"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_zoo(tmp_path_factory.mktemp("original"))


@pytest.fixture
def zoo(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(original, tmp_path / "zoo"))


def compare(spec: Path, *options: str, report: bool = False) -> Done:
    """The command; without the report's figures, which take longer than all else, unless they are asked for."""
    arguments = ["compare", str(spec), "--out", str(spec.parent / "out"), *options]
    empty = patch("quotient_manifolds.compare.report.comparison_page", lambda comparison: Page("", "", [], []))
    with nullcontext() if report else empty:
        return CliRunner().invoke(cli, arguments, catch_exceptions=False)


def found(spec: Path) -> Comparison:
    return Comparison.load(spec.parent / "out")


def measured_now(done: Result) -> int:
    if "Nothing was left to measure" in done.stdout:
        return 0
    (count,) = re.findall(r"Measured now: (\d+)", done.stdout)
    return int(count)


def units(spec: Path) -> pd.DataFrame:
    with Store(spec.parent / "out" / "store.sqlite", make=False) as store:
        return store.frame()


def table(spec: Path) -> list[tuple[Any, ...]]:
    """All that was measured, read without the package, but for the seconds it took."""
    connection = sqlite3.connect(spec.parent / "out" / "store.sqlite")
    try:
        columns = "key, checkpoint, measure, geometry, radius, batch, settings, payload"
        return connection.execute(f"SELECT {columns} FROM results ORDER BY key").fetchall()
    finally:
        connection.close()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the checkpoints that are loaded."""
    names: list[str] = []
    load = worker.load_checkpoint

    def noted(checkpoint: Any) -> nn.Module:
        names.append(checkpoint.name)
        return load(checkpoint)

    monkeypatch.setattr(worker, "load_checkpoint", noted)
    return names


# Numbers.

MODEL = "models/m_1"


def model_and_batches(folder: Path) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """The second model, and the batches of 8, without the package."""
    model = transformers.ViTForImageClassification.from_pretrained(folder / MODEL, local_files_only=True).eval()
    with np.load(folder / "train.npz") as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    return model, [
        {"pixel_values": images[start : start + 8], "labels": labels[start : start + 8]}
        for start in range(0, len(labels), 8)
    ]


Direct = Callable[[nn.Module, list[Any]], list[Result]]


def worst(geometry: Any, *radii: float, steps: int = 2, **options: Any) -> Direct:
    return lambda model, batches: [
        worst_case_sharpness(model, cross_entropy, batches, geometry=geometry, radius=radius, steps=steps, **options)
        for radius in radii
    ]


# What a spec asks for, and how a program gets the same.
MEASURES: list[tuple[str, Direct]] = [
    ("measure: worst-case, geometry: euclidean, radius: 0.05, steps: 2", worst(Euclidean(), 0.05)),
    ("measure: worst-case, geometry: euclidean, norm: linf, radius: 1e-3, steps: 2", worst(Euclidean("linf"), 0.001)),
    ("measure: worst-case, geometry: adaptive, radius: [0.1, 0.05], steps: 2", worst(Adaptive(), 0.05, 0.1)),
    ("measure: worst-case, geometry: adaptive, eta: 0.01, radius: 0.05, steps: 2", worst(Adaptive(0.01), 0.05)),
    ("measure: worst-case, geometry: adaptive, norm: linf, radius: 1e-2, steps: 2", worst(Adaptive(norm="linf"), 0.01)),
    (
        "measure: worst-case, geometry: inv, radius: 0.05, steps: 2, restarts: 1, seed: 3",
        worst(Quotient("inv"), 0.05, restarts=1, seed=3),
    ),
    (
        "measure: worst-case, geometry: mix, radius: 0.05, steps: 3, tolerance: 0.5",
        worst(Quotient("mix"), 0.05, steps=3, tolerance=0.5),
    ),
    (
        "measure: worst-case, geometry: 0.25, geodesic: first, radius: 0.05, steps: 2",
        worst(Quotient(0.25, "first"), 0.05),
    ),
    (
        "measure: worst-case, geometry: inv, geodesic: exact, radius: 0.05, steps: 1",
        worst(Quotient("inv", "exact"), 0.05, steps=1),
    ),
    ("measure: worst-case, geometry: inv, eps: 0.01, radius: 0.05, steps: 2", worst(Quotient("inv", eps=0.01), 0.05)),
    (
        "measure: worst-case, geometry: mix, radius: [0.02, 0.05, 0.1], steps: 2, warm_start: true",
        lambda model, batches: list(
            worst_case_profile(
                model, cross_entropy, batches, geometry=Quotient("mix"), radii=(0.02, 0.05, 0.1), steps=2
            )
        ),
    ),
    (
        "measure: worst-case, geometry: mix, radius: 0.02, steps: 2, normalise_logits: true",
        lambda model, batches: [
            worst_case_sharpness(
                model, normalised_logits(cross_entropy), batches, geometry=Quotient("mix"), radius=0.02, steps=2
            )
        ],
    ),
    (
        "measure: legacy-worst-case, geometry: adaptive, radius: 0.05, steps: 3",
        lambda model, batches: [
            legacy_sharpness(model, cross_entropy, batches, geometry=Adaptive(), radius=0.05, steps=3)
        ],
    ),
    (
        "measure: average-case, geometry: inv, sigma: 0.05, samples: 2, seed: 5",
        lambda model, batches: [
            average_case_sharpness(
                model, cross_entropy, batches, geometry=Quotient("inv"), sigma=0.05, samples=2, seed=5
            )
        ],
    ),
    (
        "measure: gradient-norm, geometry: [inv, euclidean]",
        lambda model, batches: [
            gradient_norm(model, cross_entropy, batches, geometry=geometry)
            for geometry in (Quotient("inv"), Euclidean())
        ],
    ),
    (
        "measure: hessian-trace, geometry: adaptive, samples: 2",
        lambda model, batches: [hessian_trace(model, cross_entropy, batches, geometry=Adaptive(), samples=2)],
    ),
    (
        "measure: top-eigenvalue, geometry: mix, tolerance: 0.1, restarts: 3",
        lambda model, batches: [
            top_eigenvalue(model, cross_entropy, batches, geometry=Quotient("mix"), tolerance=0.1, restarts=3)
        ],
    ),
]


def test_every_measure_is_the_public_function_bit_for_bit(zoo: Path) -> None:
    shutil.rmtree(zoo / "models" / "m_3")
    spec = write_spec(zoo, *(asked for asked, _ in MEASURES), head=HEAD.replace("models/*", MODEL))
    done = compare(spec)
    assert done.exit_code == 0, done.output
    model, batches = model_and_batches(zoo)
    expected = [measurement for _, direct in MEASURES for measurement in direct(model, batches)]
    comparison = found(spec)
    assert len(comparison.measures) == len(expected) == 21
    kept = payloads(spec)
    (row,) = comparison.rows
    for named, measurement in zip(comparison.measures, expected, strict=True):
        radius = measurement.settings.get("radius")
        assert named.radius == radius
        settings = {
            **measurement.settings,
            "normalise_logits": "normalised" in named.label,
            "eps": 0.01 if " eps " in named.label else 0.0,
        }
        ours = kept[(measurement.measure, measurement.geometry, radius, json.dumps(settings, sort_keys=True))]
        assert ours == list(measurement.batches), named.label
        value = row.values[named.label]
        assert value is not None
        assert (value.mean, value.standard_error) == (measurement.mean, measurement.standard_error)
        assert (value.reach, value.beyond_reach) == (measurement.reach, bool(measurement.beyond_reach))
        mean, error = float(np.mean(measurement.values)), float(np.std(measurement.values, ddof=1) / math.sqrt(2))
        assert (value.mean, value.standard_error) == pytest.approx((mean, error), rel=1e-12)


def payloads(spec: Path) -> dict[tuple[Any, ...], list[BatchResult]]:
    kept: dict[tuple[Any, ...], list[BatchResult]] = {}
    with Store(spec.parent / "out" / "store.sqlite", make=False) as store:
        for result in store.results():
            one = result.unit
            if one.measure != "score":
                place = (one.measure, one.geometry, one.radius, json.dumps(one.settings, sort_keys=True))
                kept.setdefault(place, []).append(BatchResult.from_dict(result.payload))
    return kept


def test_a_warm_start_goes_on_where_another_process_has_ended(zoo: Path) -> None:
    """The smaller radii are climbed again where their last points are not at hand."""
    head = HEAD.replace("models/*", MODEL)
    asked = "measure: worst-case, geometry: mix, steps: 2, warm_start: true, radius: "
    compare(write_spec(zoo, f"{asked} [0.02, 0.05]", head=head))
    spec = write_spec(zoo, f"{asked} [0.02, 0.05, 0.1]", head=head)
    assert measured_now(compare(spec)) == 2
    model, batches = model_and_batches(zoo)
    profile = worst_case_profile(
        model, cross_entropy, batches, geometry=Quotient("mix"), radii=(0.02, 0.05, 0.1), steps=2
    )
    assert [each for _, each in sorted(payloads(spec).items(), key=lambda item: item[0][2])] == [
        list(each.batches) for each in profile
    ]


def test_scores_and_gaps_are_over_all_examples(zoo: Path) -> None:
    """With a last batch of another size, and labels that do not count in a mean over labels."""
    spec = write_spec(
        zoo, SLOPE, head=HEAD.replace("batch_size: 8", "batch_size: 6").replace("test.npz", "test.npz, batch_size: 5")
    )
    compare(spec)
    comparison = found(spec)
    for row in comparison.rows:
        model = transformers.ViTForImageClassification.from_pretrained(zoo / "models" / row.checkpoint).eval()
        expected: dict[str, float] = {}
        for prefix, name in (("", "train.npz"), ("test_", "test.npz")):
            with np.load(zoo / name) as arrays, torch.no_grad():
                logits = model(torch.from_numpy(arrays["images"])).logits.double().numpy()
                labels = arrays["labels"]
            log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            expected[f"{prefix}loss"] = -float(log_p[np.arange(len(labels)), labels].mean())
            expected[f"{prefix}error"] = float((logits.argmax(axis=1) != labels).mean())
        expected |= {f"{what}_gap": expected[f"test_{what}"] - expected[what] for what in ("error", "loss")}
        assert row.scores == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert len({row.scores["loss"] for row in comparison.rows}) == 4
    assert comparison.against == ("error_gap", "loss_gap")


def test_the_precision_is_that_of_the_spec(zoo: Path) -> None:
    spec = write_spec(zoo, WORST, head=HEAD.replace("models/*", MODEL), tail="dtype: float64")
    compare(spec)
    model, batches = model_and_batches(zoo)
    wide = [{"pixel_values": batch["pixel_values"].double(), "labels": batch["labels"]} for batch in batches]
    direct = worst_case_sharpness(model.double(), cross_entropy, wide, geometry=Quotient("inv"), radius=0.05, steps=2)
    assert list(payloads(spec).values()) == [list(direct.batches)]


def test_models_of_text_are_measured(tmp_path: Path) -> None:
    home = hugging_face.bert_classifier(tmp_path / "bert")
    lines = ["good film", "a bad film", "very good", "not good"]
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"text": line, "label": place % 2}) + "\n" for place, line in enumerate(lines))
    )
    head = "checkpoints: {paths: bert}\ndata: {path: data.jsonl, batch_size: 2}"
    spec = write_spec(tmp_path, WORST, head=head)
    assert compare(spec).exit_code == 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(home).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    batches = [
        {**tokenizer(lines[start : start + 2], padding=True, return_tensors="pt"), "labels": torch.tensor([0, 1])}
        for start in (0, 2)
    ]
    direct = worst_case_sharpness(model, cross_entropy, batches, geometry=Quotient("inv"), radius=0.05, steps=2)
    (row,) = found(spec).rows
    (value,) = row.values.values()
    assert value is not None
    assert value.mean == pytest.approx(direct.mean, rel=1e-6)


def test_correlations_are_those_of_the_columns(zoo: Path) -> None:
    (zoo / "scores.csv").write_text("checkpoint,rate,kind\nm_0,0.1,a\nm_1,0.2,b\nm_2,0.4,a\nm_3,0.3,b\nm_9,1,a\n")
    spec = write_spec(zoo, SLOPE, tail="scores: scores.csv\nagainst: [rate, loss_gap]\ngiven: [kind, rate]")
    assert compare(spec).exit_code == 0
    comparison = found(spec)
    frame = comparison.frame()
    assert list(frame.index) == ["m_0", "m_1", "m_2", "m_3"]
    assert list(frame["rate"]) == [0.1, 0.2, 0.4, 0.3]
    assert len(comparison.rankings) == 2 * 2 * (3 + 2)
    for each in comparison.rankings:
        x, y = list(frame[each.measure]), list(frame[each.against])
        given = {name: list(frame[name]) for name in each.given}
        kind = each.correlation.kind
        assert each.correlation == correlation(x, y, kind, given=given)


# What is measured again.


def test_a_rerun_measures_nothing_and_loads_nothing(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_spec(zoo, WORST, SLOPE)
    first = compare(spec)
    assert first.exit_code == 0
    assert measured_now(first) == 4 * (3 + 2 * 3)  # scores on 2 + 1 batches, 3 measures on 2
    before, kept = table(spec), (zoo / "out" / "comparison.json").read_bytes()

    def never(*what: Any) -> None:
        raise AssertionError(what)

    monkeypatch.setattr(worker, "load_checkpoint", never)
    monkeypatch.setattr(analysis, "correlation", never)
    again = compare(spec)
    assert again.exit_code == 0, again.output
    assert "Nothing was left to measure. Known: 12 of 12 values." in again.stdout
    assert table(spec) == before
    assert (zoo / "out" / "comparison.json").read_bytes() == kept


def test_only_what_is_new_is_measured(zoo: Path, loads: list[str]) -> None:
    head = HEAD.replace("train.npz", "train.npz, max_batches: 1")
    compare(write_spec(zoo, WORST, head=head))
    before = set(table(zoo / "zoo.yaml"))
    more = WORST.replace("0.05", "[0.02, 0.05]")
    assert measured_now(compare(write_spec(zoo, more, head=head))) == 4
    assert measured_now(compare(write_spec(zoo, more, "measure: gradient-norm, geometry: inv", head=head))) == 4
    assert measured_now(compare(write_spec(zoo, more.replace("steps: 2", "steps: 3"), head=head))) == 8
    loads.clear()
    assert measured_now(compare(write_spec(zoo, more))) == 4 * (1 + 2)  # the second batch: scores and two radii
    assert loads == ["m_0", "m_1", "m_2", "m_3"]
    assert before < set(table(zoo / "zoo.yaml"))
    loads.clear()
    assert measured_now(compare(write_spec(zoo, WORST, head=head))) == 0
    assert [each.radius for each in found(zoo / "zoo.yaml").measures] == [0.05]
    assert loads == []


def test_weights_decide_not_files_or_names(zoo: Path, loads: list[str]) -> None:
    spec = write_spec(zoo, WORST)
    compare(spec)
    before, values = table(spec), found(spec).rows
    loads.clear()
    os.utime(zoo / "models" / "m_1" / "model.safetensors")
    assert measured_now(compare(spec)) == 0
    assert loads == ["m_1"]
    loads.clear()
    (zoo / "models" / "m_2").rename(zoo / "models" / "a_renamed")
    assert measured_now(compare(spec)) == 0
    assert loads == ["a_renamed"]
    renamed = found(spec).rows
    assert [row.checkpoint for row in renamed] == ["a_renamed", "m_0", "m_1", "m_3"]
    assert renamed[0].values == values[2].values
    assert renamed[0].scores == values[2].scores
    assert table(spec) == before

    loads.clear()
    model = transformers.ViTForImageClassification.from_pretrained(zoo / "models" / "m_3")
    with torch.no_grad():
        model.classifier.bias[0] += 1e-3
    save(model, zoo / "models" / "m_3")
    assert measured_now(compare(spec)) == 3 + 2
    assert loads == ["m_3"]
    changed = found(spec).rows[3]
    assert changed.values != values[3].values
    assert set(table(spec)) > set(before)


def test_a_model_is_its_class_settings_and_state(monkeypatch: pytest.MonkeyPatch) -> None:
    same = model_hash(vit(0))
    moved = vit(0)
    moved.config._name_or_path = "elsewhere"
    assert model_hash(moved) == same
    with monkeypatch.context() as patched:
        patched.setattr("transformers.configuration_utils.__version__", "99")
        assert model_hash(vit(0)) == same
    others = [vit(0) for _ in range(6)]
    others[5].vit.layernorm.eps = 1e-3
    others[0].config.hidden_act = "relu"
    others[1].classifier.bias.requires_grad_(False)
    others[2].register_buffer("shift", torch.zeros(()))
    others[3].classifier.bias.data = others[3].classifier.bias.data.double()
    others[4].classifier.bias.data = -others[4].classifier.bias.data
    assert len({same, *map(model_hash, others), model_hash(nn.Sequential(vit(0)))}) == 8


def test_a_batch_is_its_structure_and_tensors() -> None:
    x = torch.arange(4)
    batches = [
        x,
        x.float(),
        x.view(2, 2),
        (x,),
        [x],
        (x, x),
        {"a": x},
        {"b": x},
        {"a": x, "b": 1},
        {"a": x, "b": 2},
        x + 1,
    ]
    assert len(set(map(batch_hash, batches))) == len(batches)
    assert batch_hash({"a": x, "b": 1}) == batch_hash({"a": x.clone(), "b": 1})
    assert batch_hash(torch.stack([x, x], 1)[:, 0]) == batch_hash(x)  # strides do not matter


def test_a_function_is_called_again_for_nobody_knows_what_it_reads(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_spec(zoo, SLOPE, head=HEAD.replace("paths: models/*", "loader: tests.zoos:plain"))
    assert measured_now(compare(spec)) == 3 + 2 * 2
    assert measured_now(compare(spec)) == 0
    torch.manual_seed(1)
    monkeypatch.setattr("tests.zoos.plain", lambda: Plain().eval())
    assert measured_now(compare(spec)) == 3 + 2 * 2


def test_twins_are_measured_once(zoo: Path) -> None:
    shutil.copytree(zoo / "models" / "m_0", zoo / "models" / "twin")
    spec = write_spec(zoo, WORST)
    assert measured_now(compare(spec)) == 4 * 5
    rows = {row.checkpoint: row for row in found(spec).rows}
    assert rows["twin"].values == rows["m_0"].values
    assert None not in rows["twin"].values.values()


def test_data_settings_and_version_decide(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_spec(zoo, WORST, head=HEAD.replace("models/*", MODEL))
    assert measured_now(compare(spec)) == 5
    os.utime(zoo / "train.npz")
    assert measured_now(compare(spec)) == 0
    with np.load(zoo / "train.npz") as arrays:
        images, labels = arrays["images"].copy(), arrays["labels"].copy()
    images[9, 0, 3, 3] += 1.0
    np.savez(zoo / "train.npz", images=images, labels=labels)
    assert measured_now(compare(spec)) == 1 + 1  # the second batch alone: score and measure
    labels[0] = (labels[0] + 1) % CLASSES
    np.savez(zoo / "train.npz", images=images, labels=labels)
    assert measured_now(compare(spec)) == 1 + 1
    for module in ("inventory", "worker"):
        monkeypatch.setattr(f"quotient_manifolds.compare.{module}.VERSION", "99")
    assert measured_now(compare(spec)) == 5


def test_batches_that_are_equal_draw_on_their_own(zoo: Path) -> None:
    """What is random is seeded by the place of the batch, so that decides too."""
    with np.load(zoo / "train.npz") as arrays:
        images, labels = (np.concatenate([arrays[name][:8]] * 2) for name in ("images", "labels"))
    np.savez(zoo / "train.npz", images=images, labels=labels)
    spec = write_spec(
        zoo, "measure: average-case, geometry: adaptive, sigma: 0.05, samples: 2", head=HEAD.replace("models/*", MODEL)
    )
    compare(spec)
    ((first, second),) = payloads(spec).values()
    assert first.base_loss == second.base_loss
    assert first.value != second.value


def test_what_a_loader_writes_below_is_not_read_again_and_what_lies_beside_is(zoo: Path, loads: list[str]) -> None:
    """Conversions are kept in a directory of the checkpoint, and take a vocabulary from where the checkpoint lies."""
    spec = write_spec(zoo, SLOPE)
    compare(spec)
    (zoo / "models" / "m_2" / "converted").mkdir()
    (zoo / "models" / "m_2" / "converted" / "model.safetensors").touch()
    loads.clear()
    assert measured_now(compare(spec)) == 0
    assert loads == []
    (zoo / "models" / "vocab.txt").touch()
    assert measured_now(compare(spec)) == 0
    assert loads == ["m_0", "m_1", "m_2", "m_3"]


def test_a_file_written_while_it_is_loaded_is_read_again(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = worker.load_checkpoint

    def raced(checkpoint: Any) -> nn.Module:
        model = load(checkpoint)
        save(vit(77), checkpoint.path)
        return model

    spec = write_spec(zoo, WORST, head=HEAD.replace("models/*", MODEL))
    with monkeypatch.context() as patched:
        patched.setattr(worker, "load_checkpoint", raced)
        compare(spec)
    assert measured_now(compare(spec)) == 5
    model, batches = model_and_batches(zoo)
    direct = worst_case_sharpness(model, cross_entropy, batches, geometry=Quotient("inv"), radius=0.05, steps=2)
    (value,) = found(spec).rows[0].values.values()
    assert value is not None
    assert value.mean == direct.mean


# What fails.


def failures(spec: Path) -> list[tuple[str, str | None, str]]:
    return [(each.checkpoint, each.what, each.message) for each in found(spec).failures]


def said_and_shown(done: Result, spec: Path) -> None:
    """Every failure is a line on standard error and a row of the report."""
    page = (spec.parent / "out" / "report.html").read_text()
    listed = page[page.index('id="failures"') :]
    comparison = found(spec)
    assert comparison.failures
    assert done.stderr.count("Failed: ") == len(comparison.failure_groups)
    for failure in comparison.failures:
        assert failure.message in done.stderr
        assert f"<td>{failure.checkpoint}</td>" in listed or f">{failure.checkpoint}<" in listed


def test_a_checkpoint_that_does_not_load_is_a_row_and_the_rest_goes_on(zoo: Path, loads: list[str]) -> None:
    spec = write_spec(zoo, WORST)
    weights = zoo / "models" / "m_1" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    (zoo / "models" / "empty").mkdir()
    done = compare(spec, report=True)
    assert done.exit_code == 1
    assert measured_now(done) == 3 * 5
    (empty, broken) = failures(spec)
    assert empty == ("empty", None, f"{zoo / 'models' / 'empty'} is no Hugging Face model: it has no config.json.")
    assert broken[:2] == ("m_1", None)
    assert "does not load" in broken[2]
    said_and_shown(done, spec)
    assert found(spec).known == (3, 5)
    assert "Known: 3 of 5 values." in done.stdout
    weights.write_bytes(whole)
    (zoo / "models" / "empty").rmdir()
    loads.clear()
    again = compare(spec)
    assert again.exit_code == 0
    assert loads == ["m_1"]
    assert failures(spec) == []
    assert found(spec).known == (4, 4)


@pytest.mark.parametrize("touched", [False, True])
def test_a_failure_ends_when_the_files_are_back(zoo: Path, loads: list[str], touched: bool) -> None:
    """Nothing is left to measure then, and nothing tells of it but the files."""
    spec = write_spec(zoo, WORST)
    compare(spec)
    weights = zoo / "models" / "m_1" / "model.safetensors"
    weights.rename(zoo / "away")
    assert compare(spec).exit_code == 1
    (zoo / "away").rename(weights)
    if touched:
        os.utime(weights)
    loads.clear()
    done = compare(spec)
    assert (done.exit_code, measured_now(done), loads) == (0, 0, ["m_1"])  # a move changes the time of the inode


def test_a_head_with_too_few_classes(zoo: Path) -> None:
    save(vit(9, classes=2), zoo / "models" / "m_9")
    spec = write_spec(zoo, WORST, SLOPE)
    done = compare(spec, report=True)
    assert done.exit_code == 1
    ((name, _, why),) = failures(spec)
    assert name == "m_9"
    assert "the label must be in 0 ... 1, the classes of the model, found 2" in why
    said_and_shown(done, spec)


def fragile_zoo(zoo: Path) -> str:
    """Input 9, of the second batch, is marked; the loader may trip over it."""
    with np.load(zoo / "train.npz") as arrays:
        images, labels = arrays["images"].copy(), arrays["labels"].copy()
    images[9, 0, 0, 0] = MARK
    np.savez(zoo / "train.npz", images=images, labels=labels)
    return HEAD.replace("models/*", "models/*, loader: tests.zoos:fragile")


def trouble(zoo: Path, kind: str) -> None:
    (zoo / "models" / "m_1" / "trouble.txt").write_text(kind)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("nan", "must be finite"),
        ("error", "CUDA error: an illegal memory access was encountered Compile with TORCH_USE_CUDA_DSA"),
    ],
)
def test_a_failure_on_one_batch_leaves_the_others(zoo: Path, kind: str, why: str, loads: list[str]) -> None:
    head = fragile_zoo(zoo)
    trouble(zoo, kind)
    spec = write_spec(zoo, WORST, SLOPE, head=head)
    done = compare(spec, report=True)
    assert done.exit_code == 1
    assert measured_now(done) == 4 * 9 - 4
    said_and_shown(done, spec)
    assert found(spec).known == (9, 12)
    troubles = failures(spec)
    assert [(name, what) for name, what, _ in troubles] == [
        ("m_1", "loss and error on data, batch 1"),
        ("m_1", "inv (second order) worst-case sharpness, steps 2, radius 0.05, batch 1"),
        ("m_1", "euclidean gradient norm, batch 1"),
        ("m_1", "adaptive gradient norm, batch 1"),
    ]
    assert all(why in message for _, _, message in troubles)
    if kind == "nan":
        assert troubles[0][2] == "The loss must be finite. Found nan on batch 1 of data, over 8 labels"
    # Not measured, so not in a mean, a gap or a correlation.
    row = found(spec).rows[1]
    assert set(row.values.values()) == {None}
    assert set(row.scores) == {"test_loss", "test_error"}
    assert all((each.correlation.models, each.correlation.left_out) == (3, 1) for each in found(spec).rankings)

    again = compare(spec)
    assert (again.exit_code, measured_now(again)) == (1, 0)
    assert failures(spec) == troubles
    trouble(zoo, "")
    repaired = compare(spec)
    assert (repaired.exit_code, measured_now(repaired)) == (0, 4)
    assert failures(spec) == []
    assert found(spec).known == (12, 12)


@pytest.mark.parametrize("kind", ["index", "load"])
def test_whatever_a_model_or_a_loader_raises_is_a_failure(zoo: Path, kind: str) -> None:
    spec = write_spec(zoo, WORST, head=fragile_zoo(zoo))
    trouble(zoo, kind)
    done = compare(spec, report=True)
    assert done.exit_code == 1
    assert found(spec).known == (3, 4)
    said = "IndexError: index out of range in self" if kind == "index" else "raised KeyError: 'head.weight'"
    assert all(said in why for _, _, why in failures(spec))
    said_and_shown(done, spec)


def test_the_failures_of_a_twin_are_its_own(zoo: Path) -> None:
    head = fragile_zoo(zoo)
    trouble(zoo, "nan")
    shutil.copytree(zoo / "models" / "m_1", zoo / "models" / "twin")
    spec = write_spec(zoo, WORST, head=head)
    assert compare(spec).exit_code == 1
    assert [name for name, _, _ in failures(spec)] == ["m_1", "m_1", "twin", "twin"]


def test_a_model_without_symmetric_pairs_in_a_quotient_geometry(zoo: Path) -> None:
    head = HEAD.replace("paths: models/*", "loader: tests.zoos:plain")
    spec = write_spec(zoo, WORST, SLOPE, head=head)
    done = compare(spec, report=True)
    assert done.exit_code == 1
    ((name, what, why),) = failures(spec)
    assert name == "tests.zoos:plain"
    assert what == "inv (second order) worst-case sharpness, steps 2, radius 0.05, batches 0 to 1"
    assert "needs at least one symmetric pair of measured parameters, and Plain has none" in why
    assert found(spec).known == (2, 3)
    said_and_shown(done, spec)


def test_no_measure_of_a_quotient_tells_a_model_from_one_elsewhere_on_its_orbit(tmp_path: Path) -> None:
    write_images(tmp_path / "train.npz", 8, seed=0)
    images, labels = (torch.as_tensor(each) for each in np.load(tmp_path / "train.npz").values())
    model = vit(0, patch_size=8, num_hidden_layers=1).double()
    found_there = find_symmetries(model, {"pixel_values": images.double(), "labels": labels}, evaluate=cross_entropy)
    assert {freedom.kind for freedom in found_there.freedoms} >= {"norm", "mean", "rotation"}
    save(model, tmp_path / "models" / "m_0")
    model.load_state_dict(random_move(model, found_there, log_scale=2.0), strict=False)
    save(model, tmp_path / "models" / "m_1")
    where = "geometry: [adaptive, inv, mix]"
    spec = write_spec(
        tmp_path,
        f"measure: worst-case, {where}, radius: 0.05, steps: 3",
        f"measure: average-case, {where}, sigma: 0.05, samples: 2",
        f"measure: gradient-norm, {where}",
        f"measure: hessian-trace, {where}, samples: 2",
        f"measure: top-eigenvalue, {where}, tolerance: 1.0e-10, restarts: 300",
        head="checkpoints: {paths: models/*}\ndata: {path: train.npz, batch_size: 8}\ndtype: float64",
    )
    assert compare(spec).exit_code == 0
    here, there = ({name: each.mean for name, each in row.values.items() if each} for row in found(spec).rows)
    assert len(here) == 15
    for measure, value in here.items():
        if "adaptive" in measure:
            assert there[measure] != pytest.approx(value, rel=0.1), measure
        else:
            assert there[measure] == pytest.approx(value, rel=1e-9), measure


def test_a_quotient_is_proved_on_the_first_batch_that_can_be_evaluated(zoo: Path) -> None:
    head = fragile_zoo(zoo)
    with np.load(zoo / "train.npz") as arrays:
        images, labels = arrays["images"][::-1].copy(), arrays["labels"][::-1].copy()
    np.savez(zoo / "train.npz", images=images, labels=labels)  # now the first batch has the mark
    trouble(zoo, "nan")
    spec = write_spec(zoo, WORST, head=head)
    compare(spec)
    assert [what for _, what, _ in failures(spec)] == [
        "loss and error on data, batch 0",
        "inv (second order) worst-case sharpness, steps 2, radius 0.05, batch 0",
    ]


# The store.


def test_a_full_disk_is_one_sentence_and_nothing_is_lost(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_spec(zoo, WORST, SLOPE)
    opened = Store.__init__

    def on_a_full_disk(self: Store, *arguments: Any, **options: Any) -> None:
        opened(self, *arguments, **options)
        connection = self._connection
        assert connection is not None
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 1}")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "__init__", on_a_full_disk)
        done = compare(spec)
    assert done.exit_code == 2
    assert done.stderr.strip().splitlines()[-1].startswith("Error: The store ")
    assert "has no room left on its disk: free some and run again. What was finished before is kept." in done.stderr
    kept = table(spec)
    assert 0 < len(kept) < 36
    again = compare(spec)
    assert (again.exit_code, measured_now(again)) == (0, 36 - len(kept))
    assert set(kept) < set(table(spec))


def test_a_store_that_fails_is_not_the_failure_of_a_unit(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*what: Any) -> None:
        raise StoreError("The store has been locked for long.")

    spec = write_spec(zoo, SLOPE)
    with monkeypatch.context() as patched:
        patched.setattr(Store, "finish", locked)
        done = compare(spec)
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("Error: The store has been locked for long")
    with Store(zoo / "out" / "store.sqlite", make=False) as store:
        assert store.failures() == {}
    assert compare(spec).exit_code == 0


def test_a_store_of_another_version_is_left_alone(zoo: Path) -> None:
    spec = write_spec(zoo, SLOPE)
    compare(spec)
    connection = sqlite3.connect(zoo / "out" / "store.sqlite")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = (zoo / "out" / "store.sqlite").read_bytes()
    done = compare(spec)
    assert done.exit_code == 2
    assert done.stderr.strip().count("\n") == 0
    assert "Expected a store of format 2, found format 99" in done.stderr
    assert (zoo / "out" / "store.sqlite").read_bytes() == before


# What is written.


def test_a_comparison_is_saved_and_loaded(zoo: Path, tmp_path: Path) -> None:
    trouble_head = fragile_zoo(zoo)
    trouble(zoo, "nan")
    (zoo / "scores.csv").write_text("checkpoint,kind\nm_0,a\nm_1,b\nm_2,a\nm_3,c\n")
    spec = write_spec(zoo, WORST, SLOPE, head=trouble_head, tail="scores: scores.csv\ngiven: kind")
    compare(spec)
    comparison = Comparison.load(zoo / "out")
    assert comparison == Comparison.load(zoo / "out" / "comparison.json")
    comparison.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (zoo / "out" / "comparison.json").read_bytes()
    assert Comparison.load(tmp_path / "again.json") == comparison
    assert comparison.agreement is not None
    assert comparison.failures
    for text, words in [
        ("[]", "holds no comparison"),
        ("{", "holds no comparison"),
        ("[" * 100_000, "holds no comparison"),
        ('{"format": 99}', "format 1. Found 99"),
    ]:
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            Comparison.load(tmp_path / "bad.json")


def test_beyond_the_reach_of_geodesics_output_and_report_say_so(zoo: Path) -> None:
    """In mix at radius 5 the second-order geodesics of these models are far off; in inv at 0.05 they are not."""
    far = "mix (second order) worst-case sharpness, steps 2, radius 5"
    spec = write_spec(zoo, WORST, "measure: worst-case, geometry: mix, radius: [1e-4, 5.0], steps: 2")
    done = compare(spec, report=True)
    assert done.exit_code == 0
    values = [row.values[far] for row in found(spec).rows]
    reaches = [value.reach for value in values if value is not None and value.reach is not None]
    assert len(reaches) == 4
    said = f"{far}: 4 of 4 values, relative speed up to {max(reaches):.3g}."
    assert found(spec).beyond_reach == (said,)
    assert f"Beyond the reach of its geodesics: {said}" in " ".join(done.stdout.split())
    assert said in report(spec)
    assert done.stdout.count("Beyond the reach") == 1
    near = write_spec(zoo, WORST)
    assert "Beyond the reach" not in compare(near, report=True).stdout
    assert "Geodesics beyond their reach" not in report(near)
    assert all(0 < value.reach < 0.5 for row in found(near).rows for value in row.values.values() if value is not None)
    assert units(spec).reach.notna().sum() == 4 * 3 * 2


def test_a_comparison_written_before_there_was_a_reach_is_read(zoo: Path) -> None:
    spec = write_spec(zoo, WORST)
    compare(spec)
    file = zoo / "out" / "comparison.json"
    record = json.loads(file.read_text())
    for row in record["rows"]:
        for value in row["values"].values():
            del value["reach"], value["beyond_reach"]
    file.write_text(json.dumps(record))
    label = found(spec).labels[0]
    values = [row.values[label] for row in found(spec).rows]
    assert [(value.reach, value.beyond_reach) for value in values if value is not None] == [(None, False)] * 4


def test_frames_have_a_row_a_checkpoint_and_a_row_a_unit(zoo: Path) -> None:
    (zoo / "models" / "a_broken").mkdir()
    spec = write_spec(zoo, WORST, SLOPE)
    compare(spec)
    frame = found(spec).frame()
    assert list(frame.index) == ["a_broken", "m_0", "m_1", "m_2", "m_3"]
    label = "adaptive gradient norm"
    assert list(frame.columns) == [
        *("loss", "error", "test_loss", "test_error", "error_gap", "loss_gap"),
        *(
            f"{name}{more}"
            for name in (
                "inv (second order) worst-case sharpness, steps 2, radius 0.05",
                "euclidean gradient norm",
                label,
            )
            for more in ("", ", standard error")
        ),
    ]
    assert frame.loc["a_broken"].isna().all()
    assert not frame.drop("a_broken").isna().any(axis=None)
    models = pd.read_csv(zoo / "out" / "models.csv", index_col="checkpoint")
    pd.testing.assert_frame_equal(models, frame, check_exact=True)
    rows = units(spec)
    assert len(rows) == 36
    mine = rows[(rows.checkpoint == "m_2") & (rows.measure == "gradient norm") & (rows.geometry == "adaptive")]
    assert mine.value.mean() == pytest.approx(frame.loc["m_2", label], rel=1e-12)
    written = pd.read_csv(zoo / "out" / "units.csv")
    assert sorted(written.key) == sorted(rows.key)
    pd.testing.assert_series_equal(
        written.set_index("key").value.sort_index(), rows.set_index("key").value.sort_index(), check_exact=True
    )


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".json"])
def test_results_leave_the_store_as_files(zoo: Path, tmp_path: Path, suffix: str) -> None:
    spec = write_spec(zoo, SLOPE)
    compare(spec)
    path = tmp_path / f"units{suffix}"
    with Store(zoo / "out" / "store.sqlite", make=False) as store:
        store.export(path)
        expected = {result.unit.key: result.payload.get("value") for result in store.results()}
    if suffix == ".json":
        written = {each["key"]: each["payload"].get("value") for each in json.loads(path.read_text())}
    else:
        read = pd.read_csv(path) if suffix == ".csv" else pd.read_parquet(path)
        written = {key: None if pd.isna(value) else value for key, value in zip(read.key, read.value, strict=True)}
    assert written == expected


def report(spec: Path) -> str:
    return (spec.parent / "out" / "report.html").read_text(encoding="utf-8")


def test_a_report_without_scores_ranks_by_what_is_known(zoo: Path) -> None:
    spec = write_spec(zoo, SLOPE, head="checkpoints: {paths: models/*}\ndata: {path: train.npz, batch_size: 8}")
    assert compare(spec, report=True).exit_code == 0
    assert found(spec).against == tuple(
        name for name in ("loss", "error") if len({row.scores[name] for row in found(spec).rows}) > 1
    )
    assert "_gap" not in report(spec)


def test_a_report_of_one_checkpoint_ranks_nothing(zoo: Path) -> None:
    spec = write_spec(zoo, SLOPE, WORST.replace("0.05", "[0.02, 0.05]"), head=HEAD.replace("models/*", MODEL))
    done = compare(spec, report=True)
    assert done.exit_code == 0
    assert found(spec).rankings == ()
    assert "One model is no ranking." in report(spec)
    assert "m_1" in report(spec)


def test_a_report_where_everything_failed(zoo: Path) -> None:
    for number in range(4):
        (zoo / "models" / f"m_{number}" / "config.json").unlink()
    spec = write_spec(zoo, SLOPE, WORST)
    done = compare(spec, report=True)
    assert done.exit_code == 1
    assert found(spec).known == (0, 12)
    said_and_shown(done, spec)


def test_a_hyperparameter_that_is_text_is_held_fixed(zoo: Path) -> None:
    for seed in range(4, 8):
        save(vit(seed), zoo / "models" / f"m_{seed}")
    rows = "".join(f"m_{seed},{'ab'[seed % 2]}\n" for seed in range(8))
    (zoo / "scores.csv").write_text(f"checkpoint,optimizer\n{rows}")
    spec = write_spec(zoo, SLOPE, tail="scores: scores.csv\nagainst: loss_gap\ngiven: optimizer")
    assert compare(spec, report=True).exit_code == 0
    partial = [each for each in found(spec).rankings if each.given == ("optimizer",)]
    assert len(partial) == 2
    assert all(each.correlation.value is not None for each in partial)
    assert "partial tau-b" in report(spec)


def test_quiet_prints_failures_only(zoo: Path) -> None:
    spec = write_spec(zoo, SLOPE)
    done = compare(spec, "--quiet")
    assert (done.exit_code, done.output) == (0, "")
    (zoo / "models" / "m_0" / "config.json").unlink()
    done = compare(spec, "--quiet")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("Failed: m_0: ")


def test_symmetries_are_found_once_for_each_model_and_loss(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = recorded_runs(monkeypatch)
    ascent = "measure: worst-case, geometry: [inv, mix], radius: [0.05, 0.1], steps: 1"
    spec = write_spec(zoo, ascent, f"{ascent}, normalise_logits: true", "measure: gradient-norm, geometry: 0.5")
    compare(spec)
    assert len(runs) == 2 * units(spec).checkpoint.nunique()
