"""One gradient shows whether symmetries hold: true ones have no slope in any precision, false ones a large one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds.geometry import Quotient
from quotient_manifolds.replica import replica
from quotient_manifolds.symmetries import Symmetries, make_generic, propose_symmetries
from quotient_manifolds.symmetries.horizontal import Horizontal
from tests.nets.attention import BY_NAME, claimed, noise
from tests.symmetries.test_verify import attention, heads_swapped, rotate

Loss = Callable[[nn.Module, Any], Tensor]
PRECISIONS = (torch.float32, torch.float64)


def squared(model: nn.Module, batch: Any) -> Tensor:
    out = model(**batch) if isinstance(batch, dict) else model(batch)
    first = out if isinstance(out, Tensor) else out[0]
    return (first - 0.3).square().mean()


def with_pooler(model: nn.Module, batch: Any) -> Tensor:
    return squared(model, batch) + (model(**batch).pooler_output - 0.3).square().mean()


def slopes(model: nn.Module, loss: Loss, batch: Any, symmetries: Symmetries) -> tuple[Mapping[str, float], list[str]]:
    """Return slopes at the place where a measure begins, and the names of those in doubt."""
    space = Quotient(symmetries=symmetries, verify="none").tangent_space(model)
    point = {name: w.clone().requires_grad_() for name, w in space.point.items()}
    value = loss(replica(model, point), batch)
    grads = torch.autograd.grad(value, [*point.values()], allow_unused=True)
    found, given = Horizontal(symmetries, space.point), dict(zip(point, grads, strict=True))
    return found.slopes(given), found.doubtful(given)


class Stream(nn.Module):
    """A stream of 8 channels, which a second reader may or may not read past the norm."""

    def __init__(self, read: bool, mean: bool = False) -> None:
        super().__init__()
        self.read, self.mean = read, mean
        self.embed, self.norm = nn.Linear(5, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        normed = x / x.std(-1, keepdim=True) if self.mean else self.norm(x)
        return self.head(torch.tanh(normed)) + (x[..., :3] if self.read else 0)


def streams(**other: bool) -> tuple[nn.Module, Loss, Any, Symmetries]:
    """What was found in one stream, claimed of another one."""
    torch.manual_seed(0)
    first, x = make_generic(Stream(read=False)), torch.randn(6, 4, 5)
    model = Stream(**{"read": False, **other}).eval()
    model.load_state_dict(first.state_dict())
    return model, squared, x, propose_symmetries(first.eval(), x, evaluate=squared)


def swapped() -> tuple[nn.Module, Loss, Any, Symmetries]:
    model = BY_NAME["GPT-2"].build()
    pairs = BY_NAME["GPT-2"].found(model).pairs
    return model, squared, BY_NAME["GPT-2"].inputs(), Symmetries((heads_swapped(model, pairs[0]), pairs[3]))


def rotary() -> tuple[nn.Module, Loss, Any, Symmetries]:
    model = attention(rotate)
    return model, squared, noise(2, 5, 12), claimed(model)


def pooled() -> tuple[nn.Module, Loss, Any, Symmetries]:
    model, batch = BY_NAME["BERT"].build(), BY_NAME["BERT"].inputs()
    return model, with_pooler, batch, propose_symmetries(model, batch, evaluate=squared)


def dropped() -> tuple[nn.Module, Loss, Any, Symmetries]:
    """A softmax that ignores a constant of all keys, before which something else stands."""
    model, x = attention(), noise(2, 5, 12)
    return attention(torch.tanh), squared, x, propose_symmetries(model, x, evaluate=squared)


FALSE = {
    "heads across their borders": (swapped, "query/key"),
    "all matrices on rotary heads": (rotary, "query/key"),
    "a pooler that the loss reads": (pooled, "pooler"),
    "a reader of the stream that was forgotten": (lambda: streams(read=True), "norm|bias|direction|mean"),
    "a mean that no norm takes": (lambda: streams(mean=True), "direction|bias|mean"),
    "a constant of keys that is not ignored": (dropped, "k_proj"),
}


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("what", FALSE)
def test_a_false_symmetry_has_a_slope(what: str, dtype: torch.dtype) -> None:
    make, named = FALSE[what]
    model, loss, batch, symmetries = make()
    model, batch = model.to(dtype), cast(batch, dtype)
    found, doubted = slopes(model, loss, batch, symmetries)
    guilty = [name for name in doubted if any(part in name for part in named.split("|"))]
    assert guilty, found
    assert max(found[name] for name in guilty) > 1e-2


TRUE: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    name: (lambda name=name: (BY_NAME[name].build(), BY_NAME[name].inputs()))  # type: ignore[misc]
    for name in ("torch encoder", "BERT", "GPT-2", "ViT")
}


def confident() -> tuple[nn.Module, Any]:
    model, batch = TRUE["BERT"]()
    with torch.no_grad():
        for w in model.parameters():
            w *= 3
    return model, batch


TRUE |= {
    "confident": confident,
    "rounded to bfloat16": lambda: (TRUE["BERT"]()[0].bfloat16().float(), TRUE["BERT"]()[1]),
    "one sequence of 4 tokens": lambda: (TRUE["BERT"]()[0], {"input_ids": torch.tensor([[3, 9, 4, 7]])}),
}


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", TRUE)
def test_true_symmetries_have_none(name: str, dtype: torch.dtype) -> None:
    model, batch = TRUE[name]()
    model, batch = model.to(dtype), cast(batch, dtype)
    found, doubted = slopes(model, squared, batch, propose_symmetries(model, batch, evaluate=squared))
    assert not doubted, found


def cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, dict):
        return {key: cast(value, dtype) for key, value in batch.items()}
    return batch.to(dtype) if batch.is_floating_point() else batch


def test_a_declared_pair_without_gradient_is_verified_where_nothing_is_zero() -> None:
    """At B = 0, or behind weights that are 0, a false claim has no slope."""
    model = attention(torch.tanh)
    with torch.no_grad():
        model[0].o_proj.weight.zero_()  # type: ignore[union-attr,operator]
    with pytest.raises(ValueError, match=r"Found 0 query/key"):
        qm.gradient_norm(model, squared, [noise(2, 5, 12)], geometry=Quotient(symmetries=claimed(model), eps=0.1))
