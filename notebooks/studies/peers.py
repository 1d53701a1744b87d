"""Which models other libraries move without changing the function, and other quantisers along an orbit.

Brevitas rotates and equalizes the graph that torch exports; rebasin permutes units of one model to those of another.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from quotient_manifolds.messages import Progress
from quotient_manifolds.orbit import RoundingError, align, descend_orbit
from quotient_manifolds.symmetries import (
    Params,
    count_symmetries,
    find_symmetries,
    generic_inputs,
    small_copy,
    verify_symmetries,
)
from quotient_manifolds.symmetries.small_copy import joined
from studies.common import Record, Tables, resume
from studies.fibres import hugging_face, small_model
from studies.rounding import RATE, STEPS, WEIGHTS, embedded, encoded, less, minilm

PEERS = {"brevitas": "0.13.4", "rebasin": "0.0.47", "torchao": "0.18.0", "hqq": "0.2.8.post1"}
TYPES = {
    "bert": "BertForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
}
BY_HAND = ("torch's encoder, norms first", "decoder with RMSNorm and a head", "convolutions with BatchNorm")
CHANGE, SECONDS, GROUP = 1e-4, 120.0, 64


def run(out: Path, *, fast: bool = False, progress: Progress | None = None) -> Record:
    """Return what each library does with each model, and the errors of quantisers; each cell in its own process."""
    for name, known in PEERS.items():
        try:
            version(name)
        except PackageNotFoundError as error:
            raise ImportError(
                f"The study needs {name}, which is not installed: pip install {name}=={known}."
            ) from error
    models = BY_HAND[1:2] if fast else (*TYPES, *BY_HAND)
    cells: dict[str, Callable[[], Any]] = {
        f"{name} by {way}": partial(_apart, name, way) for name in models for way in WAYS
    }
    if not fast:
        cells |= {subject: partial(_quantised, subject) for subject in list(WEIGHTS)[:2]}
    found = resume(out / "cells", cells, what="cells", progress=progress)
    parts = {key: [each for each in found if key in each] for key in ("says", "errors")}
    return {**parts, "versions": {name: version(name) for name in (*PEERS, "torch", "transformers")}}


def _apart(name: str, way: str) -> Record:
    """Return the outcome of a way from a process of its own, which is killed after `SECONDS`."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            says = pool.apply_async(_outcome, (name, way)).get(SECONDS)
        except multiprocessing.TimeoutError:
            says = f"no end within {SECONDS:g} seconds"
    return {"model": name, "way": way, "says": says}


def _outcome(name: str, way: str) -> str:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    says = ""
    for move in WAYS[way]:
        try:
            says, change = move(name)
            if change < CHANGE and not says.startswith("0 "):
                return says
            says = says if says.startswith("0 ") else f"changes the function by {change:.1g}"
        except Exception as error:  # whatever others' libraries raise is the reason
            says = says or " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return says


