"""The scalar network: closed forms against exhaustive search and ascent, level sets, the paper's claims, the study."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

import quotient_manifolds as qm
from quotient_manifolds.symmetries import find_symmetries
from studies.toy import (
    MEASURES,
    Point,
    Scalar,
    Toy,
    batch,
    climb,
    first_term,
    grid,
    landscape,
    network,
    run,
    sharpness,
    squared_error,
    tables,
)
from studies.toy.closed import exact_direction, paper_direction, term_at_minimum
from studies.toy.study import Along

ONE = Scalar()
SEVERAL = Scalar((1.0, -2.0, 0.5), (0.7, 1.0, 2.0))
POINTS = (Point(0.4, 0.9), Point(2.0, -1.5), Point(-0.6, -2.5))
RECORD = Path(__file__).parents[2] / "notebooks" / "records" / "toy.json"

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
            a, c = radius * np.cos(place), radius * np.sin(place)
            product = (G + scale[0] * a) * (H + scale[1] * c)
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


def test_nothing_inside_a_ball_is_higher_than_its_edge() -> None:
    """The search above looks at the circles only: a saddle has no other maximum, as points inside show."""
    rng = np.random.default_rng(0)
    a, c = rng.standard_normal((2, 20000))
    for radius in (0.3, 3.0):
        shrunk = radius * np.sqrt(rng.random(20000)) / np.hypot(a, c)
        for point in POINTS:
            for measure, scale in (("euclidean", (1.0, 1.0)), ("adaptive", point)):
                product = (point.G + scale[0] * shrunk * a) * (point.H + scale[1] * shrunk * c)
                rise = loss(SEVERAL, product) - loss(SEVERAL, np.array(point.product))
                best = sharpness(SEVERAL, point, measure, radius)
                assert 0.95 * best < rise.max() <= best * (1 + 1e-12)


@pytest.mark.parametrize("measure", MEASURES)
def test_the_ascent_finds_the_closed_form(measure: str) -> None:
    for problem, point, radius in ((ONE, POINTS[0], 0.1), (SEVERAL, POINTS[1], 0.5), (ONE, Point(0.5, 2.0), 0.2)):
        assert climb(problem, point, measure, radius) == pytest.approx(
            sharpness(problem, point, measure, radius), rel=1e-6
        )


def test_the_ascent_tries_both_ends() -> None:
    """Where the slope at the weights points to the lower of the two maxima, a climb from there ends at it."""
    problem, point, measure = Scalar((1.0,), (1.1,)), Point.balanced(1.0), "inv (exact)"
    assert paper_direction(problem, point) != exact_direction(problem, point, 0.5)
    assert climb(problem, point, measure, 0.5) == pytest.approx(sharpness(problem, point, measure, 0.5), rel=1e-6)


@pytest.mark.parametrize(("metric", "order"), [(m, o) for m in ("inv", "mix") for o in ("first", "second", "exact")])
def test_the_networks_own_quotient_gives_the_same(metric: str, order: str) -> None:
    """Through the whole library: the pair found in the model, proved on its loss, measured on FixedRankQuotient."""
    point = POINTS[0]
    model = network(point)
    symmetries = find_symmetries(model, batch(SEVERAL)[0])
    found = qm.worst_case_sharpness(
        model,
        squared_error,
        [batch(SEVERAL)],
        geometry=qm.Quotient(metric, order, symmetries=symmetries),
        radius=0.05,
        steps=4,
    )
    measure = f"{metric} ({order if order == 'exact' else f'{order} order'})"
    assert found.geometry == measure
    assert found.mean == pytest.approx(sharpness(SEVERAL, point, measure, 0.05), rel=1e-6)


@pytest.mark.parametrize("measure", MEASURES)
def test_all_but_the_euclidean_are_constant_along_orbits(measure: str) -> None:
    here, there = (sharpness(SEVERAL, point, measure, 0.2) for point in (POINTS[1], POINTS[1].moved(-30.0)))
    if measure == "euclidean":
        assert there > 30 * here
    else:
        assert there == pytest.approx(here, rel=1e-12)


def test_landscapes_are_their_closed_forms() -> None:
    """With f = p - B / A: L' = 2 A f and L'' = 2 A in p, along G, along H and along geodesics."""
    A, B, C = SEVERAL.coefficients
    G, H = np.array(POINTS).T
    p, f = G * H, G * H - B / A
    found = landscape(SEVERAL, POINTS)
    np.testing.assert_allclose(found.loss, A * p**2 - 2 * B * p + C, rtol=1e-12)
    norms = {
        "euclidean": 2 * A * np.abs(f) * np.hypot(G, H),
        "adaptive": 8**0.5 * A * np.abs(p * f),
        "inv": 8**0.5 * A * np.abs(p * f),
        "mix": 8**0.5 * A * np.abs(f),
    }
    traces = {
        "euclidean": 2 * A * (G**2 + H**2),
        "adaptive": 4 * A * p**2,
        "inv": 4 * A * p * (p + f),
        "mix": np.full(3, 4 * A),
    }
    for name in norms:
        np.testing.assert_allclose(found.gradient_norm[name], norms[name], rtol=1e-10)
        np.testing.assert_allclose(found.hessian_trace[name], traces[name], rtol=1e-10)


