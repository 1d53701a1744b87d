"""The command line as a script meets it: exit codes, one sentence for bad input, records, nothing changed on disk."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

import quotient_manifolds.cli
from quotient_manifolds import SharpnessRecord
from quotient_manifolds.cli.app import cli
from quotient_manifolds.manifolds import runge_kutta
from quotient_manifolds.version import VERSION
from tests import hugging_face

LINES = [
    {"text": "a very good film", "label": 1},
    {"text": "not a good film", "label": 0},
    {"text": "very bad", "label": 0},
    {"text": "good not bad", "label": 1},
    {"text": "a film", "label": 1},
]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def digest(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hugging_face.bert_classifier(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def bert(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    copy = tmp_path / "bert"
    copy.mkdir()
    for file in original.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return file


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


# ---- the group


def test_version_and_help() -> None:
    assert call("--version").output == f"quotient-manifolds, version {VERSION}\n"
    for command in ("inspect", "measure"):
        shown = call(command, "--help").output
        for words in ("Exit codes:", "--seed", "--device", "--dtype", "--quiet", "--out"):
            assert words in shown, (command, words)


def test_absent_click_gives_one_sentence() -> None:
    code = "import sys; sys.modules['click'] = None; import quotient_manifolds.cli as c; c.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == 'The command line needs click and rich: pip install "quotient-manifolds[cli]".\n'


def test_a_defect_is_not_mistaken_for_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("quotient_manifolds.cli.app.cli", broken)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(SystemExit) as left:
        quotient_manifolds.cli.main()
    assert left.value.code == 70
    assert "ZeroDivisionError: a defect" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [("inspect",), ("measure", "somewhere"), ("nothing",), ("inspect", "x", "--seed", "-1")]
)
def test_usage_errors_leave_with_2(arguments: tuple[str, ...]) -> None:
    assert call(*arguments).exit_code == 2


# ---- inspect


def test_inspect_prints_symmetries_and_proofs(bert: Path) -> None:
    before = digest(bert)
    shown = call("inspect", bert)
    assert shown.exit_code == 0, shown.output
    assert "bert.encoder.layer.1.attention query/key" in shown.stdout
    assert shown.stdout.count("GL(8)^4") == shown.stdout.count("R^32") == 4
    assert shown.stdout.count("proved") == 8
    assert "The symmetry group has 1,152 dimensions, 6.17% of the parameters" in " ".join(shown.stdout.split())
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


def test_inspect_quiet_prints_nothing(bert: Path) -> None:
    shown = call("inspect", bert, "--quiet")
    assert (shown.exit_code, shown.output) == (0, "")


def test_inspect_of_a_function_needs_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def encoder():\n    torch.manual_seed(0); return torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)\n"
        "def batch():\n    torch.manual_seed(1); return torch.randn(2, 5, 8)\n"
        "def blind():\n    return torch.zeros(2, 1, 8)\n"
        "def crooked():\n    return torch.zeros(2, 5, 7)\n"
        "def broken():\n    raise KeyError('weights')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    without = call("inspect", "mine:encoder")
    assert without.exit_code == 2
    assert "No example inputs can be made for TransformerEncoderLayer" in without.stderr
    proved = call("inspect", "mine:encoder", "--inputs", "mine:batch")
    assert proved.exit_code == 0, proved.output
    crooked = call("inspect", "mine:encoder", "--inputs", "mine:crooked")
    refused(crooked, "TransformerEncoderLayer does not take the inputs made from mine:crooked")
    refused(call("inspect", "mine:broken"), "mine:broken was called and raised KeyError: 'weights'")
    # One token attends to itself whatever query and key are: nothing can be proved, and that is a finding.
    unproved = call("inspect", "mine:encoder", "--inputs", "mine:blind")
    assert unproved.exit_code == 1
    assert "inconclusive" in unproved.stdout


def test_a_refuted_pair_leaves_with_1(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quotient_manifolds.cli import subject as module

    find = module.find_symmetries

    def crossed(network: torch.nn.Module) -> object:
        """The key of the first layer's pair replaced by that of the second: no symmetry of the model."""
        from dataclasses import replace

        found = find(network)
        first, second = (pair for pair in found.pairs if pair.kind == "query/key")
        return replace(found, pairs=(replace(first, H=second.H),))

    monkeypatch.setattr(module, "find_symmetries", crossed)
    shown = call("inspect", bert)
    assert shown.exit_code == 1
    assert "refuted" in shown.stdout


# ---- measure


def test_measure_writes_results_that_load(bert: Path, data: Path, tmp_path: Path) -> None:
    before, out = digest(bert), tmp_path / "result.json"
    chosen = [*("--geometry", "euclidean"), *("--metric", "inv"), *("--geometry", "mix"), *("--geometry", "adaptive")]
    settings = ["--radius", 0.5, "--steps", 4, "--batch-size", 2, "--dtype", "float64", "--seed", 7]
    shown = call("measure", bert, "--data", data, *chosen, *settings, "--geodesic", "first", "--out", out)
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


