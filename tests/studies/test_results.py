"""The page of results: numbers are the records', verdicts follow the rules, missing records are said to be missing."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

from quotient_manifolds.compare import ComparedModel, Comparison, MeanValue, Ranking
from quotient_manifolds.statistics import correlation
from studies.__main__ import study
from studies.diagonal import Cell, DiagonalStudy, Plan
from studies.diagonal.networks import Drawing, Setting
from studies.markdown import table
from studies.paper import TAU
from studies.results.claims import claims, setting_claims
from studies.results.details import order_table, setting_family_table, setting_table
from studies.results.estimates import RULES, Estimate
from studies.results.page import BEGIN, END, PAGE, into_page, results_page, write_results
from studies.results.paper_and_here import NOT_RUN, beyond, figures, table_one
from studies.results.pictures import pictures
from studies.results.records import Records
from studies.results.settings import DiagonalZoo
from studies.results.zoos import weighted_tau
from studies.zoos.measures import WORST
from studies.zoos.page import Cost
from studies.zoos.study import load_record, write_record

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
COMMITTED = NOTEBOOKS / "records"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
COSTS = (Cost("a measure", 1, 1.0),)
STUDIES = {"toy": "toy.json", "ascents": "ascents.json", "diagonal": "diagonal.json", "vit": "vit", "bert": "bert"}
MEASURES = [f"{metric} {order}" for metric, order in itertools.product(("inv", "mix"), ("first", "second", "exact"))]
REFERENCES = ("|beta (beta - nearest)|", "|beta - nearest|", "inv gradient", "mix gradient")
DIAGONAL = Plan(
    settings=tuple(Setting(n, (0.1, 1.0), (0.01, 0.1)) for n in (50, 100)),
    seeds=7,
    profile=(0.01, 0.1, 1.0),
    family=(0.0, 0.5, 1.0),
    family_radii=(0.01, 0.1),
)


# ---- records of invented numbers, as the studies write them


def comparison(key: str, models: int, seed: int) -> Comparison:
    """The measures of a study; each goes with the gap by chance, some more than others."""
    draw = np.random.default_rng(seed)
    measures = tuple(each for each in load_record(COMMITTED / key)[0].measures if each.measure == WORST)
    names = [each.label for each in measures]
    gap = draw.standard_normal(models)
    values = {name: np.exp(draw.uniform(-2, 1) * gap + draw.standard_normal(models)) for name in names}
    scores = {"error_gap": gap, "loss_gap": gap + draw.standard_normal(models)}
    rankings = [
        Ranking(name, score, (), correlation(values[name], column, resamples=200, permutations=99))
        for name in names
        for score, column in scores.items()
    ]
    rows = [
        ComparedModel(
            f"m-{k}",
            {score: float(column[k]) for score, column in scores.items()},
            {name: MeanValue(float(values[name][k]), None) for name in names},
        )
        for k in range(models)
    ]
    return Comparison("zoo.yaml", "0", "study", measures, tuple(rows), tuple(rankings), None, ())


def diagonal() -> DiagonalStudy:
    """Cells of which only taus, rises and references are looked at."""
    draw = np.random.default_rng(5)
    bias = {name: draw.uniform(-0.6, 0.6) for name in ("adaptive", *MEASURES, "mix endless")}
    radii, cells = DIAGONAL.radii, []

    def taus(mean: float) -> tuple[float, ...]:
        return tuple(float(f"{x:.5g}") for x in np.clip(mean + 0.3 * draw.standard_normal(len(radii)), -1, 1))

    for seed, setting in itertools.product(range(DIAGONAL.seeds), DIAGONAL.settings):
        cells.append(
            Cell(
                setting=setting,
                seed=seed,
                drawing=Drawing(50, 0, 0, 100),
                train_loss=(1e-5, 1e-5),
                test_loss=(0.1, 0.2, 0.3),
                smallest=1e-3,
                radii=radii,
                taus={name: taus(mean) for name, mean in bias.items()},
                family={f"{t:g} {order}": taus(0.1)[:2] for t in DIAGONAL.family for order in ("second", "exact")},
                cornered={},
                rises={name: tuple(float(x) for x in (0.01, 0.1, 1.0)) for name in ("adaptive", *MEASURES)},
                references={name: taus(0.2)[0] for name in REFERENCES},
                matches={},
                far={},
                truncation={"inv": (1e-3, 1e-3, 1e-3), "mix": (1e-3, 0.05 if setting.points == 50 else 0.2, 1.0)},
                truncated={},
                agreement={},
                checks={},
                points={},
                seconds=1.0,
            )
        )
    return DiagonalStudy(DIAGONAL, tuple(cells), "study", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    for name in ("toy.json", "ascents.json"):
        shutil.copyfile(COMMITTED / name, folder / name)
    diagonal().save(folder / "diagonal.json")
    write_record(folder / "vit", comparison("vit", 30, 1), COSTS)
    write_record(folder / "bert", comparison("bert", 20, 2), COSTS)
    return folder


@pytest.fixture(scope="module")
def records(folder: Path) -> Records:
    return Records.load(folder)


# ---- numbers, read once more from the JSON


def read_zoo(folder: Path, key: str) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, dict[str, Any]]]:
    """Gaps in error, values by label, and the correlation with the gap by label."""
    record = json.loads(gzip.decompress((folder / key / "comparison.json.gz").read_bytes()))
    gap = np.array([row["scores"]["error_gap"] for row in record["rows"]])
    names = [each["label"] for each in record["measures"]]
    values = {name: np.array([row["values"][name]["mean"] for row in record["rows"]]) for name in names}
    found = {
        each["measure"]: each["correlation"]
        for each in record["rankings"]
        if each["against"] == "error_gap" and not each["given"] and each["correlation"]["kind"] == "kendall-b"
    }
    return gap, values, found


def by_setting(folder: Path, name: str, radius: float | None = None, column: str = "taus") -> list[np.ndarray]:
    """Tau by seed, setting after setting; of what has no radius without one."""
    record = json.loads((folder / "diagonal.json").read_text(encoding="utf-8"))
    settings: dict[str, list[float]] = {}
    for cell in record["cells"]:
        radii = cell["radii"] if column == "taus" else record["plan"]["family_radii"]
        tau = cell["references"][name] if radius is None else cell[column][name][radii.index(radius)]
        settings.setdefault(json.dumps(cell["setting"]), []).append(tau)
    return [np.array(taus) for taus in settings.values()]


def ends(taus: list[np.ndarray]) -> str:
    """The range of the means."""
    means = [each.mean() for each in taus]
    return f"{said(min(means))} to {said(max(means))} ("


def said(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def rows_of(records: Records) -> dict[str, str]:
    rows = (*table_one(records), *figures(records), *beyond(records))
    return {row.what: " / ".join(row.here) for row in rows}


@pytest.mark.parametrize(
    ("key", "what", "label"),
    [
        ("vit", "ImageNet (here: digits): adaptive", "adaptive worst-case sharpness, radius 0.5"),
        ("vit", "ImageNet (here: digits): mix", "mix (second order) worst-case sharpness, radius 0.1"),
        (
            "bert",
            "MNLI (here: templates): inv",
            "inv (second order) worst-case sharpness, steps 10, radius 0.125",
        ),
        (
            "bert",
            "MNLI (here: templates): adaptive",
            "adaptive worst-case sharpness, steps 10, radius 1",
        ),
    ],
)
def test_taus_of_transformers_are_those_of_their_values(
    key: str, what: str, label: str, folder: Path, records: Records
) -> None:
    gap, values, found = read_zoo(folder, key)
    tau = stats.kendalltau(values[label], gap).statistic
    low, high = found[label]["low"], found[label]["high"]
    assert rows_of(records)[what] == f"{said(tau)} [{said(low)}, {said(high)}], {len(gap)} models"


@pytest.mark.parametrize(("name", "closed"), [("inv", "|beta (beta - nearest)|"), ("mix", "|beta - nearest|")])
def test_diagonal_networks_are_ranges_over_settings(name: str, closed: str, folder: Path, records: Records) -> None:
    shown = rows_of(records)[f"Diagonal networks: {name}"]
    assert f"{name}, exact geodesics: {ends(by_setting(folder, f'{name} exact', 0.1))}" in shown
    assert f"{name}, closed form: {ends(by_setting(folder, closed))}" in shown
    assert shown.endswith("by setting, of 2")


def test_every_setting_has_a_row_with_intervals_over_its_seeds(folder: Path, records: Records) -> None:
    shown = [line.split(" | ") for line in setting_table(records.diagonal).splitlines()[2:]]
    columns = [by_setting(folder, name, 0.1) for name in ("adaptive", "inv exact", "mix exact")]
    columns += [by_setting(folder, name) for name in REFERENCES]
    for place, row in enumerate(shown):
        assert row[0] == f"| {DIAGONAL.settings[place].points}"
        for text, taus in zip(row[3:], (column[place] for column in columns), strict=False):
            found = re.fullmatch(r"(\S+) \[(\S+), (\S+)\]", text)
            assert found is not None, text
            value, low, high = (float(each.replace("−", "-")) for each in found.groups())
            assert value == pytest.approx(taus.mean(), abs=0.0051)
            drawn = np.random.default_rng(1).choice(taus, (4000, len(taus))).mean(axis=1)
            assert (low, high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.03)
        adaptive, inv, mix = (columns[k][place].mean() for k in (0, 3, 4))
        assert row[-1] == ("yes |" if mix < inv < adaptive < 0 else "no |")


@pytest.mark.parametrize(
    ("adaptive", "inv", "mix", "ordered"),
    [(-0.1, -0.5, -0.9, True), (-0.1, -0.9, -0.5, False), (-0.7, -0.5, -0.9, False), (0.1, -0.5, -0.9, False)],
)
def test_the_order_of_the_paper_is_told_from_others(adaptive: float, inv: float, mix: float, ordered: bool) -> None:
    study, closed = diagonal(), {"|beta (beta - nearest)|": inv, "|beta - nearest|": mix}
    cells = [
        replace(cell, references={**cell.references, **closed}, taus={**cell.taus, "adaptive": (adaptive,) * 3})
        for cell in study.cells
    ]
    zoo = DiagonalZoo(replace(study, cells=tuple(cells)))
    assert zoo.ordered(DIAGONAL.settings[0], "closed") == ordered


def test_a_setting_where_the_rise_is_truncation_error_is_left_out(folder: Path, records: Records) -> None:
    row = next(line for line in order_table(records.diagonal).splitlines() if line.startswith("| mix, second order"))
    _, _, small, middle, large, _ = (cell.strip() for cell in row.split("|"))
    taus = by_setting(folder, "mix second", 0.01)
    assert small.startswith(ends(taus))
    assert middle.startswith(ends(by_setting(folder, "mix second", 0.1)[:1]))
    assert middle.endswith("truncation error in 1 settings")
    assert large == "truncation error in all settings"


def test_settings_are_counted_by_their_own_verdict(folder: Path, records: Records) -> None:
    group = next(group for group in setting_claims(records.diagonal) if group[0].about == "tau, mix, exact geodesics")
    page = results_page(records, {})
    row = next(line for line in page.splitlines() if line.startswith("| tau, mix, exact geodesics | below 0 "))
    counts = [sum(c.verdict == v for c in group) for v in ("holds", "does not hold here", "not decided at this n")]
    assert row.endswith(" | ".join(map(str, counts)) + " |")
    stronger = next(g for g in setting_claims(records.diagonal) if "mix, closed form minus adaptive" in g[0].about)
    closed, adaptive = by_setting(folder, "|beta - nearest|"), by_setting(folder, "adaptive", 0.1)
    for claim, a, b in zip(stronger, closed, adaptive, strict=True):
        seeds = np.random.default_rng(4).integers(len(a), size=(4000, len(a)))
        drawn = np.abs(a[seeds].mean(axis=1)) - np.abs(b[seeds].mean(axis=1))
        assert claim.found is not None
        assert claim.found.value == pytest.approx(abs(a.mean()) - abs(b.mean()))
        assert (claim.found.low, claim.found.high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.03)


def test_the_family_and_the_radii_are_in_the_tables_behind(folder: Path, records: Records) -> None:
    page = results_page(records, {})
    for place, row in enumerate(setting_family_table(records.diagonal).splitlines()[2:]):
        for t in ("0", "0.5", "1"):
            assert f"{said(by_setting(folder, f'{t} exact', 0.1, 'family')[place].mean())} [" in row
    row = next(line for line in page.splitlines() if line.startswith("| mix, exact geodesics | "))
    for radius in (0.01, 0.1, 1.0):
        assert ends(by_setting(folder, "mix exact", radius)) in row
    gap, values, _ = read_zoo(folder, "vit")
    label = "t = 0.75 (second order) worst-case sharpness, radius 0.1"
    row = next(line for line in page.splitlines() if line.startswith("| 0.75 | "))
    assert said(stats.kendalltau(values[label], gap).statistic) in row
    label = "inv (second order) worst-case sharpness, radius 0.4"
    line = f"| vision transformers | inv, second order | 0.4 | {said(stats.kendalltau(values[label], gap).statistic)} ["
    assert line in page
    assert f"| {np.median(values[label]):.3g} |" in next(each for each in page.splitlines() if each.startswith(line))


def test_differences_are_resampled_with_the_same_models(folder: Path, records: Records) -> None:
    """An interval of |tau| - |tau|, by scipy's tau, model by model."""
    gap, values, _ = read_zoo(folder, "vit")
    inv, adaptive = (
        values[f"{name} worst-case sharpness, radius {radius}"]
        for name, radius in (("inv (second order)", 0.1), ("adaptive", 0.5))
    )
    draw = np.random.default_rng(9)
    drawn = []
    for _ in range(400):
        rows = draw.integers(len(gap), size=len(gap))
        taus = [stats.kendalltau(column[rows], gap[rows]).statistic for column in (inv, adaptive)]
        drawn.append(abs(taus[0]) - abs(taus[1]))
    claim = next(c for c in claims(records) if c.about == "|tau|, vision transformers: inv minus adaptive")
    assert claim.found is not None
    value = abs(stats.kendalltau(inv, gap).statistic) - abs(stats.kendalltau(adaptive, gap).statistic)
    assert claim.found.value == pytest.approx(value)
    assert (claim.found.low, claim.found.high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.06)


