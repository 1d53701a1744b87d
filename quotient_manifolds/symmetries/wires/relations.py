"""Relate channels: whose changes are one up to weights, and whose logarithms of scale obey linear equations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg
import scipy.sparse
from scipy.sparse.csgraph import connected_components


@dataclass(frozen=True)
class Relation:
    """Say how the change X_b of channels b follows from X_a: X_b = S X S^-1 with S = diag(weight), X = X_a or -X_a^T."""

    weight: float = 1.0
    dual: bool = False

    def after(self, first: Relation) -> Relation:
        """Return this relation after another one."""
        inner = 1 / first.weight if self.dual else first.weight
        return Relation(self.weight * inner, self.dual != first.dual)

    @property
    def inverse(self) -> Relation:
        return Relation(self.weight if self.dual else 1 / self.weight, self.dual)


SAME, DUAL = Relation(), Relation(dual=True)


class Classes:
    """Union-find over channels, each with its relation to the channel that represents its class."""

    def __init__(self) -> None:
        self.above: list[int] = []
        self.relation: list[Relation] = []
        self.cycles: list[tuple[int, Relation]] = []
        """Channels that are related to themselves, by another relation than equality: what closes a cycle."""

    def grow(self, count: int) -> None:
        size = len(self.above)
        self.above.extend(range(size, size + count))
        self.relation.extend([SAME] * count)

    def find(self, node: int) -> tuple[int, Relation]:
        """Return the representative, and the relation by which the node follows from it."""
        path = []
        while self.above[node] != node:
            path.append(node)
            node = self.above[node]
        relation = SAME
        for each in reversed(path):
            relation = self.relation[each].after(relation)
            self.above[each], self.relation[each] = node, relation
        return node, relation

    def join(self, a: int, b: int, relation: Relation = SAME) -> None:
        """Say that X_b follows from X_a by the relation."""
        (root_a, to_a), (root_b, to_b) = self.find(a), self.find(b)
        found = to_b.inverse.after(relation.after(to_a))
        if root_a != root_b:
            self.above[root_b], self.relation[root_b] = root_a, found
        elif found.dual or abs(found.weight - 1) > 1e-9:
            self.cycles.append((root_a, found))


class Scales:
    """Linear equations of the logarithms of scale of channels and of gains, solved a connected component at a time."""

    def __init__(self) -> None:
        self.equations: list[dict[int, float]] = []
        self.unknowns: set[int] = set()

    def equal(self, terms: dict[int, float]) -> None:
        """Say that the sum of coefficient times unknown is 0."""
        kept = {unknown: value for unknown, value in terms.items() if value}
        self.unknowns.update(kept)
        if kept:
            self.equations.append(kept)

    def solutions(self) -> list[dict[int, float]]:
        """Return a basis of all solutions, each a dictionary of the unknowns that are not 0."""
        size: dict[int, tuple[int, float]] = {}  # an unknown as a multiple of another, 0 of what is 0

        def found(name: int) -> tuple[int, float]:
            path, factor = [], 1.0
            while name in size:
                path.append((name, factor))
                name, step = size[name][0], size[name][1]
                factor *= step
                if not step:
                    break
            for each, before in path:
                size[each] = name, factor / before if before else 0.0
            return name, factor

        left = self.equations
        while True:
            kept = []
            for terms in left:
                reduced: dict[int, float] = {}
                for name, value in terms.items():
                    root, factor = found(name)
                    if factor:
                        reduced[root] = reduced.get(root, 0.0) + value * factor
                reduced = {name: value for name, value in reduced.items() if abs(value) > 1e-12}
                if len(reduced) == 1:
                    (name,) = reduced
                    size[name] = name, 0.0
                elif len(reduced) == 2:
                    (a, x), (b, y) = reduced.items()
                    size[a] = b, -y / x
                elif reduced:
                    kept.append(reduced)
            if len(kept) == len(left):
                break
            left = kept
        members: dict[int, dict[int, float]] = {}
        for name in sorted(self.unknowns):
            root, factor = found(name)
            if factor and root not in size:
                members.setdefault(root, {})[name] = factor
        names = sorted(members)
        place = {name: index for index, name in enumerate(names)}
        rows = [index for index, terms in enumerate(kept) for _ in terms]
        columns = [place[name] for terms in kept for name in terms]
        values = [value for terms in kept for value in terms.values()]
        if not names:
            return []
        matrix = scipy.sparse.csr_matrix((values, (rows, columns)), shape=(len(kept), len(names)))
        _, component = connected_components(abs(matrix.T) @ abs(matrix), directed=False)
        order = np.argsort(component, kind="stable")
        basis: list[dict[int, float]] = []
        for part in np.split(order, np.flatnonzero(np.diff(component[order])) + 1):
            some = matrix[:, part]
            for v in null_space(some[np.diff(some.indptr) > 0]).T:
                roots = {names[part[i]]: float(v[i]) for i in np.flatnonzero(abs(v) > 1e-9)}
                basis.append({n: x * f for root, x in roots.items() for n, f in members[root].items()})
        return basis


def null_space(matrix: scipy.sparse.csr_matrix) -> np.ndarray:
    """Return a basis of the null space, by elimination of equations of two unknowns first."""
    dense = matrix.toarray()
    if dense.shape[0] > 2 * dense.shape[1]:
        dense = np.linalg.qr(dense, mode="r")
    return scipy.linalg.null_space(dense, rcond=1e-9) if dense.size else np.eye(dense.shape[1])
