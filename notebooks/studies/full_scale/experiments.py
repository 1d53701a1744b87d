"""The two experiments: a spec each, the size of what it measures, and where to get that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from quotient_manifolds.files import write_text
from quotient_manifolds.load import ClipClassifier, load_object
from quotient_manifolds.load.clip_soup import ClipSizes

VIT_B_32 = ClipSizes(3, 32, 7, 768, 12, 12, 3072, 512, 1000)
TOKENS = 128


@final
@dataclass(frozen=True)
class FullScale:
    """Describe a zoo.

    spec: the name of the file. test: examples of the test data. model, inputs: on the meta device, of no memory.
    """

    spec: str
    model_name: str
    models: int
    test: int
    model: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]

    def path(self) -> AbstractContextManager[Path]:
        """Return the path of the spec, for as long as it is used."""
        return resources.as_file(resources.files(__package__) / self.spec)


def _clip() -> nn.Module:
    with torch.device("meta"):
        return ClipClassifier(VIT_B_32).eval()


def _bert() -> nn.Module:
    config: Any = load_object("transformers:BertConfig", "the configuration of BERT-base")(num_labels=3)
    with torch.device("meta"):
        model: nn.Module = load_object("transformers:BertForSequenceClassification", "BERT")(config)
    return model.eval()


EXPERIMENTS = (
    FullScale(
        "clip_soups.yaml",
        "ViT-B/32",
        72,
        50_000,
        _clip,
        lambda count: {"images": torch.empty(count, 3, 224, 224, device="meta")},
    ),
    FullScale(
        "bert_mnli.yaml",
        "BERT-base",
        35,
        9_815,
        _bert,
        lambda count: {"input_ids": torch.empty(count, TOKENS, dtype=torch.long, device="meta")},
    ),
)


def write_specs(folder: Path) -> list[Path]:
    """Write both specs, where their paths are looked up from."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in EXPERIMENTS:
        with each.path() as path:
            write_text(folder / each.spec, path.read_text(encoding="utf-8"))
    return [folder / each.spec for each in EXPERIMENTS]
