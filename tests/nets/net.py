"""Nets of a few lines: a module computes a function, whose parts are made when the function names them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

D, TOKENS, GIVEN, CLASSES, WORDS, EPS = 8, 5, 9, 12, 40, 1e-5
Body = Callable[[Any, Tensor], Tensor]
Change = Callable[[Tensor], Tensor]
Model = TypeVar("Model", bound=nn.Module)


class Computed(nn.Module):
    """Compute a function of its parts, which are modules and parameters, and of the inputs."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def linear(names: str, *sizes: int, bias: bool = True) -> dict[str, nn.Module]:
    """Return a linear map of these sizes by each letter."""
    return {name: nn.Linear(*sizes, bias=bias) for name in names}


class Net(nn.Module):
    """Map tokens to a stream of channels, this by a body, and the mean over tokens, or each of them, to classes.

    What a body names is made when it first runs: letters are linear maps, `s.a_8_3` one of 8 channels to 3; `s.p_5_8`
    is a parameter of this shape, likewise g, h, t; `s.norm_4`, `s.rmsk` are norms, of 4 channels or of all. A name with
    an underscore behind it is another one of the same kind.
    """

    def __init__(self, body: Body, bias: bool, pooled: bool, words: bool, given: int = GIVEN) -> None:
        super().__init__()
        self.body, self.bias, self.pooled = body, bias, pooled
        self.embed = nn.Embedding(WORDS, D) if words else nn.Linear(given, D, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        self.given = x
        y = self.body(self, self.embed(x))
        del self.given
        y = y.mean(1) if self.pooled and y.ndim == 3 else y
        return self.z_8_12(y) if y.shape[-1] == D else y

    def __getattr__(self, name: str) -> Any:
        kind = re.fullmatch(r"([a-z]+)((?:_\d+)*)_?", name)
        if kind is None or name in {**self._modules, **self._parameters}:
            return super().__getattr__(name)
        sizes = [int(size) for size in kind[2].split("_")[1:]]
        for some, make in KINDS.items():
            if re.fullmatch(some, kind[1]):
                made = make(sizes or [D], self.bias)
                if isinstance(made, nn.Module):
                    self._modules[name] = made
                else:
                    self._parameters[name] = made
                return made
        return super().__getattr__(name)


def _with_statistics(norm: nn.BatchNorm1d) -> nn.BatchNorm1d:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean += torch.randn_like(norm.running_mean)
    norm.running_var += torch.rand_like(norm.running_var)
    return norm


KINDS: dict[str, Callable[[list[int], bool], nn.Module | nn.Parameter]] = {
    "[abcekmoqrvwz]": lambda sizes, bias: nn.Linear(*(sizes * 2)[:2], bias=bias),
    "[ghpt]": lambda sizes, _: nn.Parameter(torch.randn(sizes)),
    "norm[bckq]?": lambda sizes, _: nn.LayerNorm(sizes, eps=EPS),
    "plain": lambda sizes, _: nn.LayerNorm(sizes, eps=EPS, elementwise_affine=False),
    "rms[bkq]?": lambda sizes, _: nn.RMSNorm(sizes, eps=EPS),
    "group": lambda *_: nn.GroupNorm(2, D),
    "fresh": lambda sizes, _: nn.BatchNorm1d(*sizes),
    "batch": lambda sizes, _: _with_statistics(nn.BatchNorm1d(*sizes)),
    "flat": lambda sizes, _: _with_statistics(nn.BatchNorm1d(*sizes, affine=False)),
    "conv": lambda _, bias: nn.Conv1d(D, D, 3, padding=1, bias=bias),
    "deep": lambda _, bias: nn.Conv1d(D, D, 3, padding=1, groups=D, bias=bias),
    "apart": lambda _, bias: nn.Conv1d(D, D, 3, groups=2, bias=bias),
    "up": lambda sizes, bias: nn.ConvTranspose1d(D, D, *(sizes if len(sizes) > 1 else (3, 2)), bias=bias),
    "round": lambda _, bias: nn.Conv1d(D, D, 3, padding=1, padding_mode="circular", bias=bias),
    "rnn": lambda _, bias: nn.RNN(D, D, bias=bias, batch_first=True),
    "gru": lambda _, bias: nn.GRU(D, D, bias=bias, batch_first=True),
    "table": lambda *_: nn.Embedding(TOKENS, D),
}
"""What the letters before the sizes of a name stand for."""


def shaken(model: Model, size: float) -> Model:
    """Return the model in eval mode, with noise added to all parameters: some start at 0 or 1."""
    with torch.no_grad():
        for w in model.parameters():
            w += size * torch.randn_like(w)
    return model.eval()


def generic(model: nn.Module, inputs: Tensor) -> nn.Module:
    """Return a net whose parts are all made at a generic point, in float64: what starts as a constant would be one."""
    model(inputs)
    model = model.double().eval()
    with torch.no_grad():
        for w in model.parameters():
            if w.ndim < 2 or bool((w == w.reshape(-1)[0]).all()):
                w += 0.3 * torch.randn_like(w)
    return model


@torch.no_grad()
def difference(model: nn.Module, x: Tensor, params: dict[str, Tensor]) -> float:
    """Return the largest change of outputs at these parameters, relative to the largest output."""
    answer = model(x)
    return float((torch.func.functional_call(model, params, (x,)) - answer).abs().max() / answer.abs().max())
