"""What a spec may say, and the one sentence, with the line, for whatever else it says."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner

from quotient_manifolds.cli.app import cli
from quotient_manifolds.compare import Spec, read_spec
from quotient_manifolds.compare.measure_entries import MEASURES
from quotient_manifolds.compare.spec_file import Schema, read_yaml
from quotient_manifolds.geometry import Adaptive, Euclidean, Quotient
from quotient_manifolds.sharpness import (
    AverageCase,
    GradientNorm,
    HessianTrace,
    LegacyWorstCase,
    Measure,
    TopEigenvalue,
    WorstCase,
)
from tests.zoos import write_images

LINES = """\
checkpoints:
  paths: models/*
  loader: huggingface
data:
  path: train.npz
  batch_size: 8
  max_batches: 2
test:
  path: test.npz
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
""".splitlines()


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


def with_line(number: int, *lines: str, empty: Sequence[int] = ()) -> str:
    """The good spec with these lines in place of its line `number`, and nothing in those that are `empty`."""
    kept = ["" if place in empty else line for place, line in enumerate(LINES, start=1)]
    return "\n".join([*kept[: number - 1], *lines, *kept[number:]]) + "\n"


def measures(read: Read, *lines: str) -> list[Measure]:
    items = "\n".join(f"  - {{{line}}}" for line in lines)
    spec = read(f"checkpoints: {{paths: models/*}}\ndata: {{path: train.npz}}\nmeasures:\n{items}\n")
    return [each.measure for each in spec.measures]


def test_a_good_spec_says_what_is_measured(read: Read, zoo: Path) -> None:
    spec = read("\n".join(LINES))
    assert [each.name for each in spec.checkpoints] == ["m_1", "m_2", "m_10"]
    assert spec.checkpoints[0].path == zoo / "models" / "m_1"
    assert (spec.data.path, spec.data.batch_size, spec.data.max_batches) == (zoo / "train.npz", 8, 2)
    assert spec.test is not None
    assert (spec.test.path, spec.test.batch_size) == (zoo / "test.npz", 32)
    assert [each.measure for each in spec.measures] == [
        *(WorstCase(Quotient("inv"), radius) for radius in (0.1, 0.2)),
        *(WorstCase(Adaptive(), radius) for radius in (0.1, 0.2)),
        GradientNorm(Euclidean()),
    ]
    assert spec.scores["m_2"] == {"rate": None, "kind": "b", "quality": 0.5}
    assert (spec.against, spec.given, spec.dtype) == (("error_gap",), ("rate",), "float64")


def test_every_measure_can_be_asked_for_with_its_options(read: Read) -> None:
    assert measures(
        read,
        "measure: worst-case, geometry: 0.25, radius: 1e-1, steps: 3, restarts: 2, tolerance: 1e-3, seed: 4, eps: 1e-2",
        "measure: worst-case, geometry: inv, radius: [0.2, 0.1], warm_start: true, geodesic: exact",
        "measure: average-case, geometry: mix, sigma: [1, 0.5], samples: 4, seed: 7, symmetries: paper",
        "measure: legacy-worst-case, geometry: euclidean, radius: 0.1, norm: linf, steps: 3",
        "measure: gradient-norm, geometry: adaptive, eta: 0.01",
        "measure: hessian-trace, geometry: euclidean, samples: 2, products: difference",
        "measure: top-eigenvalue, geometry: euclidean, tolerance: 0.01, restarts: 3",
    ) == [
        WorstCase(Quotient(0.25, eps=0.01), 0.1, steps=3, restarts=2, tolerance=1e-3, seed=4),
        WorstCase(Quotient("inv", "exact"), 0.1),
        WorstCase(Quotient("inv", "exact"), 0.2, after=(0.1,)),
        AverageCase(Quotient("mix", symmetries="paper"), 0.5, samples=4, seed=7),
        AverageCase(Quotient("mix", symmetries="paper"), 1.0, samples=4, seed=7),
        LegacyWorstCase(Euclidean("linf"), 0.1, steps=3),
        GradientNorm(Adaptive(eta=0.01)),
        HessianTrace(Euclidean(), samples=2, products="difference"),
        TopEigenvalue(Euclidean(), tolerance=0.01, restarts=3),
    ]


def test_the_help_shows_a_spec_that_can_be_read(read: Read, zoo: Path) -> None:
    text = CliRunner().invoke(cli, ["compare", "--help"]).output
    example = text[text.index("checkpoints:") : text.index("Only checkpoints")].replace(".jsonl", ".npz")
    example = example.replace("learning_rate", "rate").replace("symmetries: package.module:function", "")
    spec = read(f"    {example}")
    assert len(spec.measures) == 6
    assert (spec.against, spec.given, spec.data.max_batches) == (("error_gap",), ("rate",), 8)
    assert all(name in re.sub(r"-\s+", "-", text) for name in MEASURES)  # lines end at hyphens


def test_labels_tell_measures_apart(read: Read) -> None:
    spec = read(
        with_line(
            15,
            "  - {measure: worst-case, geometry: inv, radius: [0.3, 0.30000001], eps: 0.01}",
            "  - {measure: worst-case, geometry: inv, radius: 0.3, eps: 0.02}",
            "  - {measure: worst-case, geometry: inv, radius: 0.3, normalise_logits: true}",
            "  - {measure: worst-case, geometry: [inv, mix, 0.5], radius: 0.3, warm_start: true, symmetries: paper}",
            "  - {measure: worst-case, geometry: [euclidean, adaptive], radius: 0.3, norm: linf, steps: 7}",
            "  - measure: gradient-norm",
        )
    )
    labels = [each.label for each in spec.measures]
    assert len(set(labels)) == len(labels) == 14
    assert "inv (second order) worst-case sharpness, eps 0.01, radius 0.30000001" in labels
    assert [each.settings["eps"] for each in spec.measures[4:7]] == [0.01, 0.01, 0.02]


def test_one_value_is_a_list_of_one(read: Read) -> None:
    one = read("\n".join(LINES).replace("[error_gap]", "error_gap").replace("[rate]", "rate"))
    assert replace(one, path=Path()) == replace(read("\n".join(LINES)), path=Path())


def test_a_function_may_be_a_zoo_of_one_model(read: Read) -> None:
    spec = read(with_line(3, "  loader: tests.zoos:plain", empty=[2, 10, 18]))
    assert [(each.name, each.path) for each in spec.checkpoints] == [("tests.zoos:plain", None)]


def test_paths_may_begin_with_the_home_directory(read: Read, zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(zoo))
    text = "\n".join(LINES)
    for name in ("models/*", "train.npz", "test.npz", "scores.csv"):
        text = text.replace(name, f"~/{name}")
    spec = read(text)
    assert (spec.data.path, len(spec.checkpoints), len(spec.scores)) == (zoo / "train.npz", 3, 3)


# What is wrong, in which line (0: no line), and words that the sentence must have.
WRONG: list[tuple[str, str, int, str]] = [
    # Keys.
    (
        "unknown at the top",
        with_line(10, "score: scores.csv"),
        10,
        "unknown key 'score'; the keys here are checkpoints,",
    ),
    ("unknown in checkpoints", with_line(3, "  reader: x"), 3, "unknown key 'reader'; the keys here are paths, loader"),
    (
        "unknown in data",
        with_line(7, "  batches: 2"),
        7,
        "unknown key 'batches'; the keys here are path, batch_si",
    ),
    (
        "unknown in test",
        with_line(9, "  path: test.npz", "  x: 1"),
        10,
        "unknown key 'x'; the keys here are path, batch_size",
    ),
    (
        "unknown in a measure",
        with_line(16, "    geometri: inv"),
        16,
        "unknown key 'geometri'; the keys here are measure",
    ),
    ("a typing error, not a missing key", with_line(11, "measure:"), 11, "unknown key 'measure'"),
    ("no checkpoints", with_line(1, "", empty=[2, 3]), 1, "checkpoints is missing"),
    ("no path", with_line(5), 4, "data.path is missing"),
    ("no measure", with_line(15, "  - radius: 1"), 15, "measures.1.measure is missing"),
    ("no measures", "\n".join(LINES[:10]), 1, "measures is missing"),
    ("a key twice", with_line(7, "  batch_size: 8"), 7, "batch_size is given again (first in line 6)"),
    ("a key of a measure twice", with_line(16, "    measure: x"), 16, "measure is given again (first in line 15)"),
    ("a section twice", with_line(10, "data: {path: train.npz}"), 10, "data is given again (first in line 4)"),
    ("a number for a key", with_line(10, "1: 2"), 10, "unknown key '1'"),
    ("a list for a key", with_line(10, "[a]: 2"), 10, "a key must be text"),
    # Values.
    ("text for a number", with_line(6, "  batch_size: many"), 6, "data.batch_size: input should be a valid integer"),
    ("quotes for a number", with_line(6, "  batch_size: '8'"), 6, "valid integer. Found '8'"),
    ("a fraction for a whole number", with_line(6, "  batch_size: 8.5"), 6, "valid integer"),
    ("nought", with_line(6, "  batch_size: 0"), 6, "greater than 0. Found 0"),
    ("a list for text", with_line(5, "  path: [a, b]"), 5, "data.path: input should be a valid string"),
    ("text for a section", with_line(8, "test: test.npz", empty=[9]), 8, "test: input should"),
    ("nothing for a section", with_line(8, "test: {}", empty=[9]), 8, "test.path is missing"),
    (
        "a mapping for measures",
        with_line(12, "  measure: worst-case", empty=range(13, 17)),
        11,
        "measures: input should be a",
    ),
    ("no measures in the list", "\n".join([*LINES[:10], "measures: []"]), 11, "at least 1 item"),
    ("text for yes or no", with_line(16, "    warm_start: yes"), 16, "valid boolean. Found 'yes'"),
    ("another precision", with_line(19, "dtype: float16"), 19, "'float32' or 'float64'. Found 'float16'"),
    ("words for labels", with_line(7, "  labels: {a: b}"), 7, "data.labels.a: input should be a valid integer"),
    ("a negative label", with_line(7, "  labels: {a: -1}"), 4, "labels must give the class"),
    ("an option of text", with_line(7, "  max_length: 7"), 4, "max_length means nothing for data of the format npz"),
    # Checkpoints, data, scores.
    ("no match", with_line(2, "  paths: model/*"), 1, "The pattern 'model/*' matches nothing"),
    ("one pattern of two", with_line(2, "  paths: [models/*, other/*]"), 1, "The pattern 'other/*' matches nothing"),
    ("no paths", with_line(2), 1, "The loader 'huggingface' needs patterns"),
    ("an unknown loader", with_line(3, "  loader: hf"), 1, "The loader must be huggingface or package.module:function"),
    ("no data file", with_line(5, "  path: trian.npz"), 4, "There is no file"),
    ("no test file", with_line(9, "  path: missing.jsonl"), 8, "There is no file"),
    ("data of another kind", with_line(5, "  path: broken.npz"), 4, "broken.npz is no readable .npz file"),
    ("no scores file", with_line(10, "scores: none.csv"), 10, "none.csv cannot be read as CSV"),
    (
        "against nothing known",
        with_line(17, "against: [rate, gap]"),
        17,
        "there is no score 'gap'; known are loss, error,",
    ),
    (
        "against text",
        with_line(17, "against:", "  - rate", "  - kind"),
        19,
        "'kind' must be a number to be compared with. Found",
    ),
    (
        "given nothing known",
        with_line(18, "given: rat"),
        18,
        "no score 'rat'; known are .* test_loss, .* rate, kind, quality",
    ),
    ("a gap without test data", with_line(8, "", empty=[9]), 17, "no score 'error_gap'"),
    # Measures.
    (
        "an unknown measure",
        with_line(12, "  - measure: worst"),
        12,
        "measures.0.measure: input should be 'worst-case', ",
    ),
    (
        "an unknown geometry",
        with_line(13, "    geometry: invariant"),
        12,
        "geometry must be one of euclidean, adaptive, inv,",
    ),
    ("yes for a geometry", with_line(13, "    geometry: true"), 13, "measures.0.geometry"),
    ("radius 0", with_line(14, "    radius: 0"), 14, "greater than 0. Found 0"),
    ("radius 0 among others", with_line(14, "    radius:", "      - 0.1", "      - 0"), 16, "greater than 0. Found 0"),
    ("an infinite radius", with_line(14, "    radius: .inf"), 12, "radius must be a positive finite number. Found inf"),
    ("no radius", with_line(14), 12, "worst-case needs a radius"),
    ("no geometry", with_line(13), 12, "worst-case needs a geometry"),
    ("a radius too many", with_line(16, "    geometry: inv", "    radius: 1"), 15, "gradient-norm takes no radius"),
    (
        "a radius without a ball",
        with_line(12, "  - measure: average-case"),
        12,
        "average-case takes no radius; it needs a sigma",
    ),
    (
        "an option of another measure",
        with_line(16, "    geometry: inv", "    steps: 3"),
        15,
        "steps is no option of gradient-norm; it has none",
    ),
    (
        "an option of another geometry",
        with_line(16, "    geometry: inv", "    eta: 0.1"),
        15,
        "eta is no option of the geometry inv; it has eps, geodesic, symmetries",
    ),
    (
        "an option of one of two geometries",
        with_line(14, "    radius: 1", "    eps: 0.1"),
        12,
        "eps is no option of the geometry adaptive; it has eta, norm",
    ),
    (
        "no warm start",
        with_line(16, "    geometry: inv", "    warm_start: true"),
        15,
        "gradient-norm has no warm_start",
    ),
    (
        "a norm that is none",
        with_line(14, "    radius: 1", "    norm: l3"),
        12,
        "norm is no option of the geometry inv",
    ),
    (
        "a negative seed of steps",
        with_line(14, "    radius: 1", "    restarts: -1"),
        12,
        "restarts must be a whole number, at least 0. Found -1",
    ),
    (
        "a quotient for the released ascent",
        with_line(12, "  - measure: legacy-worst-case"),
        12,
        "The released ascent knows",
    ),
    (
        "a measure twice",
        with_line(15, "  - {measure: worst-case, geometry: inv, radius: 0.2}", "  - measure: gradient-norm"),
        15,
        "inv (second order) worst-case sharpness, radius 0.2 is asked for twice",
    ),
    ("a radius twice", with_line(14, "    radius: [0.1, 0.1]"), 12, "radius 0.1 is asked for twice"),
    # YAML.
    ("no YAML", with_line(5, "  path: [train.npz"), 6, "not valid YAML"),
    ("a tab", with_line(6, "\tbatch_size: 8"), 6, "not valid YAML (a tab, where YAML indents with spaces)"),
    ("an indentation", with_line(6, " batch_size: 8"), 6, "not valid YAML"),
    ("a colon in text", with_line(5, "  path: a: b"), 5, "not valid YAML (mapping values are not allowed here)"),
    ("two documents", with_line(10, "---"), 10, "not valid YAML (but found another document)"),
    ("a tag", with_line(19, "dtype: !!python/name:os.system"), 19, "could not determine a constructor for the tag"),
    ("an alias of itself", with_line(18, "given: &a [*a]"), 18, "this is an alias"),
    ("an unknown alias", with_line(19, "dtype: *a"), 19, "undefined alias"),
    (
        "an alias",
        with_line(19, "dtype: &a float32", "given: *a", empty=[18]),
        20,
        "this is an alias; write out what it stands for",
    ),
    (
        "a billion laughs",
        "a0: &a0 [1]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(40)),
        2,
        "this is an alias",
    ),
    ("a merged mapping", with_line(10, "<<: {a: 1}"), 10, "unknown key '<<'"),
    ("depth", with_line(18, f"given: {'[' * 5000}"), 0, "nested too deeply"),
    ("depth of mappings", with_line(18, f"given: {'{a: ' * 5000}"), 0, "nested too deeply"),
    ("depth in closed lists", with_line(18, f"given: {'[' * 5000}{']' * 5000}"), 0, "nested too deeply"),
    ("5000 digits", with_line(6, f"  batch_size: {'9' * 5000}"), 6, "limit"),
    ("400 digits", with_line(6, f"  batch_size: {'9' * 400}"), 6, "input should be less than"),
    ("a radius of 400 digits", with_line(14, f"    radius: {'9' * 400}.5"), 12, "radius must be a positive finite"),
    ("a huge number of batches", with_line(7, "  max_batches: 1e30"), 7, "data.max_batches: input should be a valid"),
    ("an infinite deviation", with_line(7, "  mean: [0]", "  std: [.inf]"), 8, "data.std.0: input should be a finite"),
    ("a mean that is none", with_line(7, "  mean: [.nan]", "  std: [1]"), 7, "data.mean"),
    ("data of nobody", with_line(5, "  path: ~nosuchuser/a.npz"), 4, "nosuchuser"),
    ("scores of nobody", with_line(10, "scores: ~nosuchuser/a.csv"), 10, "nosuchuser"),
    ("a huge seed", with_line(7, f"  seed: {10**30}"), 7, "data.seed: input should be less than"),
    (
        "a huge seed of a measure",
        with_line(14, "    radius: 1", f"    seed: {10**30}"),
        15,
        "seed: input should be less",
    ),
    ("a negative seed", with_line(7, "  seed: -1"), 7, "data.seed: input should be greater than"),
    ("too many steps", with_line(14, "    radius: 1", f"    steps: {10**30}"), 15, "steps: input should be less than"),
    ("a character", with_line(19, "dtype: \x01"), 0, "not valid YAML: unacceptable character #x0001"),
    ("nothing", "", 0, "must be YAML with the keys checkpoints, data,"),
    ("a comment", "# nothing\n", 0, "must be YAML with the keys checkpoints, data,"),
    ("a list", "- a\n", 0, "must be YAML with the keys"),
    ("text", "spec\n", 0, "must be YAML with the keys"),
    ("TOML", "[data]\npath = 'x'\n", 2, "not valid YAML"),
]


@pytest.mark.parametrize(("text", "line", "words"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_is_wrong_is_said_in_one_sentence_with_its_line(
    zoo: Path, tmp_path: Path, text: str, line: int, words: str
) -> None:
    (zoo / "broken.npz").write_bytes(b"PK no")
    spec = zoo / "wrong.yaml"
    spec.write_text(text, encoding="utf-8")
    done = CliRunner().invoke(cli, ["compare", str(spec), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2, done.output
    said = done.output.strip()
    assert said.count("\n") == 0
    assert re.match(rf"Error: {re.escape(str(spec))}{f', line {line}:' if line else ''}", said), said
    assert words in said or re.search(words, said), said
    assert not (tmp_path / "out").exists()  # nothing was begun


def scored(zoo: Path, scores: str) -> str:
    (zoo / "bad.csv").write_text(scores)
    spec = zoo / "scored.yaml"
    spec.write_text(with_line(10, "scores: bad.csv"))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(spec))}, line 10: ") as caught:
        read_spec(spec)
    return str(caught.value)


def test_scores_that_cannot_be_used(zoo: Path) -> None:
    assert "bad.csv, line 4: m_1 is named a second time" in scored(zoo, "checkpoint,rate\nm_1,1\nm_2,2\nm_1,3\n")
    assert "bad.csv, line 3: the name of the checkpoint is missing" in scored(zoo, "checkpoint,rate\nm_1,1\n,2\n")
    assert "needs a column checkpoint. Found name, rate" in scored(zoo, "name,rate\nm_1,1\n")
    assert "names none of the checkpoints, which are called m_1" in scored(zoo, "checkpoint,rate\nother,1\n")
    assert "line 3: rate must be finite. Found inf" in scored(zoo, "checkpoint,rate\nm_1,1\nm_2,inf\n")
    assert "error_gap is measured here; give the column another name" in scored(zoo, "checkpoint,error_gap\nm_1,1\n")
    assert "cannot be read as CSV" in scored(zoo, "")
    assert "names none" in scored(zoo, "checkpoint,rate\n")


def test_names_of_checkpoints_are_text_in_scores(zoo: Path, tmp_path: Path) -> None:
    for name in ("007", "08"):
        (tmp_path / name).mkdir()
    write_images(tmp_path / "train.npz", 4, seed=0)
    (tmp_path / "scores.csv").write_text("checkpoint,good\n007,True\n08,False\n")
    (tmp_path / "spec.yaml").write_text(
        "checkpoints: {paths: 0*}\ndata: {path: train.npz}\nscores: scores.csv\n"
        "measures: [{measure: gradient-norm, geometry: inv}]\n"
    )
    spec = read_spec(tmp_path / "spec.yaml")
    assert spec.scores == {"007": {"good": 1.0}, "08": {"good": 0.0}}


def test_a_spec_that_is_not_there_or_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text("a = 1\n")
    (tmp_path / "latin.yaml").write_bytes("a: ü".encode("latin-1"))
    for name, words in [
        ("spec.toml", "is TOML by its name: a spec is YAML"),
        ("none.yaml", "none.yaml' does not exist"),
        ("latin.yaml", "latin.yaml cannot be read: 'utf-8' codec"),
        (".", "is a directory"),
    ]:
        done = CliRunner().invoke(cli, ["compare", str(tmp_path / name)])
        assert done.exit_code == 2
        assert words in done.output
        assert len(re.findall(r"^Error: ", done.output, re.MULTILINE)) == 1


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no such device")
def test_a_file_without_end_is_no_spec() -> None:
    with pytest.raises(ValueError, match="/dev/zero is no spec: it has more than"):
        read_yaml(Path("/dev/zero"))


def test_missing_sections_are_named_together_with_their_parent(read: Read) -> None:
    with pytest.raises(ValueError, match=r"line 1: checkpoints is missing\.$"):
        read("data: {path: train.npz}\nmeasures: [{measure: gradient-norm, geometry: inv}]\n")


# YAML as people write it today.

PLAIN: list[tuple[str, Any]] = [
    ("1e-2", 0.01),
    ("1E3", 1000.0),
    ("-1.5e-3", -0.0015),
    ("+.5", 0.5),
    ("1.", 1.0),
    (".inf", float("inf")),
    ("-.Inf", float("-inf")),
    ("010", 10),
    ("08", 8),
    ("-3", -3),
    ("1:30", "1:30"),
    ("yes", "yes"),
    ("NO", "NO"),
    ("on", "on"),
    ("true", True),
    ("False", False),
    ("~", None),
    ("", None),
    ("null", None),
    (".", "."),
    ("1.2.3", "1.2.3"),
    ("'1'", "1"),
    ("!!str 1", "1"),
]


@pytest.mark.parametrize(("text", "value"), PLAIN)
def test_plain_values_are_what_they_look_like(tmp_path: Path, text: str, value: object) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"a: {text}\n")
    found = read_yaml(path).content["a"]
    assert (type(found), found) == (type(value), value)


def test_keys_are_text_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("{yes: 1, no: 0, 08: 2, 1.50: 3, true: 4, ~: 5}\n")
    assert read_yaml(path).content == {"yes": 1, "no": 0, "08": 2, "1.50": 3, "true": 4, "~": 5}


def test_lines_of_keys_and_items(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a:\n  b: 1\n  c:\n    - 2\n    - {d: 3,\n       e: 4}\nf: &unused\n  g: 5\n")
    document = read_yaml(path)
    assert document.content["f"] == {"g": 5}
    lines = [document.line(place) for place in [("a", "c", 1, "e"), ("a", "c", 0), ("f", "g"), ("f", "h"), ("z",)]]
    assert lines == [6, 4, 8, 7, 1]


def test_every_measure_of_the_program_has_a_name_here() -> None:
    kinds = get_args(Schema.model_fields["measures"].annotation)[0].model_fields["measure"].annotation
    assert set(get_args(kinds)) == set(MEASURES)
    direct = [each for each in Measure.__subclasses__() if each.__module__.startswith("quotient_manifolds")]
    assert set(MEASURES.values()) == {*direct, *(below for each in direct for below in each.__subclasses__())}
