"""Hold the table of the page: what the paper found, and what was found here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from studies.ascents import Ascents
from studies.paper import MIX_STRAIGHT, MODELS, SETTING, TAU
from studies.results.claims import HOW, METRICS, ZOOS, said
from studies.results.estimates import Estimate
from studies.results.records import Records
from studies.results.settings import DiagonalZoo
from studies.results.zoos import ModelZoo
from studies.toy import Toy
from studies.wording import minus, signed

NOT_RUN = "not run"
NOTEBOOKS = {
    "1": "1_symmetry_and_the_toy_model.ipynb",
    "2": "2_quotient_manifolds_from_scratch.ipynb",
    "3": "3_attention_and_its_orbit.ipynb",
    "4": "4_diagonal_networks_and_the_sign.ipynb",
    "5": "5_sharpness_of_a_real_transformer.ipynb",
    "6": "6_a_zoo_from_start_to_end.ipynb",
}
RECORDS = {
    "toy": "toy.json",
    "ascents": "ascents.json",
    "diagonal": "diagonal.json",
    "vit": "vit/comparison.json.gz",
    "bert": "bert/comparison.json.gz",
}


@final
@dataclass(frozen=True)
class Row:
    """Hold one result. paper, here: lines of a cell; study: the name of study and record, "" where there is none."""

    what: str
    paper: tuple[str, ...]
    here: tuple[str, ...]
    study: str
    notebook: str = ""


def table_one(records: Records) -> Iterator[Row]:
    """Yield every row of the paper's Table 1."""
    for key, taus in TAU.items():
        for name, tau in taus.items():
            paper = (f"{signed(tau)}", f"{MODELS[key]}; Table 1")
            if key == "diagonal":
                names = [f"{name} {how}" for how in HOW] if name in METRICS else [name]
                here = _by_setting(records.diagonal, names)
            else:
                here = _lines(records.zoos[key], [name])
            yield Row(f"{SETTING[key]}: {name}", paper, here, key, NOTEBOOK_OF[key])


NOTEBOOK_OF = {"diagonal": "4", "vit": "6", "bert": "6"}


def figures(records: Records) -> Iterator[Row]:
    """Yield a counterpart of every figure of the paper."""
    toy, zoos = records.toy, records.zoos
    yield Row("Fig. 1: level sets of the toy model", ("no number",), _spread(toy, "gradient norm"), "toy", "1")
    yield Row("Fig. 2: sketch of the quotient", ("no number",), ("built step by step, no number",), "", "2")
    names = ["adaptive", *(f"{metric} {how}" for metric in METRICS for how in HOW)]
    yield Row("Fig. 3: diagonal networks", ("as in Table 1",), _by_setting(records.diagonal, names), "diagonal", "4")
    for figure, key in (("Fig. 4", "vit"), ("Fig. 5", "bert")):
        zoo = zoos[key]
        here = (NOT_RUN,) if zoo is None else _loss_gap(zoo)
        yield Row(f"{figure}: {SETTING[key]}, with the gap in loss", ("not given",), here, key, NOTEBOOK_OF[key])
    yield Row("Fig. 6: Hessian traces of the toy model", ("no number",), _spread(toy, "Hessian trace"), "toy", "1")
    for figure, metric in (("Fig. 7", "inv"), ("Fig. 8", "mix")):
        straight = [f"{signed(MIX_STRAIGHT)} without curvature (Fig. 8)"] if metric == "mix" else []
        paper = (f"{signed(TAU['bert'][metric])} whole (Table 1)", *straight, "MNLI")
        names = [metric, f"{metric} first", f"{metric} adaptive norm"]
        for key in ("vit", "bert"):
            what = f"{figure}: ablation of {metric}, {ZOOS[key]}"
            yield Row(what, paper, _lines(zoos[key], names, ABLATED), key, NOTEBOOK_OF[key])
    for key in ("vit", "bert"):
        zoo = zoos[key]
        here = _lines(zoo, ["inv", *(zoo.relaxed if zoo else [])], RELAXED)
        yield Row(
            f"Fig. 9: relaxation, {ZOOS[key]}", ("hardly any effect (MNLI, App. H.2)",), here, key, NOTEBOOK_OF[key]
        )


