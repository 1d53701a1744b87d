"""Take any batch apart into its tensors, whatever containers hold them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Batch:
    """Hold a batch as its tensors, in order, each once, and make batches of the same form from others.

    Containers are whatever `copy.deepcopy` copies: lists, mappings, named tuples, a tokenizer's `BatchEncoding`,
    objects with attributes. Raises ValueError for what does not copy.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        collector = _Collector()
        self._copied(collector)
        self.tensors: tuple[Tensor, ...] = tuple(collector.found)

    def of(self, tensors: Sequence[Tensor]) -> Any:
        """Return a batch of the same form that holds these tensors in place of its own."""
        return self._copied(_Replacer({id(old): new for old, new in zip(self.tensors, tensors, strict=True)}))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Any:
        """Return a batch of the same form, each of whose tensors has been changed."""
        return self.of([change(tensor) for tensor in self.tensors])

    def _copied(self, mode: TorchFunctionMode) -> Any:
        try:
            with mode:
                return copy.deepcopy(self._batch)
        except Exception as error:
            raise ValueError(
                f"A batch must be copyable, for copies of it are what varies. Found that copy.deepcopy of a "
                f"{type(self._batch).__name__} raises {type(error).__name__}; pass its tensors in a dict or tuple"
            ) from error


class _Collector(TorchFunctionMode):
    """Collect the tensors that `copy.deepcopy` meets, and copy none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        if not any(each is args[0] for each in self.found):
            self.found.append(args[0])
        return args[0]


class _Replacer(TorchFunctionMode):
    """Have `copy.deepcopy` put other tensors in the place of those it meets."""

    def __init__(self, others: dict[int, Tensor]) -> None:
        super().__init__()
        self.others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        return self.others[id(args[0])]


def aliased(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same entries of the same memory."""
    return (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
        and not one.is_meta
        and torch.Size(one.shape).numel() > 0
    )
