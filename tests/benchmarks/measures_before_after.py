"""Write measures of the small models of docs/fibres.md to a JSON file, or compare them with one:

    python -m tests.benchmarks.measures_before_after measures.json SECONDS            writes
    python -m tests.benchmarks.measures_before_after measures.json SECONDS --compare  prints relative changes by measure

Models are taken in a random order, always the same one, until the seconds are over; when comparing, those of the file.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import quotient_manifolds as qm
from quotient_manifolds.symmetries import propose_symmetries
from studies.fibres import names, small_model

MEASURES = {
    "gradient norm": qm.gradient_norm,
    "worst case": partial(qm.worst_case_sharpness, radius=0.01, steps=5),
    "average case": partial(qm.average_case_sharpness, sigma=0.01, samples=4),
}


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean square of the first output, less one."""
    out = model(**batch) if isinstance(batch, Mapping) else model(*batch) if isinstance(batch, tuple) else model(batch)
    first = next(each for each in tree_leaves(dict(out) if isinstance(out, Mapping) else out) if _is_real(each))
    return ((first - 1) ** 2).mean()


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def measured(name: str) -> dict[str, float]:
    """Return the measures of a model by geometry, in float64."""
    model, batch = small_model(name)
    model, batch = model.double(), tree_map(lambda each: each.double() if _is_real(each) else each, batch)
    symmetries = propose_symmetries(model, batch, evaluate=loss)
    geometries = {metric: qm.Quotient(metric, symmetries=symmetries) for metric in ("inv", "mix")}
    return {
        f"{measure}, {kind}": measure_of(model, loss, [batch], geometry=geometry).mean
        for kind, geometry in {"euclidean": "euclidean", "adaptive": "adaptive", **geometries}.items()
        for measure, measure_of in MEASURES.items()
    }


def written(path: Path, chosen: list[str], seconds: float) -> dict[str, Any]:
    """Return the measures by model, an error's name where there are none, and write them after each model."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    start = time.perf_counter()
    for name in chosen:
        if name not in found and time.perf_counter() - start < seconds:
            try:
                found[name] = measured(name)
            except Exception as error:  # of any model: the others are measured all the same
                found[name] = f"{type(error).__name__}: {error}"[:200]
            path.write_text(json.dumps(found), encoding="utf-8")
    return found


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Print the median and the largest relative change by measure, and models without measures in either."""
    for name in before.keys() & after.keys():
        if isinstance(before[name], str) or isinstance(after[name], str):
            print(f"{name}: {before[name] if isinstance(before[name], str) else after[name]}")
    both = [name for name in before if isinstance(before[name], dict) and isinstance(after.get(name), dict)]
    print(f"{len(both)} models")
    for measure in before[both[0]]:
        changes = {name: abs(after[name][measure] / before[name][measure] - 1) for name in both}
        most = max(changes, key=changes.__getitem__)
        print(f"{measure}: median {statistics.median(changes.values()):.1e}, largest {changes[most]:.1e} ({most})")


def main(path: Path, seconds: float, *options: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    every = sorted(names())
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0)).tolist()
    if not options:
        written(path, [every[k] for k in order], seconds)
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    compare(before, written(path.with_suffix(".after.json"), [*before], seconds))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
