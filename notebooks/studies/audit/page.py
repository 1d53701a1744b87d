"""Show the record as a table, and as a page of the documentation."""

from __future__ import annotations

from quotient_manifolds.report import Table
from studies.audit.study import Audited, AuditStudy
from studies.markdown import table

PAGE = "optimizers.md"
COLUMNS = ("optimizer", "from", "settings", "learning rate", "median drift", "largest", "loss at the end")

ROUNDING = 1e-9  # a drift below it is rounding, amplified by the steps

HEAD = """# Which optimizers see the factors

An adapter B A computes the same function if it is written B Z⁻¹ and Z A. Here the same small model is trained by
optimizers of many kinds, from its weights and from others on its orbit, by `orbit_audit`;
[how to](training.md#does-your-optimizer-see-the-factors) do so with a model and an optimizer of your own. The drift is
how far the functions are apart after training, relative to the way that training went: 0, up to rounding, for an
optimizer that does not see the factors, and 1 where they part as far as they went.
"""


def drift_table(found: AuditStudy) -> Table:
    """Return a row for every optimizer."""
    return Table("audit", summary(found), list(COLUMNS), [_cells(row) for row in found.rows], [False] * 3 + [True] * 4)


def audit_page(found: AuditStudy) -> str:
    """Return the page, in Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in found.versions.items())
    parts = [
        HEAD,
        summary(found),
        "",
        table(COLUMNS, [_cells(row) for row in found.rows]),
        _setting(found),
        f"Made with {versions}; [the record](../notebooks/records/audit.json) is kept. By\n",
        f"```console\n$ {found.command}\n```",
    ]
    return "\n".join(parts) + "\n"


def summary(found: AuditStudy) -> str:
    """Say how many optimizers do not see the factors."""
    measured = [row for row in found.rows if not row.failure]
    unseeing = sum(max(row.drifts) < ROUNDING for row in measured)
    return (
        f"Of {len(measured)} optimizers that were run, {unseeing} end at the same function from all starts, "
        f"to a drift below {ROUNDING:.0e}."
    ).replace("e-0", "e-")


def _setting(found: AuditStudy) -> str:
    return f"""
The model is a BERT with random weights, two layers of width 32, in float64, frozen but for its head and adapters of
rank 4 on queries and values: {found.pairs} pairs, with B not zero. It takes {found.steps} steps on random sentences
with random labels of three classes, from a loss of {found.start:.3g}. It starts once from its weights and
{found.moves} times from weights moved by random Z of condition {found.condition:g}; shown are the median and the
largest drift of these moves, and the loss of the first batch after the run from the weights as they were.

Weight decay is off everywhere. Each optimizer has one learning rate and was not tuned: the table does not say which
optimizer trains better. It is one model and one seed; the head is trained too, so that the drift is that of the whole
function.
"""


def _cells(row: Audited) -> list[str]:
    said = [row.optimizer, row.source, row.note, f"{row.rate:g}"]
    if row.failure or row.loss is None:
        return [*said, "", "", row.failure]
    return [*said, _size(row.drift), _size(max(row.drifts)), f"{row.loss:.3g}"]


def _size(drift: float) -> str:
    """Return a drift with two digits, and one that is rounding by its order of magnitude."""
    return f"{drift:.2g}" if drift >= 1e-4 else f"{drift:.0e}".replace("e-0", "e-")
