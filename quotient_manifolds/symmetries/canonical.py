"""Move a model to the parameters of the same function at which gains are 1, and biases and means 0."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quotient_manifolds.symmetries.checks import check_model, check_weights
from quotient_manifolds.symmetries.find import held
from quotient_manifolds.symmetries.outputs import Evaluate, ModelOutputs
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.propose import find_reparameterizations
from quotient_manifolds.symmetries.reparameterization import Reparameterization, together
from quotient_manifolds.symmetries.symmetries import Refused, Symmetries
from quotient_manifolds.symmetries.wires.run import Run

HOLDS = 1e3  # times the rounding noise of the output: as much as it may change


@dataclass(frozen=True, eq=False)
class Canonical:
    """Hold the canonical parameters of a function, and what was free in the model to get there.

    params: all parameters of the model, a tied one once, in the model's precision. reparameterizations: what was set to
    1 or 0. refused: norms that keep their gains, with the reason. change: of the output, relative, in float64, before
    the parameters are rounded to the model's precision.
    """

    params: Params
    reparameterizations: tuple[Reparameterization, ...]
    refused: tuple[Refused, ...]
    change: float

    @property
    def constant(self) -> tuple[str, ...]:
        """Return the names of the gains that are 1 and of the biases of norms that are 0: freeze them to measure."""
        return tuple(
            dict.fromkeys(
                name for reparameterization in self.reparameterizations for name in reparameterization.constant
            )
        )

    @property
    def families(self) -> dict[str, int]:
        """Return the dimensions of what was free, by family."""
        found = Counter[str]()
        for reparameterization in self.reparameterizations:
            found.update(reparameterization.families)
        return dict(found)


def canonical(model: nn.Module, inputs: Any, *others: Any, evaluate: Evaluate | None = None) -> Canonical:
    """Return the parameters of the same function at which what no output depends on is 1 or 0.

    - Gains and biases of norms: y = gain * n + bias, where only linear maps read it, is W y + b = (W diag(gain)) n +
      (b + W bias). The gain becomes 1 and the bias 0, or 1 if a reader without a bias holds it in the mean of its rows.
      So do gains and biases after a linear map or convolution: batch norms in eval mode, layer scales. The bias of a
      norm whose answer also goes into a residual stream becomes 0, if the next bias that is added there can hold it.
    - Gains of norms on queries and keys against each other: equally large, channel by channel or plane by plane.
    - Directions that no reader of a norm sees: the channels of n in a LayerNorm have mean 0, so rows of W get mean 0.
    - Means that no norm reads: what is written to a stream that LayerNorms alone read gets mean 0 over its channels.
    - Vectors between all that is added: of tables of embeddings, all but the first get a mean row of 0; positions hold
      a class token and the bias of patches, and one of parallel layers the bias of the other.
    - What softmax ignores: the same number added to all logits, or to all biases for distances, has a mean of 0.
    - Scales of neurons with a squared ReLU: what comes into each has length 1.
    - Rotations of a residual stream that norms alone read: all of it turns to where the second moment of the tables is
      diagonal, which its eigenvalues decide unless two of them agree.

    All of it is found in one recorded run on the inputs, which follows numbers through views, casts, parts and sums, so
    no class need be known: norms of torch or written out, Linear, Conv1D or fused projections. What the model does not
    run on these inputs is not seen: an expert that no token goes to, a branch, an embedding that is tied to a reader
    where the inputs are embeddings. Elsewhere the function may then differ, so give inputs that go everywhere. A vector
    of gains that scales anything else is treated as a norm's.

    inputs and `evaluate` as for `verify_symmetries`. Every step is tried on the inputs in float64, and one that changes
    the output is left out. `constant` names what to freeze for measures that should not see the gains:

    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True).eval()
    >>> found = canonical(layer, torch.randn(2, 3, 8))
    >>> found.constant
    ('norm1.weight', 'norm2.weight', 'norm1.bias', 'norm2.bias')
    >>> _ = layer.load_state_dict(found.params)

    Raises ValueError in train mode, for outputs that are empty, random or NaN, and for weights that are no finite
    floating point numbers.
    """
    check_model(model)
    own = {name: value.detach() for name, value in model.named_parameters()}
    check_weights(own, own)
    batches = (inputs, *others)
    with torch.no_grad():
        every = [ModelOutputs(model, batch, evaluate) for batch in batches]
        trace = Run(model, inputs, evaluate)
        reparameterizations, refusals = find_reparameterizations(trace)
        free = held(
            model,
            batches,
            Symmetries((), refused=refusals, reparameterizations=reparameterizations),
            trace.idle,
            evaluate,
        )
        found, refused = list(free.reparameterizations), list(free.refused)
        most = [HOLDS * outputs.rounding_noise(own, torch.Generator().manual_seed(0)) for outputs in every]

        def folded(reparameterizations: list[Reparameterization]) -> Params:
            params = every[0].copied(own)
            for reparameterization in together(reparameterizations):
                reparameterization.canonicalize(params)
            return params

        def changes(params: Params) -> list[float]:
            return [outputs.change({name: value.clone() for name, value in params.items()}) for outputs in every]

        def holds(reparameterizations: list[Reparameterization]) -> bool:
            return all(
                change <= limit for change, limit in zip(changes(folded(reparameterizations)), most, strict=True)
            )

        if not holds(found):
            false = [reparameterization for reparameterization in found if not holds([reparameterization])]
            refused += [Refused(each.names[0], each.kind, "setting it changes the output") for each in false]
            found = [each for each in found if each not in false]
        params = folded(found)
        change = max(changes(params))
    stored = {name: value.to(own[name].dtype) for name, value in params.items()}
    return Canonical(stored, tuple(found), tuple(refused), change)
