"""Hold a model whose processes have a part of every parameter each: read it, move it, and put it back bit for bit.

Models sharded by FSDP2 (`fully_shard`) or by tensor parallelism have parameters that are DTensors. What is elementwise
stays in parts. What is not, such as a symmetric pair, is *owned* by one process: it gathers the parameter, computes
with it, and sends every process its part of the result. All processes call everything here together, in the same order.
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
