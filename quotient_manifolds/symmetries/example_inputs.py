"""Make inputs that a model accepts, from its signature and configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries.checks import check_model, generator_of


def without_adapters(model: nn.Module) -> Any:
    """Return the base model if peft has wrapped it, else the model."""
    return getattr(model, "get_base_model", lambda: model)()


def accepted_by(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a model's forward method, or of the base model's if peft has wrapped it."""
    return inspect.signature(without_adapters(model).forward).parameters


def example_inputs(model: nn.Module, *, seed: int = 0, length: int = 16) -> dict[str, Tensor]:
    """Return random inputs that the model's forward method accepts, made from its signature and configuration.

    Text: input_ids (rows, length) and attention_mask; with a padding token, the last quarter of the last row is
    padding. Encoder-decoders also get decoder_input_ids, and layout models bbox (rows, length, 4). Vision: Gaussian
    pixel_values (rows, channels, height, width), with frames before the channels for video. Audio: input_values
    (rows, samples) or (rows, frames, mel bins), input_features (rows, mel bins, frames). A model that accepts several
    of them gets all.
    Raises ValueError for a model without a Hugging Face configuration, or that accepts none of these inputs.
    """
    check_model(model)
    make = _Maker(getattr(model, "config", None), model, length, generator_of(seed))
    accepted = accepted_by(model)
    inputs: dict[str, Tensor] = {}
    if make.config is not None:
        for name, maker in _MAKERS.items():
            if name in accepted:
                inputs |= maker(make)
        if {"input_ids", "pixel_values"} <= set(inputs):
            inputs |= make.image_tokens(inputs["pixel_values"])
    if not inputs:
        raise ValueError(
            f"No example inputs can be made for {type(model).__name__}: expected a Hugging Face model that takes "
            "input_ids, pixel_values, input_values or input_features; give inputs of your own (--inputs)."
        )
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in inputs.items() if name in accepted}


