"""What is measured on the zoo of BERTs, fixed before any correlation was looked at, as a spec.

The middle radii are round numbers at which the median rise of the loss over three models outside the zoo lay between
0.1 and 0.3 nats; the others are a factor of 4 to either side. One batch of 24 training pairs is measured, one of each
template, in ascents of 10 steps.
"""

from __future__ import annotations

from studies.zoo_spec import Plan, measure

PLAN = Plan(
    middle={"euclidean": 0.1, "adaptive": 1.0, "inv": 0.125, "mix": 0.125},
    eps=(1e-4, 1e-2, 1e-1),
    family=(-0.5, 0.0, 0.5, 1.0, 1.5),
    steps=10,
)
BATCH_SIZE, BATCHES = 24, 1

# No test data: error and loss on all pairs stand in scores.csv, and the gaps with them.
HEAD = f"""\
checkpoints: {{paths: models/*}}
data: {{path: train.jsonl, batch_size: {BATCH_SIZE}, max_batches: {BATCHES}, max_length: 64}}
scores: scores.csv
given: [learning_rate]
measures:
"""


def full_spec() -> str:
    """The spec of the study."""
    lines = [PLAN.worst("euclidean", radius=PLAN.middle["euclidean"])]
    lines += [PLAN.worst(name, radius=list(PLAN.radii(name))) for name in ("adaptive", "inv", "mix")]
    lines += [*PLAN.parts(), PLAN.members(), *PLAN.relaxations()]
    lines += [measure("gradient-norm", ["euclidean", "adaptive", "inv"])]
    lines += [PLAN.worst(name, radius=PLAN.middle[name], normalise_logits="true") for name in ("adaptive", "inv")]
    return HEAD + "".join(lines)


def fast_spec() -> str:
    """Two of its measures, to try the code."""
    return HEAD + "".join(PLAN.worst(name, radius=PLAN.middle[name]) for name in ("adaptive", "inv"))
