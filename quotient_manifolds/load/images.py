"""Read images and their labels from arrays, and prepare pixels for a model."""

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

CHANNELS = (1, 3)  # gray, RGB
TOLERANCE = 0.01  # of the range from black to white; covers rounding and the overshoot of resizing
# Mean and std per channel, for values in 0 ... 1: of CLIP (Radford et al., 2021), of ImageNet, and unchanged.
PRESETS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "none": ((0.0,), (1.0,)),
}

Normalization = tuple[Tensor, Tensor]  # mean and standard deviation, (channels, 1, 1)


def normalization(
    mean: Sequence[float] | float | str | None, std: Sequence[float] | float | None
) -> Normalization | None:
    """Return mean and std as tensors, also for the name of a preset as mean; None if neither is given.

    A single number applies to all channels.
    """
    if mean is None and std is None:
        return None
    if isinstance(mean, str) and mean in PRESETS and std is None:
        mean, std = PRESETS[mean]
    with suppress(TypeError, ValueError, RuntimeError):  # torch.tensor raises these unless the values are numbers
        first, second = (torch.tensor(each, dtype=torch.float32).view(-1, 1, 1) for each in (mean, std))
        if len(first) == len(second) > 0 and bool((second > 0).all()):
            return first, second
    raise ValueError(
        f"mean and std must have a number for each channel, std above 0, or mean must be one of "
        f"{', '.join(PRESETS)} alone. Found {mean!r} and {std}"
    )


def read_labels(path: Path) -> list[int]:
    """Return the array `labels` (N,) of a .npz file. Raises ValueError unless they are integers."""
    labels = _array(path, "labels")
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels):
        raise ValueError(f"{path}: labels must be integers (N,). Found {labels.dtype} {labels.shape}")
    return labels.tolist()


def read_images(path: Path, count: int) -> NDArray[Any]:
    """Return the array `images` of a .npz file, uint8 or floating point, as (N, channels, height, width), N = count.

    The file may also have (N, height, width, channels) or (N, height, width). Raises ValueError for other arrays.
    """
    images = _array(path, "images")
    images = images[:, None] if images.ndim == 3 else images
    is_number = images.dtype == np.uint8 or images.dtype.kind == "f"
    if not is_number or images.ndim != 4 or not {images.shape[1], images.shape[3]} & set(CHANNELS):
        raise ValueError(
            f"{path}: images must be uint8 or floating point, (N, channels, height, width), (N, height, width, "
            f"channels) or (N, height, width). Found {images.dtype} {images.shape}"
        )
    if len(images) != count:
        raise ValueError(f"{path} must have as many images as labels. Found {len(images)} and {count}")
    return images if images.shape[1] in CHANNELS else images.transpose(0, 3, 1, 2)


def prepare(images: NDArray[Any], normalize: Normalization | None, homes: Sequence[Path], path: Path) -> Tensor:
    """Return images (N, channels, height, width) as the float32 input of a model.

    With a normalization, 8-bit values are divided by 255, and all values become (x - mean) / std. Without, 8-bit values
    are given to the image processor in one of the directories `homes`, and others are unchanged.

    Raises ValueError for 8-bit values without normalization or processor, for values in 0 ... 1 that a processor would
    normalize, and for floating-point values outside the range of pixels, see `check_pixels`.
    """
    is_8_bit = images.dtype == np.uint8
    values = torch.from_numpy(np.ascontiguousarray(images)).float()
    if normalize is not None:
        mean, std = normalize
        if len(mean) not in (1, images.shape[1]):
            raise ValueError(f"{path} has images of {images.shape[1]} channels. Found mean and std for {len(mean)}")
        if not is_8_bit and _is_for_unit_interval(mean, std):
            check_pixels(values, torch.zeros(()), torch.ones(()), path)
        return ((values / 255 if is_8_bit else values) - mean) / std
    home = next(filter(has_image_processor, homes), None)
    processor = None if home is None else load_image_processor(home)
    if is_8_bit and processor is not None:
        return _processed(processor, images, home, path)
    if is_8_bit:
        raise ValueError(
            f"The pixels of {path} must have a known normalization. Found no preprocessor_config.json of the model; "
            "give mean and std (or mean: clip, imagenet), or mean: none for values in 0 ... 1 as they are"
        )
    if getattr(processor, "do_normalize", False) and values.min() >= 0 and values.max() <= 1:
        raise ValueError(
            f"The images in {path} must be normalized, as those that the model in {home} was trained on. Found values "
            "in 0 ... 1; give mean and std, or mean: none to take them as they are"
        )
    if (ends := None if processor is None else _black_and_white(processor, images.shape)) is not None:
        check_pixels(values, *ends, path)
    return values


