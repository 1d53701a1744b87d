"""Print whether each orbit of the small nets has one canonical point.

python -m tests.symmetries.one_place --every 5 --first 0
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quotient_manifolds.symmetries.canonical import canonical
from quotient_manifolds.symmetries.charges.find import find
from quotient_manifolds.symmetries.charges.finder import Found
from quotient_manifolds.symmetries.groups import Symmetry
from tests.nets.small import NETS, net, shown
from tests.symmetries.test_canonical import PLACE, SAME, change

SCALES = (0.5, 0.5, 0.5, 1.5)
"""Of random elements; the last has a condition of about 1e4 over all wires."""


def moved(symmetries: Sequence[Symmetry], params: Mapping[str, Tensor], seed: int, scale: float) -> dict[str, Tensor]:
    """Return parameters after a random element of each symmetry."""
    generator, w = torch.Generator().manual_seed(seed), {name: each.double() for name, each in params.items()}
    for each in symmetries:
        w = each.moved(w, generator, scale)
    return w


def line(name: str, bias: bool, found: Found | None = None) -> str:
    """Return the largest relative distance of canonical points, and the largest change of outputs."""
    model, x = net(name, bias)
    found = found or find(model, shown(name, x)[:4])
    params = {key: w.detach() for key, w in model.named_parameters()}
    here, place = canonical(found.symmetries, params), 0.0
    same, size = change(model, x, here.params), max(float(at.abs().max()) for at in here.params.values())
    for seed, scale in enumerate(SCALES):
        there = canonical(found.symmetries, moved(found.symmetries, params, seed, scale))
        same = max(same, change(model, x, there.params))
        for key, at in here.params.items():
            place = max(place, float((there.params[key] - at).abs().max()) / size)
    good = place < PLACE and same < SAME
    return f"{'one ' if good else 'MORE'} {name}, {bias}: {place:.0e}, outputs {same:.0e} {here.doubts or ''}"


def main() -> None:
    """Print a line for each net."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    for name in list(NETS)[given.first :: given.every]:
        for bias in (True, False):
            try:
                print(line(name, bias), flush=True)
            except Exception as error:  # of any net: the others are looked at all the same
                print(f"MORE {name}, {bias}: {error!r}"[:200], flush=True)


if __name__ == "__main__":
    main()
