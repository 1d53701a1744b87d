"""Move a model to the parameters of the same function at which gains are 1, and biases and means 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quotient_manifolds.symmetries.checks import check_model, check_weights
from quotient_manifolds.symmetries.exchanges import find_exchanges
from quotient_manifolds.symmetries.freedom import Freedom
from quotient_manifolds.symmetries.linear_scale import LinearScale, find_linear_scales
from quotient_manifolds.symmetries.logits import find_logit_shifts
from quotient_manifolds.symmetries.neuron_scale import find_neuron_scales
from quotient_manifolds.symmetries.norm_scale import NormScale
from quotient_manifolds.symmetries.norms import find_norms
from quotient_manifolds.symmetries.outputs import Evaluate, ModelOutputs
from quotient_manifolds.symmetries.pair import Params
from quotient_manifolds.symmetries.post_norm import UnseenDirection
from quotient_manifolds.symmetries.rotations import find_rotations
from quotient_manifolds.symmetries.score_shifts import find_score_shifts
from quotient_manifolds.symmetries.streams import find_head_means, find_means
from quotient_manifolds.symmetries.symmetries import Refused
from quotient_manifolds.symmetries.trace import Trace
from quotient_manifolds.symmetries.weight_length import find_weight_lengths

HOLDS = 1e3  # times the rounding noise of the output: as much as it may change


@dataclass(frozen=True, eq=False)
class Canonical:
    """Hold the canonical parameters of a function, and what was free in the model to get there.

    params: all parameters of the model, a tied one once, in the model's precision. freedoms: what was set to 1 or 0.
    refused: norms that keep their gains, with the reason. change: of the output, relative, in float64, before the
    parameters are rounded to the model's precision.
    """

    params: Params
    freedoms: tuple[Freedom, ...]
    refused: tuple[Refused, ...]
    change: float

    @property
    def constant(self) -> tuple[str, ...]:
        """Return the names of the gains that are 1 and of the biases of norms that are 0: freeze them to measure."""
        return tuple(dict.fromkeys(name for freedom in self.freedoms for name in freedom.constant))

    @property
    def families(self) -> dict[str, int]:
        """Return the dimensions of what was free, by family."""
        found = Counter[str]()
        for freedom in self.freedoms:
            found.update(freedom.families)
        return dict(found)


def find_freedoms(
    trace: Trace, moved: Collection[str] | None = None
) -> tuple[tuple[Freedom, ...], tuple[Refused, ...]]:
    """Return what is free in a recorded computation, in the order in which it is folded, and what is not, and why.

    moved: the parameters of symmetric pairs, if these are known. These are proposals: what the recorded inputs do not
    reach is not seen. `canonical` tries each of them.
    """
    scaled = list(find_linear_scales(trace))
    found, refused = find_norms(trace, [each.scale for each in scaled])
    scales = [norm for norm in found if isinstance(norm, (NormScale, LinearScale))]
    means = list(find_means(trace, [each for each in scaled if each.scale in found]))
    unseen = [one for each in found if isinstance(each, (NormScale, UnseenDirection)) for one in each.unseen]
    found += [*means, *find_head_means(trace, unseen), *find_exchanges(trace, means)]
    found += [*find_logit_shifts(trace, found), *find_score_shifts(trace)]
    rotations = list(find_rotations(trace, scales, found, moved))
    found += [each for each in rotations if isinstance(each, Freedom)]
    refused += [each for each in rotations if isinstance(each, Refused)]
    found += [*find_neuron_scales(trace, moved or ()), *find_weight_lengths(trace)]
    return tuple(found), tuple(refused)


def canonical(model: nn.Module, inputs: Any, *, evaluate: Evaluate | None = None) -> Canonical:
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

    inputs and `evaluate` as for `prove_symmetries`. Every step is tried on the inputs in float64, and one that changes
    the output is left out. `constant` names what to freeze for measures that should not see the gains:

    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True).eval()
    >>> found = canonical(layer, torch.randn(2, 3, 8))
    >>> found.constant
    ('norm1.weight', 'norm1.bias', 'norm2.weight', 'norm2.bias')
    >>> _ = layer.load_state_dict(found.params)

    Raises ValueError in train mode, for outputs that are empty, random or NaN, and for weights that are no finite
    floating point numbers.
    """
    check_model(model)
    own = {name: value.detach() for name, value in model.named_parameters()}
    check_weights(own, own)
    with torch.no_grad():
        outputs = ModelOutputs(model, inputs, evaluate)
        trace = Trace(model, inputs, evaluate)
        freedoms, refusals = find_freedoms(trace)
        found, refused = list(freedoms), list(refusals)
        most = HOLDS * outputs.rounding_noise(own, torch.Generator().manual_seed(0))

        def folded(freedoms: list[Freedom]) -> Params:
            params = outputs.copied(outputs.params)
            for freedom in freedoms:
                freedom.fold(params)
            return params

        params = folded(found)
        if not outputs.change({name: value.clone() for name, value in params.items()}) <= most:
            false = [freedom for freedom in found if not outputs.change(folded([freedom])) <= most]
            refused += [Refused(each.names[0], each.kind, "setting it changes the output") for each in false]
            found = [each for each in found if each not in false]
            params = folded(found)
        change = outputs.change({name: value.clone() for name, value in params.items()})
    stored = {name: value.to(own[name].dtype) for name, value in params.items()}
    return Canonical(stored, tuple(found), tuple(refused), change)
