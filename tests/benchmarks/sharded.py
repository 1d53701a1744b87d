"""Cost and memory of measuring a sharded model: torchrun --nproc-per-node 2 -m tests.benchmarks.sharded KIND WHAT [N].

A Llama of 27 million parameters under fully_shard, with 4 rows of N (64) tokens on every process. KIND is "bare", for
forward and backward passes, or a geometry. WHAT is "cost": processor time of a step of the ascent over that of a bare
forward and backward pass, taken in turns; or "memory": bytes at the peak above those before, and of a process's part.
Every process prints one line of JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from quotient_manifolds import find_symmetries
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.sharpness import AutoPGD, PreparedModel, next_token_cross_entropy, worst_case_sharpness
from quotient_manifolds.sharpness.vector import over_processes
from quotient_manifolds.symmetries import Symmetries
from tests.benchmarks.alternating import Alternating
from tests.benchmarks.running import peak

STEPS = int(os.environ.get("QUOTIENT_MANIFOLDS_ROUNDS", "8"))
WORDS, EXAMPLES = 8000, 4


def made(tokens: int) -> tuple[nn.Module, dict[str, Tensor], Symmetries]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=384, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=6
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, WORDS, (2 * EXAMPLES, tokens), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    found = [_found_elsewhere(model, batch) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    own = slice(EXAMPLES * dist.get_rank(), EXAMPLES * (dist.get_rank() + 1))
    return model, {name: value[own] for name, value in batch.items()}, found[0]


def _found_elsewhere(model: nn.Module, batch: dict[str, Tensor]) -> Symmetries:
    """Find the symmetries in a process of its own, whose memory does not count."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(_pairs, model, batch).result()


def _pairs(model: nn.Module, batch: dict[str, Tensor]) -> Symmetries:
    return find_symmetries(model, batch, evaluate=next_token_cross_entropy).within("pairs")


def geometry_of(kind: str, symmetries: Symmetries) -> Geometry:
    return {
        "euclidean": Euclidean(),
        "adaptive": Adaptive(),
        "inv": Quotient("inv", symmetries=symmetries),
        "mix": Quotient("mix", symmetries=symmetries),
    }[kind]


def bare(model: nn.Module, batch: dict[str, Tensor]) -> None:
    next_token_cross_entropy(model, batch).backward()
    model.zero_grad(set_to_none=True)


def cost(kind: str, tokens: int) -> dict[str, Any]:
    model, batch, symmetries = made(tokens)
    prepared = PreparedModel.of(model, next_token_cross_entropy, [batch], geometry_of(kind, symmetries))
    timed = Alternating(prepared.objective(0), lambda: bare(model, batch))
    bare(model, batch)
    with over_processes(prepared.processes_on):
        AutoPGD(steps=STEPS + 3).maximise(timed, 0.1, torch.Generator().manual_seed(0))
    return dict(timed.ratios)


def memory(kind: str, tokens: int) -> dict[str, Any]:
    model, batch, symmetries = made(tokens)
    part = sum(w.to_local().numel() * w.element_size() for w in model.parameters())  # type: ignore[operator]
    before = peak()
    if kind == "bare":
        for _ in range(3):
            bare(model, batch)
    else:
        geometry = geometry_of(kind, symmetries)
        worst_case_sharpness(model, next_token_cross_entropy, [batch], geometry=geometry, radius=0.1, steps=20)
    return {"above": peak() - before, "part": part}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kind, what, *tokens = sys.argv[1:]
    found = (cost if what == "cost" else memory)(kind, int(tokens[0]) if tokens else 64)
    print(json.dumps({"rank": dist.get_rank(), **found}))
    dist.destroy_process_group()
