"""What looks like attention, by the name of its class or the names of its projections, so that none is passed over."""

from __future__ import annotations

import re

from torch import nn

_CLASS = re.compile(r"attention|attn", re.IGNORECASE)
_FUSED = re.compile(r"qkv|(?<![a-z])(query_key_value|queries_keys_values|c_attn)(?![a-z])", re.IGNORECASE)
_ROLES = tuple(
    re.compile(
        rf"(to_?|w_?|linear_?|project(ion)?_?|in_)?({role})(_?(proj(ection)?|lin(ear)?|layer|head|content)s?)?",
        re.IGNORECASE,
    )
    for role in ("q|query|queries", "k|key|keys", "v|value|values")
)


def looks_like_attention(module: nn.Module) -> bool:
    """Whether it has parameters, and a class named so, or projections named for queries, keys and values."""
    if next(module.parameters(), None) is None:
        return False
    if _CLASS.search(type(module).__name__):
        return True
    children = [name for name, child in module.named_children() if next(child.parameters(), None) is not None]
    fused = any(_FUSED.search(name) for name in children)
    return fused or all(any(role.fullmatch(name) for name in children) for role in _ROLES)
