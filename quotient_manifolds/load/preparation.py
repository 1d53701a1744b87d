"""Prepare images as a model expects them: resized, cropped, normalised as its directory says, or as the user does."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quotient_manifolds.load.huggingface import PROCESSORS, has_image_processor, load_image_processor
from quotient_manifolds.messages import first_line, shown

Picture = NDArray[np.uint8]  # (channels, height, width)

# Per channel, for values in 0 ... 1: of CLIP (Radford et al., 2021) and of ImageNet's training images.
PRESETS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
RAW = "none"  # said in place of a mean: values in 0 ... 1 as they are
PREPARED = 2**24  # pixels of a picture after it was resized or cropped; no model takes more than 4096 x 4096


@final
@dataclass(frozen=True)
class Normalisation:
    """Compute (x - mean) / std for each channel; without figures, x itself."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, mean: Sequence[float] | str | None, std: Sequence[float] | None) -> Normalisation | None:
        """Return what mean and std say, or the name of a preset, or "none", in place of mean; None if nothing does."""
        if isinstance(mean, str):
            if mean not in (*PRESETS, RAW) or std is not None:
                raise ValueError(
                    f"mean must be figures beside std, or one of {', '.join(PRESETS)}, {RAW} alone; found {mean!r}."
                )
            return cls((), ()) if mean == RAW else cls(*PRESETS[mean])
        if mean is None and std is None:
            return None
        if mean is None or std is None or len(mean) != len(std) or not mean or not min(std) > 0:
            raise ValueError(f"mean and std must have a figure for each channel, std above 0; found {mean} and {std}.")
        return cls(tuple(map(float, mean)), tuple(map(float, std)))

    def __call__(self, images: Tensor) -> Tensor:
        """Map (N, channels, height, width) to the same shape; a single figure serves all channels."""
        channels = images.shape[1]
        if not self.mean:
            return images
        if len(self.mean) not in (1, channels):
            raise ValueError(f"The images have {channels} channels, but mean and std are given for {len(self.mean)}.")
        mean, std = (torch.tensor(figures, dtype=images.dtype).view(-1, 1, 1) for figures in (self.mean, self.std))
        return (images - mean) / std