def test_the_trace_is_the_second_derivative_along_the_unit_geodesic() -> None:
    h = 1e-3
    for metric, unit in (("inv", 0.5**0.5), ("mix", 0.5**0.5 / abs(POINTS[1].product))):
        p = POINTS[1].product * GEODESICS[f"{metric} (exact)"](unit * h * np.arange(-2.0, 3.0))
        second = float(np.array([-1.0, 16.0, -30.0, 16.0, -1.0]) @ loss(SEVERAL, p)) / (12 * h**2)
        assert landscape(SEVERAL, POINTS[1]).hessian_trace[metric] == pytest.approx(second, rel=1e-6)


def test_a_grid_lies_in_the_plane_as_its_axes_say() -> None:
    found = grid(SEVERAL, window=2.0, resolution=8)
    assert found.landscape.loss[1, 6] == pytest.approx(float(loss(SEVERAL, found.G[6] * found.H[1])))
    assert found.landscape.gradient_norm["euclidean"][1, 2] == pytest.approx(
        float(landscape(SEVERAL, (found.G[2], found.H[1])).gradient_norm["euclidean"])
    )
    with pytest.raises(ValueError, match=r"even number, or a weight would be 0\. Found 7"):
        grid(SEVERAL, resolution=7)


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_expansions_are_the_limits_of_small_radii(metric: str) -> None:
    measure = f"{metric} (exact)"
    for point in POINTS:
        assert first_term(SEVERAL, point, measure, 1e-7) == pytest.approx(
            sharpness(SEVERAL, point, measure, 1e-7), rel=1e-5
        )
        minimum = Scalar((2.0,), (2 * point.product,))
        assert first_term(minimum, point, measure, 0.1) == pytest.approx(0, abs=1e-12)
        assert term_at_minimum(minimum, point, measure, 1e-5) == pytest.approx(
            sharpness(minimum, point, measure, 1e-5), rel=1e-3
        )


def test_the_direction_of_the_maximum_is_not_always_that_of_the_first_order_term() -> None:
    wrong = 0
    for ratio in np.linspace(0.5, 1.6, 111):
        for sign in (1, -1):
            problem, point = Scalar((1.0,), (sign * float(ratio),)), Point.balanced(sign)
            ends = [problem.rise(sign, sign * math.exp(2 * b)) for b in (-0.5 / 2**0.5, 0.5 / 2**0.5)]
            assert exact_direction(problem, point, 0.5) == (1 if ends[1] > ends[0] else -1)
            wrong += paper_direction(problem, point) != exact_direction(problem, point, 0.5)
    assert wrong == 2 * 26  # 1 < y / p < cosh(2 R) = 1.2606


def near(value: float, expected: float, digits: int = 3) -> bool:
    return f"{value:.{digits}g}" == f"{expected:.{digits}g}"


def test_the_figures_of_the_first_notebook() -> None:
    found = grid(ONE).landscape
    for values, shares in ((found.gradient_norm, (0.45, 0.83)), (found.hessian_trace, (0.32, 0.83))):
        for metric, share in zip(("inv", "mix"), shares, strict=True):
            assert round(float((values[metric] < values["euclidean"]).mean()), 2) == share
    assert near(found.hessian_trace["inv"].min(), -0.5, 2)
    moved = landscape(ONE, [Point.balanced(1.5).moved(a) for a in (0.01, 0.1, 1.0, 10.0, 100.0)])
    for quantity in (moved.gradient_norm, moved.hessian_trace):
        assert quantity["euclidean"].max() / quantity["euclidean"].min() > 70.7 - 0.05
        for metric in ("inv", "mix"):
            np.testing.assert_allclose(quantity[metric], quantity[metric][0], rtol=1e-9)
    norms = [float(landscape(ONE, Point.balanced(p)).gradient_norm["inv"]) for p in (0.5, 1.5)]
    assert near(norms[0], 0.707)
    assert near(norms[1], 2.12)
    traces = {a: landscape(ONE, Point.balanced(1.0).moved(a)).hessian_trace for a in (1.0, 10.0)}
    assert near(float(traces[1.0]["inv"]), 4)
    assert near(float(traces[1.0]["mix"]), 4)
    assert near(float(traces[10.0]["euclidean"]), 200)

    def exact(product: float, radius: float, metric: str = "inv", y: float = 1.0) -> float:
        return sharpness(Scalar((1.0,), (y,)), Point.balanced(product), f"{metric} (exact)", radius)

    assert near(first_term(ONE, Point.balanced(1.5), "inv", 0.01) / exact(1.5, 0.01), 0.972)
    assert near(first_term(ONE, Point.balanced(1.01), "inv", 0.1) / exact(1.01, 0.1), 0.107)
    assert [f"{exact(p, 1e-3, y=p) / 1e-6:.3g}" for p in (0.5, 1.0, 2.0)] == ["0.501", "2", "8.01"]
    assert [f"{exact(p, 1e-3, 'mix', y=p) / 1e-6:.3g}" for p in (0.5, 1.0, 2.0)] == ["2", "2", "2"]
    assert near(exact(1.0, 0.1 * math.sqrt(2)) / exact(1.0, 0.1), 2.12)

    def differ(radius: float) -> float:
        points = [Point.balanced(p) for p in (-0.5, 0.25, 1.0, 1.5)]
        values = [[sharpness(ONE, p, m, radius) for m in ("adaptive", "inv (first order)")] for p in points]
        return max(abs(adaptive / first - 1) for adaptive, first in values)

    assert differ(0.7) < 1e-9
    assert near(differ(1.2), 0.29, 2)


