"""Read, change and restore, bit for bit, a model whose parameters are sharded over processes.

Models sharded by FSDP2 (`fully_shard`) or by tensor parallelism have parameters that are DTensors. Elementwise
operations act on the parts. A parameter that is needed as a whole, as in a symmetric pair, is *owned* by one process:
the owner gathers it, computes with it, and sends every process its part of the result. All processes call the functions
here together, in the same order.
"""

from quotient_manifolds.sharded.model import ShardedModel, is_sharded
from quotient_manifolds.sharded.parts import Layout, Ownership, Whole, from_all, gathered, together

__all__ = [
    "Layout",
    "Ownership",
    "ShardedModel",
    "Whole",
    "from_all",
    "gathered",
    "is_sharded",
    "together",
]
