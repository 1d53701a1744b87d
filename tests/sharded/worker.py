"""What one of two processes does: torchrun --nproc-per-node 2 -m tests.sharded.worker KIND FOLDER.

KIND is "fsdp" or "tensor". Writes what it found to FOLDER, from its first process.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
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
from quotient_manifolds.load import load_shards
from quotient_manifolds.sharpness import (
    PreparedModel,
    WorstCase,
    gradient_norm,
    hessian_trace,
    legacy_sharpness,
    next_token_cross_entropy,
    worst_case_sharpness,
)
from quotient_manifolds.symmetries import Symmetries
from tests.sharded.made import Batch, batch, config, frozen, gpt2, half, llama, measured


def fsdp(dtype: torch.dtype, *, checkpointed: bool = True) -> nn.Module:
    return sharded(llama(dtype), checkpointed=checkpointed)


def sharded(model: nn.Module, *, checkpointed: bool = True) -> nn.Module:
    if checkpointed:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model).eval()


def tensor_parallel(dtype: torch.dtype) -> nn.Module:
    model, mesh = llama(dtype), init_device_mesh("cpu", (dist.get_world_size(),))
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


def same(before: dict[str, Tensor], model: nn.Module) -> bool:
    return all(torch.equal(before[name], part) for name, part in local(model).items())


def said(function: Callable[[], Any]) -> str:
    """What it raises; "" if nothing."""
    try:
        function()
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error)
    return ""


def run_fsdp(folder: Path) -> dict[str, Any]:
    whole, part = batch(), own(batch())
    symmetries = find_symmetries(llama(torch.float64), whole, evaluate=next_token_cross_entropy)
    found: dict[str, Any] = {}
    model = fsdp(torch.float64)
    before = local(model)
    for w in model.parameters():
        w.grad = torch.ones_like(w)
    found["values"] = measured(model, part, symmetries)
    found["same"] = same(before, model)
    found["gradients kept"] = all(bool((w.grad.to_local() == 1).all()) for w in model.parameters())

    calls = 0

    def breaking(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        value = next_token_cross_entropy(model, batch)
        if calls > 20:
            raise KeyboardInterrupt
        return value

    given: dict[str, Any] = {"batches": [part], "radius": 0.1, "steps": 30}
    try:
        worst_case_sharpness(model, breaking, geometry=Quotient("mix", symmetries=symmetries), **given)
    except KeyboardInterrupt:
        found["interrupted after"] = calls
    found["same after an interrupt"] = same(before, model)
    found["value after an interrupt"] = measured(model, part, symmetries.within("pairs"))["euclidean "][0]

    found["halfway"] = halfway(part)
    found["counted"] = counting(part)

    wrong = Symmetries(tuple(pair for pair in symmetries.pairs if "query" in pair.kind))
    swapped = Symmetries((type(wrong.pairs[0])("wrong", "own", wrong.pairs[0].G, wrong.pairs[1].H),))
    loss = next_token_cross_entropy
    found["said"] = {
        "scope": said(lambda: worst_case_sharpness(model, loss, geometry="mix", **given)),
        "wrong": said(lambda: worst_case_sharpness(model, loss, geometry=Quotient(symmetries=swapped), **given)),
        "hessian": said(lambda: hessian_trace(model, loss, [part], geometry="euclidean")),
        "legacy": said(lambda: legacy_sharpness(model, loss, geometry="euclidean", **given)),
        "nan": said(lambda: worst_case_sharpness(broken(), loss, geometry="euclidean", **given)),
        "moved": said(lambda: moved(part)),
        "elsewhere": said(lambda: worst_case_sharpness(model, elsewhere, geometry="euclidean", **given)),
        "half": said(lambda: worst_case_sharpness(fsdp(torch.bfloat16), loss, geometry="euclidean", **given)),
        "unsynchronised": said(lambda: worst_case_sharpness(unsynchronised(), loss, geometry="euclidean", **given)),
    }
    found["said"] |= disagreements(model, part, symmetries)
    found["warned"] = warned(part)
    found["same after errors"] = same(before, model)

    still = sharded(frozen(llama(torch.float64)))
    at_first = local(still)
    found["frozen"] = measured(still, part, symmetries)
    found["same frozen"] = same(at_first, still)
    other = gpt2()
    others = find_symmetries(other, whole, evaluate=next_token_cross_entropy)
    fully_shard(other.transformer.h[0])
    found["gpt2"] = measured(fully_shard(other).eval(), part, others)

    single = fsdp(torch.float32)
    wide = symmetries
    found["single"] = measured(single, part, wide)
    autocast = worst_case_sharpness(
        single, half, [part], geometry=Quotient("mix", symmetries=wide), radius=0.1, steps=3
    )
    found["half"] = [autocast.mean, autocast.batches[0].base_loss]

    return found | loads(folder, before, part, symmetries)


def loads(folder: Path, before: dict[str, Tensor], part: Batch, symmetries: Symmetries) -> dict[str, Any]:
    """What models made without memory are after their files were read, and what is refused."""
    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        llama(torch.float64).save_pretrained(folder / "saved", max_shard_size="30KB")
    dist.barrier()
    with init_empty_weights(include_buffers=False):
        empty = transformers.LlamaForCausalLM(config()).double()
    filled = sharded(empty, checkpointed=False)
    load_shards(filled, folder / "saved")
    found["loaded"] = same({name.replace("_checkpoint_wrapped_module.", ""): w for name, w in before.items()}, filled)
    found["loaded value"] = measured(filled, part, symmetries)["adaptive "][0]
    found["files"] = len(list((folder / "saved").glob("*.safetensors")))
    normed = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    normed[1].running_mean.fill_(7.0)
    if dist.get_rank() == 0:
        (folder / "normed").mkdir()
        save_file(normed.state_dict(), folder / "normed" / "model.safetensors")
    dist.barrier()
    normed[1].running_mean.fill_(0.0)
    load_shards(fully_shard(normed), folder / "normed")
    found["buffer"] = normed[1].running_mean.tolist()
    found["tied"] = tied(folder)
    found["refused loads"] = refused_loads(folder)
    found["not sharded"] = said(lambda: load_shards(llama(torch.float64), folder / "saved"))
    return found


class Halt(Exception):
    """What ends a pass in the middle of it."""


class HaltBackward(torch.autograd.Function):
    """The identity, whose gradient raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Halt