def test_measure_is_reproducible_and_quiet(bert: Path, data: Path, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        arguments = ("--data", data, "--metric", "inv", "--radius", 0.1, "--steps", 2, "--restarts", 1, "--quiet")
        shown = call("measure", bert, *arguments, "--out", tmp_path / name)
        assert (shown.exit_code, shown.output) == (0, "")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_measure_agrees_with_the_library(bert: Path, data: Path, tmp_path: Path) -> None:
    from quotient_manifolds import Quotient, cross_entropy, load_model, tokenised_batches, worst_case_sharpness
    from quotient_manifolds.load import LabelledText

    out = tmp_path / "result.json"
    call(
        "measure",
        bert,
        "--data",
        data,
        "--metric",
        "mix",
        "--radius",
        0.3,
        "--steps",
        3,
        "--out",
        out,
        "--batch-size",
        4,
    )
    examples = [LabelledText(str(line["text"]), None, int(line["label"])) for line in LINES]  # type: ignore[call-overload]
    batches = tokenised_batches(bert, examples, batch_size=4)
    expected = worst_case_sharpness(
        load_model(bert), cross_entropy, batches, geometry=Quotient("mix"), radius=0.3, steps=3
    )
    (found,) = json.loads(out.read_text())["results"]
    assert found["mean"] == pytest.approx(expected.mean, rel=1e-6)


# ---- bad input: one sentence, a non-zero exit, nothing changed


def poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors["bert.encoder.layer.0.attention.self.query.weight"][0, 0] = math.nan


def flatten(tensors: dict[str, torch.Tensor]) -> None:
    """The first head's queries lose a dimension, weight and bias."""
    tensors["bert.encoder.layer.0.attention.self.query.weight"][0] = 0
    tensors["bert.encoder.layer.0.attention.self.query.bias"][0] = 0


def explode(tensors: dict[str, torch.Tensor]) -> None:
    bias = tensors["classifier.bias"]
    bias.copy_(torch.where(torch.arange(len(bias)) % 2 == 0, 3e38, -3e38))


MEASURE = ("--radius", 0.1, "--steps", 2)
BAD_DATA = {
    "empty data": ("", "is empty"),
    "label out of range": ('{"text": "good", "label": 2}\n', "line 1: the label must be in 0 ... 1"),
    "no label": ('{"text": "good"}\n', "line 1: no 'label'"),
    "no JSON": ("good,1\n", "line 1: not valid JSON"),
}
BAD_MODELS = {
    "NaN weights": (lambda d: rewrite(d, poison), "query.weight"),
    "rank-deficient pair": (lambda d: rewrite(d, flatten), "bert.encoder.layer.0.attention query/key"),
    "loss not finite": (lambda d: rewrite(d, explode), "finite"),
    "no tokenizer": (lambda d: [file.unlink() for file in d.glob("token*")], "no tokenizer"),
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json"),
}
BAD_OPTIONS = {
    "unknown metric": (
        ("--metric", "manhattan", "--radius", 1),
        "geometry must be one of euclidean, adaptive, inv, mix",
    ),
    "unknown geodesic": (("--geodesic", "third", "--radius", 1), "geodesic must be one of first, second, exact"),
    "no radius": ((), "has no radius"),
    "negative radius": (("--radius", -1), "radius"),
    "radius not finite": (("--radius", "nan"), "radius"),
    "no steps": (("--radius", 1, "--steps", 0), "--steps"),
    "texts longer than the model": (("--radius", 1, "--max-length", 65), "3 ... 64"),
    "no such device": (("--radius", 1, "--device", "abacus"), "abacus"),
    "a device that is not here": (("--radius", 1, "--device", "cuda:99"), "cuda:99"),
    "half precision": (("--radius", 1, "--dtype", "float16"), "'float16' is not one of"),
    "no place for the result": (("--radius", 1, "--out", "nowhere/result.json"), "Cannot write nowhere"),
}


def refused(shown: Result, words: str) -> None:
    assert shown.exit_code == 2, shown.output
    *_, sentence = shown.stderr.strip().splitlines()
    assert sentence.startswith("Error: ")
    assert words in sentence
    assert shown.stdout == ""
    assert isinstance(shown.exception, SystemExit)  # no traceback


@pytest.mark.parametrize(("content", "words"), BAD_DATA.values(), ids=list(BAD_DATA))
def test_bad_data(content: str, words: str, bert: Path, data: Path) -> None:
    before = digest(bert)
    data.write_text(content)
    refused(call("measure", bert, "--data", data, *MEASURE), words)
    assert digest(bert) == before


@pytest.mark.parametrize(("spoil", "words"), BAD_MODELS.values(), ids=list(BAD_MODELS))
def test_bad_models(spoil: Callable[[Path], object], words: str, bert: Path, data: Path) -> None:
    spoil(bert)
    before = digest(bert)
    refused(call("measure", bert, "--data", data, *MEASURE, "--metric", "inv"), words)
    assert digest(bert) == before


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS.values(), ids=list(BAD_OPTIONS))
def test_bad_options(options: tuple[object, ...], words: str, bert: Path, data: Path) -> None:
    refused(call("measure", bert, "--data", data, *options), words)


