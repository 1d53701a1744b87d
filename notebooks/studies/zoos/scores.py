"""What is known of a model without any geometry: losses, errors, margins, the norm of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn


@final
@dataclass(frozen=True)
class Scores:
    """Hold mean cross-entropy (nats), share of wrong answers, and the margin that a tenth of the examples lie below.

    The margin of an example is the logit of its class minus the largest of the others.
    """

    loss: float
    error: float
    margin: float


def score_of(logits: Tensor, labels: Tensor, noise: float = 0.0) -> Scores:
    """Compute scores of logits (N, classes) and labels (N,); expected ones, if labels are noisy.

    noise: the probability that a label is replaced by one of the others, each with the same probability. Loss and error
    are then expectations over it, exactly; the margin is that of the labels as they are.
    """
    classes = logits.shape[1]
    others = noise / (classes - 1)
    losses = -logits.double().log_softmax(1)  # (N, classes): of each label there could be
    right = logits.argmax(1, keepdim=True) == torch.arange(classes)
    chances = torch.full_like(losses, others).scatter_(1, labels[:, None], 1 - noise)
    own = logits.gather(1, labels[:, None])[:, 0]
    rest = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
    return Scores(
        loss=float((chances * losses).sum(1).mean()),
        error=float(1 - (chances * right).sum(1).mean()),
        margin=float((own - rest).double().quantile(0.1)),
    )


def weight_norm(model: nn.Module) -> float:
    """Compute the Euclidean norm of all parameters together."""
    return float(torch.linalg.vector_norm(torch.stack([each.detach().double().norm() for each in model.parameters()])))


def gaps(train: Scores, test: Scores, prefix: str = "") -> Mapping[str, float]:
    """Return error_gap and loss_gap: what a model does worse on the test data, with a prefix."""
    return {f"{prefix}error_gap": test.error - train.error, f"{prefix}loss_gap": test.loss - train.loss}
