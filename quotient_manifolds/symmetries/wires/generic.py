"""Give the numbers of parameters with a little noise, so that nothing is zero, one or of low rank as it starts."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from quotient_manifolds.symmetries.reparameterization import typical

NOISE = 0.03  # relative to the typical size of a parameter
PERIOD = 1048573  # of the noise: a prime, so that no two rows of a matrix have the same


class Generic(Mapping[str, Tensor]):
    """Give parameters in float64 with a little noise, one at a time and the same every time it is asked.

    So gains are not 1, biases not 0, and the B of an adapter has full rank.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = params
        self._noise = torch.randn(PERIOD, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self._size: dict[str, float] = {}

    def __getitem__(self, name: str) -> Tensor:
        w = self._params[name]
        return self.between(name, 0, w.numel()).view(w.shape)

    def between(self, name: str, start: int, stop: int) -> Tensor:
        """Return some of the numbers of a parameter, counted row by row."""
        w = self._params[name].detach()
        found = w.reshape(-1)[start:stop].to(torch.float64, copy=True)
        if name not in self._size:
            self._size[name] = NOISE * typical(w)
        noise, at, done = self._noise.to(w.device), (start + zlib.crc32(name.encode())) % PERIOD, 0
        while done < len(found):
            part = noise[at : at + len(found) - done]
            own = found[done : done + len(part)]
            most = own.abs().div_(2).masked_fill_(own == 0, torch.inf)  # a gain keeps its sign
            own.add_(torch.clamp(self._size[name] * part, -most, most))
            done, at = done + len(part), 0
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)