def _processed(processor: Any, images: NDArray[Any], home: Path | None, path: Path) -> Tensor:
    """Return the pixels that an image processor computes. Raises ValueError, naming the file, if it refuses them."""
    try:
        values: Tensor = processor(list(images), input_data_format="channels_first", return_tensors="pt")[
            "pixel_values"
        ]
    except Exception as error:  # transformers raises many types here
        channels = len(getattr(processor, "image_mean", None) or ())
        if channels not in (0, images.shape[1]):
            raise _wrong_channels(images, channels, f"the image processor in {home}", path) from error
        raise ValueError(f"The image processor in {home} does not take {path}: {first_line(error)}") from error
    return values.float()


def check_channels(model: nn.Module, images: Tensor, path: Path) -> None:
    """Raise ValueError for images with fewer channels than the configuration of a Hugging Face model states."""
    config: Any = getattr(model, "config", None)
    channels = getattr(config, "num_channels", None)
    if isinstance(channels, int) and "pixel_values" in accepted_by(model) and images.shape[1] < channels:
        raise _wrong_channels(images, channels, type(model).__name__, path)


def _wrong_channels(images: NDArray[Any] | Tensor, channels: int, taker: str, path: Path) -> ValueError:
    return ValueError(
        f"The images in {path} must have {channels} channels, as {taker} takes. Found {images.shape[1]}; give a file "
        "of such images (gray ones may be repeated)"
    )


def check_pixels(values: Tensor, black: Tensor, white: Tensor, path: Path) -> None:
    """Raise ValueError unless black - 0.01 d <= values <= white + 0.01 d with d = white - black, for every pixel."""
    beyond = TOLERANCE * (white - black)
    if not bool(((values >= black - beyond) & (values <= white + beyond)).all()):
        raise ValueError(
            f"The floating point pixels of {path} must lie in {float(black.min()):.3g} ... {float(white.max()):.3g}, "
            f"from black to white. Found {float(values.min()):.3g} ... {float(values.max()):.3g}; scale them to "
            f"0 ... 1 and give mean and std, or store 0 ... 255 as uint8, or give mean: none to take them as they are"
        )


def _is_for_unit_interval(mean: Tensor, std: Tensor) -> bool:
    """Return whether a normalization is for values in 0 ... 1: not on another scale, and not the identity."""
    changes = bool((mean != 0).any() or (std != 1).any())
    return changes and 0 <= float(mean.min()) <= float(mean.max()) <= 1 >= float(std.max())


def _black_and_white(processor: Any, shape: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
    """Return the least and largest pixels that an image processor computes, or None if it refuses all images.

    They are given by channel if the processor takes as many channels as images (N, channels, height, width) have.
    """
    for channels in dict.fromkeys((shape[1], *CHANNELS)):
        images = [np.full((channels, *shape[2:]), value, np.uint8) for value in (0, 255)]
        with suppress(Exception):  # transformers raises many types for unsupported numbers of channels
            pixels = processor(images, input_data_format="channels_first", return_tensors="pt")["pixel_values"].float()
            if pixels.ndim == 4 and pixels.shape[1] == shape[1]:
                return pixels.amin((0, 2, 3), keepdim=True), pixels.amax((0, 2, 3), keepdim=True)
            return pixels.min(), pixels.max()
    return None


def _array(path: Path, name: str) -> NDArray[Any]:
    """Return an array of a .npz file, without unpickling."""
    if not path.is_file():
        raise ValueError(f"There is no data file {path}")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return arrays[name]
    except KeyError as error:
        raise ValueError(f"{path} has no array {name!r}: expected images and labels") from error
    except Exception as error:  # zipfile, zlib and numpy raise half a dozen types for damaged files
        raise ValueError(f"{path} is no readable .npz file of plain arrays: {first_line(error)}") from error
