"""The study's page: figures, what is constant on an orbit, closed forms against the ascent, and the paper's claims."""

from __future__ import annotations

from quotient_manifolds.report import Code, Fact, Figure, Gallery, Page, Section, Table, Text
from studies.toy.landscape import GEOMETRIES
from studies.toy.pictures import landscapes, orbit_picture, series_picture
from studies.toy.study import PROBLEM, Toy
from studies.wording import NBSP, change, figure

QUANTITIES = {
    "loss": "constant: the orbit is a symmetry",
    "gradient norm": "the Riemannian one is constant, the Euclidean is not (Fig. 1)",
    "Hessian trace": "the Riemannian one is constant, the Euclidean is not (App. D.1 a)",
    "worst-case sharpness": "geodesic sharpness is constant (App. D)",
}
"""Quantities, and what the paper says of each."""

CONSTANT = 1e-9  # a relative change that is rounding
VERDICTS = {"holds": "hold", "holds in part": "hold in part", "does not hold": "do not"}


def toy_page(found: Toy) -> Page:
    """Return headline figures, level sets, orbits, closed forms, expansions, claims, and how to redo it."""
    return Page(
        title="The scalar network f(x) = G H x",
        lead=(
            "The smallest network with a continuous symmetry: it sees the product of its two weights only, so "
            "(G / a, H a) is the same network for every a. Which quantities belong to the network, and which to the "
            "weights it happens to have? [da Silva, Dangel, Oore, arXiv 2505.05409, Fig. 1 and App. D]"
        ),
        facts=_facts(found),
        sections=(_levels(), _orbits(found), _closed_forms(found), _expansions(found), _claims(found), _method(found)),
    )


def spread_table(found: Toy) -> Table:
    """Return how much each quantity varies along orbits."""
    rows = []
    for quantity, claim in QUANTITIES.items():
        spreads = {geometry: found.spread(quantity, geometry) for geometry in GEOMETRIES}
        rows.append([quantity, *map(_spread, spreads.values()), claim, _constant_in(spreads)])
    return Table(
        "spread-table",
        f"Largest over smallest value along orbits, a from {min(found.sizes):g} to {max(found.sizes):g} (1: constant)",
        ["Quantity", *GEOMETRIES, "The paper", "What holds"],
        rows,
        [False, True, True, True, True, False, False],
    )


def claim_table(found: Toy) -> Table:
    """Return every claim with its verdict."""
    rows = [[claim.place, claim.claim, claim.verdict, claim.found] for claim in found.claims]
    return Table(
        "claim-table",
        "What the paper says of the scalar network, in our words, and what is found",
        ["Place", "Claim", "Verdict", "Found"],
        rows,
        [False] * 4,
    )


def _constant_in(spreads: dict[str, float | None]) -> str:
    still = [geometry for geometry, spread in spreads.items() if spread is not None and spread - 1 < CONSTANT]
    return "constant in all" if len(still) == len(spreads) else f"constant in {', '.join(still) or 'none'}"


def _spread(value: float | None) -> str:
    if value is None:
        return "vanishes"
    return f"1 + {change(value - 1)}" if value - 1 < CONSTANT else figure(value)


def _facts(found: Toy) -> list[Fact]:
    spreads = [found.spread(quantity, metric) or 1 for quantity in QUANTITIES for metric in ("inv", "mix")]
    verdicts: list[str] = [claim.verdict for claim in found.claims]
    counts = [f"{verdicts.count(verdict)} {words}" for verdict, words in VERDICTS.items()]
    return [
        Fact(
            f"× {figure(found.spread('Hessian trace', 'euclidean') or 1)}",
            "is by how much the trace of the Euclidean Hessian changes along an orbit, though the network is the same.",
        ),
        Fact(
            change(max(spreads) - 1),
            "is the largest relative change of a Riemannian quantity there, in either metric.",
        ),
        Fact(
            change(max(one.difference for one in found.agreements)),
            f"is the largest relative difference between closed form and ascent, over "
            f"{sum(one.cases for one in found.agreements)} balls.",
        ),
        Fact(f"{len(verdicts)} claims", f"of the paper checked: {', '.join(counts)}."),
    ]


