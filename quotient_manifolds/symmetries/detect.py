"""Notice what looks like attention, by the names of its class or of its projections.

Nothing here finds a symmetry. It only keeps attention of which nothing is found from being passed over in silence, so
it would rather name too much than too little.
"""

from __future__ import annotations

import re

from torch import nn

_CLASS = re.compile(r"(?i:attention|attn)|(?:^|[a-z0-9_])MH[SC]?A(?![a-z])")
_FUSED = re.compile(
    r"qkv|(?<![a-z])(query_key_value|queries_keys_values|c_attn|in_proj_weight)(?![a-z])", re.IGNORECASE
)
_ROLES = tuple(
    re.compile(
        rf"(to_?|w_?|linear_?|project(ion)?_?|in_)?({role})(_?(proj(ection)?|lin(ear)?|layer|head|content)s?)?"
        r"(_?(w|weights?|kernel|matrix))?",
        re.IGNORECASE,
    )
    for role in ("q|query|queries", "k|key|keys", "v|value|values")
)


def looks_like_attention(module: nn.Module) -> bool:
    """Return whether it has parameters, and a class named so or projections named for queries, keys and values.

    Projections are children with parameters, and parameters of its own. A class is named so if one of its ancestors is.
    """
    if next(module.parameters(), None) is None:
        return False
    if any(_CLASS.search(name) for name in _class_names(module)):
        return True
    names = [name for name, child in module.named_children() if next(child.parameters(), None) is not None]
    names += [name for name, _ in module.named_parameters(recurse=False)]
    fused = any(_FUSED.search(name) for name in names)
    return fused or all(any(role.fullmatch(name) for name in names) for role in _ROLES)


def _class_names(module: nn.Module) -> list[str]:
    """Return names of the module's class and its ancestors; mixins lend methods and say nothing of what a module is."""
    scripted = getattr(module, "original_name", None)
    bases = [cls.__name__ for cls in type(module).__mro__ if cls not in (nn.Module, object)]
    return [name for name in bases if "Mixin" not in name] + ([scripted] if isinstance(scripted, str) else [])
