"""Write values of the public interface to a JSON file, or compare them with one:

    python -m tests.values values.json             writes
    python -m tests.values values.json --compare   prints the largest relative difference and each one above 1e-12

A change that is to leave the numbers alone is made between the two.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds import statistics
from tests.cases import EVERY_BUILT_IN
from tests.nets.attention import BY_NAME, IDS, llama
from tests.nets.lora_files import product, random_lora
from tests.optim.cases import made, train

METRICS, SCOPES = ("inv", "mix"), ("pairs", "paper")
ATTENTION = ("torch encoder", "BERT", "llama")


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _squares(model: nn.Module, batch: Any) -> Tensor:
    """A loss of any model: the mean square of what it returns, less one."""
    out = model(**batch) if isinstance(batch, dict) else model(batch)
    values = next(iter(out.values())) if hasattr(out, "values") and not isinstance(out, Tensor) else out
    return (((values[0] if isinstance(values, tuple) else values) - 1) ** 2).mean()


def models() -> dict[str, tuple[nn.Module, Any]]:
    """Five small models in float64, each with a batch."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    low_rank = nn.Sequential(nn.Linear(6, 2, bias=False), nn.Linear(2, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    transformers = {name: (BY_NAME[name].build(), BY_NAME[name].inputs()) for name in ("torch encoder", "BERT")}
    torch.manual_seed(1)
    every = {"mlp": (mlp, _draw(8, 5)), "low rank": (low_rank, _draw(8, 6)), **transformers, "llama": (llama(), IDS)}
    return {name: (model.double().eval(), _in_double(batch)) for name, (model, batch) in every.items()}


def _in_double(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: _in_double(value) for key, value in batch.items()}
    return batch.double() if isinstance(batch, Tensor) and batch.is_floating_point() else batch


def of_measures() -> Iterator[tuple[str, Any]]:
    for name, (model, batch) in models().items():
        common: dict[str, Any] = {"model": model, "loss": _squares, "batches": [batch]}
        scopes = {
            f"{metric} {scope}": qm.Quotient(metric, symmetries=scope)
            for metric in METRICS
            for scope in SCOPES * (name in ATTENTION)
        }
        for geometry, chosen in ({each: each for each in ("euclidean", "adaptive", *METRICS)} | scopes).items():
            given = {**common, "geometry": chosen}
            yield f"{name} {geometry} worst", qm.worst_case_sharpness(**given, radius=0.01, steps=5).mean
            yield f"{name} {geometry} average", qm.average_case_sharpness(**given, sigma=0.01, samples=4).mean
            yield f"{name} {geometry} gradient", qm.gradient_norm(**given).mean
            yield f"{name} {geometry} trace", qm.hessian_trace(**given, samples=4).mean
            yield f"{name} {geometry} eigenvalue", qm.top_eigenvalue(**given, tolerance=1e-13, restarts=300).mean
    model, batch = models()["torch encoder"]
    common = {"model": model, "loss": _squares, "batches": [batch]}
    for settings in ({"geodesic": "exact"}, {"geodesic": "first"}, {"eps": 0.1}, {"symmetries": "paper"}):
        chosen = qm.Quotient("mix", **settings)
        yield f"worst {settings}", qm.worst_case_sharpness(**common, geometry=chosen, radius=0.01, steps=5).mean
    for norm in ("l2", "linf"):
        chosen = qm.Adaptive(norm=norm)
        yield f"worst {norm}", qm.worst_case_sharpness(**common, geometry=chosen, radius=0.01, steps=5).mean
    yield "legacy", qm.legacy_sharpness(**common, geometry="adaptive", radius=0.01, steps=5).mean
    profile = qm.worst_case_profile(**common, geometry="inv", radii=[0.01, 0.02], steps=5)
    yield "profile", [each.mean for each in profile]


def of_manifolds() -> Iterator[tuple[str, Any]]:
    for case in EVERY_BUILT_IN:
        manifold, x = case.manifold, case.point(1, 2)
        u, v = (manifold.proju(x, 0.01 * case.vector(seed, 2)) for seed in (2, 3))
        yield f"{case} proju", u.tolist()
        yield f"{case} inner", manifold.inner(x, u, v).tolist()
        yield f"{case} gradient", manifold.egrad2rgrad(x, case.vector(4, 2)).tolist()
        yield f"{case} product", case.product(manifold.retr(x, u)).tolist()
        yield f"{case} expmap", case.product(manifold.expmap(x, u)).tolist()


def of_optimizers() -> Iterator[tuple[str, Any]]:
    for name, symmetric in (
        ("QuotientSGD", qm.QuotientSGD),
        ("QuotientAdam", qm.QuotientAdam),
        ("SAM", qm.QuotientSGD),
    ):
        model, inputs, targets, found = made("encoder")
        optimizer: torch.optim.Optimizer = symmetric(model.named_parameters(), found, lr=1e-3)
        if name == "SAM":
            optimizer = qm.SAM(optimizer, model, radius=0.01)
        yield name, train(model, optimizer, inputs, targets, 20)


def of_the_rest() -> Iterator[tuple[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[dict[str, int]] = [{"a": 3, "b": 2}, {"a": 2}]
        paths = [random_lora(Path(folder) / str(i), each, i, dtype=torch.float64) for i, each in enumerate(ranks)]
        qm.merge_adapters(paths, [0.3, 0.7]).save(Path(folder) / "merged")
        yield "merged", [product(Path(folder) / "merged", name).tolist() for name in "ab"]
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2, 30))
    found = statistics.correlation(x, x + y, seed=0)
    yield "correlation", [found.value, found.low, found.high]
    yield "holm", statistics.holm([0.01, 0.04, 0.03])


def values() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in (of_measures, of_manifolds, of_optimizers, of_the_rest):
            found |= part()
    return found


def difference(a: Any, b: Any) -> float:
    one, other = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    return float(np.abs(one - other).max() / max(np.abs(one).max(), 1e-300))


def main(path: Path, *options: str) -> int:
    torch.set_num_threads(1)
    found = values()
    if not options:
        path.write_text(json.dumps(found), encoding="utf-8")
        print(f"{len(found)} values")
        return 0
    before = json.loads(path.read_text(encoding="utf-8"))
    apart = {name: difference(before[name], found[name]) for name in before}
    for name, each in apart.items():
        if not each <= 1e-12:
            print(f"{name}: {each:.1e}")
    print(f"{len(apart)} values, largest relative difference {max(apart.values()):.1e}")
    return int(not max(apart.values()) <= 1e-12)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