@final
@dataclass(frozen=True)
class Preparation:
    """Turn pictures of 8 bits into what a model was trained on.

    A picture is resized and cropped (size: its shorter side resized to that, bicubic, and size x size cut from the
    middle, as CLIP does), its values are divided by 255, and normalised. What is None, geometry or normalisation, is
    done by the image processor of the model's directory.
    """

    size: int | None
    normalisation: Normalisation | None
    processor: Any  # None: the directory has none
    home: Path | None

    @classmethod
    def of(
        cls, size: int | None, normalisation: Normalisation | None, model: nn.Module, homes: Sequence[Path]
    ) -> Preparation:
        """Take from the model's directory what is not said: size None, normalisation None.

        Raises ValueError if nothing says how pixels are normalised, or if its size is one that no picture should have.
        """
        home = next(filter(has_image_processor, homes), None)
        processor = None if home is None or (size and normalisation) else load_image_processor(home)
        if home is None and normalisation is None:
            raise ValueError(
                f"Nothing says how pixels are normalised for {type(model).__name__}: it has no {PROCESSORS[0]}; give "
                "mean and std (or mean: clip, imagenet), or mean: none for values in 0 ... 1 as they are."
            )
        sides = [side for each in _sizes(processor).values() for side in each.values()]
        if (side := max(sides, default=1)) ** 2 > PREPARED:
            raise ValueError(f"The image processor in {shown(home or '')} makes pictures with sides of {side} pixels.")
        return cls(size, normalisation, processor, home)

    def __call__(self, pictures: Sequence[Picture], places: Sequence[str]) -> Tensor:
        """Return (N, channels, height, width) in float32; `places` says where each picture stands."""
        for picture, where in zip(pictures, places, strict=True):
            self._check_area(picture, where)
        if self.size is not None:
            pictures = [cropped(picture, self.size) for picture in pictures]
        if self.processor is not None:
            prepared = [self._processed(each, where) for each, where in zip(pictures, places, strict=True)]
            values = _stacked(prepared, places)
            if not torch.isfinite(values).all():
                raise ValueError(f"The image processor in {shown(self.home or '')} makes values that are not finite.")
        else:
            values = _stacked(pictures, places)
        return values if self.normalisation is None else self.normalisation(values / 255)

    def _processed(self, picture: Picture, where: str) -> NDArray[Any]:
        """Let transformers do what the user has not said how to do."""
        options: dict[str, bool] = {}
        if self.normalisation is not None:
            options |= {"do_rescale": False, "do_normalize": False}
        if self.size is not None:
            options |= {"do_resize": False, "do_center_crop": False, "do_pad": False}
        try:
            answer = self.processor(picture, input_data_format="channels_first", return_tensors="np", **options)
            pixels = np.asarray(answer["pixel_values"])
        except Exception as error:  # transformers raises a dozen kinds
            raise ValueError(
                f"{where} cannot be prepared by {type(self.processor).__name__} as {shown(self.home or '')} has it: "
                f"{first_line(error)}"
            ) from error
        if pixels.ndim != 4 or len(pixels) != 1:
            raise ValueError(
                f"{type(self.processor).__name__} of {shown(self.home or '')} makes of a picture an array "
                f"{pixels.shape}, expected (1, channels, height, width)."
            )
        return pixels[0]

    def _check_area(self, picture: Picture, where: str) -> None:
        """Raise ValueError for a long thin picture: it grows without bound where its shorter side is resized."""
        height, width = picture.shape[1:]
        sizes = _sizes(self.processor)["size"]
        shorter = self.size or (sizes.get("shortest_edge") if not sizes.get("longest_edge") else None)
        if shorter and shorter**2 * max(height, width) / max(1, min(height, width)) > PREPARED:
            raise ValueError(
                f"{where} is {width} x {height}, which resized to {shorter} along its shorter side has more than "
                f"{PREPARED} pixels."
            )


def normalising_home(homes: Sequence[Path]) -> Path | None:
    """Return the directory whose image processor normalises, if there is one."""
    home = next(filter(has_image_processor, homes), None)
    return home if home is not None and getattr(load_image_processor(home), "do_normalize", False) else None


def cropped(picture: Picture, size: int) -> Picture:
    """Resize along the shorter side, bicubic, and cut size x size from the middle; (channels, size, size)."""
    from PIL import Image

    image = Image.fromarray(picture[0] if len(picture) == 1 else np.ascontiguousarray(picture.transpose(1, 2, 0)))
    shorter = min(image.size)
    width, height = (int(size * side / shorter) for side in image.size)
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return channels_first(np.asarray(image.crop((left, top, left + size, top + size)), dtype=np.uint8))


def channels_first(pixels: Picture) -> Picture:
    """Return (channels, height, width) for what Pillow gives as (height, width) or (height, width, channels)."""
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _stacked(pictures: Sequence[NDArray[Any]], places: Sequence[str]) -> Tensor:
    for picture, where in zip(pictures, places, strict=True):
        if picture.shape != pictures[0].shape:
            raise ValueError(f"{where} is of another size than others; give a size for all.")
    return torch.from_numpy(np.ascontiguousarray(np.stack(pictures))).float()


def _sizes(processor: Any) -> dict[str, dict[str, int]]:
    """Return the lengths an image processor is set to, by setting and side, whatever form its version keeps them in."""
    settings = {} if processor is None else json.loads(processor.to_json_string())
    found = {name: settings.get(name) for name in ("size", "crop_size", "pad_size")}
    sides = {name: value if isinstance(value, dict) else {"": value} for name, value in found.items()}
    return {
        name: {
            key: math.ceil(side) for key, side in each.items() if isinstance(side, (int, float)) and "pixels" not in key
        }
        for name, each in sides.items()
    }
