"""What is written for people: the report, the summary of a terminal, and the plan before anything is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quotient_manifolds.compare import Forecast, forecast, read_spec, run_comparison, summary_tables
from quotient_manifolds.compare.report import conclusion
from tests.zoos import run, write_seeds, write_spec

HEAD = "checkpoints: {paths: models/*, loader: tests.zoos:small}\ndata: {path: train.npz, batch_size: 4}"
TEST = "test: {path: test.npz}"
WORST = "measure: worst-case, geometry: [euclidean, adaptive], radius: [0.1, 0.2], steps: 3, restarts: 1"
SLOPE = "measure: gradient-norm, geometry: euclidean"


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    return write_seeds(tmp_path, 6)


def page(spec: Path) -> str:
    run_comparison(spec, spec.parent / "out")
    return (spec.parent / "out" / "report.html").read_text(encoding="utf-8")


def test_the_report_shows_rankings_figures_and_what_to_know(zoo: Path) -> None:
    """Whatever the names of scores, and whoever has none."""
    odd = r"US$ and $\frac <b>"
    rows = "".join(f"m_{n},{n * n},$k{n % 2}^$\n" for n in range(5))
    (zoo / "scores.csv").write_text(f"checkpoint,{odd},kind\n{rows}m9,1,a\n")
    spec = write_spec(
        zoo, SLOPE, WORST, head=HEAD, tail=f"{TEST}\nscores: scores.csv\nagainst: ['{odd}', loss_gap]\ngiven: kind"
    )
    text = page(spec)
    for words in (
        "p, Holm",
        "with 5 models, tau has standard deviation 0.41",
        "Kendall’s partial tau-b",
        "Without a row of scores, so in no correlation with them: m_5.",
        "Rows of scores that name no checkpoint: m9.",
        "US$ and $\\frac &lt;b&gt;",
    ):
        assert words in text, words
    assert text.count("<figure") == 2
    assert text.count("<img") == 2 * 5  # one of its own for each measure, readable on a phone
    spread, ranking = summary_tables(run(spec))
    assert [row[1] for row in spread.rows] == ["6"] * 5
    assert len(ranking.rows) == 5 * 2


def test_the_report_says_what_failed(zoo: Path) -> None:
    (zoo / "models" / "m_1").write_text("raise")
    text = page(write_spec(zoo, SLOPE, WORST, head=HEAD))
    listed = text[text.index('id="failures"') :]
    assert listed.count("IndexError: no such row (at zoos.py, line ") == 1
    assert "m_1" in listed
    for number in range(6):
        (zoo / "models" / f"m_{number}").write_text("exit load")
    assert "0 of 30" in page(zoo / "zoo.yaml")


def test_the_report_of_fewer_than_five_models_has_values_and_no_ranking(zoo: Path) -> None:
    spec = write_spec(zoo, SLOPE, WORST, head=HEAD.replace("models/*", "'models/m_[0-3]'"))
    text = page(spec)
    assert "There is no ranking: it takes five models" in text
    assert "Sharpness and the scores" not in text  # no section without content
    assert '<details id="values" open>' in text
    found = run(spec)
    assert (found.known, len(found.rankings), found.cautions) == ((20, 20), 0, [])
    assert len(summary_tables(found)) == 1


# The plan.


def planned(spec: Path) -> Forecast:
    return forecast(read_spec(spec), spec.parent / "out")


def test_tasks_and_passes_are_counted_and_nothing_is_written(zoo: Path) -> None:
    (zoo / "scores.csv").write_text("checkpoint,rate\n" + "".join(f"m_{n},1\n" for n in range(5)))
    trace = "measure: hessian-trace, geometry: euclidean, samples: 5"
    quotient = "measure: worst-case, geometry: mix, radius: 0.1, steps: 3"
    spec = write_spec(zoo, WORST, quotient, trace, head=HEAD, tail="scores: scores.csv")
    before = sorted(zoo.rglob("*"))
    found = planned(spec)
    assert sorted(zoo.rglob("*")) == before
    assert found.measures["tasks"].tolist() == found.measures["left"].tolist() == [12] * 7
    assert found.measures["passes"].fillna(0).tolist() == [0, 8, 8, 8, 8, 0, 10]
    (failed,) = found.failures  # there is nothing to quotient out
    assert "symmetric pair" in failed
    assert found.notes == ("Without a row of scores, so in no correlation with them: m_5.",)
    time = found.measures["seconds"] * found.measures["left"] * found.measures["passes"]
    assert found.measures["time"].dropna().tolist() == pytest.approx(time.dropna().tolist())
    assert time.sum() > 0


def test_what_is_finished_is_not_planned_again(zoo: Path) -> None:
    run(write_spec(zoo, SLOPE, head=HEAD))
    (zoo / "models" / "m_6").write_text("6")
    found = planned(write_spec(zoo, SLOPE.replace("euclidean", "[euclidean, adaptive]"), head=HEAD))
    assert found.measures["tasks"].tolist() == [14] * 3
    assert found.measures["left"].tolist() == [2, 2, 14]


def test_a_first_checkpoint_that_does_not_load_is_said(zoo: Path) -> None:
    (zoo / "models" / "m_0").write_text("exit load")
    found = planned(write_spec(zoo, SLOPE, head=HEAD))
    assert found.measures.empty
    assert [each.split(":")[0] for each in found.failures] == ["m_0"]


def test_the_conclusion_names_ties_and_says_what_few_models_show(zoo: Path) -> None:
    (zoo / "scores.csv").write_text("checkpoint,rate\n" + "".join(f"m_{n},{n}\n" for n in range(6)))
    spec = write_spec(zoo, SLOPE, WORST, head=HEAD, tail="scores: scores.csv\nagainst: rate")
    found = run(spec)
    same = found.ranking().iloc[[0, 0]].assign(measure=["one", "other"], value=0.5, low=-0.2, high=0.8)
    said = conclusion(replace(found, rankings=same))
    assert "2 measures correlate most strongly with the rate (|tau| 0.50). " in said
    assert "No 95 % interval excludes 0, so these 6 models do not show that any measure predicts it." in said
    alone = conclusion(replace(found, rankings=same.iloc[:1].assign(low=0.1)))
    assert "one correlates most strongly with the rate (tau +0.50). " in alone
    assert "1 of the 95 % intervals excludes 0. This holds for models like these 6 only." in alone
    assert page(spec).index("Sharpness and the scores") < page(spec).index("All values")