def halfway(part: Batch) -> dict[str, list[float]]:
    """Gradient norms and losses of a model, and after an exception ended a pass of a measure, or one before it."""

    def forward(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        raise Halt

    def backward(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return HaltBackward.apply(output)  # type: ignore[no-any-return]

    def numbers(model: nn.Module) -> list[float]:
        slope = gradient_norm(model, next_token_cross_entropy, [part], geometry="adaptive").mean
        with torch.no_grad():
            return [slope, float(next_token_cross_entropy(model, part))]

    def halted(hook: Any, call: int) -> list[float]:
        model, calls = fsdp(torch.float64, checkpointed=False), 0

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            nonlocal calls
            calls += 1
            handle = model.model.layers[1].mlp.register_forward_hook(hook) if calls == call else None
            try:
                return next_token_cross_entropy(model, batch)
            finally:
                if handle is not None:
                    handle.remove()

        with suppress(Halt):
            if call:
                worst_case_sharpness(model, loss, [part], geometry="euclidean", radius=3.0, steps=3)
                raise AssertionError
            calls = -1
            loss(model, part)
        return numbers(model)

    whole = numbers(fsdp(torch.float64, checkpointed=False))
    return {
        "whole": whole,
        "forward": halted(forward, 4),
        "backward": halted(backward, 4),
        "before": halted(forward, 0),
        "accumulated": accumulated(part),
    }


def accumulated(part: Batch) -> list[float]:
    """As `halfway`, amid an accumulation of gradients, which goes on as if there had been no measure."""
    model = fsdp(torch.float64, checkpointed=False)
    model.set_requires_gradient_sync(False)
    next_token_cross_entropy(model, part).backward()
    model.set_requires_gradient_sync(True)
    slope = gradient_norm(model, next_token_cross_entropy, [part], geometry="adaptive").mean
    loss = next_token_cross_entropy(model, part)
    loss.backward()
    twice = {name: w.grad.to_local().clone() for name, w in model.named_parameters()}
    model.zero_grad()
    next_token_cross_entropy(model, part).backward()
    for name, w in model.named_parameters():
        torch.testing.assert_close(twice[name], 2 * w.grad.to_local(), rtol=1e-12, atol=1e-15)
    return [slope, float(loss.detach())]


def counting(part: Batch) -> list[float]:
    """How often a model ran that counts in a buffer, putting a new one in its place: before and after a measure."""
    model = fsdp(torch.float64, checkpointed=False)
    model.register_buffer("calls", torch.zeros(()))

    def counted(model: nn.Module, batch: Batch) -> Tensor:
        model.calls = model.calls + 1
        return next_token_cross_entropy(model, batch)

    counted(model, part)
    gradient_norm(model, counted, [part], geometry="euclidean")
    return [1.0, float(model.calls)]


def elsewhere(model: nn.Module, batch: Batch) -> Tensor:
    """A loss of something that is no parameter."""
    return torch.ones((), dtype=torch.float64, requires_grad=True) * 2


def disagreements(model: nn.Module, part: Batch, symmetries: Symmetries) -> dict[str, str]:
    """What is said where processes do not do the same; none of it may leave one waiting."""
    second, loss = dist.get_rank() == 1, next_token_cross_entropy
    given: dict[str, Any] = {"geometry": "euclidean", "radius": 0.1, "steps": 2}
    quotient = Quotient(symmetries=symmetries.within("pairs") if second else symmetries)
    rows = {name: value[: 0 if second else None] for name, value in part.items()}
    trained, apart = fsdp(torch.float64).train(second), fsdp(torch.float64)
    next(apart.parameters()).requires_grad_(second)
    return {
        "batches": said(lambda: worst_case_sharpness(model, loss, [part] * (1 + second), **given)),
        "no batch": said(lambda: worst_case_sharpness(model, loss, [part] * second, **given)),
        "settings": said(lambda: worst_case_sharpness(model, loss, [part], **given | {"steps": 2 + second})),
        "geometries": said(
            lambda: worst_case_sharpness(model, loss, [part], **given | {"geometry": quotient if second else 0.5})
        ),
        "symmetries": said(lambda: worst_case_sharpness(model, loss, [part], **given | {"geometry": quotient})),
        "no rows": said(lambda: worst_case_sharpness(model, loss, [rows], **given)),
        "train mode": said(lambda: worst_case_sharpness(trained, loss, [part], **given)),
        "frozen apart": said(lambda: worst_case_sharpness(apart, loss, [part], **given)),
        "callback": said(lambda: SharpnessCallback(SimpleNamespace(model=model), loss, [part], **given)),  # type: ignore[arg-type]
    }


def warned(part: Batch) -> dict[str, Any]:
    """What is warned of: rows that do not count alike, and weights that products in bfloat16 round back."""
    found: dict[str, Any] = {}
    rows = {name: value[: 1 + dist.get_rank()] for name, value in part.items()}
    for name, dtype, policy, given in (
        ("rows", torch.float32, {}, rows),
        ("mixed", torch.float32, {"param_dtype": torch.bfloat16}, part),
        ("mixed from bfloat16", torch.bfloat16, {"param_dtype": torch.bfloat16}, part),
        ("from bfloat16", torch.bfloat16, {}, part),
    ):
        model = llama(dtype).float()
        for layer in (*model.model.layers, model):
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(**policy))  # type: ignore[arg-type]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = worst_case_sharpness(
                model.eval(), next_token_cross_entropy, [given], geometry="adaptive", radius=0.1, steps=3
            )
        found[name] = value.mean, [str(each.message) for each in caught if each.category is UserWarning]
    return found


