"""What a zoo can hold that its owner did not mean: names, cells, exits and files that must not spoil the rest."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

import pytest
from torch import nn

from quotient_manifolds.compare import Store, read_spec
from quotient_manifolds.compare.identity import files_fingerprint, model_hash
from tests.zoos import Small, compare, found, write_seeds, write_spec

HEAD = "checkpoints: {paths: models/*, loader: tests.zoos:small}\ndata: {path: train.npz}\ntest: {path: test.npz}"
SLOPE = "measure: gradient-norm, geometry: euclidean"


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """Four files that name the seeds of linear classifiers."""
    return write_seeds(tmp_path, 4)


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux alone")
def test_a_name_that_is_no_text_is_shown_as_one(zoo: Path) -> None:
    for name in (b"m_\xff", b"m_\x01\x1b[31m", b"m_\\xff"):
        Path(os.fsdecode(os.fsencode(zoo / "models") + b"/" + name)).write_text("7")
    spec = write_spec(zoo, SLOPE, head=HEAD)
    done = compare(spec)
    assert done.exit_code == 0, done.output
    names = {row.checkpoint for row in found(spec).rows}
    assert len(names) == 7
    assert {"m_\\x01\\x1b[31m", "m_3"} < names
    assert all(name.isprintable() for name in names)
    assert all(value is not None for row in found(spec).rows for value in row.values.values())


@pytest.mark.parametrize(
    "column", ["US$ and $\\frac", "a$", "\\$x$", "a\x01b\x1b", "<b>&amp;", "$$", "a\ufffeb", "line\nbreak"]
)
def test_any_name_of_a_score_can_be_drawn(zoo: Path, column: str) -> None:
    cells = [["checkpoint", column, "kind"], *([f"m_{n}", str(n * n), f"$k{n % 2}^$\x02"] for n in range(4))]
    with (zoo / "scores.csv").open("w", newline="") as file:
        csv.writer(file).writerows(cells)
    spec = write_spec(zoo, SLOPE, head=HEAD, tail="scores: scores.csv\ngiven: kind")
    text = spec.read_text() + f"against: [{column!r}]\n" if column.isprintable() and "\\" not in column else ""
    spec.write_text(text or spec.read_text())
    done = compare(spec)
    assert done.exit_code == 0, done.output
    assert "<img" in (zoo / "results" / "zoo" / "report.html").read_text()


def test_scores_may_be_called_as_they_like_and_be_as_large_as_floats_are(zoo: Path) -> None:
    (zoo / "scores.csv").write_text("checkpoint,x,y\nm_0,1e308,1e-320\nm_1,-1e308,2e-320\nm_2,1,0\nm_3,,3e-320\n")
    tail = "scores: scores.csv\nagainst: [x, y]\ngiven: [x, y]"
    done = compare(write_spec(zoo, SLOPE, head=HEAD, tail=tail))
    assert done.exit_code == 0, done.output
    assert len(found(zoo / "zoo.yaml").rankings) == 2 * (4 + 2)


def test_a_misspelt_name_among_the_scores_is_said(zoo: Path) -> None:
    (zoo / "scores.csv").write_text("checkpoint,rate\nm_0,1\nm_1,2\nm_2,3\nm3,4\n")
    spec = write_spec(zoo, SLOPE, head=HEAD, tail="scores: scores.csv")
    said = " ".join(compare(spec).stdout.split())
    assert "Without a row of scores, so in no correlation with them: m_3." in said
    assert "Rows of scores that name no checkpoint: m3." in said
    assert "name no checkpoint: m3." in (zoo / "results" / "zoo" / "report.html").read_text()


def test_checkpoints_may_be_called_na_and_null(zoo: Path) -> None:
    for seed, name in enumerate(("NA", "null", "nan", "None")):
        (zoo / "models" / f"m_{seed}").rename(zoo / "models" / name)
    (zoo / "scores.csv").write_text("checkpoint,rate\nNA,1\nnull,2\nnan,NA\nNone,4\n")
    spec = write_spec(zoo, SLOPE, head=HEAD, tail="scores: scores.csv")
    assert compare(spec).exit_code == 0
    rates = {row.checkpoint: row.scores["rate"] for row in found(spec).rows}
    assert rates == {"NA": 1, "null": 2, "nan": None, "None": 4}


@pytest.mark.parametrize("name", ["euclidean gradient norm", "loss", "error_gap"])
def test_a_score_does_not_pass_for_a_measure(zoo: Path, name: str) -> None:
    (zoo / "scores.csv").write_text(f"checkpoint,{name}\nm_1,1\n")
    done = compare(write_spec(zoo, SLOPE, head=HEAD, tail="scores: scores.csv"))
    assert done.exit_code == 2
    assert f"{name} is measured here; give the column another name" in done.stderr


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (f"checkpoint,rate\nm_1,{'9' * 400}\n", "rate must be finite"),
        (f"checkpoint,rate\nm_1,{'9' * 5000}\n", "fewer digits"),
        ("checkpoint,rate\nm_1,1e400\n", "rate must be finite"),
        ("checkpoint,rate,rate\nm_1,1,2\n", "the column 'rate' is there twice"),
        ("checkpoint,rate\nm_1,1,2\n", "a row with more cells than there are columns"),
        ("checkpoint,rate\nm_1,1,\n", "a row with more cells than there are columns"),
    ],
)
def test_scores_that_are_none(zoo: Path, cells: str, words: str) -> None:
    (zoo / "scores.csv").write_text(cells)
    done = compare(write_spec(zoo, SLOPE, head=HEAD, tail="scores: scores.csv"))
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert words in done.stderr


@pytest.mark.parametrize(
    ("trouble", "words"),
    [("exit load", "SystemExit: 0"), ("exit forward", "SystemExit: 0"), ("outcome load", "Outcome")],
)
def test_an_exit_in_a_function_of_the_users_is_a_failure(zoo: Path, trouble: str, words: str) -> None:
    (zoo / "models" / "m_1").write_text(trouble)
    spec = write_spec(zoo, SLOPE, head=HEAD)
    done = compare(spec)
    assert done.exit_code == 1
    assert "Failed: m_1" in done.stderr
    assert words in done.stderr
    assert "(at zoos.py, line " in done.stderr
    assert found(spec).known == (3, 4)


def test_an_exit_while_a_module_is_imported_is_bad_input(zoo: Path) -> None:
    (zoo / "leaves_at_import.py").write_text("import sys\nsys.exit(0)\n")
    done = compare(write_spec(zoo, SLOPE, head=HEAD.replace("tests.zoos:small", "leaves_at_import:model")))
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "SystemExit" in done.stderr or "exit" in done.stderr


def test_a_loader_that_is_not_there_is_said_once_before_anything_is_begun(zoo: Path) -> None:
    done = compare(write_spec(zoo, SLOPE, head=HEAD.replace("zoos:small", "zoos:nothing")))
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "line 1: Module 'tests.zoos' has no function 'nothing'" in done.stderr
    assert not (zoo / "results").exists()


def test_an_interruption_still_interrupts(zoo: Path) -> None:
    (zoo / "models" / "m_1").write_text("interrupt")
    done = compare(write_spec(zoo, SLOPE, head=HEAD))
    assert done.exit_code == 130
    assert "what was measured is kept" in done.stderr


def test_a_file_replaced_with_the_same_size_and_time_is_another(zoo: Path) -> None:
    file = zoo / "models" / "m_1"
    before, times = files_fingerprint(file), file.stat()
    assert files_fingerprint(file) == before
    file.write_text("2")  # in place: the same inode, another time of change
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = files_fingerprint(file)
    (zoo / "beside").write_text("3")
    os.utime(zoo / "beside", ns=(times.st_atime_ns, times.st_mtime_ns))
    os.replace(zoo / "beside", file)
    assert len({before, second, files_fingerprint(file)}) == 3


def test_modules_without_weights_decide_too() -> None:
    linear = nn.Linear(3, 3)
    models = [nn.Sequential(linear, act) for act in (nn.Tanh(), nn.ReLU(), nn.ELU(0.5), nn.ELU(0.6))]
    models += [Small(), Small("other")]
    assert len({model_hash(model) for model in models[:4]}) == 4
    models[5].load_state_dict(models[4].state_dict())
    assert model_hash(models[4]) != model_hash(models[5])


def test_the_headline_says_of_how_many_it_is_the_largest_and_that_models_are_few(zoo: Path) -> None:
    spec = write_spec(zoo, SLOPE, "measure: worst-case, geometry: adaptive, radius: [0.1, 0.2], steps: 1", head=HEAD)
    done = compare(spec)
    said = found(spec).few_models
    assert said is not None
    assert "4 models" in said
    assert said.split(":")[0] in " ".join(done.stdout.split())
    page = (zoo / "results" / "zoo" / "report.html").read_text()
    facts = page[page.index("<ul class") : page.index("</nav>")]
    assert "is the largest in size of 3 values of tau-b" in facts
    assert "corrected (Holm) for being the largest of 3" in facts
    assert "4 models are few" in facts
    assert "p, Holm" in page


def test_the_base_of_an_adapter_is_one_of_its_files(tmp_path: Path) -> None:
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    adapter.mkdir()
    base.mkdir()
    (base / "config.json").write_text("{}")
    settings = json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(base)})
    (adapter / "adapter_config.json").write_text(settings)
    before = files_fingerprint(adapter)
    assert files_fingerprint(adapter) == before
    (base / "model.safetensors").write_text("other")
    assert files_fingerprint(adapter) != before
    (adapter / "adapter_config.json").write_text("no JSON")
    assert files_fingerprint(adapter)


def test_an_exception_is_said_once_a_checkpoint_with_its_place(zoo: Path) -> None:
    (zoo / "models" / "m_1").write_text("raise")
    spec = write_spec(zoo, SLOPE, "measure: worst-case, geometry: adaptive, radius: 0.1, steps: 1", head=HEAD)
    done = compare(spec)
    assert done.exit_code == 1
    (line,) = [each for each in done.stderr.splitlines() if "Failed" in each]
    assert line.count("IndexError: no such row (at zoos.py, line ") == 1
    assert "in forward)" in line
    assert all(what in line for what in ("m_1", "loss and error on data", "gradient norm", "worst-case sharpness"))
    page = (zoo / "results" / "zoo" / "report.html").read_text()
    assert page.count("IndexError") == 1


def test_what_fails_alike_on_all_is_said_once(zoo: Path) -> None:
    spec = write_spec(zoo, SLOPE, "measure: gradient-norm, geometry: inv", head=HEAD)
    done = compare(spec)
    assert done.exit_code == 1
    (line,) = [each for each in done.stderr.splitlines() if "Failed" in each]
    assert line.startswith("Failed: m_0, m_1, m_2, m_3, inv")


def test_results_lie_beside_the_spec_wherever_the_command_is_given(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_spec(zoo, SLOPE, head=HEAD)
    (zoo / "elsewhere").mkdir()
    monkeypatch.chdir(zoo / "elsewhere")
    assert compare(Path("..") / spec.name).exit_code == 0
    monkeypatch.chdir(zoo)
    done = compare(Path(spec.name))
    assert "Nothing was left to measure" in done.stdout
    assert (zoo / "results" / "zoo" / "report.html").is_file()
    assert compare(Path(spec.name), "--out", "elsewhere/mine").exit_code == 0  # as ever, from where one stands
    assert (zoo / "elsewhere" / "mine" / "report.html").is_file()
    with Store(zoo / "results" / "zoo" / "store.sqlite", make=False) as store:
        assert len(store.results()) == 4 * 3
    assert len(read_spec(spec).checkpoints) == 4