def test_a_model_that_counts_twice_is_there_twice() -> None:
    draw = np.random.default_rng(3)
    x, y = draw.integers(6, size=12).astype(float), draw.standard_normal(12)
    counts = draw.integers(3, size=(5, 12))
    expected = [stats.kendalltau(np.repeat(x, c), np.repeat(y, c)).statistic for c in counts]
    assert weighted_tau(x, y, counts) == pytest.approx(expected)
    x[4] = np.nan
    expected = [
        stats.kendalltau(*(np.repeat(np.delete(v, 4), np.delete(c, 4)) for v in (x, y))).statistic for c in counts
    ]
    assert weighted_tau(x, y, counts) == pytest.approx(expected)
    assert np.isnan(weighted_tau(np.ones(12), y, counts)).all()


# ---- verdicts


@pytest.mark.parametrize(
    ("rule", "low", "high", "verdict"),
    [
        ("above", 0.01, 0.5, "holds"),
        ("above", -0.5, -0.01, "does not hold here"),
        ("above", -0.01, 0.5, "not decided at this n"),
        ("below", -0.5, -0.01, "holds"),
        ("below", 0.01, 0.5, "does not hold here"),
        ("below", -0.5, 0.01, "not decided at this n"),
        ("large", 0.11, 0.5, "holds"),
        ("large", -0.5, 0.09, "does not hold here"),
        ("large", 0.09, 0.5, "not decided at this n"),
        ("small", -0.09, 0.09, "holds"),
        ("small", 0.11, 0.5, "does not hold here"),
        ("small", -0.5, -0.11, "does not hold here"),
        ("small", -0.09, 0.11, "not decided at this n"),
        ("apart", 0.01, 0.5, "holds"),
        ("apart", -0.5, -0.01, "holds"),
        ("apart", -0.09, 0.09, "does not hold here"),
        ("apart", -0.09, 0.11, "not decided at this n"),
        ("above", None, None, "not decided at this n"),
    ],
)
def test_the_interval_decides(rule: str, low: float | None, high: float | None, verdict: str) -> None:
    assert RULES[rule].verdict(Estimate(0.3, low, high)) == verdict
    assert RULES[rule].verdict(None) == "not run"


