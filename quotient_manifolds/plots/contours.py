"""Draw level sets of functions on a plane, a panel for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quotient_manifolds.plots.canvas import Plot, canvas

SIZE = (3.9, 3.1)  # inches; panels are square, and have a bar of colours beside them
LEVELS = 9
CONSTANT = 1e-9  # a field that varies by less than this part of its size is drawn as constant


@dataclass(frozen=True)
class Field:
    """Hold a function on the plane: values by place, rows along y, columns along x."""

    title: str
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Hold a line to draw over every panel, and what it is in words; NaN interrupts it."""

    label: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]


def contour_figure(
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    fields: Sequence[Field],
    *,
    x_label: str,
    y_label: str,
    curves: Sequence[Curve] = (),
    columns: int = 3,
) -> Plot:
    """Draw the level sets of each field in a panel, with about as many points of the plane between any two levels.

    Raises ValueError if there is no field, or one has another shape than (len(y), len(x)) or a value not finite.
    """
    _check(x, y, fields)
    with canvas(x_label, y_label, panels=len(fields), columns=columns, size=SIZE) as (figure, all_axes):
        for axes, field in zip(all_axes, fields, strict=True):
            _panel(figure, axes, x, y, field)
            for curve in curves:
                axes.plot(curve.x, curve.y, color="#ffffff", linewidth=2.6)  # seen on any colour of the map
                axes.plot(curve.x, curve.y, color="#000000", linewidth=1.1, linestyle=(0, (4, 2)))
            axes.set(xlim=(x[0], x[-1]), ylim=(y[0], y[-1]), aspect="equal", title=field.title)
            axes.grid(visible=False)
    drawn = "".join(f" Dashed: {curve.label}." for curve in curves)
    plane = f"{x_label} from {_number(x[0])} to {_number(x[-1])} and {y_label} from {_number(y[0])} to {_number(y[-1])}"
    return Plot(figure, f"Level sets over {plane}. {'; '.join(map(_words, fields))}.{drawn}")


def _check(x: NDArray[np.float64], y: NDArray[np.float64], fields: Sequence[Field]) -> None:
    if not fields:
        raise ValueError("Level sets need at least one field, found none.")
    for field in fields:
        if field.values.shape != (len(y), len(x)) or not np.isfinite(field.values).all():
            found = f"shape {field.values.shape}, {int((~np.isfinite(field.values)).sum())} values not finite"
            raise ValueError(f"Field {field.title!r} needs finite values of shape {(len(y), len(x))}, found {found}.")


def _panel(figure: Any, axes: Any, x: NDArray[np.float64], y: NDArray[np.float64], field: Field) -> None:
    from matplotlib.colors import BoundaryNorm

    levels = _levels(field.values)
    if len(levels) < 2:
        axes.text(0.5, 0.5, f"{_number(levels[0])} everywhere", transform=axes.transAxes, ha="center", va="center")
        return
    norm = BoundaryNorm(levels, 256, extend="both")  # a colour a band, however unevenly the levels lie
    filled = axes.contourf(x, y, field.values, levels, cmap="cividis", norm=norm, extend="both")
    filled.set(edgecolor="#000000", linewidth=0.3)
    figure.colorbar(filled, ax=axes, ticks=levels, format=lambda level, _: _number(level))


def _levels(values: NDArray[np.float64]) -> list[float]:
    """Return quantiles to two digits, ascending; one level for a constant."""
    size = float(np.abs(values).max())
    if float(np.ptp(values)) <= CONSTANT * size:
        return [float(f"{np.median(values):.6g}")]
    quantiles = np.quantile(values, np.linspace(0, 1, LEVELS + 2)[1:-1])
    for digits in range(2, 17):
        levels = sorted({float(f"{level:.{digits}g}") for level in quantiles})
        if len(levels) > 1:
            return levels
    return [float(values.min()), float(values.max())]


def _words(field: Field) -> str:
    if len(_levels(field.values)) < 2:
        return f"{field.title} constant, {_number(_levels(field.values)[0])}"
    return f"{field.title} from {_number(field.values.min())} to {_number(field.values.max())}"


def _number(value: float) -> str:
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")
