"""The page of the two experiments: what to put where, what to type, and what it would cost."""

from __future__ import annotations

from importlib import resources
from string import Template

from studies.full_scale.cost import GPU, OVERHEAD, PEAK, UTILISATION, Cost, cost
from studies.full_scale.experiments import EXPERIMENTS, FullScale
from studies.markdown import table

PAGE = "full_scale.md"
GPUS = 8  # of the larger machine
ORIGINAL = ("adaptive", "inv", "mix")  # the measures of the paper's Table 1


def full_scale_page() -> str:
    """Return the page as Markdown; its costs are computed anew."""
    costs = {each: cost(each) for each in EXPERIMENTS}
    text = (resources.files(__package__) / "page.md").read_text(encoding="utf-8")
    return Template(text).substitute(
        costs=cost_table(costs),
        measures=operation_table(costs),
        gpus=GPUS,
        gpu=GPU,
        peak=f"{PEAK / 1e12:g}e12",
        utilisation=f"{100 * UTILISATION:.0f} %",
        low=f"{min(OVERHEAD.values()):g}",
        high=f"{max(OVERHEAD.values()):g}",
    )


def cost_table(costs: dict[FullScale, Cost]) -> str:
    """Tabulate hours in all, and of what the paper's Table 1 has."""
    columns = ["Spec", "Models", "Measures", "Passes", "GPU hours", f"Hours on {GPUS} GPUs", "Table 1 alone, GPU hours"]
    rows = [
        [
            *(f"`{each.spec}`", str(each.models), str(len(found.measures)), f"{found.passes:,}"),
            *(f"{hours:.0f}" for hours in (found.hours, found.hours / GPUS, _original(found))),
        ]
        for each, found in costs.items()
    ]
    total = sum(found.hours for found in costs.values())
    rows.append(["both", "", "", "", f"{total:.0f}", f"{total / GPUS:.0f}", ""])
    return table(columns, rows)


def _original(found: Cost) -> float:
    """Add up hours of adaptive, inv and mix at one radius each, and the scores."""
    hours = [next(value for label, value in found.measures.items() if label.startswith(name)) for name in ORIGINAL]
    return sum(hours) + found.scores


def operation_table(costs: dict[FullScale, Cost]) -> str:
    """Return what the hours come from."""
    rows = [
        [
            *(each.model_name, str(found.batch_size)),
            *(f"{count / 1e12:.2f}e12" for count in (found.operations.forward, found.operations.backward)),
            *(f"{hours:.1f}" for hours in (min(found.measures.values()), max(found.measures.values()), found.scores)),
        ]
        for each, found in costs.items()
    ]
    columns = ["Model", "Batch", "Operations forward", "Backward"]
    return table([*columns, "GPU hours, cheapest measure", "Dearest", "Scores on data and test"], rows)
