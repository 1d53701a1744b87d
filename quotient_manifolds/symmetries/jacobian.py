"""Compute the Jacobian of a model's outputs by its parameters, in float64 and in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from quotient_manifolds.messages import Progress
from quotient_manifolds.replica import private_batch, replica
from quotient_manifolds.symmetries.double_precision import DoublePrecision
from quotient_manifolds.symmetries.outputs import Evaluate, doubled, floating

ROWS, NUMBERS = 256, 2**24  # of J, computed at once at most


class Jacobian:
    """Differentiate all outputs of a model by the parameters that ask for gradients; the model is never touched."""

    def __init__(
        self, model: nn.Module, evaluate: Evaluate, generator: torch.Generator, progress: Progress | None = None
    ) -> None:
        self.model, self.generator, self.found_eps = model, generator, False
        own = {name: w.detach().clone() for name, w in model.named_parameters() if w.requires_grad}
        self.params = {name: doubled(w).requires_grad_() for name, w in own.items()}
        self.columns = [name for name, w in own.items() for _ in range(w.numel())]
        self._evaluate, self._progress = evaluate, progress or (lambda what, finished, total: None)

    def triangle(
        self, batches: Sequence[Any], eps: float, noise: bool = False, above: Tensor | None = None, part: float = 1.0
    ) -> tuple[Tensor, int]:
        """Return R (at most P, P) with R^T R = J^T J, and how many rows J has.

        eps: put for that of every norm. noise: is added to what tables give. above: rows to put above those of J.
        part: how much of the outputs of each batch, from the first on.
        """
        waiting, count = [] if above is None else [above], 0
        for index, batch in enumerate(batches):
            for J in self._rows(batch, eps, noise, part):
                waiting.append(J)
                count += len(J)
                if sum(map(len, waiting)) > 4 * len(self.columns):
                    waiting = [_compressed(waiting)]
            self._progress(f"Jacobian, eps {eps:g}{', noise' * noise}", index + 1, len(batches))
        return _compressed(waiting), count

    def outputs(self, batch: Any, params: dict[str, Tensor], eps: float, noise: bool = False) -> Tensor:
        """Return all outputs at these parameters, (any,)."""
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
        self.found_eps |= exact.found_eps
        return y

    def _noisy(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        noise = torch.randn(output.shape, generator=self.generator, dtype=output.dtype)
        return output + float(output.detach().std()) * noise.to(output.device)

    def _rows(self, batch: Any, eps: float, noise: bool, part: float) -> Iterator[Tensor]:
        """Yield rows of J in order, some at a time, (any, P)."""
        y, leaves = self.outputs(batch, self.params, eps, noise), list(self.params.values())
        if not y.requires_grad:
            raise ValueError("the outputs depend on no parameter that asks for gradients, as far as autograd sees.")
        step = max(1, min(ROWS, NUMBERS // len(self.columns)))
        for places in torch.arange(round(part * len(y)), device=y.device).split(step):
            yield _pulled_back(y, leaves, F.one_hot(places, len(y)).to(y))


def _pulled_back(y: Tensor, leaves: list[Tensor], cotangents: Tensor) -> Tensor:
    """Return cotangents dy/dleaves, (rows, P): all rows at once, or one by one where vmap cannot."""

    def pull(v: Tensor, batched: bool) -> tuple[Any, ...]:
        return torch.autograd.grad(y, leaves, v, retain_graph=True, allow_unused=True, is_grads_batched=batched)

    try:
        parts = pull(cotangents, batched=True)
    except RuntimeError:
        rows = [pull(v, batched=False) for v in cotangents]
        parts = tuple(None if each[0] is None else torch.stack(each) for each in zip(*rows, strict=True))
    zeros = (w.new_zeros(len(cotangents), w.numel()) for w in leaves)
    return torch.cat([zero if g is None else g.reshape(zero.shape) for g, zero in zip(parts, zeros, strict=True)], 1)


def _compressed(rows: list[Tensor]) -> Tensor:
    return torch.linalg.qr(torch.cat(rows), mode="r").R
