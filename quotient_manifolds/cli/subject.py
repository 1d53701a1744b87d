"""Make inputs for a model, find its symmetries on them, and write it at another point of its orbit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.files import new_directory, writing
from quotient_manifolds.load import call_object, load_model, load_symmetries
from quotient_manifolds.symmetries import (
    HOW_TO,
    Params,
    Scope,
    Symmetries,
    example_inputs,
    find_symmetries,
    optional_inputs,
)
from quotient_manifolds.symmetries.checks import running
from quotient_manifolds.symmetries.outputs import ModelOutputs, call, floating, relative_change

ALONE, RECORD = "example inputs", "orbit.json"
MARGIN, NOISE = 100.0, 1e-12  # The output may change by 100 times its rounding error in float64, at least 1e-12.
WEIGHTS = ("safetensors", "index.json", "bin", "pt", "pth", "ckpt", "h5", "msgpack", "onnx", "gguf")


def load_directory(source: str) -> nn.Module:
    """Load the model in a directory. Raises ValueError for other sources, which cannot be written to a directory."""
    if not Path(source).is_dir():
        raise ValueError(
            f"No model at {source}: expected a Hugging Face directory. Nothing is downloaded; transform your own "
            "models in Python"
        )
    return load_model(source)


def symmetries_of(network: nn.Module, source: str | None, *inputs: Any) -> Symmetries:
    """Return the symmetries that a function package.module:function declares, or those found within a scope.

    source: the function, or the scope (None for "all"). Raises ValueError if there is no symmetry.
    """
    if source is None or source in get_args(Scope):
        symmetries = find_symmetries(network, *inputs).within(cast(Scope, source or "all"))
    else:
        symmetries = load_symmetries(source, network)
        check_runs(network, inputs[0])
    if not symmetries.moved:
        why = [*map(str, symmetries.refused), "its operations leave none"][0]
        raise ValueError(f"{type(network).__name__} has no symmetry: {why}; {HOW_TO}")
    return symmetries


def check_runs(network: nn.Module, inputs: Any) -> None:
    """Raise ValueError unless the model runs on the inputs, and gives the same output twice."""
    ModelOutputs(network, [inputs]).own()


def inputs_of(network: nn.Module, reference: str | None, *, seed: int) -> Any:
    """Return the inputs that the function `reference` returns, or example inputs made from the configuration."""
    if reference is None:
        return example_inputs(network, seed=seed)
    return call_object(reference, "a function that returns inputs")


def all_inputs(network: nn.Module, references: Sequence[str], *, seed: int) -> dict[str, Any]:
    """Return by description the inputs that the functions return, and all example inputs on which the model runs.

    Raises ValueError if there are none.
    """
    described = {
        f"the inputs of {each}" if each else ALONE: inputs_of(network, each, seed=seed)
        for each in references or (None,)
    }
    for inputs in described.values():
        check_runs(network, inputs)
    return described | examples(network, seed=seed)


def examples(network: nn.Module, *, seed: int) -> dict[str, Any]:
    """Return the example inputs on which the model runs, alone and with each optional input, by their description."""
    described: dict[str, Any] = {}
    with suppress(ValueError), running(network):  # the configuration may lack the sizes that inputs are made from
        plain = example_inputs(network, seed=seed)
        described[ALONE] = plain
        for name, value in optional_inputs(network, plain, seed=seed).items():
            described[f"{ALONE} with {name}"] = {**plain, name: value}
    for name, inputs in [*described.items()]:
        try:
            check_runs(network, inputs)
        except ValueError:
            del described[name]
    return described


def distance(model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
    """Return the mean squared distance of the model's first output from targets: a loss for a model without a head."""
    inputs, targets = batch
    return F.mse_loss(floating(call(model, inputs))[0], targets)


def distance_batch(model: nn.Module, inputs: Any, seed: int) -> tuple[Any, Tensor]:
    """Return a batch for `distance`: the inputs, and standard Gaussian targets of the output's shape."""
    output = ModelOutputs(model, [inputs]).own()[0]
    targets = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return inputs, targets.to(output)


def write_moved(
    network: nn.Module,
    moved: Params,
    inputs: Mapping[str, Any],
    source: str,
    target: Path,
    *,
    seed: int,
    record: Mapping[str, Any] | None = None,
) -> float:
    """Write the model with weights `moved` to a new directory; return the largest relative change of the output.

    The change is measured on held-out inputs: `inputs`, with its example inputs drawn again from another seed. The
    directory is read again and compared before it is at `target`. record: the content of orbit.json, without the
    change.

    Raises ValueError if the output changes by more than rounding, OSError if the directory cannot be written.
    """
    held_out = {**inputs, **{name: each for name, each in examples(network, seed=seed).items() if name in inputs}}
    outputs = {name: ModelOutputs(network, [each]) for name, each in held_out.items()}
    for name, output in outputs.items():
        change = output.change({key: value.clone() for key, value in moved.items()})
        if not change <= MARGIN * max(output.noise(moved), NOISE):
            raise ValueError(
                f"The transformed model must compute the same on held-out inputs. Found a change by {change:.1e} on "
                f"{name}, so nothing is written; give inputs that show the difference by --inputs"
            )
    stored = {name: moved[name].to(w.dtype) for name, w in network.state_dict().items() if name in moved}
    network.load_state_dict(stored, strict=False)
    with new_directory(target) as unfinished:
        saved: Any = network
        with writing(target):
            saved.save_pretrained(unfinished)
            # Other files are copied. The original config.json replaces the one of transformers.
            ignored = shutil.ignore_patterns(*(f"*.{suffix}" for suffix in WEIGHTS), ".*")
            shutil.copytree(source, unfinished, ignore=ignored, dirs_exist_ok=True)
        again = load_model(unfinished)
        read = again.state_dict()
        for name, value in stored.items():
            if name not in read or read[name].dtype != value.dtype or not read[name].equal(value):
                raise ValueError(f"{target} must hold {name} unchanged. Found other values, so nothing is written")
        change = max(
            relative_change(ModelOutputs(again, [each]).own(), outputs[name].own()) for name, each in held_out.items()
        )
        if not change < 0.5:
            raise ValueError(
                f"Rounding to {next(iter(stored.values())).dtype} must not change the output. Found a change by "
                f"{change:.1e} of its size, so nothing is written; choose a scale nearer 1, or another seed"
            )
        if record is not None:
            text = json.dumps({**record, "change": change}, indent=1) + "\n"
            with writing(target):
                (unfinished / RECORD).write_text(text, encoding="utf-8")
    return change
