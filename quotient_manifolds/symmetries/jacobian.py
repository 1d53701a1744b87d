"""Compute the Jacobian of a model's outputs by its parameters, in float64 and in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from quotient_manifolds.messages import Progress
from quotient_manifolds.replica import private_batch, replica
from quotient_manifolds.symmetries.double_precision import DoublePrecision
from quotient_manifolds.symmetries.outputs import Evaluate, doubled, floating

STEP = 1e-6  # relative to the parameters, to see outputs move or not
ROWS, NUMBERS = 256, 2**24  # computed at once, at most


class Jacobian:
    """Compute the Jacobian of a model's outputs with respect to the parameters named, compressed to a triangle."""

    def __init__(
        self,
        model: nn.Module,
        params: dict[str, Tensor],
        counted: list[str],
        evaluate: Evaluate,
        noise: torch.Generator,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.generator, self.rows = model, noise, 0
        self._params, self._counted, self._evaluate = params, counted, evaluate
        self._progress = progress or (lambda what, finished, total: None)

    def names(self) -> list[str]:
        """Return the name of the parameter that each column belongs to."""
        return [name for name in self._counted for _ in range(self._params[name].numel())]

    def triangle(self, batches: Sequence[Any], eps: float, noise: bool = False) -> tuple[Tensor, Tensor, bool]:
        """Return R (at most P, P) with R^T R = J^T J, the same of a random half, and whether there is an eps."""
        shuffled = torch.randperm(len(batches), generator=torch.Generator().manual_seed(0)).tolist()
        half = shuffled[: len(batches) // 2]
        columns = sum(self._params[name].numel() for name in self._counted)
        first, rest = (Triangle(self._params[self._counted[0]].new_zeros(0, columns)) for _ in range(2))
        self.rows, found_eps = 0, False
        for index, batch in enumerate(batches):
            y, found = self._outputs(batch, self._params, eps, noise)
            if not y.requires_grad:
                raise ValueError("the outputs depend on no parameter that asks for gradients, as far as autograd sees.")
            found_eps |= found
            self.rows += len(y)
            own = len(y) if index in half else 0 if half else len(y) // 2  # rows that are of the half
            for start, chunk in self._chunks(y):
                cut = max(0, own - start)
                first.add(chunk[:cut])
                rest.add(chunk[cut:])
            self._progress(f"Jacobian, eps {eps:g}{', noise' * noise}", index + 1, len(batches))
        of_half = first.R()
        first.add(rest.R())
        return first.R(), of_half, found_eps

    def moved(self, batch: Any, direction: Tensor, eps: float) -> float:
        """Return how far the outputs move with a small step of the parameters in this direction."""
        leaves = [self._params[name].detach() for name in self._counted]
        size = torch.cat([w.flatten() for w in leaves]).norm() / direction.norm()
        steps = (STEP * size * direction).split([w.numel() for w in leaves])
        there = {name: w + step.view_as(w) for name, w, step in zip(self._counted, leaves, steps, strict=True)}
        here = dict(zip(self._counted, leaves, strict=True))
        old, new = (self._outputs(batch, {**self._params, **at}, eps)[0].detach() for at in (here, there))
        return float((new - old).norm())

    def _outputs(self, batch: Any, params: dict[str, Tensor], eps: float, noise: bool = False) -> tuple[Tensor, bool]:
        copy = replica(self.model, params, doubled)
        before = {name: buffer.clone() for name, buffer in copy.named_buffers()}
        for module in copy.modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = None  # it hides the row's derivative from training
                if noise:
                    module.register_forward_hook(self._noisy)
        device = next(iter(params.values())).device.type
        exact = DoublePrecision(eps)
        with torch.autocast(device, enabled=False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), exact:
            found = floating(self._evaluate(copy, private_batch(batch, doubled)))
            y = torch.cat([output.flatten() for output in found])
        for name, buffer in copy.named_buffers():
            if name not in before or not torch.equal(buffer, before[name]):
                raise ValueError(f"the model changes its buffer {name!r} when it runs, so it has no one function.")
        return y, exact.found_eps

    def _noisy(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        noise = torch.randn(output.shape, generator=self.generator, dtype=output.dtype)
        return output + float(output.detach().std()) * noise.to(output.device)

    def _chunks(self, y: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield rows of J in order, (rows, P), with the index of the first."""
        leaves = [self._params[name] for name in self._counted]
        step = max(1, min(ROWS, NUMBERS // sum(w.numel() for w in leaves)))
        for start in range(0, len(y), step):
            rows = min(step, len(y) - start)
            one_hot = torch.zeros(rows, len(y), dtype=y.dtype, device=y.device)
            one_hot[range(rows), range(start, start + rows)] = 1
            yield start, torch.cat([g.reshape(rows, -1) for g in _pulled_back(y, leaves, one_hot)], dim=1)


def _pulled_back(y: Tensor, leaves: list[Tensor], cotangents: Tensor) -> list[Tensor]:
    """Return cotangents^T dy/dleaf for every leaf, (rows, *leaf.shape); at once, or row by row where vmap cannot."""

    def pull(cotangent: Tensor, batched: bool) -> list[Tensor]:
        grads = torch.autograd.grad(
            y, leaves, cotangent, retain_graph=True, allow_unused=True, is_grads_batched=batched
        )
        shape = cotangent.shape[:1] if batched else ()
        return [w.new_zeros(*shape, *w.shape) if g is None else g for g, w in zip(grads, leaves, strict=True)]

    try:
        return pull(cotangents, batched=True)
    except RuntimeError:
        return [torch.stack(rows) for rows in zip(*(pull(row, batched=False) for row in cotangents), strict=True)]


class Triangle:
    """Accumulate rows of a matrix as the R of its QR decomposition, in the memory of some squares."""

    def __init__(self, rows: Tensor) -> None:
        self._waiting = [rows]

    def add(self, rows: Tensor) -> None:
        """Add rows, (any, P)."""
        if len(rows):  # an empty view would keep all rows that it was cut from in memory
            self._waiting.append(rows)
        if sum(map(len, self._waiting)) > 3 * rows.shape[1]:
            self._waiting = [self.R()]

    def R(self) -> Tensor:
        """Return R, (at most P, P), upper triangular."""
        return torch.linalg.qr(torch.cat(self._waiting), mode="r").R
