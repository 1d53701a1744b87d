"""Are the symmetries true? Move along the orbit and compare outputs; move one side only and see them change.

Everything runs in float64 on swapped parameters; the model itself is never touched. Models that cast to float32 inside
(softmax, norms) round there whatever their weights' dtype, so each model's rounding noise is measured, not assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from quotient_manifolds.symmetries.find import Symmetries, find_symmetries
from quotient_manifolds.symmetries.move import act, group_element
from quotient_manifolds.symmetries.pair import Params, SymmetricPair, check_weights
from quotient_manifolds.symmetries.table import text_table

Verdict = Literal["proved", "refuted", "inconclusive"]

MARGIN = 100.0  # a move may change the output by this often the rounding noise, times its condition number
REACH = 1e3  # the control must stand out of the noise this often, or the inputs do not exercise the pair
SEPARATION = 1e-2  # a move that changes the output by more than this part of the control is no symmetry


@dataclass(frozen=True)
class PairProof:
    """What one pair did to the output: changes are relative to the largest output, the largest over all output tensors.

    changes: per condition number of the group element, the largest change over the trials; control: the change when G
    alone is moved; noise: the model's own rounding noise.
    """

    pair: str
    group: str
    changes: tuple[tuple[float, float], ...]
    control: float
    noise: float
    verdict: Verdict
    reason: str = ""

    @property
    def change(self) -> float:
        return max(change for _, change in self.changes)


@dataclass(frozen=True)
class Proof:
    """The proofs of all pairs of a model; with no pair there is nothing to prove, and all are proved."""

    pairs: tuple[PairProof, ...]
    noise: float
    seed: int

    @property
    def all_proved(self) -> bool:
        return all(proof.verdict == "proved" for proof in self.pairs)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        pairs = [{**asdict(proof), "change": proof.change} for proof in self.pairs]
        return {"pairs": pairs, "noise": self.noise, "seed": self.seed, "all_proved": self.all_proved}

    def __str__(self) -> str:
        if not self.pairs:
            return "no symmetric pairs to prove"
        rows = [
            (
                proof.pair,
                proof.group,
                f"{proof.change:.1e}",
                f"{proof.control:.1e}",
                f"{proof.verdict}: {proof.reason}" if proof.reason else proof.verdict,
            )
            for proof in self.pairs
        ]
        header = ("symmetric pair", "group", "output change", "one side only", "verdict")
        return f"{text_table(header, rows)}\n\nrounding noise of the model {self.noise:.1e}, all relative to the output"


def prove_symmetries(
    model: nn.Module,
    inputs: Any,
    symmetries: Symmetries | None = None,
    *,
    seed: int = 0,
    trials: int = 1,
    conditions: tuple[float, ...] = (10.0, 1e3),
) -> Proof:
    """Output(G A^-1, H A^T) = Output(G, H) for random A of the given condition numbers, pair by pair, in float64.

    inputs: a dict for model(**inputs), a tuple for model(*inputs), or a tensor for model(inputs). Two short sequences
    suffice. ValueError in train mode, for weights that are no finite floating point numbers, and for outputs that are
    NaN, not repeatable or hold no floating point tensor.
    """
    symmetries = find_symmetries(model) if symmetries is None else symmetries
    if trials < 1 or not conditions or min(conditions) < 1:
        raise ValueError(f"a proof needs trials >= 1 and conditions >= 1. Found {trials} and {conditions}.")
    if not symmetries.pairs:
        return Proof((), 0.0, seed)
    check_weights(dict(model.named_parameters()), symmetries.names)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        run = _Run(model, inputs)
        noise = _rounding_noise(run, symmetries, generator)
        proofs = tuple(_prove_pair(run, pair, noise, generator, trials, conditions) for pair in symmetries.pairs)
    return Proof(proofs, noise, seed)


class _Run:
    """The model as a function of float64 parameters on one input, and what it answers at its own parameters."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        training = [name or "the model" for name, module in model.named_modules() if module.training]
        if training:
            raise ValueError(f"a proof needs eval mode. Found {training[0]!r} in train mode: call model.eval() first.")
        self._model = model
        self._buffers = {name: _double(value.detach()) for name, value in model.named_buffers()}
        inputs = _double(inputs)
        self._kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
        self._args = () if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple) else (inputs,)
        self.params: Params = {name: value.detach().double() for name, value in model.named_parameters()}
        self.outputs = self.at({})
        if not self.outputs:
            raise ValueError("the model's output holds no floating point tensor that could be compared.")
        if any(bool(torch.isnan(output).any()) for output in self.outputs):
            raise ValueError("the model's output on these inputs contains NaN: nothing can be compared.")
        if self.change({}) > 1e-6:
            raise ValueError("two evaluations on the same inputs differ: the model is random, nothing can be compared.")

    def at(self, moved: Params) -> list[Tensor]:
        """The floating point outputs with some parameters replaced."""
        state = {**self.params, **{name: value.clone() for name, value in self._buffers.items()}, **moved}
        return _floating(functional_call(self._model, state, self._args, self._kwargs))

    def change(self, moved: Params) -> float:
        """The largest change of an output entry, relative to the largest finite entry of its tensor."""
        return max(
            (_relative(new - old, old, same=new == old) for new, old in zip(self.at(moved), self.outputs, strict=True)),
            default=0.0,
        )

    def with_point(self, pair: SymmetricPair, x: Tensor) -> Params:
        moved = {name: self.params[name].clone() for name in pair.names}
        pair.write(moved, x)
        return moved


