"""Give the numbers of parameters with a little noise, so that nothing is zero, one or of low rank as it starts."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.reparameterization import typical

NOISE = 0.03  # relative to the typical size of a parameter
PIECE = 1 << 15  # numbers that a processor keeps at hand
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
        found = self._params[name].detach().reshape(-1)[start:stop].to(torch.float64, copy=True)
        noise, at, done = self._noise.to(found.device), (start + zlib.crc32(name.encode())) % PERIOD, 0
        while done < len(found):
            part = noise[at : at + min(PIECE, len(found) - done)]
            self._disturb(name, found[done : done + len(part)], part)
            at, done = (at + len(part)) % PERIOD, done + len(part)
        return found

    def at(self, name: str, places: Tensor) -> Tensor:
        """Return the numbers of a parameter at some places."""
        w = self._params[name].detach().reshape(-1)
        found = w[places.to(w.device)].to(torch.float64)
        self._disturb(name, found, self._noise[(places + zlib.crc32(name.encode())) % PERIOD].to(w.device))
        return found

    def _disturb(self, name: str, numbers: Tensor, noise: Tensor) -> None:
        """Add noise, in place."""
        if name not in self._size:
            self._size[name] = NOISE * typical(self._params[name])
        added = self._size[name] * noise
        for gain in (numbers, 1 + numbers):  # it keeps its sign
            most = gain.abs().div_(2).masked_fill_(gain == 0, torch.inf)
            added = torch.minimum(torch.maximum(added, -most), most)
        numbers += added

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)
