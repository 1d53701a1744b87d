"""Find the symmetries of a pretrained BERT by charges, alone: python -m tests.benchmarks.finding_by_charges NAME.

NAME is "bert", of 22.7 million parameters, or "lora", the same with adapters of rank 8 beside queries and values.
Prints a dict: passes, the processor's time for finding over that of a forward and backward pass of the batch, 16 x 32
words in float32, in the same run; parts, passes by part, of which some are inside others; bytes of peak resident memory
above the model with its passes, over those of its weights; and dimensions of what was found, by kind.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quotient_manifolds.symmetries.charges import find, finder, wide
from quotient_manifolds.symmetries.groups import Gauge
from tests.benchmarks.pretrained import pretrained
from tests.benchmarks.running import peak

PARTS: list[tuple[str, Any, str]] = [
    ("recordings", find, "Points"),
    ("walk", finder, "Walk"),
    ("answers", find.Points, "answers"),
    ("readings", wide.Wide, "everywhere"),
    ("samples", find.Points, "samples"),
    ("shifts", wide.Wide, "shifts"),
    ("finite moves", finder.Finder, "change"),
    ("moved weights", finder.Finder, "_moved"),
    ("reflections", finder.Finder, "_flips"),
]


def adapted(encoder: nn.Module) -> nn.Module:
    """Return the encoder with adapters whose second factor is not 0, all weights trained."""
    from peft import LoraConfig, get_peft_model

    model: nn.Module = get_peft_model(encoder, LoraConfig(r=8, target_modules=["query", "value"])).eval()
    generator = torch.Generator().manual_seed(0)
    for name, w in model.named_parameters():
        w.requires_grad_(True)
        if "lora_B" in name:
            w.data.copy_(0.02 * torch.randn(w.shape, generator=generator))
    return model


def timed(spent: dict[str, float], part: str, owner: Any, name: str) -> None:
    """Add what calls of owner.name take to a part."""
    called: Callable[..., Any] = getattr(owner, name)

    def measured(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return called(*args, **kwargs)
        finally:
            spent[part] += time.process_time() - start

    setattr(owner, name, measured)


def one_pass(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    start = time.process_time()
    answer = model(**batch)
    (answer.last_hidden_state.square().mean() + answer.pooler_output.square().mean()).backward()
    return time.process_time() - start


def main(name: str) -> None:
    torch.set_num_threads(1)
    encoder = pretrained().encoder
    model = adapted(encoder) if name == "lora" else encoder
    words = torch.randint(30000, (16, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    one = sorted(one_pass(model, batch) for _ in range(5))[1]
    model.zero_grad()
    spent = {part: 0.0 for part, *_ in PARTS}
    for part in PARTS:
        timed(spent, *part)
    before, start = peak(), time.process_time()
    found = find.find(model, batch)
    seconds = time.process_time() - start
    params = {each: w.detach() for each, w in model.named_parameters()}
    kinds: Counter[str] = Counter()
    for symmetry in found.symmetries:
        kind = type(symmetry.algebra if isinstance(symmetry, Gauge) else symmetry).__name__
        kinds[kind] += symmetry.dimension(params)
    result = {
        "passes": round(seconds / one, 1),
        "parts": {part: round(each / one, 2) for part, each in spent.items()},
        "extra": round((peak() - before) / sum(w.numel() * w.element_size() for w in model.parameters()), 2),
        "dimensions": dict(kinds),
        "change": found.change,
    }
    print(result)


if __name__ == "__main__":
    main(sys.argv[1])
