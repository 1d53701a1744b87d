"""What the paper found, as it states it: the only numbers of the studies that are typed in [arXiv 2505.05409]."""

from __future__ import annotations

from typing import Final

TAU: Final[dict[str, dict[str, float]]] = {
    "diagonal": {"adaptive": -0.68, "inv": -0.83, "mix": -0.86},
    "mnist": {"adaptive": -0.41, "inv": -0.71, "mix": -0.70},
    "sentiment": {"adaptive": 0.06, "inv": 0.28, "mix": 0.38},
}
"""Table 1: Kendall's tau between sharpness and generalisation, by setting and measure."""

SETTING: Final[dict[str, str]] = {
    "diagonal": "Diagonal networks",
    "mnist": "ImageNet (here: MNIST)",
    "sentiment": "MNLI (here: film reviews)",
}
"""How Table 1 calls them, and what stands for them here."""

MODELS: Final[dict[str, str]] = {
    "diagonal": "50 networks (Sec. 6.1)",
    "mnist": "CLIP ViT-B/32, how many is not said (Sec. 6.2.1)",
    "sentiment": "35 BERTs (Sec. 6.2.2)",
}

MIX_STRAIGHT: Final = 0.24
"""Fig. 8: mix on MNLI without the second-order term."""

MARGIN: Final = 0.1
"""The largest difference between the two metrics in Table 1 (MNLI), which the paper calls small (Sec. 7)."""
