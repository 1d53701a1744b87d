"""Read images and labels from a .npz file, and prepare images of 8 bits as a model expects them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quotient_manifolds.load.huggingface import has_image_processor, load_image_processor
from quotient_manifolds.messages import first_line

CHANNELS = (1, 3)  # grey, RGB
# Per channel, for values in 0 ... 1: of CLIP (Radford et al., 2021), of ImageNet's training images, and as they are.
PRESETS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "none": ((0.0,), (1.0,)),
}

Figures = tuple[Tensor, Tensor]  # mean and standard deviation, (channels, 1, 1)


def figures(mean: Sequence[float] | str | None, std: Sequence[float] | None) -> Figures | None:
    """Return what mean and std say, or the name of a preset in place of mean; None if nothing does."""
    if isinstance(mean, str):
        if mean not in PRESETS or std is not None:
            raise ValueError(f"mean must be figures beside std, or one of {', '.join(PRESETS)} alone. Found {mean!r}.")
        mean, std = PRESETS[mean]
    if mean is None and std is None:
        return None
    if mean is None or std is None or len(mean) != len(std) or not mean or not min(std) > 0:
        raise ValueError(f"mean and std must have a figure for each channel, std above 0. Found {mean} and {std}.")
    found = [torch.tensor(each, dtype=torch.float32).view(-1, 1, 1) for each in (mean, std)]
    return found[0], found[1]


def read_labels(path: Path) -> list[int]:
    """Return the array `labels` (N,) of a .npz file. Raises ValueError unless it is one of integers."""
    labels = _array(path, "labels")
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels):
        raise ValueError(f"{path}: labels must be integers (N,). Found {labels.dtype} {labels.shape}.")
    return labels.tolist()


def read_images(path: Path, count: int) -> NDArray[Any]:
    """Return the array `images` of a .npz file, (N, channels, height, width), N = count.

    It may be stored as that, as (N, height, width, channels) or (N, height, width), uint8 or floating point. Raises
    ValueError for others.
    """
    images = _array(path, "images")
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise ValueError(f"{path}: images must be uint8 or floating point. Found {images.dtype}.")
    if len(images) != count:
        raise ValueError(f"{path} must have as many images as labels. Found {len(images)} and {count}.")
    if images.ndim == 3:
        return images[:, None]
    if images.ndim != 4 or not {images.shape[1], images.shape[3]} & set(CHANNELS):
        raise ValueError(
            f"{path}: images must be (N, channels, height, width), (N, height, width, channels) or (N, height, width). "
            f"Found {images.shape}."
        )
    return images if images.shape[1] in CHANNELS else images.transpose(0, 3, 1, 2)


def prepared(images: NDArray[Any], given: Figures | None, homes: Sequence[Path], path: Path) -> Tensor:
    """Return images (N, channels, height, width) as a model takes them, float32.

    With figures, values of 8 bits are divided by 255, and all become (x - mean) / std. Without, those of 8 bits are
    given to the image processor in one of the directories `homes`, and others stay as they are. Raises ValueError
    where nothing says how values of 8 bits are normalised, and for values in 0 ... 1 that a processor would normalise.
    """
    eight = images.dtype == np.uint8
    values = torch.from_numpy(np.ascontiguousarray(images)).float()
    if given is not None:
        mean, std = given
        if len(mean) not in (1, images.shape[1]):
            raise ValueError(f"{path} has images of {images.shape[1]} channels. Found mean and std for {len(mean)}.")
        return ((values / 255 if eight else values) - mean) / std
    home = next(filter(has_image_processor, homes), None)
    processor = None if home is None else load_image_processor(home)
    if eight and processor is not None:
        return processor(list(images), input_data_format="channels_first", return_tensors="pt")["pixel_values"].float()
    if eight:
        raise ValueError(
            f"Nothing says how the pixels of {path} are normalised: the model has no preprocessor_config.json. Give "
            "mean and std (or mean: clip, imagenet), or mean: none for values in 0 ... 1 as they are."
        )
    if getattr(processor, "do_normalize", False) and values.min() >= 0 and values.max() <= 1:
        raise ValueError(
            f"The images in {path} lie in 0 ... 1, and the model in {home} was trained on normalised ones. Give mean "
            "and std, or mean: none if they are to be taken as they are."
        )
    return values


def _array(path: Path, name: str) -> NDArray[Any]:
    """Return an array of a .npz file; nothing in it is unpickled."""
    if not path.is_file():
        raise ValueError(f"There is no data file {path}.")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return arrays[name]
    except KeyError as error:
        raise ValueError(f"{path} has no array {name!r}: expected images and labels.") from error
    except Exception as error:  # zipfile, zlib and numpy raise half a dozen kinds for damaged files
        raise ValueError(f"{path} is no readable .npz file of plain arrays: {first_line(error)}") from error
