"""Merge 8 adapters of rank 16 by this package or by peft: python -m tests.benchmarks.merging KIND METHOD WIDTH LAYERS.

KIND says what the adapters are (see `KINDS`), METHOD is "ours" or a combination of peft's `add_weighted_adapter`.
Layers are WIDTH x WIDTH. Prints a dict: processor seconds of a merge (best of three) and bytes of peak resident memory
above what is held before it; the relative error of the merged update (Frobenius, over all layers), and that of what it
changes in the function of a residual tanh network, both against the exact weighted mean. peft's adapters are in memory
before time and memory count, ours are read from their files within. Linux alone tells the peak memory of a part of a
process.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds import merge_adapters
from tests.benchmarks.running import peak
from tests.nets.lora_files import lora_directory, product

ADAPTERS, RANK, TRAINED = 8, 16, 0.5
KINDS = {
    "related": "trained from one start: common factors and, half as large, factors of their own",
    "rotated": "the same products B A, each adapter with another basis (B Z^-1, Z A), Z orthogonal",
    "independent": "unrelated factors",
    "rslora": "the related ones, stored with use_rslora",
}


def factors(kind: str, width: int, layers: int) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """B and A of each adapter and layer, the size of an update about a tenth of that of a layer."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * (0.1 / RANK) ** 0.5 / width**0.25

    found: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in range(ADAPTERS)]
    for layer in range(layers):
        B, A = (draw(width, RANK), draw(RANK, width)) if kind != "independent" else (0.0, 0.0)
        size = 1.0 if kind == "independent" else TRAINED
        for adapter in found:
            own = B + size * draw(width, RANK), A + size * draw(RANK, width)
            adapter[f"layers.{layer}"] = own
    if kind == "rotated":
        for adapter in found:
            for name, (B, A) in adapter.items():
                Z, _ = torch.linalg.qr(torch.randn(RANK, RANK, generator=generator))
                adapter[name] = (B @ Z.T, Z @ A)
    return found


class Residual(nn.Module):
    """x + tanh(W x), again and again."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def base(width: int, layers: int) -> Residual:
    torch.manual_seed(1)
    return Residual(width, layers)


def timed(merge: Callable[[int], Any]) -> tuple[Any, float, int]:
    """What the first of three merges gives, the shortest time of one, and the peak memory of the first."""
    before, seconds, extra, first = peak(reset=True), [], 0, None
    for place in range(3):
        start = time.process_time()
        result = merge(place)
        seconds.append(time.process_time() - start)
        if place == 0:
            first, extra = result, peak() - before
    return first, min(seconds), extra


def ours(paths: list[Path], folder: Path, layers: int) -> tuple[list[Tensor], float, int]:
    merged, seconds, extra = timed(lambda place: merge_adapters(paths))
    merged.save(folder / "merged")
    return [product(folder / "merged", f"layers.{layer}") for layer in range(layers)], seconds, extra


def by_peft(method: str, paths: list[Path], width: int, layers: int) -> tuple[list[Tensor], float, int]:
    from peft import PeftModel

    model = PeftModel.from_pretrained(base(width, layers), str(paths[0]), adapter_name="0")
    for place, path in enumerate(paths[1:], 1):
        model.load_adapter(str(path), str(place))
    names, weights = [str(place) for place in range(len(paths))], [1 / len(paths)] * len(paths)
    options = {"density": 0.5} if method == "ties" else {}

    def merge(place: int) -> None:
        model.add_weighted_adapter(names, weights, f"merged{place}", combination_type=method, **options)

    _, seconds, extra = timed(merge)
    with torch.no_grad():
        return [layer.get_delta_weight("merged0").double() for layer in model.model.layers], seconds, extra


def errors(means: list[Tensor], found: list[Tensor], width: int) -> tuple[float, float]:
    """Relative errors of the update and of the change of the function."""
    differences = [one - other for one, other in zip(found, means, strict=True)]
    norms = [sum(float(part.square().sum()) for part in parts) for parts in (means, differences)]
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def outputs(updates: list[Tensor]) -> Tensor:
        network = base(width, len(means)).double()
        for layer, update in zip(network.layers, updates, strict=True):
            layer.weight.data += update
        with torch.no_grad():
            return network(x)

    plain, exact, merged = outputs([0.0 * mean for mean in means]), outputs(means), outputs(found)
    return (norms[1] / norms[0]) ** 0.5, float((merged - exact).norm() / (exact - plain).norm())


def measured(kind: str, method: str, width: int, layers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = {"use_rslora": True, "lora_alpha": RANK**0.5, "alpha_pattern": {}} if kind == "rslora" else {}
        adapters = factors(kind, width, layers)
        paths = [lora_directory(folder / str(i), each, **settings) for i, each in enumerate(adapters)]
        modules = [f"layers.{layer}" for layer in range(layers)]
        found, seconds, extra = (
            ours(paths, folder, layers) if method == "ours" else by_peft(method, paths, width, layers)
        )
        means = [torch.stack([product(path, module) for path in paths]).mean(0) for module in modules]
        update, function = errors(means, found, width)
    return {"seconds": seconds, "extra": extra, "update": update, "function": function}


def main(kind: str, method: str, width: int, layers: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(measured(kind, method, width, layers))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
