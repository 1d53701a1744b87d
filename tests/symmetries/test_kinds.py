"""The fibres of small nets of many kinds have the dimensions that their table says."""

import pytest

from quotient_manifolds.symmetries import fibre_dimension
from tests.nets.kinds import KINDS, batches, net

PARAMETERS, GAP = 200, 1e8


@pytest.mark.parametrize("name", KINDS)
def test_parameters_minus_the_rank_of_the_jacobian_are_the_dimensions_of_the_table(name: str) -> None:
    model, x = net(name)
    found = fibre_dimension(model, batches(name))
    assert found.dimension == KINDS[name].kernel
    assert found.doubts == ()
    assert found.gap > GAP
    assert found.parameters <= PARAMETERS
    assert len(x) >= 24
