"""What is written for people: the report, the summary of a terminal, and the plan before anything is measured."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from pathlib import Path

import pytest

from quotient_manifolds.compare import Comparison, Forecast, forecast, read_spec, run_comparison, summary_tables
from quotient_manifolds.compare.comparison import table
from quotient_manifolds.compare.report import conclusion
from quotient_manifolds.statistics import holm
from tests.nets.zoos import run, write_seeds, write_spec

HEAD = "checkpoints: {paths: models/*, loader: tests.nets.zoos:small}\ndata: {path: train.npz, batch_size: 4}"
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
    spec = write_spec(
        zoo, SLOPE, WORST.replace("steps: 3", "steps: 20"), head=HEAD.replace("models/*", "'models/m_[0-3]'")
    )
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


# The headline.

RATES = "checkpoint,rate,kind\n" + "".join(f"m_{n},{n},{n % 2}\n" for n in range(6))


def ranked(zoo: Path, given: str = "") -> Comparison:
    """A comparison against the rate, which a test gives other correlations."""
    (zoo / "scores.csv").write_text(RATES)
    return run(write_spec(zoo, SLOPE, WORST, head=HEAD, tail=f"scores: scores.csv\nagainst: rate\n{given}"))


def headline(found: Comparison, rows: list[dict[str, object]]) -> str:
    first = found.rankings[found.rankings["kind"] == "kendall-b"].iloc[0]
    given = [first.to_dict() | {"given": "", "low": -0.9, "high": 0.9} | row for row in rows]
    return conclusion(replace(found, rankings=table("rankings", given)))


def test_the_headline_is_made_of_corrected_p_values(zoo: Path) -> None:
    """An interval that excludes 0 is no finding among many measures, and a p-value is one of several."""
    found = ranked(zoo)
    weak = {"value": 0.73, "low": 0.2, "high": 1.0, "p_value": 0.02, "p_holm": 0.1}
    said = headline(found, [weak | {"measure": "one"}, weak | {"measure": "other", "value": 0.2, "p_holm": 0.4}])
    assert said.startswith(
        "Inconclusive: over these 6 models, none of 2 measures correlates significantly with the rate"
    )
    assert "The smallest p-value corrected by Holm’s method is 0.1 (one, tau +0.73 [+0.20, +1.00])." in said
    strong = weak | {"value": -0.6, "low": -0.8, "high": -0.1, "p_holm": 0.01, "measure": "other"}
    said = headline(found, [weak | {"measure": "one"}, strong])
    assert said.startswith(
        "1 of 2 measures correlates significantly with the rate (p < 0.05, corrected by Holm’s method"
    )
    assert "models with larger other have a smaller rate: tau −0.60 [−0.80, −0.10], corrected p 0.01." in said
    assert said.endswith("This holds for models like these 6 only.")
    tied = [strong | {"measure": name, "value": 0.6, "low": 0.1, "high": 0.8} for name in ("one", "other")]
    said = headline(found, tied)
    assert "2 of 2 measures correlate significantly" in said
    assert "models with larger one, or larger other, have a larger rate: |tau| 0.60" in said


def test_the_headline_is_made_of_the_partial_coefficient_that_was_asked_for(zoo: Path) -> None:
    found = ranked(zoo, "given: [kind]")
    partial = found.rankings[found.rankings["given"] == "kind"]
    assert len(partial) == 5
    assert partial["p_holm"].dropna().tolist() == holm(partial["p_value"].dropna().tolist())
    whole = {"measure": "one", "value": 0.9, "p_value": 1e-4, "p_holm": 1e-3}
    held = {"measure": "one", "value": -0.33, "low": -1.0, "high": 1.0, "p_value": 0.3, "given": "kind"}
    said = headline(found, [whole, held | {"p_holm": 0.3}])
    assert said.startswith("Inconclusive: ")
    assert "one, partial tau −0.33 [−1.00, +1.00], kind held fixed" in said
    assert "0.90" not in said
    said = headline(found, [whole, held | {"p_holm": 0.03}, held | {"p_holm": 0.2, "given": "rate of learning"}])
    assert said.startswith("Inconclusive: ")  # whatever is held fixed
    said = headline(found, [whole, held | {"p_holm": 0.03}])
    assert "models with larger one have a smaller rate: partial tau −0.33 [−1.00, +1.00], kind held fixed" in said
    undefined = dict.fromkeys(("value", "low", "high", "p_value", "p_holm"))
    said = headline(found, [whole, held | undefined])
    assert said == (
        "Inconclusive: no partial tau with the rate is defined over these 6 models, kind held fixed: that "
        "decides the measures or the score, or too few models have it."
    )


def test_what_too_few_models_have_is_no_reason_to_quote_what_was_not_asked_for(zoo: Path) -> None:
    rows = "".join(f"m_{n},{n},{n if n < 4 else ''}\n" for n in range(6))
    (zoo / "scores.csv").write_text(f"checkpoint,rate,width\n{rows}")
    found = run(write_spec(zoo, SLOPE, head=HEAD, tail="scores: scores.csv\nagainst: rate\ngiven: width"))
    assert found.ranking()["value"].notna().all()
    assert "no partial tau with the rate is defined over these 6 models, width held fixed" in conclusion(found)


def test_the_headline_stands_over_the_ranking(zoo: Path) -> None:
    ranked(zoo)
    text = page(zoo / "zoo.yaml")
    assert text.index("Sharpness and the scores") < text.index("All values")
    assert text.index('class="lead">Inconclusive: ') < text.index("Sharpness and the scores")


def test_one_model_has_a_headline_of_its_own(zoo: Path) -> None:
    spec = write_spec(zoo, SLOPE, WORST, head=HEAD.replace("models/*", "models/m_3"))
    text, found = page(spec), run(spec)
    assert "<h1>Sharpness of m_3</h1>" in text
    first = found.values.iloc[0]
    value = f"{first['mean']:.4g} ± {first['standard_error']:.2g}"
    assert f'<p class="lead">{first["label"]}: {value}; ' in text
    assert "Means over 2 batches ± standard errors; all 5 values are below." in text
    assert "1 models" not in text
    assert "1 checkpoints" not in text
    assert "no ranking" not in text
    few = write_spec(zoo, SLOPE, head=HEAD.replace("models/*", "'models/m_[0-1]'"))
    assert "2 models, 1 measure. There is no ranking: it takes five models" in page(few)


def test_points_are_called_by_their_models(zoo: Path) -> None:
    text = page(write_spec(zoo, SLOPE, head=HEAD, tail=TEST))
    for data in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", text):
        drawn = base64.b64decode(data).decode()
        assert [f">m_{n}<" in drawn for n in range(6)] == [True] * 6
