"""The figures of the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quotient_manifolds.files import write_text
from quotient_manifolds.plots import STYLES, Plot, Style
from quotient_manifolds.plots.canvas import canvas, numbers, plain_ticks
from studies.results.claims import ZOOS, said
from studies.results.estimates import Estimate
from studies.results.records import Records
from studies.results.zoos import DiagonalZoo
from studies.wording import minus

ORDERS = {"mix first": 5, "mix": 1, "mix exact": 2, "inv": 4, "inv exact": 3}  # and the place of its style


def pictures(records: Records) -> dict[str, Plot]:
    """Draw figures, by name of file, of records that are there."""
    found: dict[str, Plot] = {}
    families = {ZOOS[key]: zoo.family() for key, zoo in records.zoos.items() if zoo is not None and zoo.family()}
    if records.diagonal is not None and (exact := records.diagonal.family("exact")):
        families[f"{ZOOS['diagonal']}, exact"] = exact
    if families:
        looks = dict(zip(families, STYLES, strict=False))
        found["family"] = _lines(families, "t (0 is inv, 1 is mix)", looks)
    if (zoo := records.diagonal) is not None:
        orders = {said(name): dict(_by_radius(zoo, name)) for name in ORDERS}
        styles = {said(name): STYLES[place] for name, place in ORDERS.items()}
        found["orders"] = _lines(orders, "radius", styles, log=True)
    return found


def write_pictures(folder: Path, plots: Mapping[str, Plot]) -> None:
    """Return each as NAME.svg, a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in plots.items():
        svg = plot.svg(name).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        write_text(folder / f"{name}.svg", f"{svg}\n")


def _by_radius(zoo: DiagonalZoo, name: str) -> Iterator[tuple[float, Estimate]]:
    for radius in zoo.study.plan.radii:
        if (found := zoo.at(name, radius)) is not None:
            yield radius, found


def _lines(
    groups: Mapping[str, Mapping[float, Estimate]], x_label: str, styles: Mapping[str, Style], *, log: bool = False
) -> Plot:
    """Compute tau with its interval against a number, a line a group."""
    with canvas(x_label, "Kendall’s tau-b with the gap") as (figure, (axes,)):
        axes.axhline(0, color="#808080", linewidth=0.8)
        for words, taus in groups.items():
            style = styles[words]
            low, high = (numbers([getattr(tau, end) for tau in taus.values()]) for end in ("low", "high"))
            axes.fill_between(list(taus), low, high, color=style.colour, alpha=0.15, linewidth=0)
            look: dict[str, Any] = {"color": style.colour, "linestyle": style.line, "marker": style.marker}
            axes.plot(list(taus), [tau.value for tau in taus.values()], **look, label=words)
        axes.set(ylim=(-1.02, 1.02), xscale="log" if log else "linear")
        plain_ticks(axes)
        figure.legend(loc="outside upper center", ncols=2, frameon=False)
    said = "; ".join(
        f"{words}: " + ", ".join(f"{tau} at {minus(f'{x:g}')}" for x, tau in taus.items())
        for words, taus in groups.items()
    )
    return Plot(figure, f"Kendall’s tau-b with the gap against {x_label}. {said}.")
