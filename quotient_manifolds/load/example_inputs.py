"""Make inputs that a model accepts from its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class _Wanted:
    """Hold what a model's inputs are made of: its configuration, its class, the text length, the randomness."""

    config: Any
    model: nn.Module
    length: int
    generator: torch.Generator

    def noise(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float32)
        return values.to(next(self.model.parameters()).dtype)

    def first(self, *names: str, default: int) -> int:
        """Return the first attribute that the configuration, or its vision or audio part, has as a number."""
        parts = [self.config, *(getattr(self.config, part, None) for part in ("vision_config", "audio_config"))]
        found = (getattr(part, name, None) for name in names for part in parts)
        return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), default)


def accepted_by(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a model's forward; those of the model inside where peft has wrapped it."""
    unwrapped = getattr(model, "get_base_model", lambda: model)()
    return inspect.signature(unwrapped.forward).parameters


def example_inputs(model: nn.Module, *, seed: int = 0, length: int = 16) -> dict[str, Tensor]:
    """Return random inputs that the model's forward accepts, made from its signature and its configuration.

    Text: input_ids (rows, length) and attention_mask, the last quarter of the last row being padding where the model
    knows a padding token; decoder_input_ids where it is an encoder-decoder; bbox (rows, length, 4) where it reads
    layouts. Vision: Gaussian pixel_values (rows, channels, height, width), with frames before the channels for video.
    Audio: input_values (rows, samples) or (rows, frames, mel bins), input_features (rows, mel bins, frames). A model
    that takes several gets all of them.
    Raises ValueError for a model that has no Hugging Face configuration or takes none.
    """
    config = getattr(model, "config", None)
    accepted = accepted_by(model)
    inputs: dict[str, Tensor] = {}
    if config is not None:
        wanted = _Wanted(config, model, length, torch.Generator().manual_seed(seed))
        for name, make in _MAKERS.items():
            if name in accepted:
                inputs |= make(wanted)
    if not inputs:
        raise ValueError(
            f"No example inputs can be made for {type(model).__name__}: expected a Hugging Face model that takes "
            "input_ids, pixel_values, input_values or input_features; give inputs of your own."
        )
    if config is not None and {"input_ids", "pixel_values"} <= set(inputs):
        inputs = _with_image_tokens(wanted, inputs)
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in inputs.items() if name in accepted}


def optional_inputs(model: nn.Module, inputs: Mapping[str, Tensor], *, seed: int = 0) -> dict[str, Tensor]:
    """Return what the model's forward accepts beside its example inputs, by name, as far as its configuration tells.

    token_type_ids at random; masks of text that leave out the end of the first row; bool_masked_pos (rows, patches),
    half of them. Each is one that may be given with the inputs, and that the model may yet refuse.
    """
    wanted = _Wanted(getattr(model, "config", None), model, 0, torch.Generator().manual_seed(seed))
    accepted = accepted_by(model)
    made = {name: make(wanted, inputs) for name, make in _OPTIONAL.items() if name in accepted}
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in made.items() if value is not None}


