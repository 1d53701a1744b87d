"""Logit normalisation, so that a measure does not see the scale of a classifier's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.sharpness.losses import Loss, logits_of

_FLOOR = 1e-10


def normalised_logits(loss: Loss) -> Loss:
    """Return a loss like `loss`, of logits that are centred and scaled to length 1 (Andriushchenko et al., 2023).

    Logits o become (o - mean o) / max(|o - mean o|_2, 1e-10), over classes. `loss` gets the model in a wrapper that
    normalises what a call of it returns: a tensor, a mapping with "logits", or a tuple that starts with them. So a loss
    that does not call the model it is given is a ValueError. A measure is invariant along an orbit with it if it is
    without it.
    """

    def normalised(model: nn.Module, batch: Any) -> Tensor:
        wrapper = _Normalised(model)
        value = loss(wrapper, batch)
        if not wrapper.called:
            raise ValueError(
                "normalised_logits needs a loss that calls the model it is given, model(...). This one never does; "
                "normalise the logits inside the loss"
            )
        return value

    return normalised


@final
class _Normalised(nn.Module):
    """The model with its logits normalised; lives for one evaluation of the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = False
        self.called = False

    @property
    def wrapped(self) -> nn.Module:
        return self.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        output = self.model(*args, **kwargs)
        logits = logits_of(output)
        centred = logits - logits.mean(dim=-1, keepdim=True)
        logits = centred / torch.linalg.vector_norm(centred, dim=-1, keepdim=True).clamp(min=_FLOOR)
        if isinstance(output, Mapping):
            return {**output, "logits": logits}
        return (logits, *output[1:]) if isinstance(output, (tuple, list)) else logits
