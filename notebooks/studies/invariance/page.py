"""Show the record as a table, and as a page of the documentation."""

from __future__ import annotations

from quotient_manifolds.report import Table
from studies.invariance.study import MEASURES, METRICS, RADIUS, SAMPLES, STEPS, TARGETS, Invariance, Row
from studies.markdown import lines, table

PAGE = "invariance.md"
COLUMNS = ("model", "moved", "adaptive", "loss", *MEASURES, "what is more than the target")

HEAD = """# Measures along the whole orbit

Every model of [the table of fibres](fibres.md) is moved by random elements of the whole group that is found in it, and
measured before and after in `Quotient("inv")` and `Quotient("mix")`. All moved models compute the same function, so a
measure of the function does not change. Shown is the largest relative change of each measure, `inv` / `mix`, in float64
and under it in float32.
"""

READING = """
*moved* is the dimension of the group. *adaptive* is the factor by which the gradient norm of `Adaptive()` changes, the
largest: the moves are no small ones. *loss* is the change of the loss itself, in float64 and in float32: rounding, also
that of models which cast to float32 inside, and what the eps of a norm sees. Rises and curvatures are differences of
losses, which rounding leaves fewer digits of; average case and trace are means over few directions that may nearly
cancel. Symmetries are found anew at each place.

What misses its target, 1e-9 in float64 and 1e-3 in float32, is said in the last column.
"""


def changes_table(found: Invariance) -> Table:
    """Return a row for every model: its largest changes by precision."""
    rows = [[row.name, *(_worst(row, precision) for precision in TARGETS), row.failure] for row in found.rows]
    return Table("invariance", _summary(found), ["model", *TARGETS, "failure"], rows, [False, True, True, False])


def invariance_page(found: Invariance) -> str:
    """Return the page, in Markdown."""
    moves = ", ".join(f"{scale:g}" for scale, _ in found.moves)
    settings = (
        f"\nMoves have the log-scales {moves}: gains are multiplied by exp(scale × Gaussian), shifts are scale ×\n"
        "Gaussian times the typical size, rotations have angles of about the scale; pairs are multiplied by Gaussian\n"
        f"matrices. The worst case has the radius {RADIUS:g}, the average case that sigma, an ascent {STEPS} steps, "
        f"a mean {SAMPLES} directions."
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
        f"in {precision} to {_power(target)} in {sum(not row.misses(precision) for row in measured)}"
        for precision, target in TARGETS.items()
    ]
    return f"Of {len(found.rows)} models all measures agree {' and '.join(said)}."


def _cells(row: Row) -> list[str]:
    if row.failure:
        return [row.name, *[""] * (len(COLUMNS) - 2), row.failure]
    losses, changes = row.loss or {}, row.changes or {}

    def both(precision: str, measure: str) -> str:
        return " / ".join(_power(changes[precision][metric].get(measure)) for metric in METRICS)

    shown = [lines([both(precision, measure) for precision in TARGETS]) for measure in MEASURES]
    loss = lines([_power(losses[precision]) for precision in TARGETS])
    return [row.name, str(row.moved), _times(row.adaptive), loss, *shown, _why(row)]


def _why(row: Row) -> str:
    """Say where what misses a target comes from, and what there is no value of."""
    said = [f"no {measure}: {reason}" for measure, reason in (row.absent or {}).items()]
    if row.cast:
        largest = max((row.uncast or {})[metric][measure] for metric, measure in row.cast)
        said.append(
            "float64: the model casts to float32 inside, where a last digit may fall to either side; without the casts "
            f"the change is {_power(largest)}"
        )
    said += [
        f"float64: {measure} of {metric}"
        for metric, measure in row.misses("float64")
        if (metric, measure) not in row.cast
    ]
    if stored := row.stored_apart:
        said.append(
            "float32: moved weights are rounded when they are stored, which alone changes this in float64 by "
            f"up to {_power(max(stored.values()))}"
        )
    said += [
        f"float32: the {measure} of {metric} nearly cancels, its standard error is {ratio:.0f} times as large"
        for (metric, measure), ratio in row.cancelling.items()
    ]
    for metric, measure in row.misses("float32"):
        if (metric, measure) not in {*row.stored_apart, *row.cancelling}:
            said.append(f"float32: {measure} of {metric}")
    return "; ".join(said)


def _worst(row: Row, precision: str) -> str:
    return "" if row.failure else _power(row.worst(precision))


def _power(value: float | None) -> str:
    """Return a change by its order of magnitude, such as 3e-12."""
    return "none" if value is None else f"{value:.0e}".replace("e-0", "e-") if value else "0"


def _times(ratio: float) -> str:
    factor = max(ratio, 1 / ratio)
    return f"{factor:.0e}".replace("e+0", "e") if factor >= 1000 else f"{factor:.3g}"
