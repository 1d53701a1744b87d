"""The figure: test loss against learning rate, a panel each rank and start."""

from __future__ import annotations

import math

import numpy as np

from quotient_manifolds.plots import Plot
from quotient_manifolds.plots.canvas import canvas, style_of
from studies.training.adapters import Trained
from studies.training.choices import curve, losses_of
from studies.training.optimizers import CANDIDATES
from studies.training.study import Training
from studies.training.tables import said_scale

SIZE = (2.6, 3.4)  # inches a panel


def figure(found: Training) -> Plot:
    """Draw mean test losses against learning rates; runs that left the finite numbers are not drawn."""
    starts = [(rank, 1.0) for rank in found.plan.ranks] + [
        (found.plan.middle_rank, scale) for scale in found.plan.moved
    ]
    words = []
    with canvas("learning rate", "test loss (nats)", panels=len(starts), size=SIZE) as (picture, panels):
        for axes, (rank, scale) in zip(panels, starts, strict=True):
            for place, name in enumerate(CANDIDATES):
                cells, style = curve(found.trained, name, rank, scale), style_of(place)
                losses = [float(np.mean(losses_of(each.outcomes))) for each in cells]
                drawn = [
                    (each.cell.rate, loss) for each, loss in zip(cells, losses, strict=True) if math.isfinite(loss)
                ]
                rates, heights = zip(*drawn, strict=True) if drawn else ((), ())
                axes.plot(
                    rates,
                    heights,
                    color=style.colour,
                    marker=style.marker,
                    linestyle=style.line,
                    label=name,
                    markersize=4,
                )
            axes.set(xscale="log", title=f"rank {rank}, A × {said_scale(scale)}", ylim=(0.3, 0.8))
            best = {name: min(curve(found.trained, name, rank, scale), key=_height) for name in CANDIDATES}
            words.append(
                f"rank {rank}, A × {said_scale(scale)}: "
                + ", ".join(f"{name} {_height(each):.3f} at {each.cell.rate:g}" for name, each in best.items())
            )
        picture.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8)
    return Plot(picture, f"Mean test loss against the learning rate. Least: {'; '.join(words)}.")


def _height(each: Trained) -> float:
    return float(np.mean(losses_of(each.outcomes)))