def _prove_pair(
    run: _Run, pair: SymmetricPair, noise: float, generator: torch.Generator, trials: int, conditions: tuple[float, ...]
) -> PairProof:
    x = pair.read(run.params)
    changes = []
    for condition in conditions:
        moves = (act(pair, group_element(pair, condition, generator), x) for _ in range(trials))
        changes.append((float(condition), max(run.change(run.with_point(pair, moved)) for moved in moves)))
    moved = act(pair, group_element(pair, conditions[0], generator), x)
    control = run.change(run.with_point(pair, torch.cat([moved[..., : pair.n, :], x[..., pair.n :, :]], dim=-2)))
    verdict, reason = _judge(changes, control, noise)
    return PairProof(pair.name, pair.group, tuple(changes), control, noise, verdict, reason)


def _judge(changes: list[tuple[float, float]], control: float, noise: float) -> tuple[Verdict, str]:
    """Proved: every change is within noise and far below the control. Refuted: some change is of the control's kind."""
    if not control >= REACH * noise:
        return "inconclusive", "these inputs hardly see the pair: moving one side alone is lost in rounding noise"
    excess = [change for condition, change in changes if not change <= MARGIN * condition * noise]
    worst = max(change for _, change in changes)
    if not excess and worst <= SEPARATION * control:
        return "proved", ""
    if not worst <= SEPARATION * control and excess:
        return "refuted", "a group element changes the output like moving one side alone"
    return "inconclusive", "the output changes more than rounding explains, far less than moving one side alone"


def _rounding_noise(run: _Run, symmetries: Symmetries, generator: torch.Generator, step: float = 1e-6) -> float:
    """The output's rounding noise, from third differences along a random direction of all pairs' parameters.

    A smooth function's third difference is O(step^3), far below rounding; what remains is noise, of variance
    20 sigma^2. The step exceeds float32's spacing, so casts to float32 inside the model show. At least float64's own.
    """
    names = symmetries.names
    direction = {name: _noise_like(run.params[name], generator) for name in names}
    third = list(run.outputs)
    for count, weight in ((1, -3.0), (2, 3.0), (3, -1.0)):
        at = run.at({name: run.params[name] * (1 + count * step * direction[name]) for name in names})
        third = [total + weight * value for total, value in zip(third, at, strict=True)]
    sizes = [_relative(value, old, same=~torch.isfinite(old)) for value, old in zip(third, run.outputs, strict=True)]
    return max(max(sizes) / 20**0.5, torch.finfo(torch.float64).eps)


def _noise_like(value: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)


def _relative(difference: Tensor, reference: Tensor, same: Tensor) -> float:
    """max |difference| / max |reference|, entries marked `same` (such as equal infinities) left out."""
    finite = reference[torch.isfinite(reference)]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    difference = difference.masked_fill(same, 0.0).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    change = float(difference.max()) if difference.numel() else 0.0
    return change / size if size > 0 else change


def _double(value: Any) -> Any:
    """Floating point tensors in nested containers cast to float64; everything else as it is."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _double(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_double(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _floating(output: Any) -> list[Tensor]:
    """The floating point tensors of a tensor, tuple, list or mapping (Hugging Face's ModelOutput is one); no caches."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        return [tensor for item in output.values() for tensor in _floating(item)]
    if isinstance(output, (list, tuple)):
        return [tensor for item in output for tensor in _floating(item)]
    return []