def test_a_geodesic_that_cannot_be_followed(bert: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runge_kutta, "MAX_STEPS", 0)
    options = ("--geometry", "mix", "--geodesic", "exact", "--radius", 0.1)
    refused(call("measure", bert, "--data", data, *options), "a geodesic should end within")


def test_measure_wants_a_text_classifier(tmp_path: Path, data: Path) -> None:
    refused(
        call("measure", hugging_face.vit_classifier(tmp_path / "vit"), "--data", data, *MEASURE),
        "takes pixel_values, but",
    )
    single = hugging_face.bert_classifier(tmp_path / "one", num_labels=1)
    refused(call("measure", single, "--data", data, *MEASURE), "at least 2 classes")


def test_inspect_of_bad_models(bert: Path) -> None:
    refused(call("inspect", bert / "nowhere"), "No model at")
    refused(call("inspect", "torch.nn:Identity"), "torch.nn:Identity (Identity) has no parameters")
    rewrite(bert, poison)
    before = digest(bert)
    refused(call("inspect", bert), "NaN")
    assert digest(bert) == before


INTERRUPTED_WHILE_MEASURING = """
import os, signal, sys, threading, torch
import quotient_manifolds.cli
from quotient_manifolds import sharpness as measure
ascend = measure.worst_case_sharpness

def interrupted(*args, **kwargs):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    return ascend(*args, **kwargs)

measure.worst_case_sharpness = interrupted
torch.set_num_threads(1)
quotient_manifolds.cli.main()
"""


def test_ctrl_c_leaves_with_130_and_no_result(bert: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    long = ["--data", data, "--radius", 0.1, "--steps", 10**6, "--metric", "inv", "--out", out]
    command = [sys.executable, "-c", INTERRUPTED_WHILE_MEASURING, "measure", bert, *long]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().endswith("Interrupted.")
    assert done.stdout == ""
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bert", "data.jsonl"]


# ---- orbit


def test_orbit_draws_what_it_measured(bert: Path, tmp_path: Path) -> None:
    settings = ["--steps", 2, "--length", 4, "--scale", 0.1, "--scale", 10]
    shown = call("orbit", bert, *settings, "--figure", tmp_path / "orbit.svg")
    assert shown.exit_code == 0, shown.output
    assert "<svg" in (tmp_path / "orbit.svg").read_text()
    refused = call("orbit", bert, "--figure", tmp_path / "orbit.gif")
    assert refused.exit_code == 2
    assert "A figure is written as .svg, .pdf, .png" in refused.stderr


def test_a_measure_beyond_reach_is_said_once(bert: Path) -> None:
    """In a process of its own: pytest keeps warnings to itself."""
    settings = ["--steps", 2, "--length", 4, "--scale", 0.1, "--scale", 10, "--radius", 3]
    command = [sys.executable, "-m", "quotient_manifolds", "orbit", bert, *settings]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "followed to relative speed" in line]
    assert [line.partition(" worst")[0] for line in said] == ["Warning: mix (second order)"]


# ---- export


def test_export_writes_what_a_store_holds(tmp_path: Path) -> None:
    from quotient_manifolds.compare import Store, Unit, unit_key

    unit = Unit(unit_key({"x": 1}), "a model", "gradient norm", "euclidean", None, 0, {"seed": 3})
    with Store(tmp_path / "store.sqlite") as store:
        store.finish(unit, {"value": 0.1 + 0.2}, 1.5)
    for place in (tmp_path, tmp_path / "store.sqlite"):
        assert call("export", place, tmp_path / "units.json").exit_code == 0
        (row,) = json.loads((tmp_path / "units.json").read_text())
        assert (row["checkpoint"], row["payload"]["value"], row["settings"]) == ("a model", 0.1 + 0.2, {"seed": 3})
    refused = call("export", tmp_path, tmp_path / "units.xlsx")
    assert refused.exit_code == 2
    assert "Results are exported as .csv, .parquet, .json" in refused.stderr
    assert call("export", tmp_path / "nothing", tmp_path / "units.csv").exit_code == 2
