"""How much of the loss barrier between two networks trained from different seeds alignment takes away, by symmetry."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call

from quotient_manifolds.messages import Progress
from quotient_manifolds.orbit import align, descend_orbit, loss_along_path
from quotient_manifolds.symmetries import Reparameterization, Symmetries, find_permutations, find_symmetries
from studies.common import Record, Tables, power, resume
from studies.networks import Batch, Kind, accuracy, data, loss, trained

PAIRS, POINTS, TOKENS = 5, 21, 4096
STEPS: dict[Kind, tuple[int, int]] = {
    "RMSNorm, digits": (1500, 300),
    "LayerNorm and GELU, digits": (1500, 100),
    "language model": (2000, 100),
}
"""How long each kind of network is trained, and how long the loss along the path is lowered."""
NAMES = {
    "none": "as trained",
    "permuted": "heads and neurons permuted",
    "rotated": "and the stream rotated, gains absorbed",
    "whole group": "and GL(h) of heads, scales, shifts",
    "refined": "and descent on the path's loss",
    "refined alone": "control: the descent alone",
}


def run(out: Path, *, fast: bool = False, progress: Progress | None = None) -> Record:
    """Return a row for each pair of seeds and way to align."""
    steps, pairs = (dict.fromkeys(STEPS, (60, 3)), 1) if fast else (STEPS, PAIRS)
    cells = {
        f"{kind} {pair}": partial(_rows, kind, pair, *counts) for pair in range(pairs) for kind, counts in steps.items()
    }
    settings = {"steps": steps}
    found = resume(out / "pairs", cells, what="pairs", settings=settings, progress=progress)
    return {"rows": [row for rows in found for row in rows], **settings}


def _rows(kind: Kind, pair: int, steps: int, refined: int) -> list[dict[str, Any]]:
    """Align two networks in every way, and return barriers and accuracies on held-out data."""
    a, b = (trained(kind, 2 * pair + each, steps) for each in range(2))
    train, test, _ = data(kind)
    x, y = (each[: TOKENS // train[0].shape[1]] for each in train)  # 256 images, or 64 texts
    every, permutations = find_symmetries(b, (train[0][:8],)), find_permutations(b, (train[0][:8],))
    folded = Symmetries((), reparameterizations=tuple(each for each in every.reparameterizations if _folds(each)))
    rows = [_row(kind, pair, "none", a, b, 0.0, test)]
    near: nn.Module = b
    for way, symmetries in {"permuted": Symmetries(()), "rotated": folded, "whole group": every}.items():
        found = align(b, a, (x,), symmetries=symmetries, permutations=permutations)
        near = found.model
        rows.append(_row(kind, pair, way, a, near, found.change, test))
    options: Any = {"symmetries": every, "steps": refined, "learning_rate": 0.01, "tolerance": 0.0}
    for way, start in {"refined": near, "refined alone": b}.items():
        moved = descend_orbit(start, partial(_on_path, a, (x, y)), (x,), **options)
        rows.append(_row(kind, pair, way, a, moved.model, moved.change, test))
    return rows


def _on_path(a: nn.Module, batch: Batch, params: dict[str, Tensor]) -> Tensor:
    """Return the mean loss at three points inside of the path from a to the parameters."""
    own = {name: w.detach() for name, w in a.named_parameters()}
    paths = ({name: own[name].lerp(w, t) for name, w in params.items()} for t in (0.25, 0.5, 0.75))
    return torch.stack([loss(partial(functional_call, a, between), batch) for between in paths]).mean()


def _folds(found: Reparameterization) -> bool:
    """Return whether a symmetry is a rotation of the stream, or of gains, which are folded before it."""
    return found.symmetry.mixes or found.kind.endswith("gain")


@torch.no_grad()
def _row(kind: Kind, pair: int, way: str, a: nn.Module, b: nn.Module, change: float, test: Batch) -> dict[str, Any]:
    path = loss_along_path(a, b, loss, [test], points=POINTS)
    mean = {name: (w + v) / 2 for (name, w), v in zip(a.named_parameters(), b.parameters(), strict=True)}
    models: dict[str, Any] = {"a": a, "b": b, "mean": partial(functional_call, a, mean)}
    scores = {name: accuracy(model, test) for name, model in models.items()}
    return {"kind": kind, "pair": pair, "way": way, "barrier": path.barrier, "change": change, **scores}


def tables(record: Record) -> Tables:
    """Return medians and ranges over pairs by kind of network and way to align; the medians alone, side by side."""
    rows = pd.DataFrame(record["rows"])
    shown, ends, main = [], [], {"Alignment": [*NAMES.values()]}
    for kind, own in rows.groupby("kind", sort=False):
        before, alone = own[own.way == "none"].set_index("pair").barrier, own[["a", "b"]].to_numpy()
        ends.append([kind, str(len(before)), f"{alone.min():.3f}", f"{alone.max():.3f}"])
        ends[-1] += [str(record["steps"][kind][1]), power(float(own.change.max()))]
        main[str(kind)] = []
        for way, name in NAMES.items():
            some = own[own.way == way].set_index("pair")
            middle, mean = some.barrier.median(), some["mean"]
            left = f"{100 * (some.barrier / before).median():.0f} %"
            barrier = f"{middle:.3g} [{some.barrier.min():.2g}, {some.barrier.max():.2g}]"
            shown.append([kind, name, barrier, left, f"{mean.median():.3f} [{mean.min():.3f}, {mean.max():.3f}]"])
            main[str(kind)].append(f"{middle:.2g}, {left}, {mean.median():.2f}")
    columns = ["Networks", "Alignment", "Barrier, median [range]", "remaining", "Accuracy of the mean model"]
    named = ["Networks", "Pairs", "Accuracy, lowest", "highest", "Steps", "Change of the function"]
    barriers, networks = pd.DataFrame(shown, columns=columns), pd.DataFrame(ends, columns=named)
    return {"barriers": barriers, "main": pd.DataFrame(main), "networks": networks}
