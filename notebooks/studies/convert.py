"""Convert a folder of pictures to arrays that `DataSource` reads.

`python -m studies convert images SOURCE TARGET`, with `notebooks` on Python's path.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from quotient_manifolds.files import atomic_file
from quotient_manifolds.load.text import drawn

PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".webp")


@click.group()
def convert() -> None:
    """Convert data to a format that the package reads."""


@convert.command("images")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--size", default=224, show_default=True, help="Pixels along each side.")
@click.option("--examples", type=int, help="Number of pictures, drawn at random.  [default: all]")
@click.option("--seed", default=0, show_default=True, help="Seed of the draw.")
def convert_images(source: Path, target: Path, size: int, examples: int | None, seed: int) -> None:
    """Write the pictures of SOURCE, which has a folder for each class, to the .npz file TARGET.

    Classes are numbered in the order of the folders' names. A picture is resized along its shorter side (bicubic) and
    cropped to its central size x size pixels, as CLIP does. TARGET has images (N, 3, size, size) uint8 and labels (N,).
    """
    folders = sorted(each for each in source.iterdir() if each.is_dir() and not each.name.startswith("."))
    files = [
        (file, label)
        for label, folder in enumerate(folders)
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in PICTURES
    ]
    if not files:
        raise ValueError(f"{source} must have a folder of pictures for each class. Found no picture")
    chosen = [files[row] for row in drawn(len(files), examples, seed)]
    images = np.stack([_pixels(file, size) for file, _ in chosen])
    with atomic_file(target) as unfinished, unfinished.open("wb") as stream:
        np.savez(stream, images=images, labels=np.array([label for _, label in chosen]))


def _pixels(file: Path, size: int) -> NDArray[np.uint8]:
    """Return the pixels of a picture, (3, size, size)."""
    from PIL import Image

    with Image.open(file) as picture:
        image = picture.convert("RGB")
    shorter = min(image.size)
    width, height = (int(size * side / shorter) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return np.asarray(image.crop((left, top, left + size, top + size)), dtype=np.uint8).transpose(2, 0, 1)
