"""The page of results: numbers are the records', verdicts follow the rules, missing records are said to be missing."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

from studies.__main__ import study
from studies.diagonal import Cell, DiagonalStudy, Plan
from studies.diagonal.networks import Drawing, Setting
from studies.diagonal.records import MIDDLE, Check
from studies.markdown import table
from studies.paper import TAU
from studies.results.claims import setting_claims
from studies.results.details import order_table, setting_family_table, setting_table
from studies.results.earlier import LIMITS, by_limit, by_shift, earlier, order_difference
from studies.results.estimates import RULES, Estimate
from studies.results.page import BEGIN, END, PAGE, into_page, results_page, write_results
from studies.results.paper_and_here import NOT_RUN, beyond, figures, table_one
from studies.results.pictures import pictures
from studies.results.records import Records
from studies.results.settings import DiagonalZoo
from studies.results.stratified import stratified_tau
from studies.zoos.ranking import masked_tau

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
COMMITTED = NOTEBOOKS / "records"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
STUDIES = {"toy": "toy.json", "ascents": "ascents.json", "diagonal": "diagonal.json"}
MEASURES = [f"{metric} {order}" for metric, order in itertools.product(("inv", "mix"), ("first", "second", "exact"))]
REFERENCES = ("|beta (beta - nearest)|", "|beta - nearest|", "inv gradient", "mix gradient", "|beta|_1")
DIAGONAL = Plan(
    settings=tuple(Setting(n, (0.1, 1.0), (0.01, 0.1)) for n in (50, 100)),
    seeds=7,
    profile=(0.01, 0.1, 1.0),
    family=(0.0, 0.5, 1.0),
    family_radii=(0.01, 0.1),
)


# ---- records of invented numbers, as the studies write them


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
                middle={name: Check(taus(bias[name])[1], (0.9, 0.5), None) for name in MIDDLE},
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
    shutil.copytree(COMMITTED / "earlier", folder / "earlier")
    return folder


@pytest.fixture(scope="module")
def records(folder: Path) -> Records:
    return Records.load(folder)


# ---- numbers, read once more from the JSON


def by_setting(
    folder: Path, name: str, radius: float | None = None, column: str = "taus", *, plain: bool = False
) -> list[np.ndarray]:
    """Tau by seed, setting after setting, by thorough ascents where they were made; without a radius, of references."""
    record = json.loads((folder / "diagonal.json").read_text(encoding="utf-8"))
    settings: dict[str, list[float]] = {}
    for cell in record["cells"]:
        radii = cell["radii"] if column == "taus" else record["plan"]["family_radii"]
        tau = cell["references"][name] if radius is None else cell[column][name][radii.index(radius)]
        if not plain and column == "taus" and radius == 0.1 and name in MIDDLE:
            tau = cell["middle"][name]["tau"]
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
        replace(
            cell,
            references={**cell.references, **closed},
            middle={**cell.middle, "adaptive": Check(adaptive, (1.0, 1.0), None)},
        )
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
    counts = [sum(c.verdict == v for c in group) for v in ("for it", "against it", "not decided at this n")]
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
    rows = [line for line in page.splitlines() if line.startswith("| mix, exact geodesics | ")]
    row = next(line for line in rows if line.count("|") == 5)
    for radius in (0.01, 0.1, 1.0):
        assert ends(by_setting(folder, "mix exact", radius, plain=True)) in row


# ---- the earlier zoos


def test_a_model_that_counts_twice_is_there_twice() -> None:
    draw = np.random.default_rng(3)
    x, y = draw.integers(6, size=12).astype(float), draw.standard_normal(12)
    counts = draw.integers(3, size=(5, 12))
    expected = [stats.kendalltau(np.repeat(x, c), np.repeat(y, c)).statistic for c in counts]
    everywhere = np.ones((12, 12), dtype=bool)
    assert masked_tau(x, y, everywhere, counts) == pytest.approx(expected)
    assert np.isnan(masked_tau(np.ones(12), y, everywhere, counts)).all()


def test_tau_within_strata_is_that_of_their_models_and_the_mean_weighs_pairs() -> None:
    """Strata that differ in level, so that pooling hides what is in each; one model has no value."""
    draw = np.random.default_rng(8)
    strata = [0.0] * 9 + [1.0] * 5
    y = np.array(strata) * 5 + draw.standard_normal(14)
    x = y - np.array(strata) * 10 + 0.5 * draw.standard_normal(14)
    found = stratified_tau([None, *x], [0.0, *y], [0.0, *strata])
    taus = [stats.kendalltau(x[where], y[where]).statistic for where in (slice(9), slice(9, 14))]
    assert [found.within[key].value for key in (0.0, 1.0)] == pytest.approx(taus)
    assert found.mean.value == pytest.approx((36 * taus[0] + 10 * taus[1]) / 46)
    assert found.pooled.value == pytest.approx(stats.kendalltau(x, y).statistic)
    rows = [np.concatenate([draw.integers(9, size=9), draw.integers(9, 14, size=5)]) for _ in range(1000)]
    drawn = [[stats.kendalltau(x[part], y[part]).statistic for part in (row[:9], row[9:])] for row in rows]
    mean = np.nanquantile(np.average(np.array(drawn), axis=1, weights=[36, 10]), [0.025, 0.975])
    pooled = np.quantile([stats.kendalltau(x[row], y[row]).statistic for row in rows], [0.025, 0.975])
    assert (found.mean.low, found.mean.high) == pytest.approx(mean, abs=0.05)
    assert (found.pooled.low, found.pooled.high) == pytest.approx(pooled, abs=0.05)


def test_the_section_says_what_the_record_of_images_says(records: Records) -> None:
    zoo = records.earlier["vit"]
    label = "inv (second order) worst-case sharpness, radius 0.025"
    gap, shift, value = (np.array(zoo.column(name), dtype=float) for name in ("error_gap", "shift", label))
    found = by_shift(zoo)
    assert len(found) == 12
    within = {each: stats.kendalltau(value[shift == each], gap[shift == each]).statistic for each in (0.0, 1.0)}
    tau = found["inv", 0.025]
    assert {each: one.value for each, one in tau.within.items()} == pytest.approx(within)
    pairs = [(shift == each).sum() * ((shift == each).sum() - 1) for each in (0.0, 1.0)]
    assert tau.mean.value == pytest.approx(np.average(list(within.values()), weights=pairs))
    page = earlier(records.earlier)
    row = next(line for line in page.splitlines() if line.startswith("| inv | 0.025 | "))
    assert [cell.split()[0] for cell in row.split(" | ")[2:]] == [
        said(each) for each in (stats.kendalltau(value, gap).statistic, within[1.0], within[0.0], tau.mean.value)
    ]
    words = " ".join(page.split())
    with_shifts, without = (f"{gap[shift == each].min():.3f} to {gap[shift == each].max():.3f}" for each in (1.0, 0.0))
    assert f"With shifts the gap in error is {with_shifts}, without them {without}: the two do not overlap" in words
    assert f"for inv at radius 0.025: {said(tau.pooled.value)} pooled, {said(tau.mean.value)} within strata" in words
    mixed = replace(
        zoo, rows=tuple(replace(row, scores={**row.scores, "shift": k % 2.0}) for k, row in enumerate(zoo.rows))
    )
    assert "the two overlap" in " ".join(earlier({"vit": mixed}).split())


def test_the_section_says_what_the_record_of_sentences_says(records: Records) -> None:
    zoo = records.earlier["bert"]
    error, gap, value = (
        np.array(zoo.column(name), dtype=float)
        for name in ("train_error", "error_gap", "adaptive worst-case sharpness, steps 10, radius 1")
    )
    page, found = earlier(records.earlier), by_limit(zoo)
    for limit in LIMITS:
        kept = error <= limit
        tau = stats.kendalltau(value[kept], gap[kept]).statistic
        assert found[limit][1]["adaptive"].value == pytest.approx(tau)
        assert f"| {limit:.2f} | {kept.sum()} | {said(tau)} [" in page
    assert "normalised" not in re.sub(r"Normalised logits of\stwo classes", "", page)


@pytest.mark.parametrize("key", ["vit", "bert"])
def test_first_and_second_order_hardly_differ(key: str, records: Records) -> None:
    zoo = records.earlier[key]
    for metric in ("inv", "mix"):
        second, first = (
            next(
                np.array(zoo.column(each.label))
                for each in zoo.measures
                if each.label.startswith(f"{metric} ({order} order) worst-case") and each.radius in (0.1, 0.125)
            )
            for order in ("second", "first")
        )
        expected = np.median(np.abs(first - second) / second)
        assert order_difference(zoo, metric) == pytest.approx(expected)
        assert f"{100 * expected:.2g} % ({metric}," in " ".join(earlier(records.earlier).split())


def test_nothing_is_claimed_from_the_earlier_zoos(records: Records) -> None:
    section = earlier(records.earlier)
    assert "exploratory" in section
    assert not re.search(r"\b(hold|holds|verdict)\b", section)
    rows = (*table_one(records), *figures(records), *beyond(records))
    assert not any("transformers" in row.what or "BERTs" in row.what for row in rows)
    changed = replace(records, earlier={})
    assert [row.here for row in table_one(changed)] == [row.here for row in table_one(records)]
    assert earlier({}) == NOT_RUN


# ---- verdicts


@pytest.mark.parametrize(
    ("rule", "low", "high", "verdict"),
    [
        ("above", 0.01, 0.5, "for it"),
        ("above", -0.5, -0.01, "against it"),
        ("above", -0.01, 0.5, "not decided at this n"),
        ("below", -0.5, -0.01, "for it"),
        ("below", 0.01, 0.5, "against it"),
        ("below", -0.5, 0.01, "not decided at this n"),
        ("small", -0.09, 0.09, "for it"),
        ("small", 0.11, 0.5, "against it"),
        ("small", -0.5, -0.11, "against it"),
        ("small", -0.09, 0.11, "not decided at this n"),
        ("above", None, None, "not decided at this n"),
    ],
)
def test_the_interval_decides(rule: str, low: float | None, high: float | None, verdict: str) -> None:
    assert RULES[rule].verdict(Estimate(0.3, low, high)) == verdict
    assert RULES[rule].verdict(None) == "not run"


def test_a_sign_is_only_compared_where_adaptive_sharpness_has_one(records: Records) -> None:
    groups = [group for group in setting_claims(records.diagonal) if "same sign" in group[0].words]
    claim = groups[0][0]
    inv = Estimate(0.4, 0.2, 0.6)
    assert replace(claim, found=inv, given=Estimate(0.1, -0.1, 0.3)).verdict == "not decided at this n"
    assert replace(claim, found=inv, rule="above", given=Estimate(0.3, 0.1, 0.5)).verdict == "for it"
    for group in groups:
        for each in group:
            assert each.given is not None
            assert each.rule == ("below" if each.given.value < 0 else "above")


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
        if row.study:
            assert (NOT_RUN in row.here) == (row.study in (*missing, "mnist", "sentiment")), row
    assert bool(setting_claims(found.diagonal)) == ("diagonal" not in missing)
    write_results(found, tmp_path / "out")
    page = (tmp_path / "out" / PAGE).read_text(encoding="utf-8")
    check_form(page)


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
    assert set(plots) == {"settings"}
    for name, plot in plots.items():
        svg = (tmp_path / "results" / f"{name}.svg").read_text(encoding="utf-8")
        assert plot.alt in svg
        assert f"](results/{name}.svg)" in (tmp_path / PAGE).read_text(encoding="utf-8")


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