def test_a_sign_is_only_compared_where_adaptive_sharpness_has_one(records: Records) -> None:
    claim = next(c for c in claims(records) if "same sign" in c.words and "BERTs, inv" in c.about)
    inv = Estimate(0.4, 0.2, 0.6)
    assert replace(claim, found=inv, given=Estimate(0.1, -0.1, 0.3)).verdict == "not decided at this n"
    assert replace(claim, found=inv, rule="above", given=Estimate(0.3, 0.1, 0.5)).verdict == "holds"
    for zoo, given in (("vision transformers", records.vit), ("BERTs", records.bert)):
        assert given is not None
        adaptive = given.tau("adaptive")
        assert adaptive is not None
        rules = {c.rule for c in claims(records) if "same sign" in c.words and zoo in c.about}
        assert rules == {"below" if adaptive.value < 0 else "above"}


def test_opposite_signs_of_zoos_are_seen(records: Records) -> None:
    def shifted(zoo: Any, sign: float) -> Any:
        gap, row = "error_gap", zoo.comparison.rows
        label = zoo.measures.places["inv"]
        rows = tuple(
            replace(r, values={**r.values, label: MeanValue(float(np.exp(sign * r.scores[gap])), None)}) for r in row
        )
        return type(zoo)(zoo.key, replace(zoo.comparison, rows=rows))

    for signs, verdict in (((1.0, -1.0), "holds"), ((1.0, 1.0), "does not hold here")):
        vit, bert = (shifted(zoo, sign) for zoo, sign in zip((records.vit, records.bert), signs, strict=True))
        found = claims(replace(records, vit=vit, bert=bert))
        assert next(c for c in found if c.about == "tau, inv: least zoo times largest zoo").verdict == verdict


