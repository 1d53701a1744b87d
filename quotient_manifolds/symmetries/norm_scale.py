"""Represent a norm's gain and bias that the linear maps which read the norm can hold just as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import Freedom, gaussian, read, typical, write
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.trace import Part


@dataclass(frozen=True, eq=False)
class Reader:
    """Describe a linear map W y + b that reads a norm's answer y: which numbers of which parameters it is.

    weight: name of a parameter; elements (k, out) are flat indices into it, and row k is multiplied by channels[k] of
    the norm. bias: name of a parameter, "" if there is none; bias_elements (out,) are flat indices into it.
    """

    weight: str
    elements: Tensor
    channels: Tensor
    bias: str = ""
    bias_elements: Tensor | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the numbers of parameters that W and b are."""
        weight = (self.weight, self.elements)
        return (weight, (self.bias, self.bias_elements)) if self.bias_elements is not None else (weight,)

    def matrix(self, params: Params) -> Tensor:
        """Return W^T, (k, out), in float64."""
        return read(params, self.weight, self.elements)

    def constant(self, params: Params) -> Tensor:
        """Return b, (out,), in float64; 0 if there is none."""
        if self.bias_elements is None:
            return params[self.weight].new_zeros(self.elements.shape[1], dtype=torch.float64)
        return read(params, self.bias, self.bias_elements)

    def set(self, params: Params, matrix: Tensor, constant: Tensor) -> None:
        """Put W^T, and add a constant to b if there is one, in place."""
        write(params, self.weight, self.elements, matrix)
        if self.bias_elements is not None:
            before = read(params, self.bias, self.bias_elements)
            write(params, self.bias, self.bias_elements, before + constant)


@dataclass(frozen=True, eq=False)
class NormScale(Freedom):
    """Describe a norm y = gain * n + bias whose answer is read by linear maps alone.

    (gain, bias, W, b) and (1, 0, W diag(gain), b + W bias) are the same function, so the gain may be any vector without
    zeros, and the bias any vector if every reader has a bias of its own. centred: the channels of n have mean 0, as
    those of a LayerNorm; then each row of W diag(gain) may be shifted by any number, too. The mean of its rows can hold
    W bias for a reader without a bias: W diag(gain) + u 1^T answers W diag(gain) n to n, and u to a bias / gain of 1.
    size: the number of channels. offset: the gain is the parameter and this number, such as 1.
    """

    gain: str
    bias: str
    readers: tuple[Reader, ...]
    centred: bool
    size: int
    offset: float = 0.0
    kind: ClassVar[str] = "norm"

    @property
    def families(self) -> dict[str, int]:
        """Return the dimensions of the moves that leave the function alone, by their names."""
        unseen = sum(reader.elements.shape[1] for reader in self.unseen)
        found = {
            "gain of a norm": self.size,
            "bias of a norm": self.size * self.bias_is_free,
            "direction no reader of a norm sees": unseen,
        }
        return {name: size for name, size in found.items() if size}

    @property
    def bias_is_free(self) -> bool:
        """Return whether the readers can hold the bias."""
        return bool(self.bias) and all(reader.bias or self._sees_no_mean(reader) for reader in self.readers)

    @property
    def unseen(self) -> tuple[Reader, ...]:
        """Return the readers that have a direction each of their units does not see."""
        return tuple(reader for reader in self.readers if self._leaves_rows_free(reader))

    @property
    def held_bias(self) -> float:
        """Return the number that the bias is for every channel after a fold, if it is free."""
        return 0.0 if all(reader.bias for reader in self.readers) else 1.0

    def _leaves_rows_free(self, reader: Reader) -> bool:
        """Return whether rows of W may be shifted by any number, whatever the bias of the norm is."""
        return self._sees_no_mean(reader) and bool(reader.bias or not self.bias)

    def _sees_no_mean(self, reader: Reader) -> bool:
        return self.centred and len(reader.channels) == self.size

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move touches, each once."""
        others = (name for reader in self.readers for name in (reader.weight, reader.bias))
        return tuple(dict.fromkeys(name for name in (self.gain, self.bias, *others) if name))

    @property
    def constant(self) -> tuple[str, ...]:
        """Return the gain, and the bias if the readers can hold it."""
        return (self.gain, self.bias) if self.bias_is_free else (self.gain,)

    def fold(self, params: Params) -> None:
        """Make the gain 1, rows of W centred, and the bias 0, in place.

        The bias is 1 if a reader without a bias holds it in the mean of its rows, and bias / gain if it cannot.
        """
        self.fold_norm(params, lambda W: -W.mean(dim=0))

    def fold_norm(self, params: Params, shift: Callable[[Tensor], Tensor] | None = None) -> None:
        """Make the gain 1 and the bias 0 or 1, in place, and leave what no reader sees as it is."""
        gain, bias = self.read_norm(params)
        ones = torch.ones_like(gain)
        left = bias / gain if self.bias else bias
        self.set_norm(params, ones, ones * self.held_bias if self.bias_is_free else left, shift)

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Multiply the gain by exp(size z), shift bias / gain and rows of W diag(gain), in place."""
        gain, bias = self.read_norm(params)
        factor = (size * gaussian(gain, generator)).exp()
        if not gain.all():  # what is multiplied by 0 stays
            target, free = bias * factor, False
        else:
            target, free = self._moved_bias(bias / gain, generator, size) * gain * factor, True

        def shift(W: Tensor) -> Tensor:
            return size * typical(W) * gaussian(W, generator, W.shape[1])

        if control:
            self._write_norm(params, gain * factor, target)
        else:
            self.set_norm(params, gain * factor, target, shift if free else None)

    def _moved_bias(self, bias: Tensor, generator: torch.Generator, size: float) -> Tensor:
        """Return another bias for a gain of 1; its mean keeps its sign where readers without a bias divide by it."""
        if not self.bias_is_free:
            return bias
        moved = bias + size * typical(bias) * gaussian(bias, generator)
        if all(reader.bias for reader in self.readers):
            return moved
        mean = bias.mean() if abs(bias.mean()) > 1e-6 * typical(bias) else bias.new_tensor(typical(bias))
        return moved - moved.mean() + mean * (size * gaussian(bias, generator, 1)).exp()

    def read_norm(self, params: Params) -> tuple[Tensor, Tensor]:
        """Return gain and bias in float64."""
        gain = params[self.gain].double().flatten() + self.offset
        return gain, params[self.bias].double().flatten() if self.bias else torch.zeros_like(gain)

    def set_norm(
        self, params: Params, gain: Tensor, bias: Tensor, shift: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Give the norm a gain and a bias, and readers what makes up for it, in place.

        shift: from (W diag(gain))^T to what its rows are to be shifted by, where they may be.
        """
        old, before = self.read_norm(params)
        ratio = torch.where(gain == 0, 1.0, old / gain)
        for reader in self.readers:
            W, g = reader.matrix(params), gain[reader.channels, None]
            new = W * ratio[reader.channels, None]
            if shift is not None and self._leaves_rows_free(reader):
                new = new + shift(new * g) / g
            constant = before[reader.channels] @ W - bias[reader.channels] @ new
            if self.bias_is_free and not reader.bias:
                new = new + constant / (bias / gain).sum() / g
            reader.set(params, new, constant)
        self._write_norm(params, gain, bias)

    def _write_norm(self, params: Params, gain: Tensor, bias: Tensor) -> None:
        for name, numbers in ((self.gain, gain - self.offset), (self.bias, bias)):
            if name:
                params[name] = numbers.to(params[name].dtype).view_as(params[name])
