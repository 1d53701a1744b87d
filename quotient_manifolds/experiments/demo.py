"""The demonstration: sharpness of real transformers along a symmetry orbit, and how it ranks a zoo of them."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from quotient_manifolds.experiments.digits import TRAIN_POINTS, Batch, Digits, load_digits
from quotient_manifolds.experiments.kept import one_thread
from quotient_manifolds.experiments.measuring import across_zoo, measures, on_orbit, pair_rows, rank
from quotient_manifolds.experiments.orbit import DTYPES
from quotient_manifolds.experiments.page import demo_page
from quotient_manifolds.experiments.records import (
    DemoResult,
    Provenance,
    Settings,
    correlation_table,
    model_table,
    orbit_table,
    write_csv,
)
from quotient_manifolds.experiments.zoo import TrainedModel, draw_recipe, train_zoo
from quotient_manifolds.files import write_text
from quotient_manifolds.progress import Progress
from quotient_manifolds.report import render
from quotient_manifolds.symmetries import Proof, Symmetries, find_symmetries, prove_symmetries
from quotient_manifolds.version import VERSION

MODELS = 24  # the more models, the narrower the interval of tau
STEPS = 20
RADIUS = 0.2
EUCLIDEAN_RADIUS = 0.05
SCALES = (0.01, 0.1, 1.0, 10.0, 100.0)


def run_demo(
    out: Path,
    *,
    models: int = MODELS,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
    steps: int = STEPS,
    radius: float = RADIUS,
    euclidean_radius: float = EUCLIDEAN_RADIUS,
    batches: int = 2,
    batch_size: int = 128,
    train_points: int = TRAIN_POINTS,
    training_steps: int | None = None,
    scales: tuple[float, ...] = SCALES,
    resamples: int = 2000,
    progress: Progress | None = None,
    cache: Path | None = None,
    command: str | None = None,
) -> DemoResult:
    """Trains (once) and measures a zoo of small vision transformers on the digits; writes what it found into `out`.

    Written: records.json (`DemoResult.load`), models.csv, correlations.csv, orbit.csv, report.html. The trained zoo is
    kept in `cache` (default: out/zoo) and used again. `radius` is the ball's in the adaptive and both quotient metrics.
    `progress` is called with (what is being done, units finished, units in all). `dtype` is that of the zoo's
    measuring; the orbit is measured in float32 and float64. `training_steps` replaces every recipe's number of steps.
    torch runs on one CPU thread meanwhile. Raises ValueError for settings that make no sense, before training.
    """
    settings = Settings(
        models=models,
        seed=seed,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        steps=steps,
        radius=float(radius),
        euclidean_radius=float(euclidean_radius),
        batches=batches,
        batch_size=batch_size,
        train_points=train_points,
        training_steps=training_steps,
        scales=tuple(float(scale) for scale in scales),
        resamples=resamples,
    )
    _check(settings)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    run = _Run(settings, progress or _silent)
    with one_thread():
        result = run.everything(out / "zoo" if cache is None else Path(cache), command or _call(out, settings))
    write_results(out, result)
    return result


def write_results(out: Path, result: DemoResult) -> None:
    """records.json, three tables as CSV, and report.html, each whole or not at all."""
    result.save(out / "records.json")
    write_csv(out / "models.csv", model_table(result))
    write_csv(out / "correlations.csv", correlation_table(result))
    write_csv(out / "orbit.csv", orbit_table(result))
    write_text(out / "report.html", render(demo_page(result)))


def _check(settings: Settings) -> None:
    if settings.dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, found {settings.dtype!r}.")
    if settings.models < 2:
        raise ValueError(f"Ranking needs at least 2 models, found models={settings.models}.")
    least = {"steps": settings.steps, "resamples": settings.resamples, "training_steps": settings.training_steps}
    for name, number in least.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, found {number}.")
    positive = (settings.radius, settings.euclidean_radius, *settings.scales)
    if not settings.scales or not all(0 < number < float("inf") for number in positive):
        raise ValueError(
            "radius, euclidean_radius and all scales (at least one) must be positive and finite, found "
            f"{settings.radius}, {settings.euclidean_radius} and {settings.scales}."
        )


def _call(out: Path, settings: Settings) -> str:
    """The call that gives these numbers again, with the settings that a reader may want to change."""
    shown = ("models", "seed", "device", "dtype", "steps", "radius", "euclidean_radius")
    arguments = ", ".join(f"{name}={getattr(settings, name)!r}" for name in shown)
    return f"run_demo(Path({out.name!r}), {arguments})"


def _silent(what: str, finished: int, total: int) -> None:
    pass


@dataclass
class _Run:
    """One run: its settings, whom it tells how far it is, and the seconds each stage took."""

    settings: Settings
    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    def everything(self, cache: Path, command: str) -> DemoResult:
        settings = self.settings
        digits = load_digits(train_points=settings.train_points, seed=settings.seed)
        batches = digits.training_batches(settings.batches, settings.batch_size)
        with self.timed("training"):
            zoo = self.train(cache, digits)
        reference = zoo[0].load().to(settings.device)
        with self.timed("symmetries"):
            symmetries, proof = self.prove(reference, batches[0])
        with self.timed("orbit"):
            orbit = on_orbit(reference, symmetries, batches[:1], settings, self.progress)
        with self.timed("measuring"):
            rows, curves = across_zoo(zoo, batches, settings, self.progress)
        with self.timed("ranking"):
            correlations = rank(rows, settings)
        return DemoResult(
            settings=settings,
            provenance=self.provenance(command, zoo),
            parameters=sum(parameter.numel() for parameter in reference.parameters()),
            measures=measures(settings),
            pairs=pair_rows(symmetries, proof),
            unpaired=symmetries.rest,
            noise=proof.noise,
            orbit=orbit,
            models=rows,
            correlations=correlations,
            curves=curves,
        )

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = round(time.perf_counter() - start, 2)

    def train(self, cache: Path, digits: Digits) -> list[TrainedModel]:
        settings = self.settings
        recipes = [
            draw_recipe(index, seed=settings.seed, steps=settings.training_steps) for index in range(settings.models)
        ]
        return train_zoo(recipes, digits, cache, progress=self.progress)

    def prove(self, model: nn.Module, batch: Batch) -> tuple[Symmetries, Proof]:
        self.progress("proving symmetries", 0, 1)
        symmetries = find_symmetries(model)
        inputs = {"pixel_values": batch["pixel_values"][:8].to(self.settings.device)}
        proof = prove_symmetries(model, inputs, symmetries, seed=self.settings.seed)
        self.progress("proving symmetries", 1, 1)
        return symmetries, proof

    def provenance(self, command: str, zoo: list[TrainedModel]) -> Provenance:
        return Provenance(
            command=command,
            version=VERSION,
            torch=torch.__version__,
            python=platform.python_version(),
            platform=f"{platform.system()} {platform.machine()}",
            threads=torch.get_num_threads(),
            trained=sum(not model.reused for model in zoo),
            seconds=self.seconds,
        )
