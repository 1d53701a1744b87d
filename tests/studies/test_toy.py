"""The scalar network: closed forms against exhaustive search and ascent, the numbers of notebook 1, the study."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.optimize import minimize_scalar

import quotient_manifolds as qm
from quotient_manifolds.symmetries import find_symmetries
from studies import toy
from studies.__main__ import study
from studies.common import load
from studies.toy import MEASURES, Point, Scalar, climb, first_term, network, sharpness, squared_error

ONE = Scalar()
SEVERAL = Scalar((1.0, -2.0, 0.5), (0.7, 1.0, 2.0))
POINTS = (Point(0.4, 0.9), Point(2.0, -1.5), Point(-0.6, -2.5))

# Along the geodesics of either metric G H becomes p times this, at relative velocity b.
GEODESICS = {
    "inv (first order)": lambda b: (1 + b) ** 2,
    "inv (second order)": lambda b: (1 + b + b**2 / 2) ** 2,
    "inv (exact)": lambda b: np.exp(2 * b),
    "mix (first order)": lambda b: (1 + b) ** 2,
    "mix (second order)": lambda b: (1 + b - b**2 / 2) ** 2,
    "mix (exact)": lambda b: np.maximum(1 + 2 * b, 0),
}


def loss(problem: Scalar, product: np.ndarray) -> np.ndarray:
    """The sum of squared errors where G H is `product`, from the data."""
    return sum((x * product - y) ** 2 for x, y in zip(problem.x, problem.y, strict=True))  # type: ignore[return-value]


def searched(problem: Scalar, point: Point, measure: str, radius: float) -> float:
    """The maximum over the ball by search: a fine grid, its best point polished by scipy."""
    G, H = point
    scale = (G, H) if measure == "adaptive" else (1.0, 1.0)

    def rise(place: np.ndarray) -> np.ndarray:
        """On the circle by angle, or on the line by relative velocity."""
        if measure in GEODESICS:
            product = G * H * GEODESICS[measure](place)
        else:
            product = (G + scale[0] * radius * np.cos(place)) * (H + scale[1] * radius * np.sin(place))
        return loss(problem, product) - loss(problem, np.array(G * H))

    ends = math.pi
    if measure in GEODESICS:  # |xi|^2 = 2 b^2 in inv, 2 (G H b)^2 in mix
        ends = radius / math.sqrt(2) / (1 if measure.startswith("inv") else abs(G * H))
    places = np.linspace(-ends, ends, 4001)
    values = rise(places)
    best = int(values.argmax())
    bounds = (places[max(best - 1, 0)], places[min(best + 1, 4000)])
    polished = minimize_scalar(lambda place: -rise(place), bounds=bounds, method="bounded", options={"xatol": 1e-14})
    return max(float(values[best]), -float(polished.fun))


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("radius", [0.01, 0.3, 0.9, 3.0])
def test_closed_forms_are_the_maximum_of_an_exhaustive_search(measure: str, radius: float) -> None:
    for problem in (ONE, SEVERAL, Scalar((1.0,), (POINTS[0].product,))):
        for point in POINTS:
            expected = searched(problem, point, measure, radius)
            assert sharpness(problem, point, measure, radius) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("measure", MEASURES)
def test_the_ascent_finds_the_closed_form_which_is_constant_along_the_orbit(measure: str) -> None:
    """In the last case the slope at the weights points to the lower of two maxima: a restart finds the other."""
    uphill = (Scalar((1.0,), (1.1,)), Point.balanced(1.0), 0.5)
    for problem, point, radius in (
        (ONE, POINTS[0], 0.1),
        (SEVERAL, POINTS[1], 0.5),
        (ONE, Point(0.5, 2.0), 0.2),
        uphill,
    ):
        assert climb(problem, point, measure, radius) == pytest.approx(
            sharpness(problem, point, measure, radius), rel=1e-6
        )
    here, there = (sharpness(SEVERAL, point, measure, 0.2) for point in (POINTS[1], POINTS[1].moved(-30.0)))
    assert there > 30 * here if measure == "euclidean" else there == pytest.approx(here, rel=1e-12)
    if "(" in measure:
        term = first_term(SEVERAL, POINTS[0], measure, 1e-7)
        assert term == pytest.approx(sharpness(SEVERAL, POINTS[0], measure, 1e-7), rel=1e-5)


@pytest.mark.parametrize(("metric", "order"), [(m, o) for m in ("inv", "mix") for o in ("first", "second", "exact")])
def test_the_networks_own_quotient_gives_the_same(metric: str, order: str) -> None:
    """Through the whole library: the pair found in the model, verified on its loss, measured on FixedRankQuotient."""
    model = network(POINTS[0])
    assert [weight.item() for weight in model.parameters()] == [*POINTS[0]]
    geometry = qm.Quotient(metric, order, symmetries=find_symmetries(model, SEVERAL.batch()[0]))
    settings = {"geometry": geometry, "radius": 0.05, "steps": 4}
    found = qm.worst_case_sharpness(model, squared_error, [SEVERAL.batch()], **settings)
    measure = f"{metric} ({order if order == 'exact' else f'{order} order'})"
    assert found.geometry == measure
    assert found.mean == pytest.approx(sharpness(SEVERAL, POINTS[0], measure, 0.05), rel=1e-6)


def test_a_short_study_is_read_again_and_the_record_is_what_the_code_finds(tmp_path: Path) -> None:
    done = CliRunner().invoke(study, ["toy", "--fast", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    fast, record = load("toy", tmp_path), load("toy")
    assert fast["series"] == [{key: pytest.approx(value) for key, value in row.items()} for row in record["series"]]
    for found, cases in ((fast, 3), (record, 27)):
        assert [one["measure"] for one in found["agreements"]] == list(MEASURES)
        assert all(one["cases"] == cases and one["difference"] < 1e-6 for one in found["agreements"])
        assert len(toy.tables(found)["ascents"]) == len(MEASURES)
    lines = toy.series_picture(record, "inv", 1.01).axes[0].get_lines()
    assert [len(line.get_xdata()) for line in lines] == [len(toy.SERIES_RADII)] * 4


def test_the_numbers_of_the_first_notebook() -> None:
    def exact(product: float, radius: float, metric: str = "inv", y: float = 1.0) -> float:
        return sharpness(Scalar((1.0,), (y,)), Point.balanced(product), f"{metric} (exact)", radius)

    assert f"{first_term(ONE, Point.balanced(1.01), 'inv', 0.1) / exact(1.01, 0.1):.3f}" == "0.107"
    assert [f"{exact(p, 1e-3, y=p) / 1e-6:.3g}" for p in (0.5, 1.0, 2.0)] == ["0.501", "2", "8.01"]
    assert [f"{exact(p, 1e-3, 'mix', y=p) / 1e-6:.3g}" for p in (0.5, 1.0, 2.0)] == ["2", "2", "2"]
    for p in (-0.5, 0.25, 1.0, 1.5):  # adaptive sharpness is first-order inv up to a radius of 1 / sqrt(2)
        both = [sharpness(ONE, Point.balanced(p), measure, 0.7) for measure in ("adaptive", "inv (first order)")]
        assert both[0] == pytest.approx(both[1], rel=1e-9)