def made(name: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """Return a small generic model of a type, in float32, and a batch of a few inputs."""
    if name not in TYPES:
        model, inputs = small_model(name, seed)
    else:
        model = small_copy(hugging_face(name, TYPES[name]), seed=seed)
        inputs = joined(generic_inputs(model)[:4])
        config: Any = model.config
        config._experts_implementation = "batched_mm"  # which torch exports
        if hasattr(config, "use_cache"):
            inputs |= {"use_cache": False}
    return model.float(), inputs


@torch.no_grad()
def answer(model: nn.Module, inputs: Any) -> Tensor:
    """Return the first output."""
    found = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return found if isinstance(found, Tensor) else found[0]


def changed(before: Tensor, after: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    return float((after - before).abs().max() / before.abs().max())


@torch.no_grad()
def brevitas(name: str, *, rotate: bool, prepare: bool = False) -> tuple[str, float]:
    """Rotate or equalize what torch exports; prepare: gains are merged and norms replaced as its example does it."""
    from brevitas.graph import equalize
    from brevitas_examples.common.dynamo_utils import dynamo_export_ctx
    from brevitas_examples.llm.llm_quant import ln_affine_merge as steps

    model, inputs = made(name)
    args, options = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    before = answer(model, inputs)
    norms = tuple({type(each) for each in model.modules() if "RMS" in type(each).__name__})
    with dynamo_export_ctx():
        if prepare and norms and norms != (nn.RMSNorm,):  # which its example replaces by torch's
            with steps.rmsnorm_patch(model, model.config):
                graph = torch._dynamo.export(model)(*args, **options)[0]
        else:
            graph = torch._dynamo.export(model)(*args, **options)[0]
    if rotate:
        if prepare:
            steps.apply_layernorm_affine_merge(graph, norms)
            graph = steps.apply_layernorm_to_rmsnorm(graph)
        rotation = equalize.GraphRotationEqualization(extra_state_kwargs={"scale_invariant_layers": norms})
        graph = rotation.apply(graph)
        regions = rotation.regions
    else:
        graph, regions = equalize.EqualizeGraph(return_regions=True).apply(graph)
    return f"{len(regions)} regions", changed(before, answer(graph, inputs))


class Positional(nn.Module):
    """Call a model with its inputs in order, as rebasin does."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values: Any) -> Tensor:
        """Return the first output."""
        found: Tensor = self.model(**dict(zip(self.names, values, strict=True)))[0]
        return found


def rebasin(name: str) -> tuple[str, float]:
    """Permute the units of one model to those of another."""
    from rebasin import PermutationCoordinateDescent

    (a, inputs), (b, _) = made(name), made(name, 1)
    if isinstance(inputs, dict):
        a, b = (Positional(each, list(inputs)) for each in (a, b))
        inputs = tuple(inputs.values())
    before = answer(b, inputs)
    found = PermutationCoordinateDescent(a, b, list(inputs))
    found.rebasin()
    return f"{len(found.pinit.model_graph.permutation_to_info)} permutations", changed(before, answer(b, inputs))


def symmetric(name: str) -> tuple[str, float]:
    """Count the dimensions that `descend_orbit` may use, and move the model at random."""
    model, inputs = made(name)
    found = find_symmetries(model, inputs)
    found = verify_symmetries(model, inputs, found).holding(found)
    moved = found.transformed(model, seed=1)
    return f"{count_symmetries(model, found).dimension} dimensions", changed(
        answer(model, inputs), answer(moved, inputs)
    )


def aligned(name: str) -> tuple[str, float]:
    """Align two models."""
    (a, inputs), (b, _) = made(name), made(name, 1)
    found = align(b, a, inputs)
    return f"distance {found.before:.2f} to {found.distance:.2f}", changed(
        answer(b, inputs), answer(found.model, inputs)
    )


WAYS: dict[str, tuple[Callable[[str], tuple[str, float]], ...]] = {
    "brevitas, rotation": (partial(brevitas, rotate=True, prepare=True), partial(brevitas, rotate=True)),
    "brevitas, equalization": (partial(brevitas, rotate=False),),
    "rebasin": (rebasin,),
    "descend_orbit": (symmetric,),
    "align": (aligned,),
}


def torchao(weight: Tensor) -> Tensor:
    """Return a weight with its groups rounded to symmetric integers of 4 bits."""
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    dtypes: Any = torch
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    quantize_(layer, IntxWeightOnlyConfig(dtypes.int4, PerGroup(GROUP)))
    found: Any = layer.weight
    rounded: Tensor = found.dequantize().detach()
    return rounded


def hqq(weight: Tensor) -> Tensor:
    """Return a weight with its groups rounded by half-quadratic quantisation to 4 bits."""
    from hqq.core.quantize import Quantizer

    coded, meta = Quantizer.quantize(
        weight, nbits=4, group_size=GROUP, axis=1, device="cpu", compute_dtype=weight.dtype
    )
    rounded: Tensor = Quantizer.dequantize(coded, meta)
    return rounded


QUANTISERS = {"torchao, IntxWeightOnly": torchao, "hqq": hqq}


@torch.no_grad()
def _quantised(subject: str) -> Record:
    """Return the error of each sentence by quantiser, as stored and where attention's rounding error is least."""
    own, low = {name: w.detach() for name, w in minilm().named_parameters()}, _descended()
    base = embedded(own)
    names = [name for name, w in own.items() if WEIGHTS[subject](name, w)]
    errors = {}
    for quantiser, act in QUANTISERS.items():
        points = [params | {name: act(params[name]) for name in names} for params in (own, low)]
        errors[quantiser] = [(1 - (embedded(each) * base).sum(-1)).tolist() for each in points]
    return {"subject": subject, "errors": errors}


@cache
def _descended() -> Params:
    model, inputs = minilm(), encoded()
    shown, other = ({name: value[part, :12] for name, value in inputs.items()} for part in (slice(2), slice(2, 8)))
    names = [name for name, w in model.named_parameters() if WEIGHTS["MiniLM, attention"](name, w)]
    objective = RoundingError(4, names=names)
    return descend_orbit(model, objective, shown, held_out=[other], steps=STEPS, learning_rate=RATE).params


def tables(record: Record) -> Tables:
    """Return what each library says to each model, which of them it moves, and errors of quantisers."""
    says = pd.DataFrame(record["says"]).pivot(index="model", columns="way", values="says")
    says = says.loc[[*dict.fromkeys(row["model"] for row in record["says"])], list(WAYS)]
    says = says.rename_axis(index="Model", columns=None).replace(r"^1 (.*)s$", r"1 \1", regex=True)
    shown = []
    for row in record["errors"]:
        for quantiser, errors in row["errors"].items():
            stored, low = map(np.array, errors)
            means = [f"{part.mean():.2g}" for part in (stored, low)]
            shown.append([row["subject"], quantiser, *means, less(stored, low)])
    columns = ["Weights of", "Quantiser, 4 bits", "As stored", "Descended", "Error reduced by [95 %]"]
    accepted = says.map(lambda text: text if text[0] in "123456789d" else "no")
    accepted = accepted.replace(r" dimensions|distance ", "", regex=True)
    return {
        "models": accepted.reset_index(),
        "causes": says.reset_index(),
        "quantisers": pd.DataFrame(shown, columns=columns),
    }
