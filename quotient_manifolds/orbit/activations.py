"""Compare the activations of two models on the channels of streams that rotations act on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import Evaluate, Params
from quotient_manifolds.symmetries.groups import Rows, Symmetry
from quotient_manifolds.symmetries.outputs import ModelOutputs, answer


def moments_of(
    models: Sequence[nn.Module],
    inputs: Any,
    evaluate: Evaluate | None,
    symmetries: Sequence[Symmetry | None],
    *params: Params,
) -> list[Tensor | None]:
    """Return, for each symmetry, the moments sum a b^T of activations b of the first model and a of the second.

    The moments of each module are normalized and added; None if no module contributes.
    """
    seen = []
    for model, own in zip(models, params, strict=True):
        found = list[tuple[int, Tensor]]()

        def watched(copied: nn.Module, batch: Any, found: list[tuple[int, Tensor]] = found) -> Any:
            found.clear()  # a failed run may have left entries
            for k, symmetry in enumerate(symmetries):
                for algebra, _, placed in symmetry.blocks if symmetry is not None else ():
                    for rows, at, writes in placed if symmetry is not None and algebra.n == symmetry.shape[0] else ():
                        module = copied.get_submodule(rows.name.rpartition(".")[0])
                        module.register_forward_hook(partial(_record, found, k, rows, at, writes))
            return (evaluate or answer)(copied, batch)

        devices = {name: w.device for name, w in (*model.named_parameters(), *model.named_buffers())}
        ModelOutputs(model, [inputs], watched).at({name: w.to(devices[name]) for name, w in own.items()})
        seen.append(found)
    moments: list[Tensor | None] = [None] * len(symmetries)
    for (k, b), (_, a) in zip(*seen, strict=False):
        if a.shape == b.shape:
            M, known = unit(a.mT @ b), moments[k]
            moments[k] = M if known is None else known + M
    return moments


def unit(moment: Tensor) -> Tensor:
    """Scale a matrix to norm 1; return 0 unchanged."""
    return moment / torch.linalg.matrix_norm(moment).clamp_min(torch.finfo(moment.dtype).tiny)


def _record(
    found: list[tuple[int, Tensor]],
    k: int,
    rows: Rows,
    at: Tensor,
    writes: bool,
    module: nn.Module,
    args: Any,
    output: Any,
) -> None:
    """Record a module's output or input on the channels of a wire, depending on whether it writes or reads them."""
    index = torch.stack(torch.unravel_index(rows.places[at], rows.shape))  # (axes, channels, columns)
    axes = [n for n, each in enumerate(index) if bool((each == each[:, :1]).all())]
    x = output if writes else next(iter(args), None)
    width = rows.shape[axes[0]] if axes else 0
    if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 and x.shape[-1] == width:
        flat = x.detach().reshape(-1, width).cpu().double()
        found.append((k, flat.index_select(1, index[axes[0], :, 0])))
