"""What each command finds, prints and writes, on models and data of every kind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import quotient_manifolds as qm
from quotient_manifolds import symmetries
from quotient_manifolds.cli.subject import distance, distance_batch
from quotient_manifolds.compare import Comparison
from tests.command_line import FAST, TEXTS, call, digest, refused
from tests.nets.lora_files import random_lora

# ---- inspect


def test_inspect_prints_symmetries_and_accounts_for_every_parameter(bert: Path, tmp_path: Path) -> None:
    before = digest(bert)
    shown = call("inspect", bert, "--out", tmp_path / "record.json", "--seed", 5)
    assert shown.exit_code == 0, shown.output
    assert "bert.encoder.layer.1.attention query/key" in shown.stdout
    assert shown.stdout.count("GL(8)^4") == 2 * 4  # as found, and as verified
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["verification"]["all_hold"], record["verification"]["seed"]) == (True, 5)
    stored = load_file(bert / "model.safetensors")
    paired = {part["name"] for pair in record["symmetries"]["pairs"] for side in "GH" for part in pair[side]["views"]}
    assert paired | set(record["symmetries"]["rest"]) == set(stored)
    assert paired.isdisjoint(record["symmetries"]["rest"])
    scoped = call("inspect", bert, "--symmetries", "pairs").stdout
    assert "The symmetry group has 1,152 dimensions, 6.17% of the parameters" in scoped
    assert re.search(r"singular values of G H\^T +smallest.*query/key +4\.", scoped, re.S)
    assert digest(bert) == before


def test_an_inconclusive_certificate_leaves_with_1(mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = symmetries.make_generic(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)))
    certificate = symmetries.certify(small, [torch.randn(1, 3)])  # too few inputs
    monkeypatch.setattr(symmetries, "certify", lambda *_, **__: certificate)
    how = ("--inputs", f"{mine}:inputs", "--certify", "--out", tmp_path / "record.json")
    shown = call("inspect", f"{mine}:layer", *how)
    assert (shown.exit_code, "inconclusive: inputs are too few" in shown.stdout) == (1, True)
    assert json.loads((tmp_path / "record.json").read_text())["certificate"]["missing"] is None


def test_what_is_not_verified_leaves_with_1(bert: Path, mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # One token attends to itself whatever query and key are; the layer is tried on more.
    single = call("inspect", f"{mine}:layer", "--inputs", f"{mine}:one_token")
    assert single.exit_code == 0
    assert "query/key 32, value/output 32" in single.stdout
    from quotient_manifolds.cli import subject as module

    find = module.find_symmetries

    def crossed(network: nn.Module, inputs: object) -> object:
        """The key of the first layer's pair replaced by that of the second: no symmetry of the model."""
        from dataclasses import replace

        found = find(network, inputs)
        first, second = (pair for pair in found.pairs if pair.kind == "query/key")
        return replace(found, pairs=(replace(first, H=second.H),))

    monkeypatch.setattr(module, "find_symmetries", crossed)
    shown = call("inspect", bert)
    assert (shown.exit_code, "fails: the output on batch 0 changes along its orbit" in shown.stdout) == (1, True)


# ---- measure


def test_measure_agrees_with_the_library_and_resumes(bert: Path, texts: Path, tmp_path: Path) -> None:
    before, out = digest(bert), tmp_path / "out"
    chosen = ("--geometry", "adaptive:0.3", "--geometry", "mix", "--radius", 0.3, "--steps", 3, "--batch-size", 4)
    arguments = ("measure", bert, "--data", texts, *chosen, "--seed", 7, "--out", out)
    shown = call(*arguments)
    assert shown.exit_code == 0, shown.output
    assert f"Report: {out}" in shown.stdout.replace("\n", "")
    found = Comparison.load(out)
    batches = qm.DataSource(texts, batch_size=4).batches(qm.load_model(bert))
    for geometry in ("adaptive", "mix"):
        (row,) = [row for _, row in found.values.iterrows() if row["label"].startswith(geometry)]
        expected = qm.worst_case_sharpness(
            qm.load_model(bert), qm.cross_entropy, batches, geometry=geometry, radius=0.3, steps=3, seed=7
        )
        assert row["mean"] == pytest.approx(expected.mean, rel=1e-6)
        assert f"{row['mean']:.6g}" in shown.stdout
    assert {each.name for each in out.iterdir()} >= {"report.html", "comparison.json", "values.csv", "store.sqlite"}
    again = call(*arguments)
    assert (again.exit_code, "Nothing was left to measure" in again.stdout) == (0, True)
    assert call(*arguments, "--quiet").output == ""
    assert digest(bert) == before


