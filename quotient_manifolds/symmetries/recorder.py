"""Write down what a model computes in float64 with its own weights, of which there is no second copy."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from quotient_manifolds.replica import private_batch, replica
from quotient_manifolds.symmetries.operations import CHOICES, TURNS, Operation
from quotient_manifolds.symmetries.outputs import Evaluate, doubled, floating

_WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_SHARED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_AS_OTHER_TYPE = torch.ops.aten.view.dtype  # looks at the bits of a number, which have a meaning in its own type alone
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
PIECE = 2**19  # numbers of a weight that are cast at once where it is a factor: 4 MiB, which stay near the processor


class Recorded(NamedTuple):
    """Hold a run: what was called, the parameters that it used, its floating point outputs, and what was given."""

    operations: list[Operation]
    params: dict[str, Tensor]
    outputs: list[Tensor]
    given: list[Any]


class SharedWeight(Tensor):
    """Stand in a model for a weight, or for a view of one, and say that it is float64, whatever the weight is.

    So code that asks for types, in Python and in C++, finds one type everywhere. There are no numbers in it: operations
    read those of `weight`, each casting what it needs while it runs.
    """

    weight: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, weight: Tensor) -> SharedWeight:
        found: SharedWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            weight.shape,
            strides=weight.stride(),
            storage_offset=weight.storage_offset(),
            dtype=torch.float64,
            device=weight.device,
        )
        found.weight = weight
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a class method, as torch calls it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {})[0]


class WritesToWeight(RuntimeError):
    """Stop an operation that would write to the memory of shared weights, at these addresses."""

    def __init__(self, addresses: Set[int]) -> None:
        super().__init__("an operation would write to a weight of the model.")
        self.addresses = addresses


class Recorder(TorchDispatchMode):
    """Write down every operation of ATen; the tensors are kept alive, so that no memory is used twice.

    All that is computed is float64, whatever type is asked for; shared weights stand among the arguments as they are.
    written: the addresses of those that operations were about to write to, each of which was stopped. failed: what an
    operation raised last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.written: set[int] = set()
        self.failed: Exception | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = args[0].detach() if func in TURNS and not isinstance(args[0], SharedWeight) else None
        try:
            found, operation = _call(func, args, kwargs or {})
        except WritesToWeight as stopped:
            self.written |= stopped.addresses
            raise
        except Exception as error:
            self.failed = error
            raise
        if before is not None:
            self._remember(operation.arguments[0], before)
            view, (_, *others) = TURNS[func], operation.arguments
            operation = Operation(view.overloadpacket.__name__, view, (before, *others), operation.options, (found,))
        self.operations.append(operation)
        return found

    def _remember(self, turned: Tensor, before: Tensor) -> None:
        """Put a tensor of the shape from before in the place of one whose shape has just changed."""

        def old(leaf: Any) -> Any:
            return before if leaf is turned else leaf

        for place, each in enumerate(self.operations):
            if any(leaf is turned for leaf in tree_leaves((each.arguments, each.options, each.outputs))):
                arguments, options, outputs = tree_map(old, (each.arguments, each.options, each.outputs))
                self.operations[place] = replace(each, arguments=arguments, options=options, outputs=outputs)


def record(model: nn.Module, inputs: Any, evaluate: Evaluate) -> Recorded:
    """Run evaluate(model, inputs) in float64 on a copy of the model's structure, which computes with its own weights.

    Where the model writes to a weight, or needs more of one than its numbers, it runs again with copies.
    """
    copied: set[str] = set()
    while True:
        params, recorder = _parameters(model, copied), Recorder()
        shared = {name: w.weight for name, w in params.items() if isinstance(w, SharedWeight)}
        try:
            found, given = _run(replica(model, params, doubled), inputs, evaluate, recorder)
        except Exception as error:
            if not shared or error is recorder.failed:  # copies would not help
                raise
            if not recorder.written:
                copied |= shared.keys()
        else:
            if not recorder.written:
                outputs = [each.weight if isinstance(each, SharedWeight) else each for each in floating(found)]
                return Recorded(recorder.operations, params | shared, outputs, tree_leaves(given))
        copied |= {name for name, w in shared.items() if _address(w) in recorder.written}