def _text(wanted: _Wanted) -> dict[str, Tensor]:
    config, generator = wanted.config, wanted.generator
    text = config.get_text_config()
    pad = getattr(config, "pad_token_id", None)
    # Position tables of the RoBERTa family begin after the padding index, which costs pad + 1 places.
    places = getattr(text, "max_position_embeddings", None) or 0
    longest = max(1, places - 2) if places > 0 else wanted.length  # XLNet says -1 for any length
    rows, length = 1 if pad is None else 2, min(wanted.length, longest)
    ids = torch.randint(text.vocab_size, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if pad is not None and 0 <= pad < text.vocab_size:
        ids = torch.where(ids == pad, (pad + 1) % text.vocab_size, ids)
        mask[-1, length - length // 4 :] = 0
        ids = torch.where(mask == 0, pad, ids)
    return {"input_ids": ids, "attention_mask": mask}


def _with_image_tokens(wanted: _Wanted, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return text that begins with an image token for each feature of a picture, if the model has such a token."""
    token = getattr(wanted.config, "image_token_id", None) or getattr(wanted.config, "image_token_index", None)
    features = getattr(wanted.model, "get_image_features", None)
    if not isinstance(token, int) or features is None:
        return inputs
    with torch.no_grad():
        answer = features(pixel_values=inputs["pixel_values"])
    pictures = getattr(answer, "pooler_output", answer)
    tokens = sum(picture.shape[0] for picture in pictures) // len(inputs["pixel_values"])
    ids = torch.randint(3, token, (len(inputs["pixel_values"]), 6), generator=wanted.generator)
    ids = torch.cat([torch.full((len(ids), tokens), token), ids], dim=1)
    return {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _decoder_text(wanted: _Wanted) -> dict[str, Tensor]:
    if not getattr(wanted.config, "is_encoder_decoder", False):
        return {}
    decoder = wanted.config.get_text_config(decoder=True)
    rows = 2 if getattr(wanted.config, "pad_token_id", None) is not None else 1
    return {"decoder_input_ids": torch.randint(3, decoder.vocab_size, (rows, 6), generator=wanted.generator)}


def _encoded(wanted: _Wanted) -> dict[str, Tensor]:
    """Return what a decoder with cross-attention reads when no encoder stands before it."""
    if not getattr(wanted.config, "add_cross_attention", False):
        return {}
    rows = len(_text(wanted)["input_ids"])
    return {"encoder_hidden_states": wanted.noise(rows, 5, wanted.config.hidden_size)}


def _images(wanted: _Wanted) -> dict[str, Tensor]:
    vision = getattr(wanted.config, "vision_config", wanted.config)
    size = getattr(vision, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size[-2:]
    channels = wanted.first("num_channels", "in_channels", "in_chans", default=3)
    frames = wanted.first("num_frames", default=0)
    return {"pixel_values": wanted.noise(2, *([frames] if frames else []), channels, height, width)}


def _sound(wanted: _Wanted) -> dict[str, Tensor]:
    """Return spectrograms where the configuration counts mel bins, a waveform otherwise."""
    mels, frames = wanted.first("num_mel_bins", default=0), wanted.first("max_length", default=0)
    return {"input_values": wanted.noise(2, frames, mels) if mels and frames else wanted.noise(2, 1600)}


def _features(wanted: _Wanted) -> dict[str, Tensor]:
    config = wanted.config
    if hasattr(config, "input_feat_per_channel"):
        return {"input_features": wanted.noise(2, 24, config.input_feat_per_channel * config.input_channels)}
    mels = wanted.first("num_mel_bins", "feature_projection_input_dim", default=80)
    if hasattr(config, "max_source_positions"):
        return {"input_features": wanted.noise(2, mels, 2 * config.max_source_positions)}
    return {"input_features": wanted.noise(2, 24, mels)}


def _boxes(wanted: _Wanted) -> dict[str, Tensor]:
    """Return boxes (left, top, right, bottom) on a page of 0 to 20 points."""
    shape = _text(wanted)["input_ids"].shape
    corners = torch.randint(1, 9, (*shape, 4), generator=wanted.generator)
    return {"bbox": corners + torch.tensor([0, 0, 10, 10])}


_MAKERS: dict[str, Callable[[_Wanted], dict[str, Tensor]]] = {
    "input_ids": _text,
    "decoder_input_ids": _decoder_text,
    "encoder_hidden_states": _encoded,
    "pixel_values": _images,
    "input_values": _sound,
    "input_features": _features,
    "bbox": _boxes,
}


def _types(wanted: _Wanted, inputs: Mapping[str, Tensor]) -> Tensor | None:
    if "input_ids" not in inputs:
        return None
    types = getattr(wanted.config.get_text_config(), "type_vocab_size", None) or 2
    return torch.randint(types, inputs["input_ids"].shape, generator=wanted.generator)


def _padded(name: str, wanted: _Wanted, inputs: Mapping[str, Tensor]) -> Tensor | None:
    if name not in inputs:
        return None
    mask = torch.ones_like(inputs[name])
    mask[0, mask.shape[1] - mask.shape[1] // 4 :] = 0
    return mask


def _masked(wanted: _Wanted, inputs: Mapping[str, Tensor]) -> Tensor | None:
    patch = wanted.first("patch_size", default=0)
    if "pixel_values" not in inputs or not patch:
        return None
    rows, *_, height, width = inputs["pixel_values"].shape
    patches = (height // patch) * (width // patch)
    return torch.rand(rows, patches, generator=wanted.generator, dtype=torch.float32) < 0.5


_OPTIONAL: dict[str, Callable[[_Wanted, Mapping[str, Tensor]], Tensor | None]] = {
    "token_type_ids": _types,
    "attention_mask": partial(_padded, "input_ids"),
    "decoder_attention_mask": partial(_padded, "decoder_input_ids"),
    "bool_masked_pos": _masked,
}
