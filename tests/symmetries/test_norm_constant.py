"""What a norm's bias gives to keys and values without a bias: found, counted against the certificate, folded away."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quotient_manifolds.symmetries import certify, find_symmetries, make_generic, output_change, prove_symmetries


class Block(nn.Module):
    """Attention with norms first, and a bias at its end alone; its keys may be rotated."""

    def __init__(self, bias: bool = True, rotated: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(6), nn.Linear(6, 18, bias=False), nn.Linear(6, 6, bias=bias)
        self.rotated = rotated

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 3)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, dim=-1))
        if self.rotated:
            angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
            q, k = (torch.cat((_turned(each[..., :2], angle), each[..., 2:]), dim=-1) for each in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + (self.out(mixed) + self.beside(x))

    def beside(self, x: Tensor) -> Tensor | float:
        return 0.0


class Parallel(Block):
    """The same, and beside it a layer with a bias, which is added to what attention answers."""

    def __init__(self) -> None:
        super().__init__(bias=False)
        self.layer = nn.Linear(6, 6)

    def beside(self, x: Tensor) -> Tensor:
        return self.layer(x.sin())


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.split(1, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 5, 6, generator=generator) for _ in range(40)]


@pytest.mark.parametrize(
    ("model", "keys", "values"),
    [(Block(), 6, 6), (Block(bias=False), 6, 0), (Block(rotated=True), 2, 6), (Parallel(), 6, 6)],
)
def test_the_constants_are_all_that_is_left(model: Block, keys: int, values: int) -> None:
    certificate = certify(make_generic(model), batches())
    assert certificate.found.families.get("constant of keys", 0) == keys
    assert certificate.found.families.get("constant of values", 0) == values
    assert certificate.missing == 0


def test_they_are_proved_and_have_one_place() -> None:
    model, x = make_generic(Block()).double(), torch.randn(2, 5, 6)
    found = find_symmetries(model, x)
    constants = [each for each in found.freedoms if each.name.endswith("constant")]
    assert len(constants) == 2
    assert prove_symmetries(model, x, found).all_proved
    own = {name: w.detach() for name, w in model.named_parameters()}
    folded = []
    for seed in (1, 2):
        params = {name: w.clone() for name, w in own.items()}
        for freedom in found.freedoms:
            freedom.move(params, torch.Generator().manual_seed(seed), 1.0)
        assert output_change(model, x, own, params) < 1e-12
        assert not torch.allclose(params["qkv.weight"], own["qkv.weight"])
        for freedom in found.freedoms:
            freedom.fold(params)
        folded.append(params)
    for name in own:
        torch.testing.assert_close(folded[0][name], folded[1][name], rtol=1e-10, atol=1e-10)
    assert folded[0]["qkv.weight"][6:].mean(dim=1).abs().max() < 1e-12
