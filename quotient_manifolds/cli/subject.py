"""Make inputs that a model takes, find its symmetries on them, and write it elsewhere on its orbit."""

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
MARGIN, NOISE = 100.0, 1e-12  # how often the rounding noise the output may change, in float64; the least of it
WEIGHTS = ("safetensors", "index.json", "bin", "pt", "pth", "ckpt", "h5", "msgpack", "onnx", "gguf")


def load_directory(source: str) -> nn.Module:
    """Load the model in a directory, which can be written to another one."""
    if not Path(source).is_dir():
        raise ValueError(
            f"No model at {source}: expected a Hugging Face directory. Nothing is downloaded; transform your own "
            "models in Python."
        )
    return load_model(source)


def symmetries_of(network: nn.Module, asked: str | None, *inputs: Any) -> Symmetries:
    """Return what the function of the name `asked` declares, or what is found: all, or within that scope.

    Raises ValueError where there is none.
    """
    if asked is None or asked in get_args(Scope):
        found = find_symmetries(network, *inputs).within(cast(Scope, asked or "all"))
    else:
        found = load_symmetries(asked, network)
        check_runs(network, inputs[0])
    if not found.moved:
        why = [*map(str, found.refused), "its operations leave none"][0]
        raise ValueError(f"{type(network).__name__} has no symmetry: {why}; {HOW_TO}.")
    return found


def check_runs(network: nn.Module, inputs: Any) -> None:
    """Raise ValueError in one sentence unless the model takes the inputs, and gives one output twice."""
    ModelOutputs(network, [inputs]).own()


def inputs_of(network: nn.Module, reference: str | None, *, seed: int) -> Any:
    """Return the inputs that the function `reference` gives, or some made from the model's configuration."""
    if reference is None:
        return example_inputs(network, seed=seed)
    return call_object(reference, "a function that returns inputs")


def all_inputs(network: nn.Module, references: Sequence[str], *, seed: int) -> dict[str, Any]:
    """Return inputs by what they are: of these functions, and made from the configuration with what is optional.

    Of what is made, all that the model takes; there has to be some if there is no function.
    """
    given = references or (None,)
    found = {f"the inputs of {each}" if each else ALONE: inputs_of(network, each, seed=seed) for each in given}
    for inputs in found.values():
        check_runs(network, inputs)
    return found | examples(network, seed=seed)


def examples(network: nn.Module, *, seed: int) -> dict[str, Any]:
    """Return example inputs that the model takes, by what they are: alone, and with each optional one."""
    found: dict[str, Any] = {}
    with suppress(ValueError), running(network):  # as the configuration may lack what inputs are made from
        plain = example_inputs(network, seed=seed)
        found[ALONE] = plain
        for name, value in optional_inputs(network, plain, seed=seed).items():
            found[f"{ALONE} with {name}"] = {**plain, name: value}
    for name, inputs in [*found.items()]:
        try:
            check_runs(network, inputs)
        except ValueError:
            del found[name]
    return found


def distance(model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
    """Return the mean squared distance of the model's first output from targets: a loss for a model without a head."""
    inputs, targets = batch
    return F.mse_loss(floating(call(model, inputs))[0], targets)


def distance_batch(model: nn.Module, inputs: Any, seed: int) -> tuple[Any, Tensor]:
    """Return a batch for `distance`: the inputs, and standard Gaussian targets of the shape of the output."""
    output = ModelOutputs(model, [inputs]).own()[0]
    targets = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return inputs, targets.to(output)


def write_moved(
    network: nn.Module,
    moved: Params,
    given: Mapping[str, Any],
    source: str,
    target: Path,
    *,
    seed: int,
    record: Mapping[str, Any] | None = None,
) -> float:
    """Write the moved model to the directory OUT, and return how much it changes the output on held-out inputs.

    These are example inputs of another seed in place of those given that are examples themselves. What is written is
    read again and compared before it is at OUT. record: what orbit.json there holds, beside this change. Raises
    ValueError where something but rounding changes the output, OSError where it cannot be written.
    """
    held_out = {**given, **{what: one for what, one in examples(network, seed=seed).items() if what in given}}
    outputs = {what: ModelOutputs(network, [one]) for what, one in held_out.items()}
    for what, each in outputs.items():
        change = each.change({name: value.clone() for name, value in moved.items()})
        if not change <= MARGIN * max(each.noise(moved), NOISE):
            raise ValueError(
                f"The transformed model must compute the same on held-out inputs. Found a change by {change:.1e} on "
                f"{what}: nothing written; give inputs that show the difference by --inputs."
            )
    stored = {name: moved[name].to(w.dtype) for name, w in network.state_dict().items() if name in moved}
    network.load_state_dict(stored, strict=False)
    with new_directory(target) as fresh:
        saved: Any = network
        with writing(target):
            saved.save_pretrained(fresh)
            # Everything but weights, which are the old ones; the original's config.json replaces the one just saved.
            ignored = shutil.ignore_patterns(*(f"*.{each}" for each in WEIGHTS), ".*")
            shutil.copytree(source, fresh, ignore=ignored, dirs_exist_ok=True)
        again = load_model(fresh)
        read = again.state_dict()
        for name, value in stored.items():
            if name not in read or read[name].dtype != value.dtype or not read[name].equal(value):
                raise ValueError(f"{target} would not hold {name} as it was moved: nothing written.")
        changes = [
            relative_change(ModelOutputs(again, [one]).own(), outputs[what].own()) for what, one in held_out.items()
        ]
        if not max(changes) < 0.5:
            raise ValueError(
                f"Rounding to {next(iter(stored.values())).dtype} at this scale changes the output by "
                f"{max(changes):.1e} of its size: nothing written; choose a scale nearer 1, or another seed."
            )
        if record is not None:
            text = json.dumps({**record, "change": max(changes)}, indent=1) + "\n"
            with writing(target):
                (fresh / RECORD).write_text(text, encoding="utf-8")
    return max(changes)
