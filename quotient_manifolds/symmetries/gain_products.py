"""Find gains that a model uses in products only, such as those of norms on queries and keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quotient_manifolds.symmetries.freedom import Freedom, gaussian
from quotient_manifolds.symmetries.norm_uses import NormUse
from quotient_manifolds.symmetries.operations import SUMS, Key, Operation, key
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.trace import Trace

_FACTORS = ("mul", "mul_", "div", "div_", "neg", "neg_")
FIXED = 0  # the symbol of what may not be multiplied


@dataclass(frozen=True, eq=False)
class GainProducts(Freedom):
    """Describe norms on two sides of a product, of which the product of gains alone is used.

    (gain_q * a, gain_k / a) is the same function, elementwise, or plane by plane under a rotary embedding. gains:
    their names, offsets: what is added to each of them; biases: of the same norms, "" if there is none, which are
    multiplied alike. classes: for each gain, which number of a multiplies (1 + its index) or divides (minus that) each
    of its channels; 0: none. The one place is where logarithms of absolute gains, with these signs, add up to 0.
    """

    gains: tuple[str, ...]
    offsets: tuple[float, ...]
    biases: tuple[str, ...]
    classes: tuple[Tensor, ...]
    size: int
    kind: ClassVar[str] = "product of gains"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that a move touches, each once."""
        return tuple(dict.fromkeys(name for name in (*self.gains, *self.biases) if name))

    @property
    def families(self) -> dict[str, int]:
        """Return the dimension of the moves that leave the function alone, by its name."""
        return {"gain of a query norm against a key norm": self.size}

    def fold(self, params: Params) -> None:
        """Make gains on both sides of each product equally large, in place; where one is 0, they stay."""
        sums, counts = torch.zeros(self.size + 1).double(), torch.zeros(self.size + 1).double()
        for name, offset, classes in zip(self.gains, self.offsets, self.classes, strict=True):
            logarithms = (params[name].double().flatten().cpu() + offset).abs().log()
            sums.index_add_(0, classes.abs(), logarithms * classes.sign())
            counts.index_add_(0, classes.abs(), classes.abs().sign().double())
        self._scale(params, -(sums / counts.clamp_min(1)).nan_to_num(0.0, 0.0, 0.0))

    def move(self, params: Params, generator: torch.Generator, size: float, control: bool = False) -> None:
        """Multiply one side by exp(size z) and divide the other, in place; with `control`, multiply both."""
        logarithms = size * gaussian(torch.zeros(self.size + 1), generator)
        self._scale(params, logarithms, both=control)

    def _scale(self, params: Params, logarithms: Tensor, both: bool = False) -> None:
        logarithms[0] = 0.0
        for name, offset, bias, classes in zip(self.gains, self.offsets, self.biases, self.classes, strict=True):
            signs = classes.abs().sign() if both else classes.sign()
            factor = (logarithms[classes.abs()] * signs).exp().to(params[name].device)
            for each, added in ((name, offset), (bias, 0.0)):
                if each:
                    before = params[each].double()
                    after = (before + added) * factor.view_as(before) - added
                    params[each] = after.to(params[each].dtype)


def find_gain_products(trace: Trace, uses: Iterable[NormUse]) -> Iterator[GainProducts]:
    """Yield the gains of norms that meet others in products alone. uses: norms that have to keep their gains."""
    tried = [use for use in uses if use.gain and not _used_besides(trace, use)]
    if len(tried) < 2:
        return
    followed = _Multiples(tried)
    for operation in trace.operations:
        followed.follow(operation)
    for output in trace.outputs:
        followed.fix(output)
    left = [(use, *followed.classes(use)) for use in tried]
    while left:
        together, roots = [left.pop(0)], set[int]()
        while True:
            roots |= {root for _, its, _ in together for root in its.unique().tolist() if root != FIXED}
            more = [each for each in left if roots & set(each[1].unique().tolist())]
            if not more:
                break
            together += more
            left = [each for each in left if each not in more]
        found = _gain_products(together)
        if found is not None:
            yield found


def _used_besides(trace: Trace, use: NormUse) -> str:
    names = [name for name in (use.gain, use.bias) if name]
    return trace.used_besides([(name, torch.arange(trace.params[name].numel())) for name in names], use.operations)


def _gain_products(together: list[tuple[NormUse, Tensor, Tensor]]) -> GainProducts | None:
    """Return the gains of these norms, with all classes of channels that have members on both sides of a product."""
    roots = torch.cat([its for _, its, _ in together])
    signs = torch.cat([its for _, _, its in together])
    index = {FIXED: 0}
    for root in roots.unique().tolist():
        if root != FIXED and len(signs[roots == root].unique()) == 2:
            index[root] = len(index)
    if len(index) == 1:
        return None
    return GainProducts(
        tuple(use.gain for use, _, _ in together),
        tuple(use.offset for use, _, _ in together),
        tuple(use.bias for use, _, _ in together),
        tuple(torch.tensor([index.get(root, 0) for root in its.tolist()]) * signs for _, its, signs in together),
        len(index) - 1,
    )


