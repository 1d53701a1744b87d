"""Training small vision transformers until the loss on their own, noisy labels falls below one number for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.demo.zoo import one_thread, shifted

# 2 layers, 3 heads of 16, 17 tokens: 41,770 parameters. See demo.zoo for the deviation of the weights.
ARCHITECTURE: dict[str, Any] = {
    "image_size": 28,
    "patch_size": 7,
    "num_channels": 1,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "initializer_range": 0.08,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 10,
}
BATCH = 64
WARM_UP = 50  # steps over which the learning rate rises; then it stays
TARGET = 0.1  # nats: where training stops
OFTEN, RARELY = 2, 20  # steps between looks at the loss, near the target and far from it


@final
@dataclass(frozen=True)
class Recipe:
    """Hold a cell of the design: images, share of noisy labels, shifts, AdamW's settings, seed of data and weights."""

    points: int
    noise: float
    shift: int  # pixels up to which every image is moved at random, each time it is seen
    learning_rate: float
    weight_decay: float
    seed: int


@one_thread()
def train(
    recipe: Recipe, images: Tensor, labels: Tensor, architecture: Mapping[str, Any] = ARCHITECTURE, most: int = 60_000
) -> tuple[Any, int]:
    """Train until the loss on all training images, not shifted, is below `TARGET`; return the model and its steps.

    After `most` steps training stops wherever it is. torch's global generator is left alone.
    """
    from transformers import ViTConfig, ViTForImageClassification

    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = ViTForImageClassification(ViTConfig(**architecture)).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    blank, pause, step = float(images.min()), RARELY, 0
    while step < most:
        for _ in range(pause):
            rows = torch.randint(len(labels), (BATCH,), generator=generator)
            chosen = images[rows] if recipe.shift == 0 else shifted(images[rows], recipe.shift, blank, generator)
            loss = nn.functional.cross_entropy(model(pixel_values=chosen).logits, labels[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
        step += pause
        with torch.no_grad():
            now = float(nn.functional.cross_entropy(model(pixel_values=images).logits, labels))
        if now < TARGET:
            break
        pause = OFTEN if now < 2 * TARGET else RARELY
    return model.eval(), step
