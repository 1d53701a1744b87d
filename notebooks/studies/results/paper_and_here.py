"""Hold the table of the page: what the paper found, and what was found here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from studies.paper import MIX_STRAIGHT, MODELS, SETTING, TAU
from studies.results.claims import HOW, METRICS, said
from studies.results.records import Records
from studies.results.settings import DiagonalZoo
from studies.results.zoo_tables import GAP, PARTS
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
    "diagonal": "diagonal.json",
    "mnist": "mnist/comparison.json.gz",
    "sentiment": "sentiment/comparison.json.gz",
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
                yield Row(f"{SETTING[key]}: {name}", paper, _by_setting(records.diagonal, names), "diagonal", "4")
            else:
                here = _mnist(records, name) if key == "mnist" else _sentiment(records, name)
                yield Row(f"{SETTING[key]}: {name}", paper, here, key, "6")


def figures(records: Records) -> Iterator[Row]:
    """Yield a counterpart of every figure of the paper."""
    toy = records.toy
    yield Row("Fig. 1: level sets of the toy model", ("no number",), _spread(toy, "gradient norm"), "toy", "1")
    yield Row("Fig. 2: sketch of the quotient", ("no number",), ("built step by step, no number",), "", "2")
    names = ["adaptive", *(f"{metric} {how}" for metric in METRICS for how in HOW)]
    yield Row("Fig. 3: diagonal networks", ("as in Table 1",), _by_setting(records.diagonal, names), "diagonal", "4")
    for figure, key in (("Fig. 4", "mnist"), ("Fig. 5", "sentiment")):
        of = _mnist if key == "mnist" else _sentiment
        lines = tuple(f"{name}, {line}" for name in TAU[key] for line in of(records, name, "loss_gap")[:-1])
        yield Row(f"{figure}: {SETTING[key]}, with the gap in loss", ("not given",), lines or (NOT_RUN,), key, "6")
    yield Row("Fig. 6: Hessian traces of the toy model", ("no number",), _spread(toy, "Hessian trace"), "toy", "1")
    for figure, metric in (("Fig. 7", "inv"), ("Fig. 8", "mix")):
        straight = [f"{signed(MIX_STRAIGHT)} without curvature (Fig. 8)"] if metric == "mix" else []
        paper = (f"{signed(TAU['sentiment'][metric])} whole (Table 1)", *straight, "MNLI")
        yield Row(f"{figure}: ablation of {metric}", paper, _parts(records, metric), "mnist")
    yield Row("Fig. 9: relaxation", ("hardly any effect (MNLI, App. H.2)",), _parts(records, "eps"), "mnist")


def beyond(records: Records) -> Iterator[Row]:
    """Yield what the paper leaves open."""
    orders = ["mix first", "mix second", "mix exact", "inv first", "inv second", "inv exact"]
    what, here = (
        "Sign: order of the geodesics, diagonal networks",
        _by_setting(records.diagonal and records.diagonal.plain, orders),
    )
    yield Row(what, ("open (Sec. 7)",), here, "diagonal", "4")


def _mnist(records: Records, name: str, gap: str = GAP) -> tuple[str, ...]:
    """Return tau over all pairs of models and over those of one task, and the number of models."""
    if records.mnist is None:
        return (NOT_RUN,)
    design, label = records.mnist.design, records.mnist.catalogue.middle(name)
    pooled, within = (design.tau(label, gap, each) for each in (design.everywhere, records.mnist.within))
    return f"pooled: {pooled}", f"within cells: {within}", f"{design.models} models"


def _sentiment(records: Records, name: str, gap: str = GAP) -> tuple[str, ...]:
    """Return tau over models that differ by seed alone, and over those of the design, if there are any yet."""
    if records.sentiment is None:
        return (NOT_RUN,)
    lines = []
    for zoo, words in zip(records.sentiment, ("by seed alone", "by settings"), strict=True):
        if zoo.design.models:
            tau = zoo.design.tau(zoo.catalogue.middle(name), gap, zoo.design.everywhere)
            lines.append(f"{words}: {tau} ({zoo.design.models} models)")
    return (*lines, "")


def _parts(records: Records, part: str) -> tuple[str, ...]:
    """Return tau within cells of a metric and its parts, or of relaxed metrics, on MNIST."""
    if records.mnist is None:
        return (NOT_RUN,)
    zoo = records.mnist
    names = [name for name in zoo.catalogue.labels if "eps" in name] if part == "eps" else list(PARTS[part])
    lines = []
    for name in names:
        label = list(zoo.catalogue.labels[name].values())[-1]
        lines.append(f"{name}: {zoo.design.tau(label, GAP, zoo.within)}")
    return (*lines, "on MNIST, within cells, models of the first seed")


def _spread(toy: Toy | None, quantity: str) -> tuple[str, ...]:
    """Return largest over smallest along an orbit."""
    if toy is None:
        return (NOT_RUN,)
    found = {geometry: toy.spread(quantity, geometry) for geometry in ("euclidean", "inv", "mix")}
    lines = [f"{geometry}: {_factor(spread)}" for geometry, spread in found.items() if spread is not None]
    return (f"{quantity} along an orbit, largest over smallest:", *lines)


def _factor(spread: float) -> str:
    return f"1 + {minus(f'{spread - 1:.0e}')}" if spread < 1.001 else f"{spread:.3g}"


def _by_setting(zoo: DiagonalZoo | None, names: list[str]) -> tuple[str, ...]:
    """Return the range over the settings, and how many of their intervals lie below, around and above 0."""
    if zoo is None:
        return (NOT_RUN,)
    spreads = {name: zoo.spread(name) for name in names}
    lines = [f"{said(name)}: {'truncation error' if found is None else found}" for name, found in spreads.items()]
    return (*lines, f"by setting, of {len(zoo.settings)}")
