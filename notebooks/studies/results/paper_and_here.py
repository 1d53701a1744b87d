"""Hold the table of the page: what the paper found, and what was found here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from studies.paper import MIX_STRAIGHT, MODELS, SETTING, TAU
from studies.results.claims import HOW, METRICS, said
from studies.results.records import Records
from studies.results.settings import DiagonalZoo
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
RECORDS = {"toy": "toy.json", "diagonal": "diagonal.json"}


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
                yield Row(f"{SETTING[key]}: {name}", paper, (NOT_RUN,), "")


def figures(records: Records) -> Iterator[Row]:
    """Yield a counterpart of every figure of the paper."""
    toy = records.toy
    yield Row("Fig. 1: level sets of the toy model", ("no number",), _spread(toy, "gradient norm"), "toy", "1")
    yield Row("Fig. 2: sketch of the quotient", ("no number",), ("built step by step, no number",), "", "2")
    names = ["adaptive", *(f"{metric} {how}" for metric in METRICS for how in HOW)]
    yield Row("Fig. 3: diagonal networks", ("as in Table 1",), _by_setting(records.diagonal, names), "diagonal", "4")
    for figure, key in (("Fig. 4", "mnist"), ("Fig. 5", "sentiment")):
        yield Row(f"{figure}: {SETTING[key]}, with the gap in loss", ("not given",), (NOT_RUN,), "")
    yield Row("Fig. 6: Hessian traces of the toy model", ("no number",), _spread(toy, "Hessian trace"), "toy", "1")
    for figure, metric in (("Fig. 7", "inv"), ("Fig. 8", "mix")):
        straight = [f"{signed(MIX_STRAIGHT)} without curvature (Fig. 8)"] if metric == "mix" else []
        paper = (f"{signed(TAU['sentiment'][metric])} whole (Table 1)", *straight, "MNLI")
        yield Row(f"{figure}: ablation of {metric}", paper, (NOT_RUN,), "")
    yield Row("Fig. 9: relaxation", ("hardly any effect (MNLI, App. H.2)",), (NOT_RUN,), "")


def beyond(records: Records) -> Iterator[Row]:
    """Yield what the paper leaves open."""
    orders = ["mix first", "mix second", "mix exact", "inv first", "inv second", "inv exact"]
    what, here = "Sign: order of the geodesics, diagonal networks", _by_setting(records.diagonal, orders)
    yield Row(what, ("open (Sec. 7)",), here, "diagonal", "4")


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
