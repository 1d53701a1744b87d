"""How far measures agree along the whole orbit: small models of many kinds, moved by all that is found in them."""

from studies.invariance.page import changes_table, invariance_page
from studies.invariance.study import Invariance, Row, study_invariance

__all__ = ["Invariance", "Row", "changes_table", "invariance_page", "study_invariance"]
