"""Find what a softmax over keys does not see of biases for the distance of two positions: their mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import Freedom, gaussian, read, typical, write
from quotient_manifolds.symmetries.operations import SUMS, Operation, key, looked_up
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.trace import Part, Trace

LOWEST = -1e4  # scores are not nearly as low, but where they are masked


@dataclass(frozen=True, eq=False)
class ScoreShift(Freedom):
    """Describe a table (rows, heads) whose numbers are added to scores, of which a softmax is taken then.

    The same number added to a column adds it to all scores of a head, and softmax ignores it. The one place has columns
    of mean 0. part: the name of the table, and flat indices. A column may also be what is added to one query's scores.
    """

    part: Part
    kind: ClassVar[str] = "scores"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the table."""
        return (self.part[0],)

    @property
    def families(self) -> dict[str, int]:
        """Return the dimension of the moves that leave the function alone, by its name."""
        return {"shift of all scores": self.part[1].shape[1]}

    def fold(self, params: Params) -> None:
        """Make the mean of every column 0, in place."""
        table = read(params, *self.part)
        write(params, *self.part, table - table.mean(dim=0))

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Add a number to every column, in place; with `control`, to every other row of it."""
        table = read(params, *self.part)
        shift = (size * typical(table) * gaussian(table, generator, table.shape[1])).expand(table.shape).clone()
        if control:
            shift[::2] = 0.0
        write(params, *self.part, table + shift)


def find_score_shifts(trace: Trace) -> Iterator[ScoreShift]:
    """Yield the tables whose numbers go into scores alone, which softmax alone reads."""
    lookups: dict[str, list[Operation]] = {}
    for operation in trace.operations:
        found = looked_up(operation)
        name, rows = trace.parts.get(key(found[0]), ("", None)) if found is not None else ("", None)
        if rows is not None and rows.ndim == 2:
            lookups.setdefault(name, []).append(operation)
    for name, operations in lookups.items():
        tables = [found[0] for operation in operations if (found := looked_up(operation)) is not None]
        part = trace.parts[key(tables[0])]
        alike = all(torch.equal(trace.parts[key(table)][1], part[1]) for table in tables)
        ignored = alike and all(_ends_in_softmax(trace, operation.outputs[0], -1) for operation in operations)
        if ignored and not trace.used_besides([part], {id(operation) for operation in operations}):
            yield ScoreShift((name, part[1]))
    yield from _added_rows(trace)


def _added_rows(trace: Trace) -> Iterator[ScoreShift]:
    """Yield the parameters each of whose rows is added to all scores that a softmax is taken over."""
    found: dict[str, list[tuple[Operation, Tensor]]] = {}
    for operation in trace.operations:
        for tensor in operation.inputs if operation.name in SUMS else ():
            name, elements = trace.parts.get(key(tensor), ("", tensor))
            if name and elements.ndim > 1 and key(operation.outputs[0]) != key(tensor):
                found.setdefault(name, []).append((operation, elements))
    for name, uses in found.items():
        rows = uses[0][1].flatten(0, -2).unique(dim=0)
        alike = all(torch.equal(rows, elements.flatten(0, -2).unique(dim=0)) for _, elements in uses)
        whole = alike and torch.equal(rows.flatten().sort().values, torch.arange(trace.params[name].numel()))
        ignored = whole and all(_is_over_rows(trace, operation, rows.shape[1]) for operation, _ in uses)
        if ignored and not trace.used_besides([(name, rows)], {id(operation) for operation, _ in uses}):
            yield ScoreShift((name, rows.mT))


def _is_over_rows(trace: Trace, total: Operation, length: int) -> bool:
    """Return whether a softmax over the last axis of a sum, of this length, is all that is done with it."""
    scores = total.outputs[0]
    if length < 2 or scores.shape[-1:] != (length,) or trace.only_user(scores) is None:
        return False
    columns = torch.arange(length).expand(scores.shape)
    for view, numbers in trace.follow(scores, columns):
        for user in trace.users(view):
            if not user.is_view and key(user.outputs[0]) != key(view):
                along = user.arguments[1] % view.ndim if user.name in ("_softmax", "_safe_softmax") else None
                if along is None or not torch.equal(
                    numbers.movedim(along, -1).flatten(0, -2).unique(dim=0), columns.flatten(0, -2)[:1]
                ):
                    return False
    return True


def _ends_in_softmax(trace: Trace, y: Tensor, axis: int) -> bool:
    """Return whether softmax along another axis than that of heads is all that is done with y, after sums or none."""
    heads = y.shape[axis]
    own = [1] * y.ndim
    own[axis] = -1
    ends = 0
    for view, numbers in trace.follow(y, torch.arange(heads).view(own).expand(y.shape)):
        users = [user for user in trace.users(view) if not user.is_view]
        if trace.is_output(view):
            return False
        along = _axis(numbers, heads) if users else None
        for user in users:
            if user.name in SUMS and key(user.outputs[0]) == key(user.arguments[0]) == key(view):
                continue  # in place: all else that takes it is asked
            if along is None or not _ignores(trace, user, view, along):
                return False
            ends += 1
    return ends > 0


def _axis(numbers: Tensor, heads: int) -> int | None:
    """Return the axis, from the end, along which the heads lie in order."""
    for axis in range(-numbers.ndim, 0):
        last = numbers.movedim(axis, -1)
        if last.shape[-1] == heads and torch.equal(last, torch.arange(heads).expand(last.shape)):
            return axis
    return None


def _ignores(trace: Trace, user: Operation, scores: Tensor, axis: int) -> bool:
    """Return whether an operation ignores what is added to all scores of a head, or whatever reads its sum does."""
    shape = user.outputs[0].shape if user.outputs else torch.Size()
    if user.name in ("_softmax", "_safe_softmax"):
        return user.arguments[1] % scores.ndim != axis % scores.ndim
    if "scaled_dot_product" in user.name:
        added = [*user.arguments[3:4], user.options.get("attn_mask"), user.options.get("attn_bias")]
        once = sum(key(each) == key(scores) for each in user.inputs) == 1
        return once and axis != -1 and any(isinstance(each, Tensor) and key(each) == key(scores) for each in added)
    place = {"where": 1, "masked_fill": 0}.get(user.name)
    masked = place is not None and key(user.arguments[place]) == key(scores) and _is_low(user.arguments[2])
    if not (masked or user.name in SUMS) or key(user.outputs[0]) == key(scores) or shape[axis] != scores.shape[axis]:
        return False
    return _ends_in_softmax(trace, user.outputs[0], axis)


def _is_low(number: object) -> bool:
    """Return whether a number in place of a score makes its weight 0."""
    one = isinstance(number, (int, float)) or (isinstance(number, Tensor) and number.numel() == 1)
    return one and float(number) < LOWEST  # type: ignore[arg-type]
