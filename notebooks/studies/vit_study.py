"""The study of a zoo of vision transformers: what `compare` finds, and figures of what the paper asks besides."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quotient_manifolds.progress import Progress
from studies.vit_page import vit_page
from studies.vit_zoo import FAST, FULL, prepare
from studies.zoo_study import measure_zoo

if TYPE_CHECKING:
    from quotient_manifolds.compare import Comparison


def run_vit_study(out: Path, *, fast: bool = False, command: str, progress: Progress) -> Comparison:
    """Trains the zoo (once), measures it, and writes all that was found, see `measure_zoo`.

    Run again after an interruption, it goes on where it was.
    """
    prepare(out, FAST if fast else FULL, progress)
    return measure_zoo(out, partial(vit_page, fast=fast), command=command, progress=progress)
