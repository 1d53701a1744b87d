"""Show the record as a table, and as a page of the documentation."""

from __future__ import annotations

from quotient_manifolds.report import Table
from studies.invariance.study import MEASURES, METRICS, RADIUS, SAMPLES, STEPS, TARGETS, Invariance, Row, Values
from studies.markdown import lines, table

PAGE = "invariance.md"
COLUMNS = ("model", "moved", "adaptive", "loss", *MEASURES, "what is more than the target")

HEAD = """# Measures along the whole orbit

Every model of [the table of fibres](fibres.md) is moved by random elements of the whole group that is found in it, and
measured before and after in `Quotient("inv")` and `Quotient("mix")`. All moved models compute the same function, so a
measure of the function does not change. What is shown is the largest relative change of each measure, `inv` / `mix`, in
float64 and under it in float32; a change of 0 is less than the last digit.
"""

READING = """
*moved* is the dimension of the group. *adaptive* is how many times larger or smaller the gradient norm in `Adaptive()` becomes:
the moves are no small ones. *loss* is the change of the loss itself: rounding, and where it is larger in float64, what the
eps of a norm sees of a move (a bias of zero variance beside it), or a cast to float32 inside the model. Rises and curvatures
are small differences of losses, of which rounding takes more digits; the average case and the trace are means over few
directions, that may nearly cancel. A bottleneck and neurons are divided out, too.
"""


def changes_table(found: Invariance) -> Table:
    """Return a row for every model: its largest changes by precision."""
    rows = [[row.name, *(_worst(row, precision) for precision in TARGETS), row.failure] for row in found.rows]
    return Table("invariance", _summary(found), ["model", *TARGETS, "failure"], rows, [False, True, True, False])


def invariance_page(found: Invariance) -> str:
    """Return the page, in Markdown."""
    moves = ", ".join(f"{scale:g}" for scale, _ in found.moves)
    settings = (
        f"\nMoves have the log-scales {moves}: gains are multiplied by exp(scale × Gaussian), shifts are scale × Gaussian times "
        f"the typical size, rotations have angles of about the scale, and pairs are multiplied by Gaussian matrices. Worst and "
        f"average case have the radius {RADIUS:g}, an ascent {STEPS} steps, means {SAMPLES} directions."
    )
    parts = [HEAD, _summary(found), settings, READING.rstrip()]
    for kind in dict.fromkeys(row.kind for row in found.rows):
        rows = [_cells(row) for row in found.rows if row.kind == kind]
        parts.append(f"\n## {kind[:1].upper()}{kind[1:]}\n\n{table(COLUMNS, rows)}")
    parts.append(
        f"\nMade with torch {found.torch} and transformers {found.transformers}, of which [the record]"
        f"(../notebooks/records/invariance.json) is kept, by\n\n```console\n$ {found.command}\n```"
    )
    return "\n".join(parts) + "\n"


def _summary(found: Invariance) -> str:
    measured = [row for row in found.rows if not row.failure]
    said = [
        f"in {precision} to {_power(target)} in {sum(precision not in row.missed for row in measured)}"
        for precision, target in TARGETS.items()
    ]
    return f"Of {len(found.rows)} models all measures agree {' and '.join(said)}."


def _cells(row: Row) -> list[str]:
    if row.failure:
        return [row.name, *[""] * (len(COLUMNS) - 2), row.failure]
    losses, changes = row.loss or {}, row.changes or {}
    shown = [
        lines([" / ".join(_power(changes[precision][metric].get(measure)) for metric in METRICS) for precision in TARGETS])
        for measure in MEASURES
    ]
    loss = lines([_power(losses[precision]) for precision in TARGETS])
    return [row.name, str(row.moved), _times(row.adaptive), loss, *shown, _why(row)]


def _why(row: Row) -> str:
    """Say where what misses a target comes from, and what there is no value of."""
    said = [f"no {measure}: {reason}" for measure, reason in (row.absent or {}).items()]
    losses = row.loss or {}
    if "float64" in row.missed:
        said.append("float64")
    if "float32" in row.missed and row.stored is not None:
        said.append(
            f"float32: the moved weights, rounded when they are stored, are another function, which in float64 differs by "
            f"as much: {_range(row.stored)}; rounding takes {losses['float64'] / 2**-53:.0e} times the spacing of numbers from "
            f"the loss in float64"
        )
    return "; ".join(said)


def _range(values: Values) -> str:
    return f"up to {_power(max(each for by_measure in values.values() for each in by_measure.values()))}"


def _worst(row: Row, precision: str) -> str:
    return "" if row.failure else _power(row.worst(precision))


def _power(value: float | None) -> str:
    """Return a change by its order of magnitude, such as 3e-12."""
    return "none" if value is None else f"{value:.0e}".replace("e-0", "e-") if value else "0"


def _times(ratio: float) -> str:
    factor = max(ratio, 1 / ratio)
    return f"{factor:.0e}".replace("e+0", "e") if factor >= 1000 else f"{factor:.3g}"
