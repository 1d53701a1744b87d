"""Whether optimizers on the quotient train better than others.

Fixed before these runs. Learning rates are half a decade apart, over three decades around a middle that one run each of
seed 0 chose (rank 16). Of every optimizer, rank and start the rate is that of the
least mean loss on the sentences to choose by; what is reported is the loss on others. Primary comparison: the mean over
seeds of the test loss of `OURS` less that of AdamW, at rank 16, from the usual start, after an equal number of steps.
Everything else is exploratory.
"""

from __future__ import annotations

from studies.training.study import run
from studies.training.tables import figure, tables

__all__ = ["figure", "run", "tables"]
