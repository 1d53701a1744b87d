"""What one of two processes does: torchrun --nproc-per-node 2 -m tests.sharded.worker FOLDER.

What a process can check by itself it checks; the numbers it writes to FOLDER, under fully_shard and in tensor parallel.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from quotient_manifolds import find_symmetries
from quotient_manifolds.callbacks import SharpnessCallback
from quotient_manifolds.geometry import Euclidean, Quotient
from quotient_manifolds.sharpness import (
    AutoPGD,
    PreparedModel,
    WorstCase,
    gradient_norm,
    next_token_cross_entropy,
    worst_case_sharpness,
)
from quotient_manifolds.symmetries import Symmetries
from tests.sharded.made import ELSEWHERE, FEW, Batch, batch, frozen, half, llama, measured

LOSS = next_token_cross_entropy
Numbers = dict[str, Any]


def fsdp(dtype: torch.dtype = torch.float64, *, checkpointed: bool = True) -> nn.Module:
    return sharded(llama(dtype), checkpointed=checkpointed)


def sharded(model: nn.Module, *, checkpointed: bool = True) -> nn.Module:
    if checkpointed:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model).eval()


def tensor_parallel() -> nn.Module:
    model, mesh = llama(torch.float64), init_device_mesh("cpu", (dist.get_world_size(),))
    column = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    row = ("self_attn.o_proj", "mlp.down_proj")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in column} | {name: RowwiseParallel() for name in row}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def own(whole: Batch) -> Batch:
    rows = len(whole["input_ids"]) // dist.get_world_size()
    return {name: value[rows * dist.get_rank() :][:rows] for name, value in whole.items()}


def local(model: nn.Module) -> dict[str, Tensor]:
    parts = {name: w.to_local() if isinstance(w, DTensor) else w for name, w in model.named_parameters()}
    return {name: part.detach().clone() for name, part in parts.items()}


def assert_same(before: dict[str, Tensor], model: nn.Module) -> None:
    for name, part in local(model).items():
        assert torch.equal(before[name], part), name


def refused(words: str, function: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        function()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def run_fsdp() -> Numbers:
    whole, part = batch(), own(batch())
    symmetries = find_symmetries(llama(torch.float64), whole, evaluate=LOSS)
    model = fsdp()
    before = local(model)
    for w in model.parameters():
        w.grad = torch.ones_like(w)
    found: Numbers = {"values": measured(model, part, symmetries)}
    assert_same(before, model)
    assert all(bool((w.grad.to_local() == 1).all()) for w in model.parameters())
    interrupted(model, part)
    assert_same(before, model)
    found["again"] = measured(model, part, symmetries.within("pairs"), "euclidean")["euclidean"]
    halfway(part)
    counting(part)
    refusals(model, part, symmetries)
    assert_same(before, model)
    found["rises"] = rounded(part)

    still = sharded(frozen(llama(torch.float64)))
    at_first = local(still)
    found["frozen"] = measured(still, part, symmetries, *FEW)
    assert_same(at_first, still)
    single, mix = fsdp(torch.float32), Quotient("mix", symmetries=symmetries)
    found["single"] = measured(single, part, symmetries, *FEW)
    autocast = worst_case_sharpness(single, half, [part], geometry=mix, radius=0.1, steps=3)
    found["half"] = [autocast.mean, autocast.batches[0].base_loss]
    return found


def interrupted(model: nn.Module, part: Batch) -> None:
    """Press Ctrl-C in the middle of an ascent."""
    calls = 0

    def breaking(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        value = LOSS(model, batch)
        if calls > 20:
            raise KeyboardInterrupt
        return value

    with suppress(KeyboardInterrupt):
        worst_case_sharpness(model, breaking, [part], "euclidean", radius=0.1, steps=40, ascent=AutoPGD)
    assert calls == 21


class Halt(Exception):
    """What ends a pass in the middle of it."""


def halfway(part: Batch) -> None:
    """Measure a model alike after an exception ended a pass of a measure, or one before it, and amid accumulation."""

    def forward(*_: Any) -> None:
        raise Halt

    def backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(forward)

    def slope(model: nn.Module) -> float:
        return gradient_norm(model, LOSS, [part], geometry="adaptive").mean

    def halted(hook: Any, call: int) -> float:
        model, calls = fsdp(checkpointed=False), 0

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            nonlocal calls
            calls += 1
            handle = model.model.layers[1].mlp.register_forward_hook(hook) if calls == call else None
            try:
                return LOSS(model, batch)
            finally:
                if handle is not None:
                    handle.remove()

        with suppress(Halt):
            if call > 1:
                worst_case_sharpness(model, loss, [part], geometry="euclidean", radius=3.0, steps=3)
            else:
                loss(model, part)
            raise AssertionError
        return slope(model)

    whole = slope(fsdp(checkpointed=False))
    assert [halted(forward, 4), halted(backward, 4), halted(forward, 1)] == [whole] * 3
    model = fsdp(checkpointed=False)
    model.set_requires_gradient_sync(False)
    LOSS(model, part).backward()
    model.set_requires_gradient_sync(True)
    assert slope(model) == whole
    LOSS(model, part).backward()  # the accumulation goes on as if there had been no measure
    twice = {name: w.grad.to_local().clone() for name, w in model.named_parameters()}
    model.zero_grad()
    LOSS(model, part).backward()
    for name, w in model.named_parameters():
        torch.testing.assert_close(twice[name], 2 * w.grad.to_local(), rtol=1e-12, atol=1e-15)


def counting(part: Batch) -> None:
    """Leave a buffer alone that a forward pass replaces by a new one."""
    model = fsdp(checkpointed=False)
    model.register_buffer("calls", torch.zeros(()))

    def counted(model: nn.Module, batch: Batch) -> Tensor:
        model.calls = model.calls + 1
        return LOSS(model, batch)

    counted(model, part)
    gradient_norm(model, counted, [part], geometry="euclidean")
    assert model.calls == 1


def refusals(model: nn.Module, part: Batch, symmetries: Symmetries) -> None:
    """Check what is said, by all processes: none of it may leave one waiting."""
    second = dist.get_rank() == 1
    one, other = [pair for pair in symmetries.pairs if "query" in pair.kind][:2]
    swapped = Symmetries((type(one)("wrong", "own", one.G, other.H),))
    quotient = Quotient(symmetries=symmetries.within("pairs") if second else symmetries)
    no_rows = {name: value[: 0 if second else None] for name, value in part.items()}
    trained, apart, unsynchronised, broken = fsdp().train(second), fsdp(), fsdp(), fsdp()
    next(apart.parameters()).requires_grad_(second)
    unsynchronised.set_requires_gradient_sync(False)
    if second:
        with torch.no_grad():
            next(iter(broken.parameters())).to_local()[0] = torch.nan

    def worst(model: nn.Module = model, batches: Any = None, **others: Any) -> Any:
        given = {"geometry": "euclidean", "radius": 0.1, "steps": 2, **others}
        return worst_case_sharpness(model, LOSS, [part] if batches is None else batches, **given)

    def moved() -> None:
        model = fsdp()
        prepared = PreparedModel.of(model, LOSS, [part], "euclidean")
        with torch.no_grad():
            next(iter(model.parameters())).mul_(2)
        WorstCase(Euclidean(), 0.1, 2).on(prepared, 0, lambda: None)

    table: dict[str, Callable[[], Any]] = {
        "find them before it is sharded": lambda: worst(geometry="mix"),
        "must not change along the orbit of a symmetry that is given. Found wrong": lambda: worst(
            geometry=Quotient(symmetries=swapped)
        ),
        "holds NaN or infinity": lambda: worst(broken),
        "prepare it again": moved,
        "must be averaged over the processes": lambda: worst(unsynchronised),
        "must measure the same. Found number of batches": lambda: worst(batches=[part] * (1 + second)),
        "must measure the same. Found steps 2 and 3": lambda: worst(steps=2 + second),
        "must measure the same. Found geometry": lambda: worst(geometry=quotient if second else 0.5),
        "must quotient out the same symmetries": lambda: worst(geometry=quotient),
        "must have rows of every batch": lambda: worst(batches=[no_rows]),
        "must be in eval mode": lambda: worst(trained),
        "must measure the same parameters": lambda: worst(apart),
        "The model must be whole": lambda: SharpnessCallback(
            SimpleNamespace(model=model), LOSS, [part], geometry="euclidean", radius=0.1
        ),
    }
    for words, call in table.items():
        refused(words, call)


def rounded(part: Batch) -> dict[str, float]:
    """Check what is warned of: rows that do not count alike, and weights that products in bfloat16 round back."""
    rises: dict[str, float] = {}
    rows = {name: value[: 1 + dist.get_rank()] for name, value in part.items()}
    for name, dtype, policy, given, words in (
        ("rows", torch.float32, {}, rows, "mean over processes"),
        ("mixed", torch.float32, {"param_dtype": torch.bfloat16}, part, ""),
        ("mixed from bfloat16", torch.bfloat16, {"param_dtype": torch.bfloat16}, part, "are lost in rounding"),
        ("from bfloat16", torch.bfloat16, {}, part, ""),
    ):
        model = llama(dtype).float()
        for layer in (*model.model.layers, model):
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(**policy))  # type: ignore[arg-type]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = worst_case_sharpness(model.eval(), LOSS, [given], geometry="adaptive", radius=0.1, steps=3)
        said = [str(each.message) for each in caught if each.category is UserWarning]
        assert len(said) == bool(words), (name, said)
        assert all(words in each for each in said), (name, said)
        rises[name] = value.mean
    return rises


def run_tensor() -> Numbers:
    symmetries = find_symmetries(llama(torch.float64), batch(), evaluate=LOSS)
    model = tensor_parallel()
    before = local(model)
    found = {"values": measured(model, batch(), symmetries, *ELSEWHERE)}
    assert_same(before, model)
    rank, rows = dist.get_rank(), batch()
    for batches in ([own(rows)], [rows, own(rows)], [{name: value[: 2 + rank] for name, value in rows.items()}]):
        refused("must have the same batches", lambda b=batches: gradient_norm(model, LOSS, b, geometry="euclidean"))

    def squares(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()

    norm = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)).double().eval()
    data = (torch.randn(4, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), None)
    alone = gradient_norm(norm, squares, [data], geometry="adaptive").mean
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "0": ColwiseParallel(output_layouts=Shard(1)),
        "1": SequenceParallel(),
        "2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(norm, mesh, plan)
    assert abs(gradient_norm(norm, squares, [data], geometry="adaptive").mean - alone) < 1e-12 * alone
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    found = {"fsdp": run_fsdp(), "tensor": run_tensor()}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # gloo's threads of several meshes may abort a process that ends in another way
