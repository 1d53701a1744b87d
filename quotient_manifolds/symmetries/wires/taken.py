"""Say what pairs use up of blocks and of scales."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from quotient_manifolds.symmetries.wires.blocks import Block
from quotient_manifolds.symmetries.wires.channels import Bundle
from quotient_manifolds.symmetries.wires.linear_algebra import Array


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


def _diagonal(bundle: Bundle) -> Iterator[tuple[Array, Array]]:
    groups = range(bundle.size) if bundle.acts == "linear" else (None,)
    for channel in groups:
        here = slice(None) if channel is None else bundle.channel == channel
        yield bundle.nodes[here], bundle.sign[here]
