"""Find the blocks of channels that may mix, and the tangents of what they allow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.relations import Classes, Relation
from quotient_manifolds.symmetries.wires.walk import FIXED, Walk


@dataclass(frozen=True, eq=False)
class Block:
    """Hold channels that mix: their classes' representatives, the kind of group, and in which weights it is orthogonal."""

    kind: str  # linear, complex, orthogonal, centred or mean
    roots: tuple[int, ...]
    weights: Tensor
    classes: Classes

    @property
    def dimension(self) -> int:
        """Of what mixes channels; their scales are counted apart."""
        n = len(self.roots)
        return {"linear": n * (n - 1), "complex": 1, "orthogonal": n * (n - 1) // 2,
                "centred": (n - 1) * (n - 2) // 2, "mean": n}[self.kind]

    def generators(self) -> Iterator[Tensor]:
        n, m = len(self.roots), self.weights
        unit = torch.eye(n, dtype=torch.float64)
        if self.kind == "linear":
            for i in range(n):
                for j in range(n):
                    if i != j:
                        yield torch.outer(unit[i], unit[j])
            return
        if self.kind == "mean":
            for j in range(n):
                yield torch.outer(1 / m, unit[j])
            return
        if self.kind == "complex":
            yield torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
            return
        basis = unit
        if self.kind == "centred":
            basis = torch.linalg.qr(torch.cat([torch.ones(n, 1, dtype=torch.float64), unit[:, 1:]], 1))[0][:, 1:].T
        for i in range(len(basis)):
            for j in range(i):
                skew = torch.outer(basis[i], basis[j]) - torch.outer(basis[j], basis[i])
                yield skew * m / m[:, None]


def find_blocks(walk: Walk) -> list[Block]:
    """Return the blocks of channels that may mix."""
    return [*_blocks(walk, walk.turns, mean=False), *_blocks(walk, walk.means, mean=True)]


def _blocks(walk: Walk, classes: Classes, *, mean: bool) -> Iterator[Block]:
    tokens: dict[int, list[tuple[Any, float]]] = defaultdict(list)
    for node, marks in enumerate(walk.marks):
        if node <= FIXED:
            continue
        root, relation = classes.find(node)
        size = 1 / relation.weight if relation.dual else relation.weight
        tokens[root] += [(mark, size) for mark in marks]
    planes: dict[int, set[frozenset[int]]] = defaultdict(set)
    for p, q in walk.notes.get(("plane", None), []):
        pair = frozenset((classes.find(p)[0], classes.find(q)[0]))
        for root in pair:
            planes[root].add(pair)
    cycles: dict[int, list[Any]] = defaultdict(list)
    for node, relation in classes.cycles:
        root, to_node = classes.find(node)
        whole = to_node.inverse.after(relation.after(to_node))
        cycles[root].append((whole.dual, round(whole.weight, 9)))
    groups: dict[Any, list[int]] = defaultdict(list)
    weights: dict[int, float] = {}
    for root, found in tokens.items():
        if not found:
            continue
        signature = _signature(found, cycles[root], mean)
        if signature is None:
            continue
        weights[root] = signature[1]
        key = (signature[0], tuple(sorted(tuple(sorted(pair)) for pair in planes[root])))
        groups[key].append(root)
    for (signature, plane), roots in groups.items():
        kind = _kind(signature, plane, roots, mean)
        if kind:
            size = torch.tensor([weights[root] for root in roots], dtype=torch.float64)
            yield Block(kind, tuple(_oriented(walk, classes, roots) if kind == "complex" else roots), size, classes)


def _signature(found: list[tuple[Any, float]], cycles: list[Any], mean: bool) -> tuple[Any, float] | None:
    """Return what the channels of a block have in common, and the weight in which this one is orthogonal."""
    if any(mark[0] in ("alone", "fixed") or (mean and mark[0] == "normed") for mark, _ in found):
        return None
    found = [each for each in found if each[0][0] != "normed"]
    strict = sorted((mark, size) for mark, size in found if mark[0] in ("orthogonal", "centred"))
    weight = strict[0][1] if strict else 1.0
    ratios = [(mark, round(abs(size / weight), 9)) for mark, size in strict]
    plain = Counter(mark for mark, _ in found if mark[0] not in ("orthogonal", "centred"))
    duals = [w for dual, w in cycles if dual]
    if duals and (strict or len(duals) > 1):
        return None
    if duals:
        weight = abs(duals[0]) ** 0.5
        ratios = [(("orthogonal", "dual"), 1.0 if duals[0] > 0 else -1.0)]
    rest = sorted(w for dual, w in cycles if not dual)
    return (tuple(sorted(Counter(ratios).items(), key=repr)), tuple(sorted(plain.items(), key=repr)), tuple(rest)), weight


def _kind(signature: Any, plane: Any, roots: list[int], mean: bool) -> str | None:
    strict = Counter({mark: count for (mark, _), count in signature[0]})
    orthogonal = {mark[1:3] for mark in strict if mark[0] == "orthogonal"}
    centred = {mark[1:3] for mark in strict if mark[0] == "centred"}
    if mean:
        whole = centred and orthogonal <= centred and not plane and not signature[2]
        whole = whole and all(mark[3] == len(roots) for mark in strict if mark[0] == "centred")
        return "mean" if whole and len(roots) > 1 else None
    if len(roots) < 2:
        return None
    if plane:
        return "complex" if len(plane) == 1 and len(roots) == 2 and not strict else None
    if centred:
        return "centred" if orthogonal and len(roots) > 2 else None
    return "orthogonal" if orthogonal else "linear"


def _oriented(walk: Walk, classes: Classes, roots: list[int]) -> list[int]:
    for p, q in walk.notes["plane", None]:
        found = [classes.find(p)[0], classes.find(q)[0]]
        if sorted(found) == sorted(roots):
            return found
    return roots


class Places:
    """Say where the channels of a block stand in a list of nodes: positions, weights and duality, for each copy."""

    def __init__(self, block: Block, nodes: list[int]) -> None:
        position = {root: i for i, root in enumerate(block.roots)}
        seen: Counter[int] = Counter()
        self.copies: dict[int, list[tuple[int, int, Relation]]] = defaultdict(list)
        for place, node in enumerate(nodes):
            if node <= FIXED:
                continue
            root, relation = block.classes.find(node)
            if root in position:
                self.copies[seen[root]].append((place, position[root], relation))
                seen[root] += 1

    def __bool__(self) -> bool:
        return bool(self.copies)

    def of(self, X: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        """Yield positions and the change of the channels that stand there."""
        for copy in self.copies.values():
            places, roots = [each[0] for each in copy], [each[1] for each in copy]
            w = torch.tensor([each[2].weight for each in copy], dtype=torch.float64)
            part = X[roots][:, roots]
            if copy[0][2].dual:
                part = -part.T
            yield places, w[:, None] * part / w


def gauge_tangents(walk: Walk) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield a tangent for every direction of every block, and of every solution of the log-scales."""
    values = {id(each): each.entries.read(walk.parameters) for each in (*walk.linears, *walk.vectors)}
    for block in find_blocks(walk):
        linears = [(each, Places(block, each.outs[0]), Places(block, each.ins[0])) for each in walk.linears]
        linears = [each for each in linears if each[1] or each[2]]
        vectors = [(each, [Places(block, row) for row in each.outs]) for each in walk.vectors if not each.gain]
        vectors = [each for each in vectors if any(each[1])]
        for X in block.generators():
            tangent = zeros(walk)
            done: set[Any] = set()
            for linear, out, ins in linears:
                if linear.entries.key in done:
                    continue
                done.add(linear.entries.key)
                W = values[id(linear)]
                change = torch.zeros_like(W)
                for places, part in out.of(X):
                    change[:, places] += part @ W[:, places]
                for places, part in ins.of(X):
                    change[:, :, places] -= W[:, :, places] @ part
                linear.entries.add_to(tangent, change)
            for vector, rows in vectors:
                if vector.entries.key in done:
                    continue
                done.add(vector.entries.key)
                change = torch.zeros_like(values[id(vector)])
                for place, row in enumerate(rows):
                    for places, part in row.of(X):
                        change[place, places] += part @ values[id(vector)][place, places]
                vector.entries.add_to(tangent, change)
            yield f"{block.kind} {len(block.roots)}", tangent
    for solution in walk.scales.solutions():
        tangent = zeros(walk)
        done = set()
        for each in (*walk.linears, *walk.vectors):
            if each.entries.key in done:
                continue
            done.add(each.entries.key)
            if hasattr(each, "gain"):
                if each.gain:
                    index, weights = walk.notes["gain index", id(each)]
                    flat = tangent[each.entries.name].view(-1)
                    for place, unknown, value in zip(index, each.unknowns[0], weights, strict=True):
                        flat[place] = solution.get(unknown, 0.0) * value / each.entries.scale
                    continue
                size = torch.tensor([[solution.get(n, 0.0) for n in row] for row in each.outs], dtype=torch.float64)
                each.entries.add_to(tangent, size * values[id(each)])
                continue
            out = torch.tensor([solution.get(n, 0.0) for n in each.outs[0]], dtype=torch.float64)
            ins = torch.tensor([solution.get(n, 0.0) for n in each.ins[0]], dtype=torch.float64)
            each.entries.add_to(tangent, values[id(each)] * (out[:, None] - ins))
        if any(bool(part.any()) for part in tangent.values()):
            yield "scale", tangent


def zeros(walk: Walk) -> dict[str, Tensor]:
    return {name: torch.zeros(w.shape, dtype=torch.float64) for name, w in walk.parameters.items()}
