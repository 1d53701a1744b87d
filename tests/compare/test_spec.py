"""What a spec may say, and the one sentence, with the key, for whatever else it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import quotient_manifolds as qm
from quotient_manifolds.compare import MeasureEntry, Spec, forecast, read_spec, run_comparison
from quotient_manifolds.compare.spec import MEASURES
from quotient_manifolds.geometry import Adaptive, Euclidean, Quotient
from quotient_manifolds.load import BatchFunction, Checkpoint
from quotient_manifolds.sharpness import GradientNorm, Measure, WorstCase
from tests.nets.zoos import small, write_images, write_seeds, write_spec

GOOD = """\
checkpoints:
  paths: models/*
  loader: huggingface
data:
  path: train.npz
  batch_size: 8
  max_batches: 2
test: {path: test.npz}
scores: scores.csv
measures:
  - measure: worst-case
    geometry: [inv, adaptive]
    radius: [0.1, 0.2]
  - measure: gradient-norm
    geometry: euclidean
against: [error_gap]
given: [rate]
dtype: float64
"""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints by name only: a spec is read without loading any."""
    folder = tmp_path_factory.mktemp("zoo")
    for number in (1, 2, 10):
        (folder / "models" / f"m_{number}").mkdir(parents=True)
    write_images(folder / "train.npz", 16, seed=0)
    write_images(folder / "test.npz", 12, seed=1)
    (folder / "scores.csv").write_text("checkpoint,rate,kind,quality\nm_1,0.1,a,1\nm_2,,b,0.5\nm_10,0.3,a,2\n")
    return folder


Read = Callable[[str], Spec]


@pytest.fixture
def read(zoo: Path) -> Read:
    def from_text(text: str) -> Spec:
        (zoo / "spec.yaml").write_text(text, encoding="utf-8")
        return read_spec(zoo / "spec.yaml")

    return from_text


def measures(read: Read, *lines: str) -> list[MeasureEntry]:
    items = "\n".join(f"  - {{{line}}}" for line in lines)
    return list(read(f"checkpoints: {{paths: models/*}}\ndata: train.npz\nmeasures:\n{items}\n").measures)


def test_a_good_spec_says_what_is_measured(read: Read, zoo: Path) -> None:
    spec = read(GOOD)
    assert [each.name for each in spec.checkpoints] == ["m_1", "m_2", "m_10"]
    assert spec.checkpoints[0].path == zoo / "models" / "m_1"
    data: Any = spec.data
    test: Any = spec.test
    assert (data.path, data.batch_size, data.max_batches) == (zoo / "train.npz", 8, 2)
    assert (test.path, test.batch_size) == (zoo / "test.npz", 32)
    assert [each.measure for each in spec.measures] == [
        *(WorstCase(Quotient("inv"), radius) for radius in (0.1, 0.2)),
        *(WorstCase(Adaptive(), radius) for radius in (0.1, 0.2)),
        GradientNorm(Euclidean()),
    ]
    assert spec.scores["m_2"] == {"rate": None, "kind": "b", "quality": 0.5}
    assert (spec.against, spec.given, spec.dtype) == (("error_gap",), ("rate",), "float64")
    one = read(GOOD.replace("[error_gap]", "error_gap").replace("{path: test.npz}", "test.npz"))
    assert replace(one, path=None) == replace(spec, path=None)


def test_every_measure_of_the_package_has_a_name_here() -> None:
    direct = [each for each in Measure.__subclasses__() if each.__module__.startswith("quotient_manifolds")]
    assert set(MEASURES.values()) == {*direct, *(below for each in direct for below in each.__subclasses__())}


def test_labels_tell_measures_apart(read: Read) -> None:
    found = measures(
        read,
        "measure: worst-case, geometry: inv, radius: [0.3, 0.30000001], eps: 0.01",
        "measure: worst-case, geometry: inv, radius: 0.3, eps: 0.02",
        "measure: worst-case, geometry: [inv, mix, 0.5], radius: 0.3, symmetries: paper",
        "measure: worst-case, geometry: [euclidean, adaptive], radius: 0.3, norm: linf, steps: 7",
    )
    labels = [each.label for each in found]
    assert len(set(labels)) == len(labels) == 8
    assert "inv (second order) worst-case sharpness, eps 0.01, radius 0.30000001" in labels


def test_functions_and_the_home_directory(read: Read, zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = read(
        "checkpoints: {loader: 'tests.nets.zoos:plain'}\n"
        "data: tests.nets.zoos:two_batches\nloss: tests.nets.zoos:squares\n"
        + GOOD[GOOD.index("measures") : GOOD.index("against")]
    )
    assert [(each.name, each.path) for each in one.checkpoints] == [("tests.nets.zoos:plain", None)]
    assert (one.data, one.loss) == (BatchFunction("tests.nets.zoos:two_batches"), "tests.nets.zoos:squares")
    monkeypatch.setenv("HOME", str(zoo))
    found = read(re.sub(r"(models/|train\.|test\.|scores\.c)", r"~/\1", GOOD))
    assert found.data.path == zoo / "train.npz"  # type: ignore[attr-defined]
    assert (len(found.checkpoints), len(found.scores)) == (3, 3)


# What stands in the good spec, what stands there instead, and words that the sentence must have.
WRONG: list[tuple[str, str, str]] = [
    # Keys.
    ("scores: ", "score: ", "unknown key 'score'; did you mean 'scores'? The keys here: checkpoints,"),
    ("max_batches", "batches", "unknown key 'data.batches'; did you mean 'max_batches'?"),
    ("{path: test.npz}", "{path: test.npz, xyzzy: 1}", "unknown key 'test.xyzzy'. The keys here: path, batch_size"),
    (
        "geometry: euclidean",
        "geometri: inv",
        "measures.1: gradient-norm must have options among geometry. Found geometri; did you mean 'geometry'?",
    ),
    ("  path: train.npz\n", "", "data.path is missing"),
    (
        "- measure: gradient-norm\n    geometry: euclidean",
        "- radius: 1",
        "measures.1: measure must be one of worst-case, .* Found None",
    ),
    # Values.
    ("batch_size: 8", "batch_size: many", "data: batch_size must be an integer of at least 1. Found 'many'"),
    ("batch_size: 8", "batch_size: 8\n  seed: a", "data: seed must be an integer of at least 0. Found 'a'"),
    ("scores: scores.csv", "scores: 3", "scores: "),
    ("dtype: float64", "loss: 3", "loss: "),
    ("float64", "float16", "dtype must be one of float32, float64. Found 'float16'"),
    ("path: train.npz", "path: train.csv.gz", "data: Data must be in a "),
    # Checkpoints, data, scores, functions.
    ("models/*", "model/*", "checkpoints: The pattern 'model/*' matches nothing"),
    ("loader: huggingface", "loader: tests.nets.zoos:nothing", "'tests.nets.zoos' must have .* no function 'nothing'"),
    ("path: train.npz", "path: trian.npz", "data: There is no file"),
    ("path: train.npz", "path: tests.nets.zoos:two_batches", "batch_size must be left out for the batches of"),
    (
        "dtype: float64",
        "loss: tests.nets.zoos:nothing",
        "loss: Module 'tests.nets.zoos' must have .* no function 'nothing'",
    ),
    ("scores.csv", "none.csv", "scores: .*none.csv must be readable as CSV"),
    ("[error_gap]", "[rate, gap]", "against must name scores: loss, error,.* Found 'gap'"),
    ("[error_gap]", "[rate, kind]", "against must name scores that are numbers. Found 'kind'"),
    ("[rate]", "rat", "given must name scores: .* rate, kind, quality. Found 'rat'"),
    ("test: {path: test.npz}\n", "", "Found 'error_gap'"),
    # Measures.
    ("measure: worst-case", "measure: worst", "measures.0: measure must be one of worst-case, "),
    ("[inv, adaptive]", "invariant", "measures.0: geometry must be one of euclidean, adaptive, inv,"),
    ("radius: [0.1, 0.2]", "raduis: 1", "geometry, radius, restarts, seed, steps. Found raduis; did you"),
    ("[0.1, 0.2]", "0", "measures.0: radius must be a positive finite number. Found 0"),
    ("geometry: euclidean", "geometry: inv\n    radius: 1", "must have options among geometry. Found radius"),
    (
        "geometry: euclidean",
        "geometry: inv\n    eta: 0.1",
        "The geometry inv has the options eps, geodesic, ",
    ),
    ("[0.1, 0.2]", "[0.1, 0.1]", "measures must have names of their own. Found inv .*, radius 0.1 twice"),
    ("[0.1, 0.2]", "[0.1, small]", "measures.0: radius must be a positive finite number. Found 'small'"),
    ("- measure: gradient-norm\n    geometry: euclidean", "- gradient-norm", "measures.1: a measure must be a mapping"),
    ("paths: models/*", "paths: 5", "checkpoints: A path must be text. Found 5"),
    ("scores: scores.csv", "scores: [scores.csv]", r"scores: A path must be text. Found \['scores.csv'\]"),
    # YAML.
    ("train.npz", "[train.npz", "must be valid YAML.*line 6"),
    ("  batch_size: 8", "\tbatch_size: 8", "must be valid YAML.*line"),
    ("float64", "!!python/name:os.system", "must be valid YAML"),
    (GOOD, "", "a spec must have the keys checkpoints, data,"),
]


@pytest.mark.parametrize(("good", "bad", "words"), WRONG)
def test_what_is_wrong_is_said_in_one_sentence(read: Read, zoo: Path, good: str, bad: str, words: str) -> None:
    assert good in GOOD
    with pytest.raises(ValueError, match=rf"^{re.escape(str(zoo / 'spec.yaml'))}") as caught:
        read(GOOD.replace(good, bad, 1))
    said = str(caught.value)
    assert "\n" not in said
    assert words in said or re.search(words, said), said


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ("checkpoint,rate\nm_1,1\nm_2,2\nm_1,3\n", "must name each checkpoint once. Found 'm_1'"),
        ("checkpoint,rate\nm_1,1\n,2\n", "must name each checkpoint once. Found ''"),
        ("name,rate\nm_1,1\n", "must have a column checkpoint. Found name, rate"),
        ("checkpoint,error_gap\nm_1,1\n", "names that are measured. Found error_gap; rename it"),
        ("checkpoint,euclidean gradient norm\nm_1,1\n", "Found euclidean gradient norm"),
        ("checkpoint,rate\nm_1,1,2\n", "must be readable as CSV"),
        ("checkpoint,rate\nm_1,inf\nm_2,1\n", "bad.csv must have finite numbers. Found inf for the rate of m_1"),
        ("checkpoint,rate\nm_1,1\nm_2,-1e999\n", "Found -inf for the rate of m_2"),
        ("checkpoint,rate,rate\nm_1,1,2\n", "bad.csv must have each column once. Found rate twice"),
        ("checkpoint,rate,checkpoint\nm_1,1,m_2\n", "Found checkpoint twice"),
        ("", "must be readable as CSV"),
    ],
)
def test_scores_that_cannot_be_used(read: Read, zoo: Path, cells: str, words: str) -> None:
    (zoo / "bad.csv").write_text(cells)
    with pytest.raises(ValueError, match=r"(scores: .*bad\.csv|scores must not have)") as caught:
        read(GOOD.replace("scores.csv", "bad.csv").replace("given: [rate]", ""))
    assert words in str(caught.value)


def test_names_of_checkpoints_are_text_in_scores(tmp_path: Path) -> None:
    """Whatever they look like; and scores are numbers, truths or text, NA where there is none."""
    for name in ("007", "8", "1e3", "nan", "NA"):
        (tmp_path / name).mkdir()
    write_images(tmp_path / "train.npz", 4, seed=0)
    rows = "007,True,a,1\n8,False,NA,\n1e3,True,b,1e-320\nnan,True,a,2\nNA,,a,3\n"
    (tmp_path / "scores.csv").write_text(f"\ufeffcheckpoint,good,kind,rate\n{rows}", encoding="utf-8")
    (tmp_path / "spec.yaml").write_text(
        "\ufeffcheckpoints: {paths: ['0*', '8', '1e3', 'nan', 'NA']}\ndata: train.npz\nscores: scores.csv\n"
        "measures: [{measure: gradient-norm, geometry: inv}]\n"
    )
    assert read_spec(tmp_path / "spec.yaml").scores == {
        "007": {"good": 1.0, "kind": "a", "rate": 1.0},
        "8": {"good": 0.0, "kind": None, "rate": None},
        "1e3": {"good": 1.0, "kind": "b", "rate": 1e-320},
        "nan": {"good": 1.0, "kind": "a", "rate": 2},
        "NA": {"good": None, "kind": "a", "rate": 3},
    }


ONE = Checkpoint("one", None, "tests.nets.zoos:plain")
DATA = BatchFunction("tests.nets.zoos:two_batches")
ENTRY = MeasureEntry(GradientNorm(Euclidean()))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"measures": [GradientNorm(Euclidean())]}, TypeError, "measures must be MeasureEntry"),
        ({"measures": []}, ValueError, "measures must not be empty"),
        ({"checkpoints": [ONE, ONE]}, ValueError, "checkpoints must have names of their own. Found one twice"),
        ({"scores": {"one": {"rate": float("inf")}}}, ValueError, "scores must have finite numbers. Found inf for"),
        (
            {"against": ["error"], "loss": "tests.nets.zoos:squares"},
            ValueError,
            "against must name scores: loss. Found",
        ),
    ],
)
def test_a_spec_of_python_is_checked(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    given: dict[str, Any] = {"checkpoints": [ONE], "data": DATA, "measures": [ENTRY]} | changes
    with pytest.raises(error, match=re.escape(words)):
        Spec(**given)


def test_files_that_are_no_spec(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("a: ü".encode("latin-1"))
    for path in (tmp_path / "latin.yaml", tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ValueError, match="must be readable YAML"):
            read_spec(path)


def test_a_radius_that_is_not_given_is_suggested_once_on_the_first_model(tmp_path: Path) -> None:
    zoo = write_seeds(tmp_path, 3)
    head = "checkpoints: {paths: models/*, loader: tests.nets.zoos:small}\ndata: {path: train.npz, batch_size: 4}"
    spec = write_spec(zoo, "measure: worst-case, geometry: [euclidean, adaptive], steps: 3", head=head)
    planned = forecast(read_spec(spec), zoo / "out")
    found = run_comparison(spec, zoo / "out")
    first = qm.suggest_radius(small(zoo / "models" / "m_0"), qm.cross_entropy, batches_of(spec)[:1], "adaptive")
    assert found.measures["radius"].tolist()[1] == first
    assert [each for each in planned.measures.index if "adaptive" in each] == [found.labels[1]]
    assert f"The radius of {found.labels[1]} was suggested on m_0 (suggest_radius)." in found.notes
    assert run_comparison(spec, zoo / "out").measured_now == 0


def batches_of(spec: Path) -> list[Any]:
    return list(read_spec(spec).data.batches(nn.Linear(1, 1)))