def broken() -> nn.Module:
    """A model of which the second process alone has a NaN."""
    model = fsdp(torch.float64)
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(iter(model.parameters())).to_local()[0] = torch.nan
    return model


def unsynchronised() -> nn.Module:
    model = fsdp(torch.float64)
    model.set_requires_gradient_sync(False)
    return model


def tied(folder: Path) -> tuple[str, bool, float, float]:
    """A model with one table for reading and writing: refused where it lost the tie, else filled as it was saved."""
    settings = config()
    settings.tie_word_embeddings = True
    torch.manual_seed(2)
    whole = transformers.LlamaForCausalLM(settings).double().eval()
    if dist.get_rank() == 0:
        whole.save_pretrained(folder / "tied")
    dist.barrier()

    def empty() -> nn.Module:
        with init_empty_weights(include_buffers=False):
            return transformers.LlamaForCausalLM(settings).double()

    refused = said(lambda: load_shards(sharded(empty(), checkpointed=False), folder / "tied"))
    model = empty()
    model.tie_weights()
    filled = sharded(model, checkpointed=False)
    load_shards(filled, folder / "tied")
    kept = filled.lm_head.weight is filled.model.embed_tokens.weight
    result = worst_case_sharpness(filled, next_token_cross_entropy, [batch()], geometry="adaptive", radius=0.1, steps=3)
    kept = kept and filled.lm_head.weight is filled.model.embed_tokens.weight
    own = worst_case_sharpness(whole, next_token_cross_entropy, [batch()], geometry="adaptive", radius=0.1, steps=3)
    return refused, kept, result.mean, own.mean


