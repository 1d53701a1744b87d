"""Make inputs that a model takes, find its symmetries on them, and act on it by them."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.cli.common import BadInput
from quotient_manifolds.geometry import Geometry, KnownSymmetries
from quotient_manifolds.load import call_object, load_model, load_symmetries
from quotient_manifolds.messages import Progress, sentence
from quotient_manifolds.replica import private_batch, replica
from quotient_manifolds.sharpness import WorstCase
from quotient_manifolds.sharpness.measure import warned
from quotient_manifolds.symmetries import (
    Params,
    Scope,
    Symmetries,
    example_inputs,
    find_symmetries,
    optional_inputs,
    output_change,
    random_representative,
)
from quotient_manifolds.symmetries.outputs import ModelOutputs, answer, floating, relative_change

ALONE = "example inputs"

# What a model raises on inputs that it cannot take.
UNFIT = (RuntimeError, IndexError, KeyError, AttributeError, TypeError, NotImplementedError, AssertionError)
MARGIN, NOISE = 100.0, 1e-12  # how often the rounding noise the output may change, in float64; the least of it
WEIGHTS = ("safetensors", "index.json", "bin", "pt", "pth", "ckpt", "h5", "msgpack", "onnx", "gguf")


def symmetries_of(network: nn.Module, inputs: Any, asked: str | None, *others: Any) -> Symmetries:
    """Return what the function of the name `asked` declares, or what is found: all, or within that scope."""
    if asked is None or asked in get_args(Scope):
        return find_symmetries(network, inputs, *others).within(cast(Scope, asked or "all"))
    return load_symmetries(asked, network)


@contextmanager
def inputs_for(network: nn.Module, reference: str | None, *, seed: int) -> Iterator[Any]:
    """Yield the inputs that the function `reference` gives, or some made from the model's configuration.

    Say in one sentence if the model does not take them, inside.
    """
    if reference is not None:
        given = call_object(reference, "a function that returns inputs")
    else:
        try:
            given = example_inputs(network, seed=seed)
        except ValueError as error:
            raise BadInput(f"{str(error).rstrip('.')}, by --inputs package.module:function.") from error
    try:
        yield given
    except (*UNFIT, ValueError) as raised:
        cause = raised.__cause__ if isinstance(raised, ValueError) else raised  # what finding symmetries says of a run
        if not isinstance(cause, UNFIT):
            raise
        what = f"the inputs made from {reference or 'its configuration'}"
        raise BadInput(
            f"{type(network).__name__} does not take {what}: {sentence(cause)}; give others with --inputs."
        ) from raised


def all_inputs(network: nn.Module, references: Sequence[str], *, seed: int) -> dict[str, Any]:
    """Return inputs by what they are: of these functions, and made from the configuration with what is optional.

    Of what is made, all that the model takes; there has to be some if there is no function.
    """
    found = {}
    for reference in references or (None,):
        with inputs_for(network, reference, seed=seed) as given:
            output_change(network, given, {}, {})
            found[ALONE if reference is None else f"the inputs of {reference}"] = given
    for name, inputs in examples(network, seed=seed).items():
        with suppress(*UNFIT, ValueError):
            output_change(network, inputs, {}, {})
            found[name] = inputs
    return found


def examples(network: nn.Module, *, seed: int) -> dict[str, Any]:
    """Return example inputs by what they are: alone, and with each optional one; none where none can be made."""
    try:
        plain = example_inputs(network, seed=seed)
        optional = optional_inputs(network, plain, seed=seed)
    except (*UNFIT, ValueError):
        return {}
    return {ALONE: plain, **{f"example inputs with {name}": {**plain, name: optional[name]} for name in optional}}


def along_orbit(
    model: nn.Module,
    symmetries: Symmetries,
    geometries: Sequence[Geometry],
    batch: Any,
    scales: Sequence[float],
    *,
    ascent: dict[str, Any],
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """Yield the sharpness of a model and of its moves by A = scale x Gaussian per head, in float32 and in float64.

    On copies; A is drawn anew for every scale. [paper, ICML version, Sec. 6.2]
    Raises ValueError if a sharpness to compare with is not positive.
    """
    total, done = 2 * len(geometries) * (1 + len(scales)), 0
    for precision, start in (("float32", copy.deepcopy(model).float()), ("float64", copy.deepcopy(model).double())):
        before: dict[str, float] = {}
        for index, scale in enumerate((None, *scales)):
            moved = copy.deepcopy(start)
            if scale is not None:
                there = random_representative(start, symmetries, scale=scale, seed=ascent["seed"] + index - 1)
                moved.load_state_dict(there, strict=False)  # buffers stay
            here, known = [like(batch, next(moved.parameters()))], KnownSymmetries()
            for geometry in geometries:
                settings = {**ascent, "radius": ascent["radius"][geometry.name]}
                value = warned(WorstCase(geometry, **settings).of(moved, distance, here, known)).mean
                done += 1
                progress("moving along the orbit", done, total)
                if scale is None and not value > 0:
                    raise ValueError(
                        f"The loss of the model must increase within radius {settings['radius']:g} of {geometry.name}. "
                        f"Found no increase in {precision}: choose more steps, or another radius."
                    )
                ratio = value / before.setdefault(geometry.name, value)
                yield {"precision": precision, "measure": geometry.name, "scale": scale, "value": value, "ratio": ratio}


def distance(model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
    """Return the mean squared distance of the model's first output from targets: a loss for a model without a head."""
    inputs, targets = batch
    return F.mse_loss(floating(answer(model, inputs))[0], targets)


