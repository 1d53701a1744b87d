"""What each command finds, prints and writes, on models and data of every kind."""

from __future__ import annotations

import importlib
import json
import math
import os
import stat
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import Result
from safetensors.torch import load_file
from torch import nn

from quotient_manifolds import Adaptive, Euclidean, Quotient
from quotient_manifolds.cli.balls import balls
from quotient_manifolds.cli.batches import distance, distance_batch, first_output
from quotient_manifolds.cli.record import SharpnessRecord
from quotient_manifolds.geometry import Geometry, geometry_from_dict
from quotient_manifolds.version import VERSION
from tests import hugging_face
from tests.command_line import FAST, TEXTS, call, digest, refused, write_images
from tests.counters import recorded_runs


def test_inspect_prints_symmetries_and_proofs(bert: Path) -> None:
    before = digest(bert)
    shown = call("inspect", bert)
    assert shown.exit_code == 0, shown.output
    assert "bert.encoder.layer.1.attention query/key" in shown.stdout
    assert shown.stdout.count("GL(8)^4") == shown.stdout.count("R^32") == 4
    assert shown.stdout.count("proved") >= 8
    assert "no norm reads: 33" in " ".join(shown.stdout.split())
    scoped = call("inspect", bert, "--symmetries", "pairs")
    assert scoped.stdout.count("proved") == 8
    assert "The symmetry group has 1,152 dimensions, 6.17% of the parameters" in " ".join(scoped.stdout.split())
    assert digest(bert) == before


def test_inspect_json_accounts_for_every_parameter(bert: Path, tmp_path: Path) -> None:
    shown = call("inspect", bert, "--json", "--out", tmp_path / "record.json", "--seed", 5, "--dtype", "float64")
    record = json.loads(shown.stdout)
    assert record == json.loads((tmp_path / "record.json").read_text())
    assert record["proof"]["all_proved"] is True
    assert record["proof"]["seed"] == 5
    stored = load_file(bert / "model.safetensors")
    paired = {part["name"] for pair in record["symmetries"]["pairs"] for side in "GH" for part in pair[side]["views"]}
    assert paired | set(record["symmetries"]["rest"]) == set(stored)
    assert paired.isdisjoint(record["symmetries"]["rest"])


def _found(certificate: dict[str, Any]) -> int:
    return sum(certificate["found"]["families"].values()) - int(certificate["shared"])


def test_inspect_counts_what_it_finds_against_the_fibre(bert: Path, mine: str, tmp_path: Path) -> None:
    shown = call("inspect", bert, "--certify", "--out", tmp_path / "record.json")
    certificate = json.loads((tmp_path / "record.json").read_text())["certificate"]
    assert shown.exit_code == 0
    assert certificate["found"]["families"].keys() >= {"query/key", "value/output", "key bias", "gain of a norm"}
    assert certificate["fibre"]["dimension"] == _found(certificate) + certificate["missing"]
    assert "dimension of the fibre" in shown.stdout
    assert "not found" in shown.stdout


