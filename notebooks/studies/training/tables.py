"""Which learning rates and radii are chosen, how wide the range of good ones is, and the tables and figure of runs.

Runs are rows of a DataFrame: what they have in common with others, the place of their seed, and the outcome, losses
infinite where a run left the finite numbers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import scipy.stats
from matplotlib.figure import Figure

from studies.common import Floats, Record, Tables, minus, table
from studies.training.adapters import ADAMW, CANDIDATES
from studies.training.merging import OURS as MERGED
from studies.training.sharpness_aware import BARE, SHORT, TASKS, UNITS

GOOD = 1.02  # a loss over the least, up to which a learning rate is good
LEARNT = 0.95 * math.log(2)  # nats: whoever ends above it has hardly left the start, which guesses between two classes
NONE = "—"
Name = TypeVar("Name", bound=Hashable)

# ---- means over seeds


class Mean(NamedTuple):
    """Hold a mean over seeds, its 95 % confidence interval and the p-value of the mean 0, of Student's t."""

    value: float
    low: float
    high: float
    p: float

    @property
    def decided(self) -> bool:
        """Return whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0

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


def significant(gaps: Mapping[Name, Mean], level: float = 0.05) -> set[Name]:
    """Return the names of means that differ from 0, whatever their number, by Holm's correction [Holm 1979]."""
    rest, found = sorted(gaps, key=lambda name: gaps[name].p), set()
    for place, name in enumerate(rest):
        if gaps[name].p > level / (len(rest) - place):
            break
        found.add(name)
    return found


# ---- choices


def frame(done: Sequence[Record], kind: str) -> pd.DataFrame:
    """Return a row for every run: what it has in common with others ("cell" or "ball"), and its outcome."""
    rows = [{**each[kind], "seed": s, **out} for each in done for s, out in enumerate(each["outcomes"])]
    runs = pd.DataFrame(rows).drop(columns="seeds")
    return runs.astype(dict.fromkeys(("validation", "test", "error"), float)).fillna(math.inf)


def curve(runs: pd.DataFrame, optimizer: str, rank: int, scale: float = 1.0) -> pd.DataFrame:
    """Return the runs of an optimizer, rank and start, from the lowest rate to the highest."""
    wanted = (runs.optimizer == optimizer) & (runs["rank"] == rank) & (runs.scale == scale)
    return runs[wanted].sort_values(["rate", "seed"])


