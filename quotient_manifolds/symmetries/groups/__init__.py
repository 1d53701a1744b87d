"""Act on parameters by symmetry groups, and compute the charges of their generators.

| | acts by | defined by |
|---|---|---|
| `Gauge` | matrices A on the channels of a `Wire`: writers A W, readers R A^-1 | an algebra, such as `GL` or `SO` |
| `Torus` | log-scales of slices of parameters | exponents |
| `Translation` | adding left @ z @ right to rows of parameters | factors left and right |
| `Linear` | flows of linear fields on a few parameters, if no wire has them | sparse matrices |
| `Charted` | flows on functions of parameters, such as a weight that the model normalizes | a `Chart` |
| `Permutation` | permutations of units | `UnitRows` |

All but the last have `act(params, element)`, `charge(params, cotangent)`, and `tangent`, the derivative of `act`.
Parameters are dicts of tensors by name, and never changed. Results are computed in float64 and cast once.

>>> x = {"W": torch.randn(3, 5), "R": torch.randn(2, 3)}  # y = R W x, three channels between
>>> wire = Wire(
...     (
...         Slot(Rows.along("W", (3, 5), axis=0), torch.arange(3), writes=True),
...         Slot(Rows.along("R", (2, 3), axis=1), torch.arange(3), writes=False),
...     ),
...     channels=3,
... )
>>> gauge = Gauge(wire, GL(3))
>>> y = gauge.act(x, gauge.element(torch.Generator().manual_seed(0)))
>>> torch.allclose(y["R"] @ y["W"], x["R"] @ x["W"], atol=1e-5)
True
"""

from quotient_manifolds.symmetries.groups.algebras import (
    GL,
    SO,
    Algebra,
    CenteredSO,
    Complex,
    DirectSum,
    FromSum,
    IntoMean,
    Pattern,
    Span,
    blocks,
    diagonal,
    planes,
)
from quotient_manifolds.symmetries.groups.charted import Chart, Charted
from quotient_manifolds.symmetries.groups.factors import Beyond, Factor, Matrix, Product, Sparse, Sum, Terms
from quotient_manifolds.symmetries.groups.gains import Constant, Constants, Gain
from quotient_manifolds.symmetries.groups.gauge import Gauge
from quotient_manifolds.symmetries.groups.linear import Linear
from quotient_manifolds.symmetries.groups.permutation import Permutation, UnitRows
from quotient_manifolds.symmetries.groups.rows import Draft, Params, Rows
from quotient_manifolds.symmetries.groups.symmetry import Symmetry
from quotient_manifolds.symmetries.groups.torus import Slices, Torus
from quotient_manifolds.symmetries.groups.translation import Part, Translation
from quotient_manifolds.symmetries.groups.wire import Charge, Slot, Wire

__all__ = [
    "GL",
    "SO",
    "Algebra",
    "Beyond",
    "CenteredSO",
    "Charge",
    "Chart",
    "Charted",
    "Complex",
    "Constant",
    "Constants",
    "DirectSum",
    "Draft",
    "Factor",
    "FromSum",
    "Gain",
    "Gauge",
    "IntoMean",
    "Linear",
    "Matrix",
    "Params",
    "Part",
    "Pattern",
    "Permutation",
    "Product",
    "Rows",
    "Slices",
    "Slot",
    "Span",
    "Sparse",
    "Sum",
    "Symmetry",
    "Terms",
    "Torus",
    "Translation",
    "UnitRows",
    "Wire",
    "blocks",
    "diagonal",
    "planes",
]
