"""Inputs that a model accepts, made from its configuration."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn


def example_inputs(model: nn.Module, *, seed: int = 0, length: int = 16) -> dict[str, Tensor]:
    """Random inputs that the model's forward accepts, made from its signature and its configuration.

    Text: input_ids (rows, length) and attention_mask, the last quarter of the last row being padding where the model
    knows a padding token. Vision: Gaussian pixel_values (rows, channels, height, width). A model that takes both gets
    both.
    Raises ValueError for a model that has no Hugging Face configuration or takes neither.
    """
    config = getattr(model, "config", None)
    accepted = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, Tensor] = {}
    if config is not None and "input_ids" in accepted:
        inputs |= _example_text(config, length, generator)
    if config is not None and "pixel_values" in accepted:
        inputs |= _example_images(model, config, generator)
    if not inputs:
        raise ValueError(
            f"No example inputs can be made for {type(model).__name__}: expected a Hugging Face model that takes "
            "input_ids or pixel_values; give inputs of your own."
        )
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in inputs.items() if name in accepted}


def _example_text(config: Any, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    text = config.get_text_config()
    pad = getattr(config, "pad_token_id", None)
    # Position tables of the RoBERTa family begin after the padding index, which costs pad + 1 places.
    longest = (getattr(text, "max_position_embeddings", None) or length + 2) - 2
    rows, length = 1 if pad is None else 2, max(1, min(length, longest))
    ids = torch.randint(text.vocab_size, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if pad is not None and 0 <= pad < text.vocab_size:
        ids = torch.where(ids == pad, (pad + 1) % text.vocab_size, ids)
        mask[-1, length - length // 4 :] = 0
        ids = torch.where(mask == 0, pad, ids)
    return {"input_ids": ids, "attention_mask": mask}


def _example_images(model: nn.Module, config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.randn(2, getattr(vision, "num_channels", 3), height, width, generator=generator)
    return {"pixel_values": pixels.to(next(model.parameters()).dtype)}
