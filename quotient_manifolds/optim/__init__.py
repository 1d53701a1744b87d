"""Train on the quotient: optimizers whose runs do not depend on the representative they start from."""

from __future__ import annotations

from quotient_manifolds.optim.audit import OrbitAudit, orbit_audit
from quotient_manifolds.optim.optimizers import QuotientAdam, QuotientSGD
from quotient_manifolds.optim.sam import SAM

__all__ = ["SAM", "OrbitAudit", "QuotientAdam", "QuotientSGD", "orbit_audit"]
