"""Zoos of a user's own models: symmetries that a function declares, models that are not to be touched, texts cut."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from quotient_manifolds.compare import Store
from quotient_manifolds.geometry import Quotient, geometry_from_dict
from quotient_manifolds.sharpness import cross_entropy, worst_case_sharpness
from tests import hugging_face, zoos
from tests.zoos import compare, found, write_seeds, write_spec

HEAD = "checkpoints: {paths: models/*, loader: tests.zoos:FUNCTION}\ndata: {path: train.npz, batch_size: 8}"
INV = "measure: worst-case, geometry: inv, radius: 0.1, steps: 2"
SLOPE = "measure: gradient-norm, geometry: euclidean"
DECLARED = "symmetries: tests.zoos:declared"


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    return write_seeds(tmp_path, 2, examples=16)


def batches(folder: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with np.load(folder / "train.npz") as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    return [(images[start : start + 8], labels[start : start + 8]) for start in (0, 8)]


def test_declared_symmetries_are_divided_out(zoo: Path) -> None:
    head = HEAD.replace("FUNCTION", "own")
    assert compare(write_spec(zoo, INV, head=head)).exit_code == 0  # what it computes tells, without a declaration
    spec = write_spec(zoo, INV, SLOPE, head=head, tail=DECLARED)
    done = compare(spec)
    assert done.exit_code == 0, done.output
    model = zoos.own(zoo / "models" / "m_1").eval()
    geometry = Quotient("inv", symmetries=zoos.declared(model))
    direct = worst_case_sharpness(model, cross_entropy, batches(zoo), geometry=geometry, radius=0.1, steps=2)
    comparison = found(spec)
    value = comparison.rows[1].values[comparison.labels[0]]
    assert value is not None
    assert value.mean == direct.mean
    assert comparison.symmetries == "tests.zoos:declared"
    inv, slope = comparison.measures
    assert (inv.geometry or {})["symmetries"] == "given"
    assert "symmetries" not in (slope.geometry or {})
    assert "tests.zoos:declared" in (zoo / "results" / "zoo" / "report.html").read_text()
    with Store(zoo / "results" / "zoo" / "store.sqlite", make=False) as store:
        frame = store.frame()
    assert set(frame["settings.symmetries"].dropna().str.split().str[0]) == {"tests.zoos:declared"}


def test_what_is_declared_decides_what_is_measured_again(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_spec(zoo, INV, SLOPE, head=HEAD.replace("FUNCTION", "own"), tail=DECLARED)
    assert "Measured now: 12," in compare(spec).stdout  # scores and two measures, on 2 models and 2 batches
    assert "Nothing was left" in compare(spec).stdout
    declared = zoos.declared

    def fewer(model: torch.nn.Module) -> object:
        from dataclasses import replace

        symmetries = declared(model)
        return replace(symmetries, pairs=symmetries.pairs[:1], translations=())

    monkeypatch.setattr(zoos, "declared", fewer)
    assert "Measured now: 4," in compare(spec).stdout  # the quotient alone depends on them


@pytest.mark.parametrize(
    ("tail", "measure", "words"),
    [
        ("symmetries: tests.zoos:nothing", INV, "line 5: Module 'tests.zoos' has no function 'nothing'"),
        ("symmetries: nowhere:f", INV, "line 5: Cannot import 'nowhere'"),
        ("symmetries: declared", INV, "line 5: Expected package.module:function"),
        ("symmetries: [a]", INV, "line 5: symmetries: input should be a valid string"),
        (DECLARED, SLOPE, "line 5: symmetries mean nothing here: no measure has a quotient geometry"),
    ],
)
def test_symmetries_that_cannot_be_declared(zoo: Path, tail: str, measure: str, words: str) -> None:
    done = compare(write_spec(zoo, measure, head=HEAD.replace("FUNCTION", "own"), tail=tail))
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert words in done.stderr


def test_symmetries_that_do_not_fit_fail_by_checkpoint(zoo: Path) -> None:
    done = compare(write_spec(zoo, INV, head=HEAD.replace("FUNCTION", "own"), tail="symmetries: tests.zoos:own"))
    assert done.exit_code == 1
    assert "Failed: m_0, m_1: tests.zoos:own was called with Own and raised AttributeError" in done.stderr
    assert "(at zoos.py, line " in done.stderr


def test_a_model_that_uses_a_layer_twice(zoo: Path) -> None:
    """Values are those of the weights as they were loaded, on every batch and in any order."""
    measures = (SLOPE, "measure: worst-case, geometry: adaptive, radius: 0.1, steps: 2")
    spec = write_spec(zoo, *measures, head=HEAD.replace("FUNCTION", "twice"))
    assert compare(spec).exit_code == 0
    layer, head = (zoos.twice(zoo / "models" / "m_1")[place] for place in (1, 4))
    weights = [layer.weight, layer.bias, head.weight, head.bias]
    losses, slopes = [], []
    for images, labels in batches(zoo):
        hidden = F.linear(torch.tanh(F.linear(images.flatten(1), *weights[:2])), *weights[:2])
        loss = F.cross_entropy(F.linear(hidden, *weights[2:]), labels)
        losses.append(float(loss.detach()))
        slopes.append(float(torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)]).norm()))
    row = found(spec).rows[1]
    assert row.scores["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    slope = row.values["euclidean gradient norm"]
    assert slope is not None
    assert slope.mean == pytest.approx(np.mean(slopes), rel=1e-4)
    values = [row.values for row in found(spec).rows]
    again = write_spec(zoo, *reversed(measures), head=HEAD.replace("FUNCTION", "twice"), name="again")
    assert compare(again).exit_code == 0
    assert [row.values for row in found(again).rows] == values  # bit for bit


def test_texts_that_were_cut_are_counted(tmp_path: Path) -> None:
    hugging_face.bert_classifier(tmp_path / "bert")
    lines = ["good film", "a bad film very good not good", "very good", "not good a bad film"]
    examples = [json.dumps({"text": line, "label": place % 2}) for place, line in enumerate(lines)]
    (tmp_path / "data.jsonl").write_text("\n".join(examples))
    head = "checkpoints: {paths: bert}\ndata: {path: data.jsonl, max_length: 5}"
    spec = write_spec(tmp_path, SLOPE, head=head)
    for options in (["--check"], [], []):  # also when nothing is loaded again
        said = " ".join(compare(spec, *options).stdout.split())
        assert "2 of 4 texts were cut at 5 tokens" in said
    assert "2 of 4 texts were cut at 5 tokens" in (tmp_path / "results" / "zoo" / "report.html").read_text()
    (note,) = found(spec).notes
    assert note.startswith("bert, data: ")


def test_geometries_are_kept_as_what_they_are(zoo: Path) -> None:
    measures = (
        "measure: gradient-norm, geometry: adaptive, eta: 0.01",
        "measure: worst-case, geometry: euclidean, norm: linf, radius: 0.1, steps: 1",
        "measure: worst-case, geometry: 0.25, geodesic: first, symmetries: paper, radius: [0.1, 0.2], steps: 1",
    )
    spec = write_spec(zoo, *measures, head=HEAD.replace("FUNCTION", "own"), tail=DECLARED)
    assert compare(spec).exit_code == 0
    comparison = found(spec)
    kept = [geometry_from_dict({**(each.geometry or {}), "symmetries": "paper"}) for each in comparison.measures[2:]]
    assert kept == [Quotient(0.25, "first", symmetries="paper")] * 2
    frame = comparison.frame("values")
    assert len(frame) == 2 * 4
    mine = frame[(frame.checkpoint == "m_1") & (frame.radius == 0.2)].iloc[0]
    assert mine["geometry.metric"] in ("0.25", 0.25)
    assert mine["geometry.geodesic"] == "first"
    assert set(frame["geometry.kind"]) == {"adaptive", "euclidean", "quotient"}
    assert frame["geometry.eta"].dropna().tolist() == [0.01, 0.01]
    assert set(frame["geometry.norm"].dropna()) == {"l2", "linf"}
    wide = comparison.frame()
    for label in comparison.labels:
        assert frame[frame.label == label]["mean"].tolist() == wide[label].tolist()
    with pytest.raises(ValueError, match="rows must be"):
        comparison.frame("units")  # type: ignore[arg-type]


def test_climbs_that_have_not_converged_are_said(zoo: Path) -> None:
    far = "measure: worst-case, geometry: euclidean, radius: 5, steps: 3"
    spec = write_spec(zoo, far, head=HEAD.replace("FUNCTION", "own"))
    done = compare(spec)
    values = [value for row in found(spec).rows for value in row.values.values()]
    late = [value.late_rise for value in values if value is not None and value.late_rise is not None]
    assert len(late) == 2
    (said,) = found(spec).unconverged
    assert f"{sum(share > 0.05 for share in late)} of 2 values" in said
    assert "Not converged: " in done.stdout
    assert "Climbs that have not converged" in (zoo / "results" / "zoo" / "report.html").read_text()


def test_rises_that_are_rounding_are_said(zoo: Path) -> None:
    near = "measure: worst-case, geometry: adaptive, radius: 2.0e-5, steps: 3"
    spec = write_spec(zoo, near, head=HEAD.replace("FUNCTION", "own"))
    done = compare(spec)
    (said,) = found(spec).rounded
    assert "of 2 values" in said
    assert "Near rounding: " in done.stdout
    assert "Near rounding" in (zoo / "results" / "zoo" / "report.html").read_text()
