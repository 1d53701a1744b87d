"""What is measured on the zoo of vision transformers, fixed before any correlation was looked at, as a spec.

The middle radii are round numbers at which the median rise of the loss over three models outside the zoo lay between
0.1 and 0.3 nats (published grids for vision transformers: 0.025 to 0.2 Euclidean, 0.5 to 4 adaptive); the others are a
factor of 4 to either side, where the rise is far below and far above what a Taylor series reaches.
"""

from __future__ import annotations

from quotient_manifolds.geometry import Geometry
from studies.zoo_spec import Plan, measure, of_family

PLAN = Plan(
    middle={"euclidean": 0.05, "adaptive": 0.5, "inv": 0.1, "mix": 0.1},
    eps=(1e-4, 1e-3, 1e-2, 1e-1),
    family=tuple(k / 4 for k in range(-2, 7)),
    average={"adaptive": 0.05, "inv": 0.02},
)
EPS, FAMILY = PLAN.eps, PLAN.family
BATCH_SIZE, BATCHES = 128, 2

__all__ = ["EPS", "FAMILY", "PLAN", "fast_spec", "full_spec", "label", "of_family"]


def label(geometry: Geometry, radius: float, *, normalise_logits: bool = False) -> str:
    """How a comparison calls worst-case sharpness in a ball."""
    return PLAN.label(geometry, radius, normalise_logits=normalise_logits)


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
    lines = [PLAN.worst(name, radius=list(PLAN.radii(name))) for name in PLAN.middle]
    lines += [*PLAN.parts(), PLAN.worst("inv", radius=PLAN.middle["inv"], geodesic="exact")]
    lines += [*PLAN.relaxations(), PLAN.members()]
    lines += [measure("average-case", name, radius=radius) for name, radius in PLAN.average.items()]
    lines += [measure("gradient-norm", ["euclidean", "adaptive", "inv"])]
    lines += [PLAN.worst(name, radius=PLAN.middle[name], normalise_logits="true") for name in ("adaptive", "inv")]
    return HEAD + "".join(lines)


def fast_spec() -> str:
    """Two of its measures, to try the code."""
    return HEAD + "".join(PLAN.worst(name, radius=PLAN.middle[name]) for name in ("adaptive", "inv"))
