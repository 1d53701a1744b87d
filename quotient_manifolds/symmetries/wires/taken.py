"""Say what pairs use up of blocks and of scales, and what they leave to others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from quotient_manifolds.symmetries.wires.blocks import Block
from quotient_manifolds.symmetries.wires.channels import Bundle
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.relations import Component

SMALL = 1e-9


@dataclass(frozen=True, eq=False)
class Taken:
    """Hold blocks, and solutions of the equations of log-scales: the unknowns that are not 0, and their values."""

    blocks: tuple[Block, ...] = ()
    scales: tuple[tuple[Array, Array], ...] = ()

    @staticmethod
    def by(bundles: Iterable[Bundle]) -> Taken:
        """Return what a group of any matrices, of complex numbers or of scales takes: its diagonal is of scales."""
        several = list(bundles)
        blocks = tuple(each.block for each in several if each.block is not None)
        return Taken(blocks, tuple(scale for each in several for scale in _diagonal(each)))

    def left_of_blocks(self, blocks: Iterable[Block]) -> list[Block]:
        """Return the blocks that are none of these."""
        known = {(each.kind, each.roots) for each in self.blocks}
        return [each for each in blocks if (each.kind, each.roots) not in known]

    def left_of_scales(self, components: Iterable[Component]) -> list[Component]:
        """Return components of log-scales with a basis of what is left of each."""
        found = list(components)
        size = 1 + max((int(each.unknowns[-1]) for each in found), default=0)
        owner, place = np.full(size, -1), np.zeros(size, np.int64)
        for number, each in enumerate(found):
            owner[each.unknowns], place[each.unknowns] = number, np.arange(len(each.unknowns))
        used: dict[int, list[Array]] = {}
        for nodes, values in self.scales:
            known = nodes < size
            nodes, values = nodes[known], values[known]
            for number in np.unique(owner[nodes]).tolist():
                if number >= 0:
                    vector = np.zeros(len(found[number].unknowns))
                    here = owner[nodes] == number
                    vector[place[nodes[here]]] = values[here]
                    used.setdefault(number, []).append(vector)
        left = [_rest(each, used[i]) if i in used else each for i, each in enumerate(found)]
        return [each for each in left if each.basis.shape[1]]


def _diagonal(bundle: Bundle) -> Iterator[tuple[Array, Array]]:
    groups = range(bundle.size) if bundle.acts == "linear" else (None,)
    for channel in groups:
        here = slice(None) if channel is None else bundle.channel == channel
        yield bundle.nodes[here], bundle.sign[here]


def _rest(component: Component, used: list[Array]) -> Component:
    """Return a component with the directions of its basis that make up, with those used, all of it."""
    parts = np.linalg.lstsq(component.basis, np.stack(used, 1), rcond=None)[0]  # (directions, used)
    R, order = scipy.linalg.qr(parts.T, mode="r", pivoting=True)
    size = np.abs(np.diag(R))
    rank = int((size > SMALL * max(1.0, size[0])).sum())
    basis = component.basis[:, np.sort(order[rank:])]
    there = np.any(basis != 0, axis=1)
    return Component(component.unknowns[there], basis[there])
