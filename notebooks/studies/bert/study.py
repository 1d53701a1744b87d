"""The study of a zoo of BERTs: what `compare` finds, and figures of what the paper asks besides."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quotient_manifolds.progress import Progress
from studies.bert.page import bert_page
from studies.bert.zoo import FAST, FULL, prepare
from studies.zoo_study import measure_zoo

if TYPE_CHECKING:
    from quotient_manifolds.compare import Comparison


def run_bert_study(out: Path, *, fast: bool = False, command: str, progress: Progress) -> Comparison:
    """Fine-tunes the zoo (once), measures it, and writes all that was found, see `measure_zoo`.

    Run again after an interruption, it goes on where it was; several processes at once share the work.
    """
    prepare(out, FAST if fast else FULL, progress)
    return measure_zoo(out, partial(bert_page, fast=fast), command=command, progress=progress)
