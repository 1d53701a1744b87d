"""What is measured on the zoo of vision transformers, fixed before any correlation was looked at, as a spec.

The middle radii are round numbers at which the median rise of the loss over three models outside the zoo lay between
0.1 and 0.3 nats (published grids for vision transformers: 0.025 to 0.2 Euclidean, 0.5 to 4 adaptive); the others are a
factor of 4 to either side, where the rise is far below and far above what a Taylor series reaches.
"""

from __future__ import annotations

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.sharpness import WorstCase

FACTOR = 4.0
MIDDLE: dict[str, float] = {"euclidean": 0.05, "adaptive": 0.5, "inv": 0.1, "mix": 0.1}
PLAIN: dict[str, Geometry] = {
    "euclidean": Euclidean(),
    "adaptive": Adaptive(),
    "inv": Quotient("inv"),
    "mix": Quotient("mix"),
}
EPS = (1e-4, 1e-3, 1e-2, 1e-1)
FAMILY = tuple(k / 4 for k in range(-2, 7))  # t of the metrics; 0 is inv and 1 is mix
AVERAGE = {"adaptive": 0.05, "inv": 0.02}  # standard deviations per dimension
BATCH_SIZE, BATCHES = 128, 2


def radii(name: str) -> tuple[float, float, float]:
    """Those of a geometry of `PLAIN`, ascending."""
    middle = MIDDLE[name]
    return middle / FACTOR, middle, middle * FACTOR


def of_family(t: float) -> Geometry:
    """inv and mix by their names."""
    return Quotient({0.0: "inv", 1.0: "mix"}.get(t, t))


ABLATION: dict[str, dict[str, tuple[Geometry, float]]] = {
    metric: {
        "whole": (Quotient(metric), MIDDLE[metric]),
        "no curvature": (Quotient(metric, geodesic="first"), MIDDLE[metric]),
        # The ball is adaptive sharpness's, and so is its radius.
        "adaptive norm": (Quotient(metric, norm="adaptive"), MIDDLE["adaptive"]),
    }
    for metric in ("inv", "mix")
}
"""By metric: the measure, and what is left when one of its parts is turned off [paper, App. G]."""


def label(geometry: Geometry, radius: float, *, normalise_logits: bool = False) -> str:
    """How a comparison calls worst-case sharpness in a ball."""
    from quotient_manifolds.compare.measures import Measured

    return Measured(WorstCase(geometry, radius), normalise_logits).label


HEAD = f"""\
checkpoints: {{paths: models/*}}
data: {{path: train.npz, batch_size: {BATCH_SIZE}, max_batches: {BATCHES}}}
test: {{path: test.npz, batch_size: 256}}
scores: scores.csv
given: [learning_rate, start]
measures:
"""


def full_spec() -> str:
    """The spec of the study."""
    lines = [_worst(name, radius=list(radii(name))) for name in PLAIN]
    lines += [_worst(metric, radius=MIDDLE[metric], geodesic="first") for metric in ABLATION]
    lines += [_worst(metric, radius=MIDDLE["adaptive"], norm="adaptive") for metric in ABLATION]
    lines += [_worst("inv", radius=MIDDLE["inv"], geodesic="exact")]
    lines += [_worst("inv", radius=MIDDLE["inv"], eps=eps) for eps in EPS]
    lines += [_worst([t for t in FAMILY if t not in (0.0, 1.0)], radius=MIDDLE["inv"])]
    lines += [_measure("average-case", name, radius=radius) for name, radius in AVERAGE.items()]
    lines += [_measure("gradient-norm", ["euclidean", "adaptive", "inv"])]
    lines += [_worst(name, radius=MIDDLE[name], normalise_logits="true") for name in ("adaptive", "inv")]
    return HEAD + "".join(lines)


def fast_spec() -> str:
    """Two of its measures, to try the code."""
    return HEAD + "".join(_worst(name, radius=MIDDLE[name]) for name in ("adaptive", "inv"))


def _worst(geometry: str | list[float] | list[str], **options: object) -> str:
    return _measure("worst-case", geometry, **options)


def _measure(kind: str, geometry: str | list[float] | list[str], **options: object) -> str:
    words = ", ".join(f"{key}: {_flow(value)}" for key, value in {"geometry": geometry, **options}.items())
    return f"  - {{measure: {kind}, {words}}}\n"


def _flow(value: object) -> str:
    """A scalar or a list as YAML."""
    return f"[{', '.join(map(_flow, value))}]" if isinstance(value, list) else f"{value}"
