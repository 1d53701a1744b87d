"""The numbers of a comparison: those of the public functions, of the definitions, and of what is read again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from quotient_manifolds.compare import Comparison, MeasureEntry, Spec, run_comparison
from quotient_manifolds.compare.comparison import TABLES
from quotient_manifolds.geometry import Adaptive, Euclidean, Quotient
from quotient_manifolds.load import BatchFunction, Checkpoint
from quotient_manifolds.sharpness import (
    GradientNorm,
    Result,
    average_case_sharpness,
    cross_entropy,
    gradient_norm,
    hessian_trace,
    legacy_sharpness,
    top_eigenvalue,
    worst_case_sharpness,
)
from quotient_manifolds.statistics import correlation, holm
from tests.nets import hugging_face, zoos
from tests.nets.zoos import run, write_seeds, write_spec, write_zoo

SMALL = "checkpoints: {paths: models/*, loader: tests.nets.zoos:small}\ndata: {path: train.npz, batch_size: 4}"
SLOPE = "measure: gradient-norm, geometry: [euclidean, adaptive]"
Direct = Callable[[nn.Module, list[Any]], list[Result]]


def worst(geometry: Any, *radii: float, steps: int = 2, **options: Any) -> Direct:
    return lambda model, batches: [
        worst_case_sharpness(model, cross_entropy, batches, geometry=geometry, radius=radius, steps=steps, **options)
        for radius in radii
    ]


def of(function: Callable[..., Result], geometry: Any, **options: Any) -> Direct:
    return lambda model, batches: [function(model, cross_entropy, batches, geometry=geometry, **options)]


# What a spec asks for, and how a program gets the same.
MEASURES: list[tuple[str, Direct]] = [
    ("worst-case, geometry: euclidean, norm: linf, radius: 1e-3, steps: 2", worst(Euclidean("linf"), 0.001)),
    ("worst-case, geometry: adaptive, eta: 0.01, radius: [0.1, 0.05], steps: 2", worst(Adaptive(0.01), 0.05, 0.1)),
    ("worst-case, geometry: 0.25, geodesic: first, radius: 0.05, steps: 2", worst(Quotient(0.25, "first"), 0.05)),
    (
        "worst-case, geometry: inv, eps: 0.01, radius: 0.05, steps: 2, restarts: 1, seed: 3",
        worst(Quotient("inv", eps=0.01), 0.05, restarts=1, seed=3),
    ),
    ("worst-case, geometry: mix, radius: [0.02, 0.05], steps: 2", worst(Quotient("mix"), 0.02, 0.05)),
    ("gradient-norm, geometry: mix", of(gradient_norm, "mix")),
    (
        "legacy-worst-case, geometry: adaptive, radius: 0.05, steps: 3",
        of(legacy_sharpness, Adaptive(), radius=0.05, steps=3),
    ),
    (
        "average-case, geometry: inv, symmetries: paper, sigma: 0.05, samples: 2, seed: 5",
        of(average_case_sharpness, Quotient("inv", symmetries="paper"), sigma=0.05, samples=2, seed=5),
    ),
    ("hessian-trace, geometry: adaptive, samples: 2", of(hessian_trace, Adaptive(), samples=2)),
    (
        "top-eigenvalue, geometry: mix, tolerance: 0.1, restarts: 3",
        of(top_eigenvalue, Quotient("mix"), tolerance=0.1, restarts=3),
    ),
]


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """Six files that name the seeds of linear classifiers."""
    return write_seeds(tmp_path, 6)


def arrays(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(path) as found:
        return torch.from_numpy(found["images"]), torch.from_numpy(found["labels"])


def test_every_measure_of_one_model_is_the_public_function_bit_for_bit(tmp_path: Path) -> None:
    write_zoo(tmp_path, models=1)
    found = run(write_spec(tmp_path, *(f"measure: {asked}" for asked, _ in MEASURES)))
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path / "models" / "m_0").eval()
    images, labels = arrays(tmp_path / "train.npz")
    batches = [{"pixel_values": images[k : k + 8], "labels": labels[k : k + 8]} for k in (0, 8)]
    expected = [result for _, direct in MEASURES for result in direct(model, batches)]
    assert found.failures.empty
    assert len(found.values) == len(expected) == 12
    for (_, value), result in zip(found.values.iterrows(), expected, strict=True):
        named = found.measures.loc[value["label"]]
        assert (named["measure"], named["geometry"]) == (result.measure, result.geometry)
        for name, setting in result.settings.items():
            assert named["radius" if name == "radius" else f"settings.{name}"] == setting
        for name, setting in result.geometry_settings.items():
            assert named[f"geometry.{name}"] == setting
        for name in ("mean", "standard_error", "reach", "relative_gap", "promise_kept"):
            assert value[name] == getattr(result, name) or (np.isnan(value[name]) and getattr(result, name) is None)
        assert (value["batches"], value["beyond_reach"]) == (2, result.truncation_warning is not None)
        assert value["not_converged"] == (result.convergence_warning is not None)
    assert found.rankings.empty


@pytest.mark.filterwarnings("ignore::quotient_manifolds.sharpness.SharpnessWarning")
def test_a_larger_ball_has_no_smaller_value_in_a_comparison(tmp_path: Path) -> None:
    """With ascents that overshoot, each alone; what a spec asks for in another order is the same."""
    head = (
        "checkpoints: {loader: 'tests.nets.zoos:plain'}\ndata: tests.nets.zoos:two_batches\nloss: tests.nets.zoos:waves"
    )
    asked = "measure: worst-case, geometry: adaptive, steps: 1, ascent: AutoPGD, radius:"
    radii = [3.0, 0.5, 10.0, 1.0]
    alone = [
        run(write_spec(tmp_path, f"{asked} {radius}", head=head)).values["mean"].item() for radius in sorted(radii)
    ]
    assert alone != sorted(alone)
    found = run(write_spec(tmp_path, f"{asked} {radii}", head=head)).values["mean"].tolist()
    assert found == sorted(found)
    assert all(together >= own for together, own in zip(found, alone, strict=True))


def test_scores_and_gaps_are_over_all_examples(zoo: Path) -> None:
    """With a last batch of another size."""
    head = SMALL.replace("batch_size: 4", "batch_size: 5") + "\ntest: {path: test.npz, batch_size: 3}"
    found = run(write_spec(zoo, SLOPE, head=head))
    for name in found.scores.index:
        model, expected = zoos.small(zoo / "models" / name), {}
        for prefix, file in (("", "train.npz"), ("test_", "test.npz")):
            images, labels = arrays(zoo / file)
            logits = model(images).detach()
            expected[f"{prefix}loss"] = float(F.cross_entropy(logits, labels))
            expected[f"{prefix}error"] = float((logits.argmax(1) != labels).double().mean())
        expected |= {f"{what}_gap": expected[f"test_{what}"] - expected[what] for what in ("error", "loss")}
        assert found.scores.loc[name].to_dict() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert found.rankings["against"].unique().tolist() == ["error_gap", "loss_gap"]


def test_a_loss_and_batches_of_the_users(zoo: Path) -> None:
    """In Python and in YAML, where they are functions by name."""
    checkpoints = [Checkpoint(f"m_{seed}", zoo / "models" / f"m_{seed}", "tests.nets.zoos:small") for seed in (1, 2)]
    measures = [MeasureEntry(GradientNorm(Euclidean()))]  # no file is needed
    data = BatchFunction("tests.nets.zoos:two_batches")
    told: list[tuple[str, int, int]] = []
    spec = Spec(checkpoints, data, measures, loss="tests.nets.zoos:squares")
    found = run_comparison(spec, progress=lambda *step: told.append(step))
    model, batches = zoos.small(zoo / "models" / "m_2"), zoos.two_batches()
    assert (
        found.frame()[found.labels[0]].iloc[1] == gradient_norm(model, zoos.squares, batches, geometry="euclidean").mean
    )
    losses = [zoos.squares(model, batch).item() for batch in batches]
    assert found.scores.loc["m_2"].to_dict() == {"loss": pytest.approx(np.mean(losses))}
    assert ("checkpoints", 2, 2) in told
    assert ("euclidean gradient norm", 1, 1) in told
    head = SMALL.replace("{path: train.npz, batch_size: 4}", "tests.nets.zoos:two_batches")
    again = run(write_spec(zoo, SLOPE, head=head, tail="loss: tests.nets.zoos:squares"))
    assert zoos.values(again)["m_2"][0] == zoos.values(found)["m_2"][0]
    other = run(write_spec(zoo, SLOPE, head=SMALL))  # of cross-entropy, which is another number
    assert other.measured_now == 6 * 2 * (1 + 2)


def test_models_of_text_are_measured_and_cut_texts_are_counted(tmp_path: Path) -> None:
    home = hugging_face.bert_classifier(tmp_path / "bert")
    lines = ["good film", "a bad film very good not good", "very good", "not good a bad film"]
    rows = [json.dumps({"text": line, "label": place % 2}) for place, line in enumerate(lines)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    head = "checkpoints: {paths: bert}\ndata: {path: data.jsonl, batch_size: 2, max_length: 5}"
    spec = write_spec(tmp_path, "measure: worst-case, geometry: inv, radius: 0.05, steps: 2", head=head)
    found = run(spec)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(home).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    given = {"padding": True, "return_tensors": "pt", "truncation": True, "max_length": 5}
    batches = [{**tokenizer(lines[k : k + 2], **given), "labels": torch.tensor([0, 1])} for k in (0, 2)]
    direct = worst_case_sharpness(model, cross_entropy, batches, geometry=Quotient("inv"), radius=0.05, steps=2)
    assert found.values["mean"].tolist() == pytest.approx([direct.mean], rel=1e-6)
    assert found.notes == run(spec).notes  # also when nothing is loaded again
    (note,) = found.notes
    assert note.startswith("bert, data: ")
    assert "2 of 4 texts were cut at 5 tokens" in note


# Tables.


def test_correlations_are_those_of_the_columns(zoo: Path) -> None:
    rows = "".join(f"m_{n},{0.1 * n**2},{'ab'[n % 2]}\n" for n in range(6))
    (zoo / "scores.csv").write_text(f"checkpoint,rate,kind\n{rows}m_9,1,a\n")
    tail = "scores: scores.csv\nagainst: [rate, loss]\ngiven: [kind, rate]"
    found = run(write_spec(zoo, SLOPE, head=SMALL, tail=tail))
    frame = found.frame()
    assert frame["rate"].tolist() == pytest.approx([0.1 * n**2 for n in range(6)])
    assert len(found.rankings) == 2 * 2 * (3 + 2)
    for _, row in found.rankings.iterrows():
        x, y = frame[row["measure"]].tolist(), frame[row["against"]].tolist()
        given = {row["given"]: frame[row["given"]].tolist()} if row["given"] else None
        expected = vars(correlation(x, y, row["kind"], given=given))
        own = {name: None if pd.isna(row[name]) else row[name] for name in expected}
        assert own == expected
    tau = found.ranking()
    assert tau["p_holm"].tolist() == holm(tau["p_value"].tolist())
    partial = found.rankings[found.rankings["given"] != ""]
    assert partial["p_holm"].dropna().tolist() == holm(partial["p_value"].dropna().tolist())
    assert "6 models, tau has standard deviation 0.35" in found.cautions[-1]
    again = run(zoo / "zoo.yaml")  # correlations are kept in the store, too
    pd.testing.assert_frame_equal(again.rankings, found.rankings)


def test_a_comparison_is_saved_and_loaded_and_written_as_a_table(zoo: Path) -> None:
    (zoo / "models" / "m_1").write_text("raise")
    (zoo / "scores.csv").write_text("checkpoint,kind,empty\nm_0,a,\nm_1,b,\nm_2,a,\n")
    asked = "measure: worst-case, geometry: adaptive, radius: [0.1, 0.2], steps: 1"
    found = run(write_spec(zoo, SLOPE, asked, head=SMALL, tail="scores: scores.csv"))
    for source in (zoo / "out", zoo / "out" / "comparison.json"):
        loaded = Comparison.load(source)
        for name in TABLES:
            pd.testing.assert_frame_equal(getattr(loaded, name), getattr(found, name), check_exact=True)
        assert (loaded.notes, loaded.known, loaded.command) == (found.notes, (20, 24), found.command)
    written = pd.read_csv(zoo / "out" / "values.csv")
    assert written["mean"].tolist() == found.values["mean"].tolist()
    assert set(written["geometry.kind"]) == {"euclidean", "adaptive"}
    assert written["radius"].notna().sum() == 10
    frame = found.frame()
    assert frame.columns.tolist() == ["loss", "error", "kind", "empty", *found.labels]
    assert frame.loc["m_1", ["loss", *found.labels]].isna().all()
    for text, words in (("{", "must hold a comparison"), ('{"format": 1}', "format 3. Found 1")):
        (zoo / "out" / "comparison.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            Comparison.load(zoo / "out")


def test_values_to_read_with_care_are_said(tmp_path: Path) -> None:
    """An ascent that has not converged, geodesics beyond their reach, an increase near rounding."""
    write_zoo(tmp_path, models=2)
    far = "measure: worst-case, geometry: mix, radius: [1e-4, 5.0], steps: 2"
    near = "measure: worst-case, geometry: adaptive, radius: 2.0e-6, steps: 3"
    found = run(write_spec(tmp_path, far, near))
    _, values, rounded = (found.values[found.values["label"] == label] for label in found.labels)
    assert values["beyond_reach"].all()
    assert rounded["rounded"].all()
    late = values[values["not_converged"]]
    rising, far, near = found.cautions
    said = f"{found.labels[1]}, {len(late)} of 2 values not converged (one more step promises over 1% of the increase"
    assert rising.startswith(said)
    assert far.startswith(
        f"{found.labels[1]}, 2 of 2 values beyond the reach of truncated geodesics (relative speed up"
    )
    assert f" {values['reach'].max():.3g})" in far
    assert near.startswith(f"{found.labels[2]}, 2 of 2 values near rounding")