def test_inspect_counts_a_model_written_by_hand_on_its_inputs(mine: str, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    shown = call("inspect", f"{mine}:layer", "--inputs", f"{mine}:many_inputs", "--certify", "--out", record)
    certificate = json.loads(record.read_text())["certificate"]
    assert shown.exit_code == 0, shown.output
    assert certificate["fibre"]["dimension"] == _found(certificate) + certificate["missing"]
    assert certificate["fibre"]["outputs"] == 50 * 5 * 8


def test_inspect_calls_nothing_missing_under_a_doubt(mine: str, tmp_path: Path) -> None:
    few = ("--inputs", f"{mine}:inputs", "--out", tmp_path / "record.json", "--report", tmp_path / "page.html")
    assert call("inspect", f"{mine}:layer", *few).exit_code == 0
    shown = call("inspect", f"{mine}:layer", *few, "--certify")
    assert shown.exit_code == 1, shown.output
    assert shown.stdout.startswith("inconclusive: inputs are too few")
    assert json.loads((tmp_path / "record.json").read_text())["certificate"]["missing"] is None
    page = (tmp_path / "page.html").read_text()
    assert page.index("inputs are too few") < page.index("not found")


def test_inspect_quiet_prints_nothing(bert: Path) -> None:
    shown = call("inspect", bert, "--quiet")
    assert (shown.exit_code, shown.output) == (0, "")


def test_inspect_of_a_function_takes_inputs(mine: str) -> None:
    def inspect(inputs: str) -> Result:
        return call("inspect", f"{mine}:layer", "--inputs", f"{mine}:{inputs}")

    assert inspect("inputs").exit_code == 0
    refused(inspect("narrow"), f"TransformerEncoderLayer does not take the inputs made from {mine}:narrow")
    refused(inspect("raises"), f"{mine}:raises was called and raised KeyError: 'weights'")
    unproved = inspect("one_token")  # which attends to itself whatever query and key are: a finding
    assert unproved.exit_code == 1
    assert "inconclusive" in unproved.stdout


def test_translations_alone_are_shown(mine: str, tmp_path: Path) -> None:
    how = ("--inputs", f"{mine}:inputs", "--symmetries", f"{mine}:shifts", "--report", tmp_path / "page.html")
    shown = call("inspect", f"{mine}:layer", *how)
    assert shown.exit_code == 0, shown.output
    assert "TransformerEncoderLayer" in shown.stdout
    assert "uncompensated" in shown.stdout
    assert (tmp_path / "page.html").read_text().count("<table") == 1


def test_a_refuted_pair_leaves_with_1(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quotient_manifolds.cli import subject as module

    find = module.find_symmetries

    def crossed(network: torch.nn.Module, inputs: object) -> object:
        """The key of the first layer's pair replaced by that of the second: no symmetry of the model."""
        from dataclasses import replace

        found = find(network, inputs)
        first, second = (pair for pair in found.pairs if pair.kind == "query/key")
        return replace(found, pairs=(replace(first, H=second.H),))

    monkeypatch.setattr(module, "find_symmetries", crossed)
    shown = call("inspect", bert)
    assert shown.exit_code == 1
    assert "refuted" in shown.stdout


def test_measure_writes_results_that_load(bert: Path, texts: Path, tmp_path: Path) -> None:
    before, out = digest(bert), tmp_path / "result.json"
    chosen = [*("--geometry", "euclidean"), *("--metric", "inv"), *("--geometry", "mix"), *("--geometry", "adaptive")]
    settings = ["--radius", 0.5, "--steps", 4, "--batch-size", 2, "--dtype", "float64", "--seed", 7]
    shown = call("measure", bert, "--data", texts, *chosen, *settings, "--geodesic", "first", "--out", out)
    assert shown.exit_code == 0, shown.output
    results = SharpnessRecord.load(out)
    assert (results.settings["examples"], results.settings["dtype"], results.version) == (5, "float64", VERSION)
    assert results.complete
    assert len(results.frame()) == 4
    assert [result.geometry for result in results] == [
        "euclidean",
        "inv (first order)",
        "mix (first order)",
        "adaptive",
    ]
    for result in results:
        assert result.settings.items() >= {"radius": 0.5, "steps": 4, "seed": 7}.items()
        assert len(result.values) == 3
        assert math.isfinite(result.mean)
        assert result.mean > 0
        assert f"{result.mean:.6g}" in shown.stdout
    assert [result.reach is None for result in results] == [True, False, False, True]
    assert results[2].warning is not None
    warned = [f"Warning: {result.warning}" for result in results if result.warning is not None]
    assert [line for line in shown.stderr.splitlines() if "Warning" in line] == warned
    assert digest(bert) == before


def test_measure_is_reproducible_and_quiet(bert: Path, texts: Path, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        arguments = ("--data", texts, "--metric", "inv", "--radius", 0.1, "--steps", 2, "--restarts", 1, "--quiet")
        shown = call("measure", bert, *arguments, "--out", tmp_path / name)
        assert (shown.exit_code, shown.output) == (0, "")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_measure_agrees_with_the_library(bert: Path, texts: Path, tmp_path: Path) -> None:
    from quotient_manifolds import Quotient, cross_entropy, load_model, tokenised_batches, worst_case_sharpness
    from quotient_manifolds.load import LabelledText

    out = tmp_path / "result.json"
    settings = ("--metric", "mix", "--radius", 0.3, "--steps", 3, "--batch-size", 4)
    call("measure", bert, "--data", texts, *settings, "--out", out)
    examples = [LabelledText(text, None, int(word == "POS")) for text, word in TEXTS]
    batches = tokenised_batches(bert, examples, batch_size=4)
    expected = worst_case_sharpness(
        load_model(bert), cross_entropy, batches, geometry=Quotient("mix"), radius=0.3, steps=3
    )
    (found,) = json.loads(out.read_text())["results"]
    assert found["mean"] == pytest.approx(expected.mean, rel=1e-6)


def test_every_ball_is_measured(bert: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    geometries = ("--geometry", "inv:0.1,0.2", "--geometry", "adaptive", "--geometry", "0.5:0.3")
    shown = call("measure", bert, "--data", texts, *geometries, "--radius", 0.1, "--radius", 0.05, *FAST, "--out", out)
    assert shown.exit_code == 0, shown.output
    found = SharpnessRecord.load(out)
    assert [(each.geometry.partition(" (")[0], each.settings["radius"]) for each in found] == [
        ("inv", 0.1),
        ("inv", 0.2),
        ("adaptive", 0.05),
        ("adaptive", 0.1),
        ("t = 0.5", 0.3),
    ]
    assert [geometry_from_dict(each.geometry_settings or {}).name for each in found] == [
        each.geometry for each in found
    ]


def test_symmetries_are_found_once_for_all_balls(
    bert: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = recorded_runs(monkeypatch)
    geometries = ("--geometry", "inv:0.1,0.2", "--geometry", "mix:0.1")
    assert call("measure", bert, "--data", texts, *geometries, *FAST).exit_code == 0
    assert len(runs) == 1


def test_radii_repeat_and_belong_to_geometries() -> None:
    found = balls(["inv:0.2,0.1", "adaptive", "0.5:3", "t=1.5:1"], [0.5, 0.4], {})
    expected: list[tuple[Geometry, float]] = [
        *((Quotient("inv"), radius) for radius in (0.1, 0.2)),
        *((Adaptive(), radius) for radius in (0.4, 0.5)),
        (Quotient(0.5), 3.0),
        (Quotient(1.5), 1.0),
    ]
    assert found == expected


def test_options_go_to_the_geometries_that_have_them() -> None:
    options = {"norm": "linf", "eta": 0.01, "symmetries": "paper", "geodesic": "first", "eps": None}
    found = [geometry for geometry, _ in balls(["euclidean", "adaptive", "mix"], [1.0], options)]
    assert found == [
        Euclidean("linf"),
        Adaptive(0.01, "linf"),
        Quotient("mix", geodesic="first", symmetries="paper"),
    ]


def test_labels_by_name_columns_and_a_cap(bert: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "data.csv", tmp_path / "out.json"
    file.write_text("sentence,mood\n" + "".join(f"{text},{word}\n" for text, word in TEXTS))
    options = ("--columns", "text=sentence,label=mood", "--labels", "POS=1,NEG=0", "--examples", 3, "--batch-size", 2)
    shown = call("measure", bert, "--data", file, "--geometry", "adaptive:0.1", *options, *FAST, "--out", out)
    assert shown.exit_code == 0, shown.output
    found = SharpnessRecord.load(out)
    assert found.settings["examples"] == 3
    assert len(found[0].batches) == 2


def test_images_and_arrays(tmp_path: Path) -> None:
    vit = hugging_face.vit_classifier(tmp_path / "vit")
    write_images(tmp_path)
    how = ("--mean", 0.5, "--std", 0.5, "--geometry", "inv:0.1", *FAST)
    out = tmp_path / "out.json"
    shown = call("measure", vit, "--data", tmp_path / "images.npz", *how, "--draw", 0, "--out", out)
    assert shown.exit_code == 0, shown.output
    assert SharpnessRecord.load(out).settings["examples"] == 6


def test_functions_for_model_data_and_loss(mine: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    what = (f"{mine}:encoder", "--data", f"{mine}:batches", "--radius", 0.1, *FAST, "--out", out)
    shown = call("measure", *what, "--dtype", "float64", "--symmetries", f"{mine}:swapped")
    assert shown.exit_code == 0, shown.output
    found = SharpnessRecord.load(out)
    assert [(each.geometry_settings or {}).get("symmetries") for each in found] == [None, "given", "given"]
    assert call("measure", *what, "--loss", f"{mine}:squares").exit_code == 0
    assert SharpnessRecord.load(out)[0].base_losses != found[0].base_losses
    refused(call("measure", *what, "--batch-size", 3), "--batch-size means nothing")
    data = ("--data", f"{mine}:one_batch", "--radius", 0.1)
    refused(call("measure", f"{mine}:encoder", *data), "must return a list of batches")
    refused(call("measure", f"{mine}:encoder", "--data", f"{mine}:no_batch", "--radius", 0.1), "at least one batch")
    refused(call("measure", *what, "--symmetries", f"{mine}:undeclared"), "must return quotient_manifolds.Symmetries")


def test_an_adapter_is_named_with_its_base(bert: Path, texts: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(bert)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft's own
        peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
        shown = call("inspect", tmp_path / "adapter")
        measured = call("measure", tmp_path / "adapter", "--data", texts, "--geometry", "inv:0.1", *FAST)
    for each in (shown, measured):
        assert each.exit_code == 0, each.output
        assert f"is an adapter of peft: default (LORA) on {bert}" in "".join(each.stdout.splitlines())


def test_results_are_kept_as_they_are_finished(
    bert: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quotient_manifolds import sharpness

    out, ascend, seen = tmp_path / "out.json", sharpness.WorstCase.of, []

    def interrupted(*args: object) -> object:
        seen.append(len(SharpnessRecord.load(out)) if out.exists() else 0)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return ascend(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(sharpness.WorstCase, "of", interrupted)
    shown = call("measure", bert, "--data", texts, "--radius", "0.1,0.2", *FAST, "--out", out)
    assert shown.exit_code == 130
    assert "2 of 6 results" in shown.stderr
    assert seen == [0, 1, 2]
    found = SharpnessRecord.load(out)
    assert (len(found), found.asked, found.complete) == (2, 6, False)


def test_a_pipe_stays_a_pipe(bert: Path, texts: Path, tmp_path: Path) -> None:
    """As a device does; a device of the machine would be in danger where the code is wrong."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    shown = call("measure", bert, "--data", texts, "--geometry", "adaptive:0.1", *FAST, "--out", pipe)
    assert shown.exit_code == 0, shown.output
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert len(SharpnessRecord.from_dict(json.loads(os.read(reader, 10**6)))) == 1
    os.close(reader)


def test_a_model_that_writes_its_inputs_is_measured_as_in_python_and_one_that_writes_weights_refused(
    mine: str, tmp_path: Path
) -> None:
    import quotient_manifolds as qm

    out = tmp_path / "out.json"
    wanted = ("--data", f"{mine}:batches", "--geometry", "adaptive:0.1", *FAST, "--quiet", "--out", out)
    refused = call("measure", f"{mine}:writing", *wanted)
    assert refused.exit_code == 2
    assert "writes to" in refused.stderr
    assert call("measure", f"{mine}:writing_inputs", *wanted).exit_code == 0
    own = importlib.import_module(mine)
    expected = qm.worst_case_sharpness(
        own.writing_inputs().eval(), qm.cross_entropy, own.batches(), geometry="adaptive", radius=0.1, steps=2
    )
    assert SharpnessRecord.load(out)[0].values == expected.values


def test_a_pipe_gets_all_results_at_once(mine: str, tmp_path: Path) -> None:
    """One document, however many results: nobody reads half of them, and nothing waits for a second reader."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    wanted = ("--geometry", "adaptive:0.1,0.2", "--geometry", "euclidean:0.1")
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        done = call("measure", f"{mine}:encoder", "--data", f"{mine}:batches", *wanted, *FAST, "--quiet", "--out", pipe)
        assert done.exit_code == 0, done.output
        read, _ = reader.communicate(timeout=60)
    assert len(SharpnessRecord.from_dict(json.loads(read))) == 3


def test_what_is_measured_is_printed_also_if_another_geometry_fails(mine: str) -> None:
    wanted = ("--geometry", "adaptive:0.1", "--geometry", "inv:1e-30")
    done = call("measure", f"{mine}:encoder", "--data", f"{mine}:batches", *wanted, *FAST)
    assert done.exit_code == 2
    assert "adaptive" in done.stdout


def test_rows_for_every_precision_measure_and_scale(bert: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in bert.iterdir()}
    out = tmp_path / "orbit.json"
    result = call("orbit", bert, "--steps", 2, "--scale", 0.1, "--scale", 10, "--out", out)
    assert result.exit_code == 0, result.output
    assert "a = 0.1" in result.output
    found = SharpnessRecord.load(out)
    assert len(found) == 2 * 3 * 3
    frame = found.frame()
    assert frame["scale"].isna().sum() == 2 * 3
    before_move = {(row.dtype, row.geometry): row.mean for row in frame[frame["scale"].isna()].itertuples()}
    for row in frame.itertuples():
        assert row.ratio == row.mean / before_move[row.dtype, row.geometry]
    ratios = {(row.dtype, row.geometry, row.scale): row.ratio for row in frame[frame["scale"].notna()].itertuples()}
    for (dtype, geometry, _), value in ratios.items():
        if geometry != "adaptive":
            assert value == pytest.approx(1, abs=1e-9 if dtype == "float64" else 1e-3)
    assert all(abs(value - 1) > 1e-3 for (_, geometry, _), value in ratios.items() if geometry == "adaptive")
    assert {file.name: file.read_bytes() for file in bert.iterdir()} == before


def test_orbit_of_a_function_takes_inputs(mine: str, tmp_path: Path) -> None:
    shown = call("orbit", f"{mine}:encoder")
    refused(shown, "No example inputs can be made for Sequential", "--inputs")
    refused(call("inspect", f"{mine}:encoder"), "No example inputs can be made for Sequential", "--inputs")
    refused(call("inspect", f"{mine}:dict_config"), "config is of type dict", "--inputs")
    how = ("--inputs", f"{mine}:inputs", "--symmetries", f"{mine}:swapped")
    shown = call("orbit", f"{mine}:encoder", *how, *FAST, "--scale", 10, "--out", tmp_path / "orbit.json")
    assert shown.exit_code == 0, shown.output
    assert len(SharpnessRecord.load(tmp_path / "orbit.json")) == 2 * 3 * 2
    assert call("inspect", f"{mine}:encoder", *how).exit_code == 0


@pytest.mark.filterwarnings("default")
def test_a_measure_beyond_reach_is_said_once(bert: Path) -> None:
    shown = call("orbit", bert, *FAST, "--length", 4, "--scale", 0.1, "--scale", 10, "--radius", 3)
    assert shown.exit_code == 0, shown.output
    said = [line for line in shown.stderr.splitlines() if "followed to relative speed" in line]
    assert [line.partition(" worst")[0] for line in said] == ["Warning: mix (second order)"]


def test_the_distance_loss_is_that_of_the_first_output() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"ids": torch.zeros(2, dtype=torch.long), "out": 2 * x}

    inputs, targets = distance_batch(Two(), {"x": torch.ones(3)}, seed=0)
    assert targets.shape == (3,)
    assert float(distance(Two(), (inputs, targets))) == pytest.approx(float(((2 - targets) ** 2).mean()))
    with pytest.raises(TypeError, match="should return a floating-point tensor"):
        first_output((torch.zeros(2, dtype=torch.long),))
