"""Draw the charge matrices of a transformer block with random weights: the entries that vanish show the group.

`PYTHONPATH=notebooks python -m studies pages` writes the figure of docs/charges.md.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from matplotlib.colors import LogNorm
from torch import Tensor, nn

from quotient_manifolds.plots.canvas import Plot, canvas
from quotient_manifolds.symmetries.groups import SO, Charge, Gain, Gauge, Rows, Slot, Wire

WIDTH, HEADS, TOKENS, NEURONS = 16, 4, 11, 24
SIZE = WIDTH // HEADS
LEAST: Final = 1e-18
"""The lower end of the color scale; an exact 0 has its color."""

ALT: Final = (
    "Four matrices of 16 by 16 entries, on a logarithmic color scale from 1e-18 to 1. Queries and keys, and values and "
    "outputs: the blocks of the four heads on the diagonal are below 1e-14, all other entries are above 1e-5. "
    "Residual stream: all entries of C are above 1e-5, all entries of C minus its transpose are below 1e-14."
)


class Block(nn.Module):
    """Be an embedding, a transformer block with RMSNorm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, NEURONS), nn.Linear(NEURONS, WIDTH)
        self.norm1, self.norm2, self.norm3 = (nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, length, TOKENS)."""
        t = self.embedding(tokens)
        x = self.norm1(t)
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.query, self.key, self.value))
        weights = (q @ k.mT / math.sqrt(SIZE)).softmax(-1)
        t = t + self.output((weights @ v).transpose(1, 2).flatten(2))
        t = t + self.down(nn.functional.gelu(self.up(self.norm2(t))))
        return self.head(self.norm3(t))


def _wires(model: nn.Module) -> tuple[Wire, Wire, Wire]:
    """Return the wires of queries with keys, of values, and of the residual stream, each with all WIDTH channels."""
    shapes = {name: tuple(w.shape) for name, w in model.named_parameters()}
    channels = torch.arange(WIDTH)

    def writers(module: str, *, dual: bool = False) -> list[Slot]:
        names = [f"{module}.weight", f"{module}.bias"]
        return [Slot(Rows.along(each, shapes[each], 0), channels, writes=True, dual=dual) for each in names]

    def columns(module: str, norm: str = "", *, writes: bool = False) -> Slot:
        gains = (Gain.of(f"{norm}.weight", (WIDTH,), channels),) if norm else ()
        return Slot(Rows.along(name := f"{module}.weight", shapes[name], 1), channels, writes=writes, gains=gains)

    norms = {"query": "norm1", "key": "norm1", "value": "norm1", "up": "norm2", "head": "norm3"}
    readers = [columns(module, norm) for module, norm in norms.items()]
    stream = [columns("embedding", writes=True), *writers("output"), *writers("down"), *readers]
    return (
        Wire((*writers("query"), *writers("key", dual=True)), WIDTH),
        Wire((*writers("value"), columns("output")), WIDTH),
        Wire(tuple(stream), WIDTH),
    )


def charges() -> dict[str, Charge]:
    """Return the charges of the block's wires at random weights and tokens, by the titles of their panels."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    with torch.device("meta"):
        model = Block()
    params = {name: normal(*w.shape) / math.sqrt(w.shape[-1]) ** (w.ndim - 1) for name, w in model.named_parameters()}
    tokens, multiples = torch.randint(TOKENS, (4, 9), generator=generator), normal(4, 9, TOKENS)

    def loss(params: dict[str, Tensor]) -> Tensor:
        return (torch.func.functional_call(model, params, (tokens,)) * multiples).sum()

    gradient = torch.func.grad(loss)(params)
    scores, values, stream = _wires(model)
    return {
        "queries and keys: C": scores.charge(params, gradient),
        "values and outputs: C": values.charge(params, gradient),
        "residual stream: C": stream.charge(params, gradient),
        "residual stream: C − Cᵀ": Gauge(stream, SO(WIDTH)).charge(params, gradient),
    }


def ratios() -> dict[str, Tensor]:
    """Return |charge| over the sum of the absolute values of its summands (WIDTH, WIDTH), 0 without summands."""
    return {title: (value.abs() / size).nan_to_num(0.0) for title, (value, size) in charges().items()}


def figure() -> Plot:
    """Draw the matrices, narrow enough for a phone."""
    places, names = [SIZE * (head + 0.5) - 0.5 for head in range(HEADS)], range(1, HEADS + 1)
    with canvas("", "", panels=4, size=(2.4, 2.45)) as (drawn, panels):
        image: Any = None
        for axes, (title, matrix) in zip(panels, ratios().items(), strict=True):
            shown = matrix.clamp(min=LEAST).numpy()
            image = axes.imshow(shown, norm=LogNorm(LEAST, 1), cmap="cividis", interpolation="none")
            axes.set(title=title, xticks=[], yticks=[])
            axes.grid(visible=False)
            axes.spines[:].set_visible(True)
            if not title.startswith("residual"):
                axes.set(xlabel="head", xticks=places, xticklabels=names, yticks=places, yticklabels=names)
                axes.tick_params(length=0)
                for head in range(1, HEADS):
                    axes.axhline(SIZE * head - 0.5, color="white", linewidth=0.6)
                    axes.axvline(SIZE * head - 0.5, color="white", linewidth=0.6)
        bar = drawn.colorbar(image, ax=panels, location="bottom", shrink=0.9, aspect=30)
        bar.set_label("|charge| / sum of |summands|")
        bar.set_ticks([LEAST, 1e-12, 1e-6, 1])
        return Plot(drawn, ALT)
