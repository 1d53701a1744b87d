"""Draw measures against a generalisation gap, a point for each model."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quotient_manifolds.plots.canvas import STYLES, Plot, Style, canvas, extent, numbers, plain, plain_ticks, style_of
from quotient_manifolds.statistics import COEFFICIENT_NAMES, Correlation, Numbers

LABEL_WIDTH = 38  # letters under a panel; a longer label goes on in another line


@dataclass(frozen=True)
class Panel:
    """Hold a measure x and the gap y of every model, None where not measured, and half lengths of error bars."""

    label: str
    x: Numbers
    y: Numbers
    correlation: Correlation | None = None
    x_errors: Numbers | None = None
    y_errors: Numbers | None = None
    style: Style = STYLES[2]


@dataclass(frozen=True)
class Colour:
    """Hold what colours all panels, by model: numbers along a scale, or text, a colour and marker each."""

    label: str
    values: Sequence[float | str | None]

    @property
    def on_a_scale(self) -> bool:
        return not any(isinstance(value, str) for value in self.values)


def scatter_figure(
    panels: Sequence[Panel],
    *,
    y_label: str,
    colour: Colour | None = None,
    columns: int = 3,
) -> Plot:
    """Draw the gap against each measure, in a panel titled with correlation and interval. [paper, Fig. 3 to 5]

    x is logarithmic where its values span more than a factor of ten. A model with x or y missing is not drawn, and
    the text alternative counts it.
    """
    if not panels:
        raise ValueError("A scatter plot needs at least one panel, found none.")
    _check_lengths(panels, colour)
    with canvas("", y_label, panels=len(panels), columns=columns) as (figure, all_axes):
        for axes, panel in zip(all_axes, panels, strict=True):
            _points(axes, panel, colour)
            x = numbers(panel.x)[_present(panel)]
            if len(x) and x.min() > 0 and x.max() > 10 * x.min():
                axes.set_xscale("log")
            plain_ticks(axes)
            axes.set_xlabel(textwrap.fill(plain(panel.label), LABEL_WIDTH))
            axes.set_title(_title(panel))
        if colour is not None:
            _key(figure, all_axes, colour)
    alt = " ".join(_words(panel, y_label) for panel in panels)
    return Plot(figure, f"{alt} Colour shows {colour.label}." if colour else alt)


def _check_lengths(panels: Sequence[Panel], colour: Colour | None) -> None:
    by_model = [values for panel in panels for values in (panel.x, panel.y)]
    lengths = {len(each) for each in (*by_model, colour.values if colour else None) if each is not None}
    if len(lengths) > 1:
        raise ValueError(f"All panels and the colour need one value a model, found lengths {sorted(lengths)}.")


def _present(panel: Panel) -> NDArray[np.bool_]:
    return np.isfinite(numbers(panel.x)) & np.isfinite(numbers(panel.y))


def _points(axes: Any, panel: Panel, colour: Colour | None) -> None:
    there = _present(panel)
    series: list[tuple[str | None, Style, NDArray[np.bool_]]] = [(None, panel.style, there)]
    if colour is not None and colour.on_a_scale:
        axes.errorbar(*_bars(panel, there), fmt="none", ecolor="#808080", elinewidth=0.8)
        look = {"norm": _norm(colour), "cmap": "cividis", "edgecolors": "#808080", "plotnonfinite": True}
        values = numbers(colour.values)[there]  # type: ignore[arg-type]
        axes.scatter(*_bars(panel, there)[:2], c=values, **look)
        return
    if colour is not None:
        names = np.array(["missing" if value is None else str(value) for value in colour.values])
        levels = sorted(set(names.tolist()))
        series = [(plain(name), style_of(place), there & (names == name)) for place, name in enumerate(levels)]
    for label, style, some in series:
        look = {"fmt": style.marker, "color": style.colour, "markerfacecolor": f"{style.colour}55", "elinewidth": 0.8}
        axes.errorbar(*_bars(panel, some), **look, label=label)


def _bars(panel: Panel, there: NDArray[np.bool_]) -> tuple[Any, Any, Any, Any]:
    """Return x, y and the half lengths of the bars in y and x, as matplotlib takes them, of some models."""
    errors = [None if some is None else numbers(some)[there] for some in (panel.y_errors, panel.x_errors)]
    return numbers(panel.x)[there], numbers(panel.y)[there], errors[0], errors[1]


def _norm(colour: Colour) -> Any:
    """Return the scale of colours, logarithmic where values span about a factor of ten, as learning rates do."""
    from matplotlib.colors import LogNorm, Normalize

    values = numbers(colour.values)  # type: ignore[arg-type]
    values = values[np.isfinite(values)]
    if not len(values):
        return Normalize(0, 1)
    low, high = float(values.min()), float(values.max())
    return LogNorm(low, high) if low > 0 and high > 9 * low else Normalize(low, high)


def _key(figure: Any, axes: Sequence[Any], colour: Colour) -> None:
    if colour.on_a_scale:
        bar = figure.colorbar(axes[0].collections[-1], ax=axes, label=plain(colour.label))
        bar.solids.set_rasterized(False)
        bar.solids.set_edgecolor("face")
        return
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, title=plain(colour.label), loc="outside upper center", ncols=3, frameon=False)


def _title(panel: Panel) -> str:
    return "" if panel.correlation is None else f"{COEFFICIENT_NAMES[panel.correlation.kind]} {panel.correlation}"


def _words(panel: Panel, y_label: str) -> str:
    there = _present(panel)
    missing = int((~there).sum())
    count = f"{int(there.sum())} models" + (f", {missing} without a value not drawn" if missing else "")
    text = f"{panel.label} against {y_label}, {count}"
    if there.any():
        text += f"; {extent(numbers(panel.x)[there])} and {extent(numbers(panel.y)[there])}"
    return f"{text}; {_title(panel)}." if panel.correlation else f"{text}."
