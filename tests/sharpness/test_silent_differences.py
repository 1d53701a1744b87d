"""No random network is measured as another function: masks, branches, gates and experts of later rows included."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

import quotient_manifolds as qm
from quotient_manifolds.sharpness import PreparedModel
from quotient_manifolds.symmetries import find_symmetries
from quotient_manifolds.symmetries.verify import verify_on_batches
from tests.nets.random_nets import Batch, Loss, net

NETS = int(os.environ.get("QUOTIENT_MANIFOLDS_NETS", "12"))
SAME = 1e-8  # relative: random elements may be ill-conditioned


def changed(model: nn.Module, loss: Loss, params: dict[str, Tensor], batches: list[Batch]) -> float:
    """The largest relative change of the loss, by an evaluation that shares nothing with the package."""
    own = copy.deepcopy(model)

    def at(given: dict[str, Tensor], batch: Batch) -> float:
        called = lambda x, mask: functional_call(own, given, (x, mask))  # noqa: E731
        return float(loss(called, batch).detach())  # type: ignore[arg-type]

    return max(abs(at(params, batch) / at({}, batch) - 1) for batch in batches)


def elements(model: nn.Module, symmetries: qm.Symmetries) -> Iterator[dict[str, Tensor]]:
    for seed in range(2):
        yield qm.random_representative(model, symmetries, seed=seed, log_scale=0.3)


def silent(model: nn.Module, loss: Loss, batches: list[Batch]) -> float:
    """How far the function that is measured is from the model's, on any batch; 0 where the measurement is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            prepared = PreparedModel.of(model, loss, batches, "inv").verified()
        except ValueError:  # nothing to quotient out, or a pair without full rank: said in a sentence
            return 0.0
    geometry = prepared.geometry
    assert isinstance(geometry, qm.Quotient)
    assert isinstance(geometry.symmetries, qm.Symmetries)
    places = [prepared.space.point, *elements(model, geometry.symmetries)]
    return max(changed(model, loss, params, batches) for params in places)


@given(seed=st.integers(0, 2**31), fresh=st.booleans(), canonical=st.booleans())
@settings(max_examples=NETS, deadline=None)
def test_what_is_measured_is_the_model_on_every_batch(seed: int, fresh: bool, canonical: bool) -> None:
    model, loss, batches = net(seed, hidden=True, fresh=fresh)
    if canonical:
        found = qm.find_symmetries(model, *batches, evaluate=loss)
        model.load_state_dict(qm.balance(model, found), strict=False)
    assert silent(model, loss, batches) < SAME


def test_nets_without_masks_keep_their_symmetries() -> None:
    """To refuse everything would not pass: at most 1 % of them lose a true one."""
    lost, had = [], 0
    for seed in range(NETS):
        model, loss, batches = net(seed, hidden=False, fresh=bool(seed % 2))
        found = find_symmetries(model, batches[0], evaluate=loss)
        failed = set(verify_on_batches(model, loss, batches, found).failed)
        had += bool(found.every)
        alone = found.without({each.name for each in found.every} - failed)
        if failed and all(changed(model, loss, params, batches) < SAME for params in elements(model, alone)):
            lost.append(seed)
    assert had > 0.9 * NETS
    assert len(lost) <= NETS / 100, lost
