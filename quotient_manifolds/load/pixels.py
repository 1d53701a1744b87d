"""Pixel values as models expect them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

# Per channel, for values in 0 ... 1: of CLIP (Radford et al., 2021) and of ImageNet's training images.
PRESETS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
RAW = "none"  # said in place of a mean: values in 0 ... 1 as they are


@final
@dataclass(frozen=True)
class Normalisation:
    """(x - mean) / std for each channel; of no channels, x itself."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """(N, channels, height, width) -> the same; one figure serves all channels."""
        channels = images.shape[1]
        if not self.mean:
            return images
        if len(self.mean) not in (1, channels):
            raise ValueError(f"The images have {channels} channels, but mean and std are given for {len(self.mean)}.")
        mean, std = (torch.tensor(figures, dtype=images.dtype).view(-1, 1, 1) for figures in (self.mean, self.std))
        return (images - mean) / std


def normalisation_of(mean: Sequence[float] | str | None, std: Sequence[float] | None) -> Normalisation | None:
    """What mean and std say, or the name of a preset, or "none", in place of mean; None where nothing is said."""
    if isinstance(mean, str):
        if mean not in (*PRESETS, RAW) or std is not None:
            raise ValueError(
                f"mean must be figures beside std, or one of {', '.join(PRESETS)}, {RAW} alone; found {mean!r}."
            )
        return Normalisation((), ()) if mean == RAW else Normalisation(*PRESETS[mean])
    if mean is None and std is None:
        return None
    if mean is None or std is None or len(mean) != len(std) or not mean or not min(std) > 0:
        raise ValueError(f"mean and std must have a figure for each channel, std above 0; found {mean} and {std}.")
    return Normalisation(tuple(map(float, mean)), tuple(map(float, std)))
