"""Which learning rates are chosen, how wide the range of good ones is, and the tables and figure of runs.

Runs are rows of a DataFrame: what they have in common with others, the place of their seed, and the outcome, losses
infinite where a run left the finite numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.stats
from matplotlib.figure import Figure

from quotient_manifolds.statistics import holm
from studies.common import Record, Tables, minus
from studies.training.study import ADAMW, CANDIDATES

GOOD = 1.02  # a loss over the least, up to which a learning rate is good
LEARNT = 0.95 * math.log(2)  # nats: whoever ends above it has hardly left the start, which guesses between two classes
NONE = "—"

# ---- means over seeds


class Mean(NamedTuple):
    """Hold a mean over seeds, its 95 % confidence interval and the p-value of the mean 0, of Student's t."""

    value: float
    low: float
    high: float
    p: float

    def __str__(self) -> str:
        """Return 0.376 [0.370, 0.382]."""
        if not math.isfinite(self.value):
            return "not finite"
        return minus(f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]")


def mean_of(values: Sequence[float] | pd.Series[float]) -> Mean:
    """Return the mean of values of several seeds; of values that are all alike the interval is a point.

    A mean that is infinite, of a run that left the finite numbers, is told from 0; one that is undefined is not.
    """
    values = list(values)
    value = sum(values) / len(values)
    if len(values) < 2 or not math.isfinite(value) or float(np.ptp(values)) == 0:
        told = math.isinf(value) or (len(values) > 1 and math.isfinite(value) and value != 0)
        return Mean(value, value, value, 0.0 if told else 1.0)
    tested = scipy.stats.ttest_1samp(values, 0.0)
    low, high = tested.confidence_interval(0.95)
    return Mean(value, float(low), float(high), float(tested.pvalue))


def difference(one: pd.DataFrame, other: pd.DataFrame) -> Mean:
    """Return the mean over seeds of the test loss of one less that of the other."""
    return mean_of([a - b for a, b in zip(one.test, other.test, strict=True)])


# ---- choices


def frame(done: Sequence[Record]) -> pd.DataFrame:
    """Return a row for every run: what it has in common with others, and its outcome."""
    rows = [{**each["cell"], "seed": s, **out} for each in done for s, out in enumerate(each["outcomes"])]
    runs = pd.DataFrame(rows).drop(columns="seeds")
    return runs.astype(dict.fromkeys(("validation", "test", "error"), float)).fillna(math.inf)


def curve(runs: pd.DataFrame, optimizer: str, rank: int, scale: float = 1.0) -> pd.DataFrame:
    """Return the runs of an optimizer, rank and start, from the lowest rate to the highest."""
    wanted = (runs.optimizer == optimizer) & (runs["rank"] == rank) & (runs.scale == scale)
    return runs[wanted].sort_values(["rate", "seed"])


def chosen(runs: pd.DataFrame, optimizer: str, rank: int, scale: float = 1.0, seeds: int | None = None) -> pd.DataFrame:
    """Return the runs, of all or of the first seeds, at the rate of the least mean loss on what it is chosen by."""
    own = curve(runs, optimizer, rank, scale)
    own = own if seeds is None else own[own.seed < seeds]
    return own[own.rate == own.groupby("rate").validation.mean().idxmin()]


def width(runs: pd.DataFrame, good: float | None = None) -> tuple[float, bool]:
    """Return how many decades of rates around the best are good, and whether that range is cut off by those tried.

    Between rates that were tried the mean test loss is interpolated linearly in log(rate), and counts as 10 nats where
    runs left the finite numbers. good: the largest loss of a good rate; of itself `GOOD` times the least.
    """
    means = runs.groupby("rate").test.mean().clip(upper=10.0)  # no slope leads to infinity
    x, y = np.log10(means.index.to_numpy()), means.to_numpy()
    place, limit = int(y.argmin()), GOOD * float(y.min()) if good is None else good
    above = y > limit
    if above[place]:
        return 0.0, False
    steps = np.flatnonzero(above[1:] != above[:-1])  # between a rate that is good and one that is not
    crossings = x[steps] + (limit - y[steps]) / (y[steps + 1] - y[steps]) * (x[steps + 1] - x[steps])
    left, right = crossings[steps < place], crossings[steps >= place]
    reach = (right[0] if len(right) else x[-1]) - (left[-1] if len(left) else x[0])
    return float(reach), not (len(left) and len(right))


# ---- tables


def tables(record: Record) -> Tables:
    """Return all tables of the study."""
    plan, runs = record["plan"], frame(record["trained"])
    return {
        "losses": (losses := _losses(plan, runs)),
        "overview": _overview(losses),
        "widths": _widths(plan["ranks"], runs),
        "starts": _starts(plan, runs),
    }


