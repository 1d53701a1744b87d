"""Read images and their labels from arrays, and make pixels that a model takes of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quotient_manifolds.load.huggingface import has_image_processor, load_image_processor
from quotient_manifolds.messages import first_line
from quotient_manifolds.symmetries.example_inputs import accepted_by

CHANNELS = (1, 3)  # grey, RGB
TOLERANCE = 0.01  # of black to white: rounding, and what resizing overshoots
# Per channel, for values in 0 ... 1: of CLIP (Radford et al., 2021), of ImageNet's training images, and as they are.
PRESETS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "none": ((0.0,), (1.0,)),
}

Figures = tuple[Tensor, Tensor]  # mean and standard deviation, (channels, 1, 1)


def figures(mean: Sequence[float] | float | str | None, std: Sequence[float] | float | None) -> Figures | None:
    """Return what mean and std say, or the name of a preset in place of mean; None if nothing does.

    A number alone is that of all channels.
    """
    if mean is None and std is None:
        return None
    if isinstance(mean, str) and mean in PRESETS and std is None:
        mean, std = PRESETS[mean]
    with suppress(TypeError, ValueError, RuntimeError):  # of what are no numbers
        first, second = (torch.tensor(each, dtype=torch.float32).view(-1, 1, 1) for each in (mean, std))
        if len(first) == len(second) > 0 and bool((second > 0).all()):
            return first, second
    raise ValueError(
        f"mean and std must have a figure for each channel, std above 0, or mean must be one of "
        f"{', '.join(PRESETS)} alone. Found {mean!r} and {std}."
    )


def read_labels(path: Path) -> list[int]:
    """Return the array `labels` (N,) of a .npz file. Raises ValueError unless it is one of integers."""
    labels = _array(path, "labels")
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels):
        raise ValueError(f"{path}: labels must be integers (N,). Found {labels.dtype} {labels.shape}.")
    return labels.tolist()


def read_images(path: Path, count: int) -> NDArray[Any]:
    """Return the array `images` of a .npz file, uint8 or floating point, (N, channels, height, width), N = count.

    It may be stored as (N, height, width, channels) or (N, height, width), too. Raises ValueError for others.
    """
    images = _array(path, "images")
    images = images[:, None] if images.ndim == 3 else images
    known = images.dtype == np.uint8 or images.dtype.kind == "f"
    if not known or images.ndim != 4 or not {images.shape[1], images.shape[3]} & set(CHANNELS):
        raise ValueError(
            f"{path}: images must be uint8 or floating point, (N, channels, height, width), (N, height, width, "
            f"channels) or (N, height, width). Found {images.dtype} {images.shape}."
        )
    if len(images) != count:
        raise ValueError(f"{path} must have as many images as labels. Found {len(images)} and {count}.")
    return images if images.shape[1] in CHANNELS else images.transpose(0, 3, 1, 2)


def prepared(images: NDArray[Any], given: Figures | None, homes: Sequence[Path], path: Path) -> Tensor:
    """Return images (N, channels, height, width) as a model takes them, float32.

    With figures, values of 8 bits are divided by 255, and all become (x - mean) / std. Without, those of 8 bits are
    given to the image processor in one of the directories `homes`, and others stay as they are. Raises ValueError
    where nothing says how values of 8 bits are normalised, for values in 0 ... 1 that a processor would normalise, and
    for floating point values that pixels do not have there: see `check_pixels`.
    """
    eight = images.dtype == np.uint8
    values = torch.from_numpy(np.ascontiguousarray(images)).float()
    if given is not None:
        mean, std = given
        if len(mean) not in (1, images.shape[1]):
            raise ValueError(f"{path} has images of {images.shape[1]} channels. Found mean and std for {len(mean)}.")
        if not eight and _of_unit_interval(mean, std):
            check_pixels(values, torch.zeros(()), torch.ones(()), path)
        return ((values / 255 if eight else values) - mean) / std
    home = next(filter(has_image_processor, homes), None)
    processor = None if home is None else load_image_processor(home)
    if eight and processor is not None:
        return _processed(processor, images, home, path)
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
    if (ends := None if processor is None else _black_and_white(processor, images.shape)) is not None:
        check_pixels(values, *ends, path)
    return values


def _processed(processor: Any, images: NDArray[Any], home: Path | None, path: Path) -> Tensor:
    """Return what an image processor makes of images. Raises ValueError naming the file where it makes nothing."""
    try:
        made: Tensor = processor(list(images), input_data_format="channels_first", return_tensors="pt")["pixel_values"]
    except Exception as error:  # code of transformers
        channels = len(getattr(processor, "image_mean", None) or ())
        if channels not in (0, images.shape[1]):
            raise ValueError(
                f"The images in {path} must have {channels} channels, as the image processor in {home} takes. Found "
                f"{images.shape[1]}; give a file of such images (grey ones may be repeated)."
            ) from error
        raise ValueError(f"The image processor in {home} does not take {path}: {first_line(error)}") from error
    return made.float()


def check_channels(model: nn.Module, images: Tensor, path: Path) -> None:
    """Raise ValueError for images with fewer channels than the configuration of a Hugging Face model says."""
    config: Any = getattr(model, "config", None)
    channels = getattr(config, "num_channels", None)
    if isinstance(channels, int) and "pixel_values" in accepted_by(model) and images.shape[1] < channels:
        raise ValueError(
            f"The images in {path} must have {channels} channels, as {type(model).__name__} takes. Found "
            f"{images.shape[1]}; give a file of such images (grey ones may be repeated)."
        )


def check_pixels(values: Tensor, black: Tensor, white: Tensor, path: Path) -> None:
    """Raise ValueError unless floating point pixels lie between those of black and white, or beyond by 1 % at most."""
    beyond = TOLERANCE * (white - black)
    if not bool(((values >= black - beyond) & (values <= white + beyond)).all()):
        raise ValueError(
            f"The floating point pixels of {path} must lie in {float(black.min()):.3g} ... {float(white.max()):.3g}, "
            f"from black to white. Found {float(values.min()):.3g} ... {float(values.max()):.3g}; scale them to "
            f"0 ... 1 and give mean and std, or store 0 ... 255 as uint8, or give mean: none to take them as they are."
        )


def _of_unit_interval(mean: Tensor, std: Tensor) -> bool:
    """Return whether figures are those of values in 0 ... 1: others are of the data's own scale, or change nothing."""
    changes = bool((mean != 0).any() or (std != 1).any())
    return changes and 0 <= float(mean.min()) <= float(mean.max()) <= 1 >= float(std.max())


def _black_and_white(processor: Any, shape: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
    """Return the least and largest pixels that an image processor makes; None if it makes none of such images.

    By channel, if it takes as many as the images (N, channels, height, width) have.
    """
    for channels in dict.fromkeys((shape[1], *CHANNELS)):
        images = [np.full((channels, *shape[2:]), value, np.uint8) for value in (0, 255)]
        with suppress(Exception):  # code of transformers, for a number of channels that it does not take
            made = processor(images, input_data_format="channels_first", return_tensors="pt")["pixel_values"].float()
            if made.ndim == 4 and made.shape[1] == shape[1]:
                return made.amin((0, 2, 3), keepdim=True), made.amax((0, 2, 3), keepdim=True)
            return made.min(), made.max()
    return None


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
