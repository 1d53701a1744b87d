"""The page of the study of vision transformers: what was found, beside what the paper found on CLIP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quotient_manifolds.report import Page
from studies.vit_spec import PLAN
from studies.zoo_page import ZooPage
from studies.zoo_study import Cost

if TYPE_CHECKING:
    from quotient_manifolds.compare import Comparison

VIT = ZooPage(
    title="Vision transformers fine-tuned on few digits",
    zoo=(
        "Three vision transformers (3 layers, 4 heads of 12, 58,570 parameters) are pre-trained on 500 of "
        "scikit-learn’s digits: turned by 90°, inverted, or with two digits to a class. Each model begins from one of "
        "them with a new classifier and is fine-tuned on 256 other digits, shifted by up to a pixel and with noise of "
        "0.3 standard deviations; 1041 more, disturbed alike, test it. At random: learning rate (6e-4 to 6e-3), weight "
        "decay (1e-4 to 1), batch size (16, 32, 64), label smoothing (0, 0.1), augmentation by further shifts (with, "
        "without), steps (400, 600) and seed. Sharpness is measured on the 256 training images, in 2 batches of 128."
    ),
    plan=PLAN,
    given={"learning_rate": "learning rate", "start": "start"},
    paper={"adaptive": "−0.41", "inv": "−0.71", "mix": "−0.70"},  # [paper, Table 1: CLIP fine-tuned on ImageNet]
    paper_models="72 CLIP models",
)


def vit_page(comparison: Comparison, costs: tuple[Cost, ...], *, fast: bool = False) -> Page:
    """All that the study says."""
    return VIT.page(comparison, costs, fast=fast)