# ---- the page


def test_the_paper_s_table_is_whole() -> None:
    source = "-0.68 -0.83 -0.86 -0.41 -0.71 -0.70 0.06 0.28 0.38"  # Table 1, row by row
    assert [tau for row in TAU.values() for tau in row.values()] == list(map(float, source.split()))


@pytest.mark.parametrize("missing", [(), *((name,) for name in STUDIES), tuple(STUDIES)])
def test_a_record_that_is_not_there_is_said_so(missing: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "records")
    for name in missing:
        path = tmp_path / "records" / STUDIES[name]
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = Records.load(tmp_path / "records")
    for row in (*table_one(found), *figures(found), *beyond(found)):
        assert (NOT_RUN in row.here) == (row.study in missing), row
    words = {"vit": "vision transformers", "bert": "BERTs"}
    gone = [words[name] for name in missing if name in words]
    for claim in claims(found):
        if "zoo times" not in claim.about:
            assert (claim.verdict == NOT_RUN) == any(word in claim.about for word in gone), claim
    assert bool(setting_claims(found.diagonal)) == ("diagonal" not in missing)
    write_results(found, tmp_path / "out")
    page = (tmp_path / "out" / PAGE).read_text(encoding="utf-8")
    check_form(page)
    if not missing:
        assert NOT_RUN not in page.replace("shown as not run", "")