def distance_batch(model: nn.Module, inputs: Any, seed: int) -> tuple[Any, Tensor]:
    """Return a batch for `distance`: the inputs, and standard Gaussian targets of the shape of the output."""
    inputs = like(inputs, next(model.parameters()))
    with torch.no_grad():
        output = floating(answer(replica(model, {}), private_batch(inputs)))[0]
    targets = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return inputs, targets.to(output)


def like(batch: Any, parameter: Tensor) -> Any:
    """Return the batch on the device of a parameter, its floating-point tensors in the parameter's dtype."""
    return private_batch(batch, lambda value: value.to(parameter if value.is_floating_point() else parameter.device))


def write_moved(
    network: nn.Module, moved: Params, given: Mapping[str, Any], source: Path, target: Path, *, seed: int
) -> float:
    """Write the moved model to the directory OUT, and return how much it changes the output on held-out inputs.

    These are example inputs of another seed in place of those given that are examples themselves. It is written beside
    OUT, read again, compared and renamed, so that OUT is complete or not there. Raises BadInput where something but
    rounding changes the output.
    """
    held_out = {**given, **{what: one for what, one in examples(network, seed=seed).items() if what in given}}
    before = {what: _unchanged(network, moved, what, one) for what, one in held_out.items()}
    stored = {name: moved[name].to(w.dtype) for name, w in network.named_parameters()}
    network.load_state_dict(stored, strict=False)  # buffers stay
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=f".{target.name}.") as folder:
        fresh = Path(folder) / target.name
        saved: Any = network
        saved.save_pretrained(fresh)
        # Everything but weights, which are the old ones; the original's config.json replaces the one just saved.
        ignored = shutil.ignore_patterns(*(f"*.{each}" for each in WEIGHTS), ".*")
        shutil.copytree(source, fresh, ignore=ignored, dirs_exist_ok=True)
        again = load_model(fresh)
        read = dict(again.named_parameters())
        for name, value in stored.items():
            if name not in read or read[name].dtype != value.dtype or not read[name].equal(value):
                raise BadInput(f"{target} would not hold {name} as it was moved: nothing written.")
        change = 0.0
        for what, one in held_out.items():
            change = max(change, relative_change(ModelOutputs(again, [one]).own(), before[what]))
        if not change < 0.5:
            raise BadInput(
                f"Rounding to {next(iter(stored.values())).dtype} at this scale changes the output by {change:.1e} of "
                "its size: nothing written; choose a scale nearer 1, or another seed."
            )
        fresh.rename(target)
    return change


def _unchanged(network: nn.Module, moved: Params, what: str, inputs: Any) -> list[Tensor]:
    """Return the output of a model, in float64. Raises BadInput if the moved parameters change it beyond rounding."""
    here = ModelOutputs(network, [inputs])
    change = here.change({name: value.clone() for name, value in moved.items()})
    if not change <= MARGIN * max(here.noise(moved), NOISE):
        raise BadInput(
            f"The transformed model must compute the same on held-out inputs. Found a change by "
            f"{change:.1e} on {what}: nothing written; give inputs that show the difference by --inputs."
        )
    return here.own()
