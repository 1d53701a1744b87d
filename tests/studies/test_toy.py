"""The scalar network: closed forms against exhaustive search and ascent, the numbers of notebook 1, the study."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds.symmetries import find_symmetries
from studies import toy
from studies.__main__ import study
from studies.common import load
from studies.toy import MEASURES, Point, Scalar, first_term, sharpness

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


def network(point: Point) -> nn.Sequential:
    """x -> H (G x): two Linears without bias, in float64."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double().eval()
    for weight, value in zip(model.parameters(), point, strict=True):
        nn.init.constant_(weight, value)
    return model


def batch_of(problem: Scalar) -> tuple[Tensor, Tensor]:
    x, y = torch.tensor([problem.x, problem.y], dtype=torch.float64)[..., None]
    return x, y


def squared_error(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = ((model(data[0]) - data[1]) ** 2).sum()
    return loss


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
def test_closed_forms_are_constant_along_the_orbit_and_begin_with_the_first_term(measure: str) -> None:
    here, there = (sharpness(SEVERAL, point, measure, 0.2) for point in (POINTS[1], POINTS[1].moved(-30.0)))
    assert there > 30 * here if measure == "euclidean" else there == pytest.approx(here, rel=1e-12)
    if "(" in measure:
        term = first_term(SEVERAL, POINTS[0], measure, 1e-7)
        assert term == pytest.approx(sharpness(SEVERAL, POINTS[0], measure, 1e-7), rel=1e-5)


@pytest.mark.parametrize("measure", MEASURES)
def test_the_whole_library_gives_the_same(measure: str) -> None:
    """The pair found in the model, verified on its loss, measured on FixedRankQuotient.

    In the last case the slope at the weights points to the lower of two maxima: a restart finds the other.
    """
    geometry: Any = measure
    if "(" in measure:
        metric, order = measure.rstrip(")").split(" (")
        symmetries = find_symmetries(network(POINTS[0]), batch_of(SEVERAL)[0])
        geometry = qm.Quotient(metric, order.removesuffix(" order"), symmetries=symmetries)  # type: ignore[arg-type]
    uphill = (Scalar((1.0,), (1.1,)), Point.balanced(1.0), 0.5, 30, 3)
    cases = [
        (SEVERAL, POINTS[0], 0.05, 4, 0),
        *([uphill] if measure in ("euclidean", "adaptive", "inv (exact)") else []),
    ]
    for problem, point, radius, steps, restarts in cases:
        model, settings = network(point), {"radius": radius, "steps": steps, "restarts": restarts}
        found = qm.worst_case_sharpness(model, squared_error, [batch_of(problem)], geometry=geometry, **settings)
        assert found.geometry == measure
        assert found.mean == pytest.approx(sharpness(problem, point, measure, radius), rel=1e-6)


def test_the_record_is_what_the_study_finds(tmp_path: Path) -> None:
    done = CliRunner().invoke(study, ["toy", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found, record = load("toy", tmp_path)["series"], load("toy")
    assert found == [{key: pytest.approx(value) for key, value in row.items()} for row in record["series"]]
    lines = toy.series_picture(record, "inv", 1.01).axes[0].get_lines()
    assert [len(line.get_xdata()) for line in lines] == [len(toy.SERIES_RADII)] * 4