def check_form(page: str) -> None:
    """Tables are rectangles that begin with a head and a rule; lines of text are not too long."""
    for block in page.split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("|"):
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
            assert len(widths) == 1, block
            assert set(lines[1]) == set("| -")
        else:
            assert all(len(line) <= 128 for line in lines if not line.startswith("![")), block


def test_a_crooked_table_is_refused() -> None:
    assert table(["a", "b"], [["|x|", "y"]]).splitlines()[2] == r"| \|x\| | y |"
    with pytest.raises(ValueError, match=r"has 2 columns\. Found a row of 1"):
        table(["a", "b"], [["x"]])


def test_figures_are_files_of_their_own_that_name_every_number(records: Records, tmp_path: Path) -> None:
    write_results(records, tmp_path)
    plots = pictures(records)
    assert set(plots) == {"family", "settings"}
    for name, plot in plots.items():
        svg = (tmp_path / "results" / f"{name}.svg").read_text(encoding="utf-8")
        assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
        assert plot.alt in svg
        assert f"](results/{name}.svg)" in (tmp_path / PAGE).read_text(encoding="utf-8")
    assert records.vit is not None
    assert str(records.vit.family()[0.75]) in plots["family"].alt


def test_the_command_writes_pages_and_table(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    arguments = ["results", "--records", str(folder), "--out", str(tmp_path), "--page", str(page)]
    done = CliRunner().invoke(study, arguments)
    assert done.exit_code == 0, done.output
    assert {"results.md", "full_scale.md"} <= {path.name for path in tmp_path.iterdir()}
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}\n| ")
    assert text.endswith(f" |\n{END}\nafter\n")
    assert "old" not in text