def refused_loads(folder: Path) -> list[str]:
    """What is said of files that do not fit; nothing is written then."""
    filled = fsdp(torch.float64, checkpointed=False)
    before = local(filled)
    sentences = []
    index = json.loads((folder / "saved" / "model.safetensors.index.json").read_text())["weight_map"]
    for name in ("wrong", "damaged"):
        if dist.get_rank() == 0:
            shutil.copytree(folder / "saved", folder / name)
            last = folder / name / sorted(set(index.values()))[-1]
            if name == "damaged":
                last.write_bytes(last.read_bytes()[:-10])
            else:
                tensors = load_file(last)
                save_file({key: torch.zeros(3) for key in tensors}, last)
        dist.barrier()
        sentences.append(said(lambda name=name: load_shards(filled, folder / name)))
    assert same(before, filled)
    return sentences


def moved(part: Batch) -> None:
    model = fsdp(torch.float64)
    prepared = PreparedModel.of(model, next_token_cross_entropy, [part], "euclidean")
    with torch.no_grad():
        next(iter(model.parameters())).mul_(2)
    WorstCase(Euclidean(), 0.1, 2).on(prepared, 0, lambda: None, {})


def run_tensor(folder: Path) -> dict[str, Any]:
    symmetries = find_symmetries(llama(torch.float64), batch(), evaluate=next_token_cross_entropy)
    model = tensor_parallel(torch.float64)
    before = local(model)
    found: dict[str, Any] = {"values": measured(model, batch(), symmetries), "same": same(before, model)}
    rank, rows = dist.get_rank(), batch()
    loss = next_token_cross_entropy
    found["other rows"] = [
        said(lambda batches=batches: gradient_norm(model, loss, batches, geometry="euclidean"))
        for batches in ([own(rows)], [rows, own(rows)], [{name: value[: 2 + rank] for name, value in rows.items()}])
    ]
    norm = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)).double().eval()
    rows: Any = (torch.randn(4, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), None)
    found["alone"] = gradient_norm(norm, squares, [rows], geometry="adaptive").mean
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "0": ColwiseParallel(output_layouts=Shard(1)),
        "1": SequenceParallel(),
        "2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(norm, mesh, plan)
    found["in sequence"] = gradient_norm(norm, squares, [rows], geometry="adaptive").mean
    return found


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kind, folder = sys.argv[1], Path(sys.argv[2])
    found = {"fsdp": run_fsdp, "tensor": run_tensor}[kind](folder)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # gloo's threads of several meshes may abort a process that ends in another way
