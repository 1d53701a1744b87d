"""Show the record as tables, and as a page of the documentation."""

from __future__ import annotations

from quotient_manifolds.report import Table
from studies.fibres.reasons import REASONS
from studies.fibres.study import Fibres, Row
from studies.markdown import table

PAGE = "fibres.md"
COLUMNS = (
    "model",
    "parameters",
    "fibre",
    "near",
    "found",
    "not reached",
    "not found",
    "found by family",
    "doubts, and what is missing",
)
LARGEST_PLACES = 4  # parameters named where nobody has said what is missing

HEAD = """# How much of the fibre is found

The *fibre* of a model is the set of all parameters with the same function. Its dimension is the number of parameters
less the rank of the Jacobian of the outputs, which needs no theory of symmetries: the certificate. Beside it stand the
dimensions that `find_symmetries` finds, by family, each proved by moving along it, and the rank of all together. Where
*not found* is 0, no continuous symmetry is missing. *not reached* counts numbers that no output depends on, such as
rows of tables that no input asks for: they are neither.

Models are small copies of model types of Hugging Face (width 8, 2 heads, 12 neurons, 40 words, 6 positions, one block
or two, generic parameters and inputs), and small models that are written by hand. *near* counts directions that only
the eps of norms breaks. *twice* is what two families have in common, and is subtracted. For a model of your own, see
`inspect --certify` on [the command line](command_line.md). [Another page](invariance.md) has what measures say along
the whole orbit of each model.
"""


def fibre_table(found: Fibres) -> Table:
    """Return a row for every model."""
    rows = [[row.name, *_numbers(row), why(row)] for row in found.rows]
    columns = [*COLUMNS[:7], COLUMNS[8]]
    return Table("fibres", _summary(found), columns, rows, [False, *[True] * 6, False])


def fibres_page(found: Fibres) -> str:
    """Return the page, in Markdown."""
    parts = [HEAD, _summary(found)]
    for kind in dict.fromkeys(row.kind for row in found.rows):
        rows = [[row.name, *_numbers(row), _families(row), why(row)] for row in found.rows if row.kind == kind]
        parts.append(f"\n## {kind[:1].upper()}{kind[1:]}\n\n{table(COLUMNS, rows)}")
    parts.append(
        f"\nMade with torch {found.torch} and transformers {found.transformers}, of which [the record]"
        f"(../notebooks/records/fibres.json) is kept, by\n\n```console\n$ {found.command}\n```"
    )
    return "\n".join(parts) + "\n"


def why(row: Row) -> str:
    """Return the failure, or what is missing or else where it lies, and the doubts; "" if all is well."""
    if row.failure:
        return row.failure
    said = [*row.doubts, *(f"{name} holds on some inputs only" for name in row.outside)]
    if row.missing and row.name in REASONS:
        said.insert(0, REASONS[row.name])
    elif row.missing:
        largest = sorted((row.places or {}).items(), key=lambda place: -place[1])[:LARGEST_PLACES]
        said.insert(0, f"they lie in {', '.join(f'{name} ({size:.1f})' for name, size in largest)}")
    return "; ".join(said)


def _summary(found: Fibres) -> str:
    counted = [row for row in found.rows if not row.failure]
    of_types = [row for row in counted if row.kind != "by hand"]
    by_hand = [row for row in counted if row.kind == "by hand"]
    return (
        f"All is found in {sum(row.equal for row in of_types)} of {len(of_types)} model types and in "
        f"{sum(row.equal for row in by_hand)} of {len(by_hand)} models written by hand; of "
        f"{sum(row.dimension for row in counted):,} dimensions of all fibres "
        f"{sum(row.missing or 0 for row in counted):,} are not found."
    )


def _numbers(row: Row) -> list[str]:
    if row.failure:
        return [""] * 6
    numbers = (row.parameters, row.dimension, row.near, sum((row.found or {}).values()) - row.shared, row.unreached)
    return ["?" if number is None else str(number) for number in (*numbers, row.missing)]


def _families(row: Row) -> str:
    twice = [f"twice {-row.shared}"] if row.shared else []
    return ", ".join([*(f"{name} {size}" for name, size in (row.found or {}).items()), *twice])