def beyond(records: Records) -> Iterator[Row]:
    """Yield what the paper leaves open."""
    orders = ["mix first", "mix second", "mix exact", "inv first", "inv second", "inv exact"]
    paper = ("open (Sec. 7)",)
    what, here = "Sign: order of the geodesics, diagonal networks", _by_setting(records.diagonal, orders)
    yield Row(what, paper, here, "diagonal", "4")
    for key in ("vit", "bert"):
        names = ["mix first", "mix", "inv first", "inv", "inv exact"]
        yield Row(f"Sign: order of the geodesics, {ZOOS[key]}", paper, _lines(records.zoos[key], names), key, "5")
    for key, zoo in records.zoos.items():
        lines = (NOT_RUN,) if zoo is None else _family(zoo)
        yield Row(
            f"Metric: t from inv to mix and beyond, {ZOOS[key]}", ("inv and mix only",), lines, key, NOTEBOOK_OF[key]
        )


ABLATED = {"first": "without curvature", "adaptive norm": "without its norm", "": "whole"}
RELAXED = {"": "eps 0"}


def counted(found: Estimate, zoo: ModelZoo) -> str:
    return f"{found}, {zoo.count} {zoo.units}"


def _lines(zoo: ModelZoo | None, names: list[str], words: dict[str, str] | None = None) -> tuple[str, ...]:
    if zoo is None:
        return (NOT_RUN,)
    lines = []
    for name in names:
        if (found := zoo.tau(name)) is not None:
            shown = said(name) if words is None else words.get(name.partition(" ")[2], name.partition(" ")[2])
            lines.append(counted(found, zoo) if len(names) == 1 else f"{shown}: {found}")
    if len(names) > 1 and lines:
        lines.append(f"{zoo.count} {zoo.units}")
    return (*lines,) or ("not measured",)


def _spread(toy: Toy | None, quantity: str) -> tuple[str, ...]:
    """Return largest over smallest along an orbit."""
    if toy is None:
        return (NOT_RUN,)
    found = {geometry: toy.spread(quantity, geometry) for geometry in ("euclidean", "inv", "mix")}
    lines = [f"{geometry}: {_factor(spread)}" for geometry, spread in found.items() if spread is not None]
    return (f"{quantity} along an orbit, largest over smallest:", *lines)


def _ascents(found: Ascents | None) -> tuple[str, ...]:
    if found is None:
        return (NOT_RUN,)
    median, low, high = found.median_ratio("adaptive")
    cases = sum(case.geometry == "adaptive" for case in found.cases)
    return (f"{median:.3f} [{low:.3f}, {high:.3f}], {cases} cases",)


def _factor(spread: float) -> str:
    return f"1 + {minus(f'{spread - 1:.0e}')}" if spread < 1.001 else f"{spread:.3g}"


def _by_setting(zoo: DiagonalZoo | None, names: list[str]) -> tuple[str, ...]:
    """Return the range over the settings, and how many of their intervals lie below, around and above 0."""
    if zoo is None:
        return (NOT_RUN,)
    spreads = {name: zoo.spread(name) for name in names}
    lines = [f"{said(name)}: {'truncation error' if found is None else found}" for name, found in spreads.items()]
    return (*lines, f"by setting, of {len(zoo.settings)}")


def _loss_gap(zoo: ModelZoo) -> tuple[str, ...]:
    found = {name: zoo.tau(name, "loss_gap") for name in ("adaptive", *METRICS)}
    return (*(f"{name}: {tau}" for name, tau in found.items() if tau is not None), f"{zoo.count} {zoo.units}")


def _family(zoo: ModelZoo) -> tuple[str, ...]:
    taus = zoo.family()
    if not taus:
        return ("not measured",)
    least, most = (pick(taus, key=lambda t: taus[t].value) for pick in (min, max))
    return (
        f"smallest at t = {minus(f'{least:g}')}: {taus[least]}",
        f"largest at t = {minus(f'{most:g}')}: {taus[most]}",
        f"{zoo.count} {zoo.units}",
    )