class _Multiples:
    """Give numbers that gains multiply a symbol each, and say which multiples may differ from 1.

    Symbols are joined where their multiples have to be the same, or inverse: a union-find with signs.
    """

    def __init__(self, uses: Sequence[NormUse]) -> None:
        self._labels: dict[Key, Tensor] = {}
        self._first: dict[str, int] = {}
        self._starts: dict[Key, NormUse] = {}
        self._parents, self._signs = [FIXED], [1]
        for use in uses:
            self._first[use.gain] = len(self._parents)
            self._parents += range(len(self._parents), len(self._parents) + use.size)
            self._signs += [1] * use.size
            self._starts |= {key(answer): use for answer in use.answers}

    def classes(self, use: NormUse) -> tuple[Tensor, Tensor]:
        """Return for every channel of a norm the symbol that stands for its class, and the sign of its exponent."""
        found = [self._root(self._first[use.gain] + channel) for channel in range(use.size)]
        return torch.tensor([root for root, _ in found]), torch.tensor([sign for _, sign in found])

    def follow(self, operation: Operation) -> None:
        """Say which of the numbers that an operation gives are multiplied, and join what it takes."""
        if operation.is_view:
            labels = self._labels.get(key(operation.inputs[0]))
            if labels is not None:
                for output, moved in zip(operation.outputs, operation.moved(labels), strict=True):
                    self._labels[key(output)] = moved
            return
        labels = self._given(operation)
        for output in operation.outputs:
            use = self._starts.get(key(output))
            if use is not None and id(operation) in use.operations:
                labels = torch.arange(use.size).expand(output.shape) + self._first[use.gain]
            self._labels.pop(key(output), None)
        if labels is not None:
            self._labels[key(operation.outputs[0])] = labels

    def fix(self, tensor: object) -> None:
        """Note that numbers may not be multiplied."""
        labels = self._of(tensor)
        if labels is not None:
            for symbol in labels.unique().tolist():
                self._join(symbol, FIXED, 1)

    def _of(self, tensor: object) -> Tensor | None:
        return self._labels.get(key(tensor)) if isinstance(tensor, Tensor) else None

    def _given(self, operation: Operation) -> Tensor | None:
        """Return the symbols of what an operation gives, if they are those of what it takes."""
        known = [tensor for tensor in operation.inputs if self._of(tensor) is not None]
        if not known:
            return None
        name, arguments = operation.name, operation.arguments
        if name in (*SUMS, "sub", "sub_") and len(operation.inputs) == 2:
            first, second = (self._symbols(each).expand(operation.outputs[0].shape) for each in operation.inputs)
            self._join_all(first, second, 1)
            return torch.maximum(first, second)
        if name == "cat":
            return torch.cat([self._symbols(each) for each in arguments[0]], *arguments[1:])
        if name in _FACTORS and len(known) == 1 and (known[0] is arguments[0] or not name.startswith("div")):
            return self._symbols(known[0]).expand(operation.outputs[0].shape)
        if name == "view_as_complex":
            real, imaginary = self._symbols(arguments[0]).unbind(-1)
            self._join_all(real, imaginary, 1)
            return real
        if name == "view_as_real":
            return self._symbols(arguments[0])[..., None].expand(operation.outputs[0].shape)
        if name in ("mm", "bmm") and len(known) == 2:
            self._multiply(self._symbols(arguments[0]), self._symbols(arguments[1]).mT)
        elif "scaled_dot_product" in name and self._of(arguments[2]) is None:
            left, right = map(self._symbols, arguments[:2])
            if left.ndim == right.ndim == 4:
                right = right.repeat_interleave(left.shape[1] // right.shape[1], dim=1)
            self._multiply(left, right)
        else:
            for tensor in known:
                self.fix(tensor)
        return None

    def _symbols(self, tensor: Tensor) -> Tensor:
        labels = self._of(tensor)
        return torch.full(tensor.shape, FIXED) if labels is None else labels

    def _multiply(self, left: Tensor, right: Tensor) -> None:
        """Join the symbols of (..., i, k) and (..., j, k), of which sums over k of products are taken."""
        for symbols in (left, right):
            if not bool((symbols == symbols[..., :1, :]).all()):
                self._join_all(symbols, torch.full_like(symbols, FIXED), 1)
        self._join_all(left[..., 0, :], right[..., 0, :], -1)

    def _join_all(self, first: Tensor, second: Tensor, sign: int) -> None:
        count = len(self._parents)
        for code in (first * count + second).unique().tolist():
            self._join(code // count, code % count, sign)

    def _root(self, symbol: int) -> tuple[int, int]:
        sign = 1
        while self._parents[symbol] != symbol:
            sign *= self._signs[symbol]
            symbol = self._parents[symbol]
        return symbol, sign

    def _join(self, one: int, other: int, sign: int) -> None:
        """Let the exponent of one symbol be that of another, or minus that."""
        (first, its), (second, others) = self._root(one), self._root(other)
        relative = its * others * sign
        if first == second:
            if relative < 0 and first != FIXED:  # its own inverse
                self._parents[first] = FIXED
        elif first == FIXED:
            self._parents[second], self._signs[second] = FIXED, relative
        else:
            self._parents[first], self._signs[first] = second, relative
