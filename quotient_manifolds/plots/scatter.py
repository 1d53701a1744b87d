"""A measure against a generalisation gap, a point a model."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quotient_manifolds.plots.canvas import SIZE, STYLES, Plot, Style, canvas, numbers, plain, plain_ticks, style_of
from quotient_manifolds.statistics import NAMES, Correlation

Values = Sequence[float | None] | NDArray[Any]

LABEL_WIDTH = 38  # letters under a panel; a longer label goes on in another line


@dataclass(frozen=True)
class Panel:
    """One measure: x the measure, y the gap, by model; errors are half lengths of error bars. None: not measured."""

    label: str
    x: Values
    y: Values
    correlation: Correlation | None = None
    x_errors: Values | None = None
    y_errors: Values | None = None
    style: Style = STYLES[2]


@dataclass(frozen=True)
class Colour:
    """What colours the points of every panel, by model: numbers along a scale, or text, a colour and marker each."""

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
    names: Sequence[str] | None = None,
) -> Plot:
    """A panel a measure, titled with its correlation and interval. [paper, Fig. 3 to 5]

    names: of the models, shown under the pointer where the figure is an SVG in a page.

    x is logarithmic where its values span more than a factor of ten. A model with x or y missing is not drawn, and
    the text alternative counts it.
    """
    if not panels:
        raise ValueError("A scatter plot needs at least one panel, found none.")
    _check_lengths(panels, colour, names)
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    named: dict[str, list[str]] = {}
    with canvas("", y_label, rows=rows, columns=columns, size=SIZE) as (figure, all_axes):
        for axes, panel in zip(all_axes, panels, strict=False):
            for kept, drawn in _points(axes, panel, colour):
                if names is not None:
                    drawn.set_gid(f"models-{len(named)}")
                    named[drawn.get_gid()] = [name for name, here in zip(names, kept, strict=True) if here]
            x = numbers(panel.x)[_present(panel)]
            if len(x) and x.min() > 0 and x.max() > 10 * x.min():
                axes.set_xscale("log")
            plain_ticks(axes)
            axes.set_xlabel(textwrap.fill(plain(panel.label), LABEL_WIDTH))
            axes.set_title(_title(panel))
        for axes in all_axes[len(panels) :]:
            axes.remove()
        if colour is not None:
            _key(figure, all_axes[: len(panels)], colour)
    alt = " ".join(_words(panel, y_label) for panel in panels)
    return Plot(figure, f"{alt} Colour shows {colour.label}." if colour else alt, named)


def _check_lengths(panels: Sequence[Panel], colour: Colour | None, names: Sequence[str] | None) -> None:
    lengths = {len(panel.x) for panel in panels} | {len(panel.y) for panel in panels}
    if colour is not None:
        lengths.add(len(colour.values))
    if names is not None:
        lengths.add(len(names))
    if len(lengths) > 1:
        raise ValueError(
            f"All panels, the colour and the names need one value a model, found lengths {sorted(lengths)}."
        )


def _present(panel: Panel) -> NDArray[np.bool_]:
    return np.isfinite(numbers(panel.x)) & np.isfinite(numbers(panel.y))


def _categories(colour: Colour | None, panel: Panel) -> list[tuple[str | None, Style, NDArray[np.bool_]]]:
    """Label, style and models: one a category, or all models in the panel's style."""
    if colour is None:
        return [(None, panel.style, _present(panel))]
    names = np.array(["missing" if value is None else str(value) for value in colour.values])
    levels = sorted(set(names.tolist()))
    return [(level, style_of(place), _present(panel) & (names == level)) for place, level in enumerate(levels)]


def _points(axes: Any, panel: Panel, colour: Colour | None) -> Iterator[tuple[NDArray[np.bool_], Any]]:
    """Draws the points; gives which models are among each series, and what draws its markers."""
    if colour is not None and colour.on_a_scale:
        kept = _present(panel)
        axes.errorbar(*_bars(panel, kept), fmt="none", ecolor="#808080", elinewidth=0.8)
        x, y, *_ = _bars(panel, kept)
        values = numbers(colour.values)[kept]  # type: ignore[arg-type]
        yield (
            kept,
            axes.scatter(x, y, c=values, norm=_norm(colour), cmap="cividis", edgecolors="#808080", plotnonfinite=True),
        )
        return
    for label, style, kept in _categories(colour, panel):
        filled = f"{style.colour}55"
        bars = axes.errorbar(
            *_bars(panel, kept),
            fmt=style.marker,
            color=style.colour,
            markerfacecolor=filled,
            elinewidth=0.8,
            label=None if label is None else plain(label),
        )
        yield kept, bars.lines[0]


def _bars(panel: Panel, kept: NDArray[np.bool_]) -> tuple[Any, Any, Any, Any]:
    """x, y and the half lengths of the bars in y and x, as matplotlib takes them, of the models `kept`."""
    errors = [None if some is None else numbers(some)[kept] for some in (panel.y_errors, panel.x_errors)]
    return numbers(panel.x)[kept], numbers(panel.y)[kept], errors[0], errors[1]


def _norm(colour: Colour) -> Any:
    """Logarithmic where the values span about a factor of ten or more, as learning rates do."""
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
        bar.solids.set_rasterized(False)  # an SVG without pictures inside
        bar.solids.set_edgecolor("face")
        return
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, title=plain(colour.label), loc="outside upper center", ncols=3, frameon=False)


def _title(panel: Panel) -> str:
    return "" if panel.correlation is None else f"{NAMES[panel.correlation.kind]} {panel.correlation}"


def _words(panel: Panel, y_label: str) -> str:
    there = _present(panel)
    missing = int((~there).sum())
    count = f"{int(there.sum())} models" + (f", {missing} without a value not drawn" if missing else "")
    text = f"{panel.label} against {y_label}, {count}"
    if there.any():
        x, y = numbers(panel.x)[there], numbers(panel.y)[there]
        text += f"; from {x.min():.3g} to {x.max():.3g} and from {y.min():.3g} to {y.max():.3g}"
    return f"{text}; {_title(panel)}." if panel.correlation else f"{text}."