def best(runs: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return the runs whose rate or radius has the least mean loss on what choices are made by."""
    return runs[runs[by] == runs.groupby(by).validation.mean().idxmin()]


def chosen(runs: pd.DataFrame, optimizer: str, rank: int, scale: float = 1.0, seeds: int | None = None) -> pd.DataFrame:
    """Return the runs at the chosen rate, of all or of the first seeds."""
    own = curve(runs, optimizer, rank, scale)
    return best(own if seeds is None else own[own.seed < seeds], "rate")


def width(runs: pd.DataFrame, good: float | None = None) -> tuple[float, bool]:
    """Return how many decades of rates around the best are good, and whether that range is cut off by those tried.

    Between rates that were tried the mean test loss is interpolated linearly in log(rate), and counts as 10 nats where
    runs left the finite numbers. good: the largest loss of a good rate; of itself `GOOD` times the least.
    """
    means = runs.groupby("rate").test.mean().clip(upper=10.0)  # no slope leads to infinity
    rates, losses = np.log10(means.index.to_numpy()), means.to_numpy()
    place = int(np.argmin(losses))
    limit = GOOD * float(losses[place]) if good is None else good
    if losses[place] > limit:
        return 0.0, False
    left, cut_left = _reach(rates[place::-1], losses[place::-1], limit)
    right, cut_right = _reach(rates[place:], losses[place:], limit)
    return left + right, cut_left or cut_right


def _reach(rates: Floats, losses: Floats, limit: float) -> tuple[float, bool]:
    """Return how far from the first rate the loss stays below the limit, and whether it does to the end."""
    beyond = np.flatnonzero(losses > limit)
    if len(beyond) == 0:
        return abs(float(rates[-1] - rates[0])), True
    end = int(beyond[0])
    share = (limit - losses[end - 1]) / (losses[end] - losses[end - 1])
    return abs(float(rates[end - 1] + share * (rates[end] - rates[end - 1]) - rates[0])), False


# ---- tables


def tables(record: Record) -> Tables:
    """Return all tables of the study."""
    plan, runs = record["plan"], frame(record["trained"], "cell")
    return {
        "losses": _losses(plan, runs),
        "widths": _widths(plan["ranks"], runs),
        "starts": _starts(plan, runs),
        "time": _time(record["costs"], frame(record["timed"], "cell")),
        **_sam(plan["radii"], frame(record["flattened"], "ball")),
        "merging": _merging(record["mixed"]),
    }


def _losses(plan: Record, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the loss of every optimizer at its chosen rate, by rank, after equal steps."""
    keys = [(rank, name) for rank in plan["ranks"] for name in CANDIDATES]
    of = {(rank, name): chosen(runs, name, rank) for rank, name in keys}
    gaps = {(rank, name): difference(of[rank, name], of[rank, ADAMW]) for rank, name in keys if name != ADAMW}
    told = significant(gaps)
    less = {key: f"{gap}{' *' * (key in told)}" for key, gap in gaps.items()}
    rows = [
        [
            name,
            CANDIDATES[name][0],
            str(rank),
            _rate(runs, own),
            str(mean_of(own.test)),
            less.get(key, NONE),
            _error(own),
        ]
        for key, own in of.items()
        for rank, name in [key]
    ]
    return table(["optimizer", "from", "rank", "learning rate", "test loss", "less AdamW's", "error"], rows)


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
    """Return how many decades of rates are good, of an optimizer's own best loss and of the best of all."""
    least = (
        runs[runs.scale == 1.0].groupby(["rank", "optimizer", "rate"]).test.mean().groupby(["rank", "optimizer"]).min()
    )

    def own(name: str, rank: int) -> str:
        """Return the width, and its range when a seed is left out; a dash where no rate trains."""
        if least[rank, name] > LEARNT:
            return NONE
        cells = curve(runs, name, rank)
        others = [width(cells[cells.seed != seed])[0] for seed in cells.seed.unique() if cells.seed.nunique() > 1]
        return said(cells) + (f" ({min(others):.1f} to {max(others):.1f})" if others else "")

    def said(cells: pd.DataFrame, good: float | None = None) -> str:
        decades, cut = width(cells, good)
        return f"{'≥ ' if cut else ''}{decades:.1f}"

    columns = ["optimizer", *(f"rank {rank}" for rank in ranks), *(f"rank {rank}, of all" for rank in ranks)]
    good = {rank: GOOD * least[rank].min() for rank in ranks}
    rows = (
        [name, *(own(name, rank) for rank in ranks), *(said(curve(runs, name, rank), good[rank]) for rank in ranks)]
        for name in CANDIDATES
    )
    return table(columns, rows)


def _starts(plan: Record, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the chosen rates and the losses from starts on one orbit; of the seeds that all starts have."""
    moved, rank, seeds = plan["moved"], plan["middle_rank"], plan["moved_seeds"]
    scales, rows = sorted({1.0, *moved}), []
    for name in CANDIDATES:
        own = {scale: chosen(runs, name, rank, scale, seeds) for scale in scales}
        kept = [curve(runs, name, rank, scale).query("rate == @rate") for rate in own[1.0].rate[:1] for scale in moved]
        losses = [_loss(each.test.mean()) for each in (*own.values(), *kept)]
        rows.append([name, *(_rate(runs, each) for each in own.values()), *losses])
    said = [f"A × {_scale(scale)}" for scale in scales]
    kept_columns = [f"loss, A × {_scale(scale)}, rate as of A × 1" for scale in moved]
    return table(
        ["optimizer", *(f"rate, {scale}" for scale in said), *(f"loss, {scale}" for scale in said), *kept_columns], rows
    )


def _time(costs: Sequence[Record], timed: pd.DataFrame) -> pd.DataFrame:
    """Return what steps cost, and the losses after as many as AdamW's time leaves room for."""
    rows = []
    for cost in costs:
        name, rank = cost["optimizer"], cost["rank"]
        own, usual = curve(timed, name, rank), curve(timed, ADAMW, rank)
        less = NONE if name == ADAMW else str(difference(own, usual))
        spent = [f"{cost['passes']:.0f}", f"{cost['step']:.1f}", str(own.steps.iloc[0])]
        rows.append([name, str(rank), *spent, str(mean_of(own.test)), less])
    return table(["optimizer", "rank", "passes, ms", "step, ms", "steps", "test loss", "less AdamW's"], rows)


def _sam(units: Sequence[float], runs: pd.DataFrame) -> Tables:
    """Return the kinds of SAM at their chosen radii, beside the bare optimizer, and the test losses at all radii."""
    rows, losses = [], []
    for task in TASKS:
        of = {kind: runs[(runs.task == task) & (runs.kind == kind)] for kind in UNITS}
        own = {kind: best(tried, "radius") for kind, tried in of.items()}
        for kind, tried in of.items():
            radius, mean = float(own[kind].radius.iloc[0]), str(mean_of(own[kind].test))
            edge = " †" if radius in (tried.radius.min(), tried.radius.max()) else ""
            less = [NONE if kind == to else str(difference(own[kind], own[to])) for to in (BARE, SHORT)]
            rows.append([task, kind, f"{radius:.2g}{edge}" if UNITS[kind] else NONE, mean, *less, _error(own[kind])])
            if UNITS[kind]:
                losses.append([task, kind, *map(_loss, tried.groupby("radius").test.mean())])
    columns = ["task", "kind", "radius", "test loss", "less AdamW's", "less AdamW's of as many steps", "error"]
    return {"sam": table(columns, rows), "radii": table(["task", "kind", *(f"{u:g} units" for u in units)], losses)}


def _merging(mixed: Sequence[Record]) -> pd.DataFrame:
    """Return what ways to merge lead to, and whether they depend on how an adapter is written."""
    found = pd.DataFrame([{"seed": place, **score} for place, each in enumerate(mixed) for score in each["scores"]])
    ours, rows = found[found.method == MERGED].loss.to_numpy(), []
    for method, own in found.groupby("method", sort=False):
        less = NONE if method == MERGED else str(mean_of(own.loss.to_numpy() - ours))
        change = (own.moved - own.loss).abs().max()
        small = f"{change:.0e}".replace("e-0", "e-")
        changed = NONE if math.isnan(change) else f"{change:.3f}" if change > 1e-3 else small
        rows.append([method, str(mean_of(own.loss)), less, f"{own.error.mean():.3f}", changed])
    return table(
        ["merged by", "test loss", "less that of merge_adapters", "error", "change of the loss by refactoring"], rows
    )


def _error(runs: pd.DataFrame) -> str:
    """Return the mean error over seeds, if all runs have one."""
    return f"{runs.error.mean():.3f}" if np.isfinite(runs.error).all() else "not finite"


def _loss(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "not finite"


def _scale(scale: float) -> str:
    """Return 16 or 1/16."""
    return f"{scale:g}" if scale >= 1 else f"1/{1 / scale:g}"


def figure(record: Record) -> Figure:
    """Draw mean test losses against learning rates, a panel each rank and start; infinite ones are not drawn."""
    plan, runs = record["plan"], frame(record["trained"], "cell")
    starts = [(rank, 1.0) for rank in plan["ranks"]] + [(plan["middle_rank"], scale) for scale in plan["moved"]]
    drawn = Figure(figsize=(2.6 * len(starts), 3.4), layout="constrained")
    panels: Any = drawn.subplots(1, len(starts), squeeze=False)[0]
    for axes, (rank, scale) in zip(panels, starts, strict=True):
        for name, style in zip(CANDIDATES, ("D:", "^-.", "o-", "s--", "v-", "P:", "x--"), strict=True):
            means = curve(runs, name, rank, scale).groupby("rate").test.mean().replace(math.inf, math.nan).dropna()
            axes.plot(means.index, means, style, label=name, markersize=4)
        axes.set(xscale="log", title=f"rank {rank}, A × {_scale(scale)}", ylim=(0.3, 0.8), xlabel="learning rate")
        axes.grid(color="#dddddd")
    panels[0].set_ylabel("test loss (nats)")
    drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8)
    return drawn