def test_what_is_not_there_is_said_in_one_sentence(records: Records, tmp_path: Path) -> None:
    done = CliRunner().invoke(study, ["results", "--records", str(tmp_path / "none"), "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "must be the folder of records that the studies wrote" in done.output
    (tmp_path / "bare.md").write_text("nothing\n", encoding="utf-8")
    with pytest.raises(ValueError, match="must have the lines <!-- results -->"):
        into_page(tmp_path / "bare.md", records)


# ---- what is committed


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("written")
    committed = Records.load(COMMITTED)
    write_results(committed, out)
    shutil.copyfile(BENCHMARKS, out / BENCHMARKS.name)
    into_page(out / BENCHMARKS.name, committed)
    return out


def test_the_committed_pages_are_what_the_command_writes(written: Path) -> None:
    again = 'run `make study NAME=results ARGS="--page docs/benchmarks.md"`'
    assert (written / PAGE).read_text(encoding="utf-8") == (NOTEBOOKS / PAGE).read_text(encoding="utf-8"), again
    assert (written / BENCHMARKS.name).read_text(encoding="utf-8") == BENCHMARKS.read_text(encoding="utf-8"), again


def test_the_committed_figures_say_what_the_records_say() -> None:
    """Their bytes depend on the version of matplotlib; their words do not."""
    for name, plot in pictures(Records.load(COMMITTED)).items():
        assert plot.alt in (NOTEBOOKS / "results" / f"{name}.svg").read_text(encoding="utf-8")


def test_every_committed_record_is_in_the_page() -> None:
    page = (NOTEBOOKS / PAGE).read_text(encoding="utf-8")
    for line in page.splitlines():
        for name, path in STUDIES.items():
            if f"`make study NAME={name}`" in line and (COMMITTED / path).exists():
                assert NOT_RUN not in line, line
    assert sum(path.stat().st_size for path in NOTEBOOKS.glob("results/*")) < 300_000
    check_form(page)