def optional_inputs(model: nn.Module, inputs: Mapping[str, Tensor], *, seed: int = 0) -> dict[str, Tensor]:
    """Return further inputs that the model's forward method accepts, by name, as far as its configuration tells.

    These are random token_type_ids, attention masks that exclude the end of the first row, and bool_masked_pos
    (rows, patches), of which half are set. Each may be added to the inputs, but the model may still refuse it.
    """
    make = _Maker(getattr(model, "config", None), model, 0, generator_of(seed))
    found: dict[str, Tensor] = {}
    if "input_ids" in inputs:
        types = getattr(make.config.get_text_config(), "type_vocab_size", None) or 2
        found["token_type_ids"] = torch.randint(types, inputs["input_ids"].shape, generator=make.generator)
    for name in ("input_ids", "decoder_input_ids"):
        if name in inputs:
            mask = torch.ones_like(inputs[name])
            mask[0, mask.shape[1] - mask.shape[1] // 4 :] = 0
            found[name.replace("input_ids", "attention_mask")] = mask
    if "pixel_values" in inputs and (patch := make.first("patch_size", default=0)):
        rows, *_, height, width = inputs["pixel_values"].shape
        shape = rows, (height // patch) * (width // patch)
        found["bool_masked_pos"] = torch.rand(shape, generator=make.generator, dtype=torch.float32) < 0.5
    accepted, device = accepted_by(model), next(model.parameters()).device
    return {name: value.to(device) for name, value in found.items() if name in accepted}


@dataclass(frozen=True)
class _Maker:
    """Make inputs of each kind from a model's configuration and class, a text length, and a random generator."""

    config: Any
    model: nn.Module
    length: int
    generator: torch.Generator

    def noise(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float32)
        return values.to(next(self.model.parameters()).dtype)

    def first(self, *names: str, default: int) -> int:
        """Return the first of these attributes that is an integer in the configuration or its vision or audio part."""
        parts = [self.config, *(getattr(self.config, part, None) for part in ("vision_config", "audio_config"))]
        found = (getattr(part, name, None) for name in names for part in parts)
        return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), default)

    def text(self) -> dict[str, Tensor]:
        text = self.config.get_text_config()
        pad = getattr(self.config, "pad_token_id", None)
        # Position tables of the RoBERTa family begin after the padding index, so pad + 1 positions are unavailable.
        places = getattr(text, "max_position_embeddings", None) or 0
        longest = max(1, places - 2) if places > 0 else self.length  # XLNet sets -1 for any length
        rows, length = 1 if pad is None else 2, min(self.length, longest)
        ids = torch.randint(text.vocab_size, (rows, length), generator=self.generator)
        mask = torch.ones_like(ids)
        if pad is not None and 0 <= pad < text.vocab_size:
            ids = torch.where(ids == pad, (pad + 1) % text.vocab_size, ids)
            mask[-1, length - length // 4 :] = 0
            ids = torch.where(mask == 0, pad, ids)
        return {"input_ids": ids, "attention_mask": mask}

    def image_tokens(self, pixels: Tensor) -> dict[str, Tensor]:
        """Return text that starts with one image token per image feature, if the model has such a token."""
        token = getattr(self.config, "image_token_id", None) or getattr(self.config, "image_token_index", None)
        features = getattr(self.model, "get_image_features", None)
        if not isinstance(token, int) or features is None:
            return {}
        with torch.no_grad():
            answer = features(pixel_values=pixels)
        pictures = getattr(answer, "pooler_output", answer)
        tokens = sum(picture.shape[0] for picture in pictures) // len(pixels)
        ids = torch.randint(3, token, (len(pixels), 6), generator=self.generator)
        ids = torch.cat([torch.full((len(ids), tokens), token), ids], dim=1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def decoder_text(self) -> dict[str, Tensor]:
        if not getattr(self.config, "is_encoder_decoder", False):
            return {}
        decoder = self.config.get_text_config(decoder=True)
        rows = 2 if getattr(self.config, "pad_token_id", None) is not None else 1
        return {"decoder_input_ids": torch.randint(3, decoder.vocab_size, (rows, 6), generator=self.generator)}

    def encoded(self) -> dict[str, Tensor]:
        """Return encoder outputs for a decoder with cross-attention but without an encoder."""
        if not getattr(self.config, "add_cross_attention", False):
            return {}
        rows = len(self.text()["input_ids"])
        return {"encoder_hidden_states": self.noise(rows, 5, self.config.hidden_size)}

    def images(self) -> dict[str, Tensor]:
        size = getattr(getattr(self.config, "vision_config", self.config), "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size[-2:]
        channels = self.first("num_channels", "in_channels", "in_chans", default=3)
        frames = self.first("num_frames", default=0)
        return {"pixel_values": self.noise(2, *([frames] if frames else []), channels, height, width)}

    def sound(self) -> dict[str, Tensor]:
        """Return a spectrogram if the configuration has mel bins, else a waveform."""
        mels, frames = self.first("num_mel_bins", default=0), self.first("max_length", default=0)
        return {"input_values": self.noise(2, frames, mels) if mels and frames else self.noise(2, 1600)}

    def features(self) -> dict[str, Tensor]:
        if hasattr(self.config, "input_feat_per_channel"):
            width = self.config.input_feat_per_channel * self.config.input_channels
            return {"input_features": self.noise(2, 24, width)}
        mels = self.first("num_mel_bins", "feature_projection_input_dim", default=80)
        frames = getattr(self.config, "max_source_positions", None)
        return {"input_features": self.noise(2, 24, mels) if frames is None else self.noise(2, mels, 2 * frames)}

    def boxes(self) -> dict[str, Tensor]:
        """Return boxes (left, top, right, bottom) on a page of 0 to 20 points."""
        shape = self.text()["input_ids"].shape
        corners = torch.randint(1, 9, (*shape, 4), generator=self.generator)
        return {"bbox": corners + torch.tensor([0, 0, 10, 10])}


_MAKERS: dict[str, Callable[[_Maker], dict[str, Tensor]]] = {
    "input_ids": _Maker.text,
    "decoder_input_ids": _Maker.decoder_text,
    "encoder_hidden_states": _Maker.encoded,
    "pixel_values": _Maker.images,
    "input_values": _Maker.sound,
    "input_features": _Maker.features,
    "bbox": _Maker.boxes,
}
