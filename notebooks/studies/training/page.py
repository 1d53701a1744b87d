"""The page of the documentation: what was found in short, then tables."""

from __future__ import annotations

from importlib import resources
from string import Template

from quotient_manifolds.report import Table
from studies.markdown import table
from studies.training.adapters import BATCH
from studies.training.choices import GOOD, LEARNT
from studies.training.claims import in_short
from studies.training.few import IMAGES, SENTENCES, TASKS
from studies.training.merging import CONDITION, RATE
from studies.training.optimizers import HEAD_RATE, LORA_PLUS
from studies.training.reviews import LONGEST
from studies.training.study import Training
from studies.training.tables import (
    losses_table,
    merging_table,
    radii_table,
    sam_table,
    starts_table,
    time_table,
    widths_table,
)

PAGE = "usefulness.md"
FIGURE = "images/learning_rates.svg"  # as seen from the page


def training_page(found: Training) -> str:
    """Return the page as Markdown."""
    plan, (training, validation, test) = found.plan, found.plan.sizes
    tasks = {f"{name}_{key}": value for name, key, value in _tasks()}
    tables = {
        "losses": losses_table(found),
        "widths": widths_table(found),
        "starts": starts_table(found),
        "time": time_table(found),
        "sam": sam_table(found),
        "radii": radii_table(found),
        "merging": merging_table(found),
    }
    text = (resources.files(__package__) / "page.md").read_text(encoding="utf-8")
    return Template(text).substitute(
        **tasks,
        **{name: _markdown(shown) for name, shown in tables.items()},
        in_short="\n".join(f"- {line}" for line in in_short(found)),
        training=f"{training:,}",
        validation=validation,
        test=test,
        longest=LONGEST,
        head=f"{HEAD_RATE:g}",
        steps=plan.steps,
        batch=BATCH,
        seeds=len(plan.seeds),
        moved_seeds=plan.moved_seeds,
        middle=plan.middle_rank,
        good=f"{100 * (GOOD - 1):.0f}",
        ratio=f"{LORA_PLUS:g}",
        learnt=f"{LEARNT:.2f}",
        radii_tried=", ".join(f"{radius:g}" for radius in plan.radii),
        ball_seeds=len(plan.ball_seeds),
        merge_steps=plan.merging.steps,
        merge_training=plan.merging.training,
        merge_test=plan.merging.test,
        merge_rate=f"{RATE:g}",
        condition=f"{CONDITION:g}",
        figure=FIGURE,
        versions=", ".join(f"{name} {number}" for name, number in found.versions.items()),
        command=found.command,
    )


def _tasks() -> list[tuple[str, str, str]]:
    return [
        (name, key, value)
        for name, few in (("image", TASKS[IMAGES]), ("sentence", TASKS[SENTENCES]))
        for key, value in (
            ("examples", str(few.examples)),
            ("passes", str(few.passes)),
            ("batch", str(few.batch)),
            ("rate", f"{few.rate:g}"),
        )
    ]


def _markdown(shown: Table) -> str:
    return table(shown.columns, shown.rows)