def test_bad_input_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match="of equal length, and one x other than 0"):
        Scalar((0.0,), (1.0,))
    with pytest.raises(ValueError, match=r"measure must be one of euclidean, .* Found 'inv'"):
        sharpness(ONE, POINTS[0], "inv", 0.1)
    with pytest.raises(ValueError, match=r"measure must be one of .* Found 'mix'"):
        climb(ONE, POINTS[0], "mix", 0.1)


def test_a_spread_is_that_of_magnitudes() -> None:
    assert Along("trace", "inv", 0.25, (-0.5, -2.0, -1.0)).spread == 4
    assert Along("gradient", "inv", 1.0, (0.0, 1e-16)).spread is None


# --- the study -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    out = tmp_path_factory.mktemp("toy")
    return run(out, fast=True, command="make study NAME=toy ARGS=--fast", progress=lambda what, done, total: None)


def test_the_study_finds_what_is_constant(found: Toy) -> None:
    for quantity in ("gradient norm", "Hessian trace", "worst-case sharpness"):
        assert found.spread(quantity, "euclidean") > 5  # type: ignore[operator]
        for geometry in ("adaptive", "inv", "mix"):
            assert found.spread(quantity, geometry) == pytest.approx(1, abs=1e-9)
    assert [one.measure for one in found.agreements] == list(MEASURES)
    assert all(one.cases == 3 and one.difference < 1e-6 for one in found.agreements)
    at_minimum = [one for one in found.along if (one.quantity, one.product) == ("gradient norm", 1.0)]
    assert [one.spread for one in at_minimum] == [None] * 4


def test_the_record_lasts(found: Toy, tmp_path: Path) -> None:
    found.save(tmp_path / "toy.json")
    assert Toy.load(tmp_path / "toy.json") == found


def test_the_committed_record_is_what_the_code_finds() -> None:
    """Closed forms to their digits, ascents by their agreement; of the orbits a value each."""
    record = Toy.load(RECORD)
    assert record.command == "quotient-manifolds study toy"  # of the version that wrote it
    for one in record.series:
        for name, order in (("first", "first order"), ("second", "second order"), ("exact", "exact")):
            expected = sharpness(ONE, Point.balanced(one.product), f"{one.metric} ({order})", one.radius)
            assert getattr(one, name) == pytest.approx(expected, rel=1e-9)
    assert sum(one.cases for one in record.agreements) == 27 * len(MEASURES)
    assert max(one.difference for one in record.agreements) < 1e-6
    sharp = [row for row in record.along if row.quantity == "worst-case sharpness"]
    assert len(sharp) == 4 * 4
    for row in sharp:
        measure = row.geometry if row.geometry in MEASURES else f"{row.geometry} (exact)"
        moved = Point.balanced(row.product).moved(record.sizes[2])
        assert row.values[2] == pytest.approx(sharpness(ONE, moved, measure, record.radius), rel=1e-6)


def test_the_command_shows_what_changes(found: Toy) -> None:
    spreads, ascents = tables(found)
    assert {row[0] for row in spreads.rows} >= {"gradient norm", "worst-case sharpness"}
    assert len(ascents.rows) == len(MEASURES)


# --- level sets as a figure ------------------------------------------------------------------------------------------


def test_the_network_is_the_problem() -> None:
    model = network(POINTS[1])
    with torch.no_grad():
        assert float(squared_error(model, batch(SEVERAL))) == pytest.approx(
            float(loss(SEVERAL, np.array(POINTS[1].product)))
        )
    assert [weight.item() for weight in model.parameters()] == [*POINTS[1]]