def _levels() -> Section:
    gradients, traces = landscapes(PROBLEM)
    return Section(
        "levels",
        "Level sets",
        (
            Text(
                "One point of data, (1, 1). Every orbit is a hyperbola G H = p; the minima, dashed, are G H = 1. The "
                "loss is constant along hyperbolas. So are the Riemannian quantities, in both metrics: the Euclidean "
                "ones are not."
            ),
            Gallery(
                (
                    Figure(
                        gradients.html(),
                        "Loss and gradient norm [Fig. 1]. All are 0 on the minima; the Euclidean norm bends its level "
                        "sets towards circles around the origin.",
                        wide=True,
                    ),
                    Figure(
                        traces.html(),
                        "Trace of the Hessian [App. D.1]. The Euclidean one, 2 (G² + H²), does not see the data at "
                        "all. In mix it is the same everywhere.",
                        wide=True,
                    ),
                )
            ),
        ),
    )


def _orbits(found: Toy) -> Section:
    products = ", ".join(f"{p:g}" for p in dict.fromkeys(one.product for one in found.along))
    return Section(
        "orbits",
        "What changes along an orbit",
        (
            Text(
                f"The weights are moved to (G / a, H a), on the orbits G H = {products} of the same loss. Gradients "
                "and Hessians are taken by autograd, sharpness (radius "
                f"{found.radius:g}, exact geodesics) by the ascent. Adaptive sharpness is constant here, for GL(1) "
                "rescales single weights, which is what it corrects for; with matrices in place of numbers it is not."
            ),
            spread_table(found),
            Gallery(
                (
                    Figure(
                        orbit_picture(found).html(),
                        "Worst-case sharpness at the minimum after a move, over sharpness before. Three measures lie "
                        "on each other at 1; the Euclidean one grows with the larger weight.",
                    ),
                )
            ),
        ),
    )


def _closed_forms(found: Toy) -> Section:
    rows = [
        [one.measure, str(one.cases), change(one.difference), f"{one.product:g}", f"{one.radius:g}"]
        for one in found.agreements
    ]
    return Section(
        "closed-forms",
        "Closed forms against the ascent",
        (
            Text(
                "A ball around (G, H) reaches an interval of products, and the loss is a parabola in the product, so "
                "the maximum lies at an end of the interval. In inv that is Eq. 19 to 21 of the paper, with "
                f"|b| ≤ ρ{NBSP}/{NBSP}√2, which is the ball of the metric's own norm. What is left for exact "
                "geodesics of mix is a stop just before the edge of the manifold, where a product would become 0."
            ),
            Table(
                "agreement-table",
                "Largest relative difference between closed form and ascent, and where it is",
                ["Measure", "Balls", "Largest difference", "G H", "Radius"],
                rows,
                [False, True, True, True, True],
            ),
        ),
    )


def _expansions(found: Toy) -> Section:
    rows = [
        [
            *(one.metric, f"{one.product:g}", f"{one.radius:g}", f"{one.exact:.4g}"),
            *(f"{value / one.exact:.4g}" for value in (one.term, one.first, one.second)),
        ]
        for one in found.series
        if one.radius in (0.001, 0.01, 0.1, 1.0)
    ]
    pictures = [
        Figure(
            series_picture(found, metric, product).html(),
            f"{metric}, G H = {product:g}.",
        )
        for metric in ("inv", "mix")
        for place, product in enumerate(dict.fromkeys(one.product for one in found.series))
        if product != 1
    ]
    return Section(
        "expansions",
        "How far expansions reach",
        (
            Text(
                "The first-order term is, in inv, Eq. 22 of the paper: the sharpness only where the radius is small "
                "against the relative residual |1 − 1 / (G H)|, and is 0 at the minimum, G H = 1, where the sharpness "
                "is not. Following the geodesic to first or second order is another matter: both keep all orders of "
                "the loss."
            ),
            Table(
                "series-table",
                "Exact sharpness, and the first-order term and sharpness with truncated geodesics divided by it",
                [
                    "Metric",
                    "G H",
                    "Radius",
                    "Exact",
                    "First-order term",
                    "First-order geodesics",
                    "Second-order geodesics",
                ],
                rows,
                [False, True, True, True, True, True, True],
            ),
            Gallery(pictures),
        ),
    )


def _claims(found: Toy) -> Section:
    return Section("claims", "The paper's claims", (claim_table(found),))


def _method(found: Toy) -> Section:
    return Section(
        "method",
        "Redo it",
        (Code(found.command or "make study NAME=toy"), Text(f"Written by version {found.version}.")),
    )