def test_every_ball_is_measured_on_the_examples_asked_for(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("sentence,mood\n" + "".join(f"{text},{word}\n" for text, word in TEXTS))
    balls = ("--geometry", "inv:0.1,0.2", "--geometry", "euclidean", "--geometry", "0.5:0.3", "--radius", 0.1)
    names = ("--column", "text", "sentence", "--column", "label", "mood", "--label", "POS", 1, "--label", "NEG", 0)
    data = (*names, "--examples", 3, "--batch-size", 2)
    how = ("--geodesic", "first", "--symmetries", "pairs", *FAST, "--draw", 0)
    shown = call("measure", bert, "--data", tmp_path / "data.csv", *balls, *data, *how, "--out", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    found = Comparison.load(tmp_path / "out")
    assert [(each["geometry"], each["radius"]) for _, each in found.measures.iterrows()] == [
        ("inv (first order, pairs alone)", 0.1),
        ("inv (first order, pairs alone)", 0.2),
        ("euclidean", 0.1),
        ("t = 0.5 (first order, pairs alone)", 0.3),
    ]
    assert set(found.values["batches"]) == {2}


def test_functions_for_model_data_and_loss(mine: str, tmp_path: Path) -> None:
    what = (f"{mine}:encoder", "--data", f"{mine}:batches", "--geometry", "adaptive:0.1", *FAST, "--dtype", "float64")
    values = []
    for name, more in (("a", ()), ("b", ("--loss", f"{mine}:squares"))):
        shown = call("measure", *what, *more, "--out", tmp_path / name)
        assert shown.exit_code == 0, shown.output
        values.append(Comparison.load(tmp_path / name).values["mean"][0])
    assert values[0] != values[1]
    assert call("measure", *what).exit_code == 0  # nothing is written
    assert {each.name for each in tmp_path.iterdir()} >= {"a", "b"}


def test_what_is_measured_is_kept_if_another_geometry_fails(mine: str, tmp_path: Path) -> None:
    wanted = ("--geometry", "adaptive:0.1", "--geometry", "inv:1e-30", "--out", tmp_path / "out")
    done = call("measure", f"{mine}:encoder", "--data", f"{mine}:batches", *wanted, *FAST)
    assert done.exit_code == 2
    assert "adaptive" in done.stdout
    assert len(Comparison.load(tmp_path / "out").values) == 1


# ---- orbit


def test_rows_for_every_precision_measure_and_scale(mine: str, tmp_path: Path) -> None:
    out, how = tmp_path / "orbit.json", ("--inputs", f"{mine}:inputs", "--scale", 10, *FAST)
    result = call("orbit", f"{mine}:encoder", *how, "--out", out, "--figure", tmp_path / "o.svg")
    assert result.exit_code == 0, result.output
    assert "a = 10" in result.output
    assert "<svg" in (tmp_path / "o.svg").read_text()
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * 3 * 2
    start = {(row["precision"], row["measure"]): row["value"] for row in rows if row["scale"] is None}
    assert len(start) == 2 * 3
    for row in rows:
        assert row["ratio"] == row["value"] / start[row["precision"], row["measure"]]
        if row["measure"] != "adaptive":
            assert row["ratio"] == pytest.approx(1, abs=1e-9 if row["precision"] == "float64" else 1e-3)
        elif row["scale"] is not None:
            assert abs(row["ratio"] - 1) > 1e-3


@pytest.mark.filterwarnings("default")
def test_orbit_of_a_function_says_once_that_a_measure_is_beyond_reach(mine: str) -> None:
    how = ("--inputs", f"{mine}:inputs", "--symmetries", f"{mine}:swapped", "--radius", 2)
    shown = call("orbit", f"{mine}:encoder", *how, *FAST, "--scale", 10)
    assert shown.exit_code == 0, shown.output
    said = [line.partition(" worst")[0] for line in shown.stderr.splitlines() if "relative speed" in line]
    assert sorted(set(said)) == sorted(said) != []
    assert "geodesic=" not in shown.stderr  # which is no option of the command


@pytest.mark.filterwarnings("default")
def test_a_point_that_cannot_be_measured_is_a_row_with_its_reason(mine: str, tmp_path: Path) -> None:
    """At a scale of 1e8 float32 has no digits left for the canonical point."""
    out, how = tmp_path / "orbit.json", ("--inputs", f"{mine}:inputs", "--scale", 1, "--scale", 1e8, "--radius", 0.1)
    shown = call("orbit", f"{mine}:encoder", *how, *FAST, "--out", out, "--figure", tmp_path / "o.svg")
    assert shown.exit_code == 1, shown.output
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * 3 * 3
    for row in rows:
        assert (row["value"] is None) == (row["ratio"] is None) == bool(row["failed"])
        assert bool(row["failed"]) == (
            (row["precision"], row["scale"]) == ("float32", 1e8) and row["measure"] != "adaptive"
        )
    assert "<svg" in (tmp_path / "o.svg").read_text()
    lines = [line for line in shown.stderr.splitlines() if line.startswith("Failed: ")]
    geometries = ("inv (second order), float32", "mix (second order), float32")
    assert [line.partition(", a = 1e+08: ")[0] for line in lines] == [f"Failed: {each}" for each in geometries]
    for each in geometries:
        assert next(line for line in shown.stdout.splitlines() if line.startswith(each)).split()[-1] == "failed"
    for word in ("verify", "Adaptive()", "symmetries="):
        assert word not in shown.output


def test_a_geometry_without_a_radius_leaves_the_others(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def suggested(
        model: object, loss: object, batches: object, geometry: qm.Adaptive | qm.Quotient, known: object
    ) -> float:
        if geometry.name == "mix (second order)":
            raise ValueError(
                "Pair a cannot be measured: rank(G H^T) = h = 3 fails; use eps > 0; use Adaptive(), or pass symmetries="
            )
        return 0.1

    monkeypatch.setattr("quotient_manifolds.sharpness.suggest_radius", suggested)
    shown = call("orbit", f"{mine}:encoder", "--inputs", f"{mine}:inputs", "--scale", 1, *FAST)
    assert shown.exit_code == 1, shown.output
    failed = (
        "Failed: mix (second order), {}, the model itself, a = 1: Pair a cannot be measured: rank(G H^T) = h = 3 fails"
    )
    said = [line for line in shown.stderr.splitlines() if line.startswith("Failed: ")]
    assert said == [failed.format(precision) for precision in ("float32", "float64")]
    assert len([line for line in shown.stdout.splitlines() if line.startswith(("adaptive, ", "inv (", "mix ("))]) == 6


def test_one_radius_for_all_geometries_is_suggested(mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suggested = {"adaptive": 0.5, "inv (second order)": 0.2, "mix (second order)": 1.0}
    monkeypatch.setattr(
        "quotient_manifolds.sharpness.suggest_radius",
        lambda model, loss, batches, geometry, known: suggested[geometry.name],
    )
    out = tmp_path / "orbit.json"
    shown = call("orbit", f"{mine}:encoder", "--inputs", f"{mine}:inputs", "--scale", 1, "--out", out, *FAST)
    assert shown.exit_code == 0, shown.output
    assert json.loads(out.read_text())["radius"] == dict.fromkeys(suggested, 0.2)
    assert "relative change of sharpness at radius 0.2, " in shown.stdout


def test_nothing_that_can_be_measured_is_bad_input(mine: str) -> None:
    refused(
        call("orbit", f"{mine}:encoder", "--inputs", f"{mine}:inputs", "--radius", 1e-30, "--scale", 1, *FAST),
        "float64",
    )


def test_the_distance_loss_is_that_of_the_first_output() -> None:
    class Two(nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"ids": torch.zeros(2, dtype=torch.long), "out": 2 * x}

    inputs, targets = distance_batch(Two(1, 1).eval(), {"x": torch.ones(3)}, seed=0)
    assert targets.shape == (3,)
    assert float(distance(Two(1, 1), (inputs, targets))) == pytest.approx(float(((2 - targets) ** 2).mean()))


# ---- merge


def test_adapters_are_merged(tmp_path: Path) -> None:
    pair = [random_lora(tmp_path / str(seed), {"a": 2, "b": 3 * seed + 1}, seed) for seed in range(2)]
    before = [digest(path) for path in pair]
    shown = call("merge", *pair, tmp_path / "out", "--weight", 0.7, "--weight", -0.3, "--rank", 3)
    assert shown.exit_code == 0, shown.output
    expected = qm.merge_adapters(pair, [0.7, -0.3], rank=3)
    assert shown.stdout == f"{tmp_path / 'out'}: {expected}\n"
    for name, value in load_file(tmp_path / "out" / "adapter_model.safetensors").items():
        assert torch.equal(value, expected.tensors[name])
    assert before == [digest(path) for path in pair]
    assert call("merge", pair[0], tmp_path / "quiet", "--quiet").output == ""