def _losses(plan: Record, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the loss of every optimizer at its chosen rate, by rank, after equal steps."""
    of = {(rank, name): chosen(runs, name, rank) for rank in plan["ranks"] for name in CANDIDATES}
    gaps = {(rank, name): difference(own, of[rank, ADAMW]) for (rank, name), own in of.items() if name != ADAMW}
    corrected = dict(zip(gaps, holm([gap.p for gap in gaps.values()]), strict=True))
    less = {key: f"{gap}{' *' * (corrected[key] <= 0.05)}" for key, gap in gaps.items()}  # type: ignore[operator]
    rows = []
    for (rank, name), own in of.items():
        said = {"optimizer": name, "from": CANDIDATES[name][0], "rank": rank, "learning rate": _rate(runs, own)}
        said |= {"test loss": mean_of(own.test), "less AdamW's": less.get((rank, name), NONE)}
        rows.append(said | {"error": _loss(own.error.mean())})
    return pd.DataFrame(rows)


def _overview(losses: pd.DataFrame) -> pd.DataFrame:
    """Return the test losses with a column for each rank, and the signs of a rate at the end and of significance."""
    signs = (losses["learning rate"].str.contains("†").map({True: " †", False: ""})) + losses["less AdamW's"].map(
        lambda less: " *" if str(less).endswith("*") else ""
    )
    cells = losses.assign(cell=losses["test loss"].map(str) + signs, rank="rank " + losses["rank"].map(str))
    return (
        cells.pivot(index="optimizer", columns="rank", values="cell")[[*cells["rank"].unique()]]
        .loc[[*CANDIDATES]]
        .reset_index()
    )


def _rate(runs: pd.DataFrame, own: pd.DataFrame) -> str:
    """Return a chosen rate, with a dagger where no better one may have been tried; a dash if none left all finite."""
    if not math.isfinite(own.test.mean()):
        return NONE
    first = own.iloc[0]
    validation = curve(runs, first.optimizer, first["rank"], first.scale).groupby("rate").validation.mean()
    rates = validation.index[np.isfinite(validation)]
    at_edge = not len(rates) or first.rate in (rates[0], rates[-1])
    return f"{first.rate:.2g}{' †' if at_edge else ''}"


def _widths(ranks: Sequence[int], runs: pd.DataFrame) -> pd.DataFrame:
    """Return how many decades of rates are good, of an optimizer's own best loss and of the best of all.

    In parentheses the range when a seed is left out; a dash where no rate trains.
    """
    means = runs[runs.scale == 1.0].groupby(["rank", "optimizer", "rate"]).test.mean()
    least = means.groupby(["rank", "optimizer"]).min()

    def said(cells: pd.DataFrame, good: float | None = None) -> str:
        decades, cut = width(cells, good)
        return f"{'≥ ' if cut else ''}{decades:.1f}"

    def own(name: str, rank: int) -> str:
        if least[rank, name] > LEARNT:
            return NONE
        cells = curve(runs, name, rank)
        others = [width(cells[cells.seed != seed])[0] for seed in cells.seed.unique() if cells.seed.nunique() > 1]
        return said(cells) + (f" ({min(others):.1f} to {max(others):.1f})" if others else "")

    return pd.DataFrame(
        {"optimizer": name}
        | {f"rank {rank}": own(name, rank) for rank in ranks}
        | {f"rank {rank}, of all": said(curve(runs, name, rank), GOOD * least[rank].min()) for rank in ranks}
        for name in CANDIDATES
    )


def _starts(plan: Record, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the chosen rates and the losses from starts on one orbit; of the seeds that all starts have."""
    moved, rank, seeds = plan["moved"], plan["middle_rank"], plan["moved_seeds"]
    rows = []
    for name in CANDIDATES:
        own = {scale: chosen(runs, name, rank, scale, seeds) for scale in sorted({1.0, *moved})}
        row = {"optimizer": name} | {f"rate, {_start(scale)}": _rate(runs, each) for scale, each in own.items()}
        row |= {f"loss, {_start(scale)}": _loss(each.test.mean()) for scale, each in own.items()}
        for scale in moved:
            kept = curve(runs, name, rank, scale)
            kept = kept[kept.rate == own[1.0].rate.iloc[0]]
            row[f"loss, {_start(scale)}, rate as of A × 1"] = _loss(kept.test.mean())
        rows.append(row)
    return pd.DataFrame(rows)


def _loss(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "not finite"


def _start(scale: float) -> str:
    """Return "A × 16" or "A × 1/16"."""
    return f"A × {scale:g}" if scale >= 1 else f"A × 1/{1 / scale:g}"


def figure(record: Record) -> Figure:
    """Draw mean test losses against learning rates, a panel each rank and start; infinite ones are not drawn."""
    plan, runs = record["plan"], frame(record["trained"])
    starts = [(rank, 1.0) for rank in plan["ranks"]] + [(plan["middle_rank"], scale) for scale in plan["moved"]]
    rows = len(starts) // 2 + 1  # of two panels, readable on a page; one of them is the legend's
    drawn = Figure(figsize=(7.2, 2.6 * rows), layout="constrained")
    panels: Any = drawn.subplots(rows, 2, squeeze=False).ravel()
    for axes, (rank, scale) in zip(panels, starts, strict=False):
        for name, style in zip(CANDIDATES, ("D:", "^-.", "o-", "s--", "v-", "P:", "x--"), strict=True):
            means = curve(runs, name, rank, scale).groupby("rate").test.mean().replace(math.inf, math.nan).dropna()
            axes.plot(means.index, means, style, label=name, markersize=4)
        axes.set(xlabel="learning rate", ylabel="test loss (nats)", title=f"rank {rank}, {_start(scale)}")
        axes.set(xscale="log", ylim=(0.3, 0.8))
        axes.grid(color="#dddddd")
    for axes in panels[len(starts) :]:
        axes.axis("off")
    drawn.legend(*panels[0].get_legend_handles_labels(), loc="lower right", bbox_to_anchor=(0.9, 0.08))
    return drawn