def _parameters(model: nn.Module, copied: Set[str]) -> dict[str, Tensor]:
    """Return what stands for the model's parameters: float64 copies of those named, and of what cannot be shared."""
    found: dict[str, Tensor] = {}
    memories: set[int] = set()
    for name, w in model.named_parameters():
        shares = name not in copied and _can_share(w) and _address(w) not in memories
        if shares:
            memories.add(_address(w))
            found[name] = SharedWeight(w.detach())
            found[name]._is_param = True  # by which torch tells a parameter
        else:
            own = doubled(w.detach().clone(memory_format=torch.contiguous_format))
            found[name] = nn.Parameter(own, requires_grad=False)
    return found


def _run(model: nn.Module, inputs: Any, evaluate: Evaluate, recorder: Recorder) -> tuple[Any, Any]:
    """Return what the model answers, while the recorder writes down how, and what it was given."""
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # one fused operation would hide all of a torch layer
        given = private_batch(inputs, doubled)
        with torch.no_grad(), recorder:
            return evaluate(model, given), given
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _address(weight: Tensor) -> int:
    return weight.untyped_storage().data_ptr()


def _can_share(weight: Tensor) -> bool:
    """Return whether a weight is plain numbers, in order, with a memory of their own."""
    return (
        type(weight.detach()) is Tensor
        and weight.dtype in _SHARED
        and weight.layout == torch.strided
        and weight.device.type != "meta"
        and weight.is_contiguous()
        and 0 < weight.numel() * weight.element_size() == weight.untyped_storage().nbytes()
    )


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | dict(kwargs)
    targets = [given.get(each.name) for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
    return [leaf for leaf in tree_leaves(targets) if isinstance(leaf, Tensor)]


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Operation]:
    """Run an operation in float64; return what the model gets, and what there is to write down."""
    written = _written(func, args, kwargs)
    if stopped := {_address(each.weight) for each in written if isinstance(each, SharedWeight)}:
        raise WritesToWeight(stopped)
    shares = any(isinstance(leaf, SharedWeight) for leaf in tree_leaves((args, kwargs)))
    args, kwargs = tree_map_only(SharedWeight, lambda each: each.weight, (args, kwargs))
    if kwargs.get("dtype") in _WIDE and func is not _AS_OTHER_TYPE:
        kwargs = {**kwargs, "dtype": _WIDE[kwargs["dtype"]]}
    if _is_view(func):
        found = func(*args, **kwargs)
        given = tree_map_only(Tensor, SharedWeight, found) if shares else found
    elif func in _PRODUCTS and args[-1].dtype in _WIDE and args[-1].numel() > PIECE:
        given = found = _product(func, args, kwargs)
    else:
        kept = set(map(id, written))
        chooses = func.overloadpacket.__name__ in CHOICES

        def wide(tensor: Tensor) -> Tensor:
            return tensor if chooses or id(tensor) in kept else _widened(tensor)

        wide_args, wide_options = tree_map_only(Tensor, wide, (args, kwargs))
        found = func(*wide_args, **wide_options)
        given = found = found if written else tree_map_only(Tensor, _widened, found)
    outputs = tuple(leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
    return given, Operation(func.overloadpacket.__name__, func, args, kwargs, outputs)


def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Multiply by a weight, or add to such a product, without a float64 copy of all of the weight."""
    *added, left, right = args
    left = _widened(left)
    found = left.new_empty(len(left), right.shape[1])
    width = max(1, PIECE // len(right))
    wide = torch.empty_like(right[:, :width], dtype=left.dtype)
    for some, its in zip(right.split(width, 1), found.split(width, 1), strict=True):
        its.copy_(left @ wide[:, : some.shape[1]].copy_(some))
    if not added:
        return found
    return kwargs.get("beta", 1) * _widened(added[0]) + kwargs.get("alpha", 1) * found


def _is_view(func: Any) -> bool:
    """Return whether an operation gives what lies in the memory of what it takes, unchanged."""
    aliases = [each.alias_info for each in func._schema.returns]
    only = bool(aliases) and all(each is not None and not each.is_write for each in aliases)
    return only and func is not _AS_OTHER_TYPE


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(_WIDE[tensor.dtype]) if tensor.dtype in _WIDE else tensor
