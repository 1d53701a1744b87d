"""List batches with notes on them, choose rows, and find the class of a label."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from quotient_manifolds.messages import brief

Labels = Mapping[str, int]  # the class of each label, by how the label is written


@final
class Batches(list[Any]):
    """List batches in order; notes: sentences that belong beside any number measured on them."""

    def __init__(self, batches: Sequence[Any], notes: Sequence[str] = ()) -> None:
        super().__init__(batches)
        self.notes = list(notes)


def drawn(count: int, most: int | None, seed: int | None) -> list[int]:
    """Return `most` of `count` rows (None: all): the first ones, or with a seed random ones without replacement."""
    if seed is None:
        return list(range(count))[:most]
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:most].tolist()


def class_of(
    label: Any, where: str, labels: Labels | None = None, count: int | None = None, names: Labels | None = None
) -> int:
    """Return the class of a label: what `labels` says, or else what `names` says of a word, or else the number itself.

    names: the classes of the model by their names in lower case. Raises ValueError with `where`, the place of the
    label in the data, for one without a class and for a class that is not in 0 ... count - 1.
    """
    found = label
    if labels is not None:
        if str(label) not in labels:
            raise ValueError(f"{where}: the label must be one of {', '.join(labels)}. Found {brief(label)}.")
        found = labels[str(label)]
    elif isinstance(label, str):
        number = re.fullmatch(r"\s*(-?\d{1,18})\s*", label)
        found = int(number[1]) if number else (names or {}).get(label.strip().casefold(), label)
    if not isinstance(found, int) or isinstance(found, bool):
        known = f" or one of {', '.join(list(names)[:5])}" if names else ""
        raise ValueError(
            f"{where}: the label must be an integer{known}. Found {brief(label)}. Give labels, the class of each word."
        )
    if found < 0 or (count is not None and found >= count):
        wanted = "at least 0" if count is None else f"in 0 ... {count - 1}, the classes of the model"
        raise ValueError(f"{where}: the label must be {wanted}. Found {brief(label)}.")
    return found


def known_classes(model: nn.Module) -> tuple[int | None, Labels]:
    """Return how many classes a Hugging Face classifier has, and their names in lower case; of others (None, {})."""
    unwrapped = getattr(model, "get_base_model", lambda: model)()  # of peft
    config: Any = getattr(unwrapped, "config", None)
    count = getattr(config, "num_labels", None)
    if not type(unwrapped).__name__.endswith("Classification") or not isinstance(count, int):
        return None, {}
    names = getattr(config, "id2label", None) or {}
    return count, {str(name).casefold(): int(number) for number, name in names.items()}
