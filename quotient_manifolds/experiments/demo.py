"""The demonstration: sharpness of real transformers along a symmetry orbit, and how it ranks a zoo of them."""

from __future__ import annotations

import copy
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quotient_manifolds.experiments.digits import TRAIN_POINTS, Batch, Digits, load_digits
from quotient_manifolds.experiments.page import demo_page
from quotient_manifolds.experiments.records import (
    CorrelationRow,
    DemoResult,
    Measure,
    ModelRow,
    OrbitRow,
    PairRow,
    Provenance,
    Settings,
    Sharpness,
    correlation_table,
    model_table,
    orbit_table,
    write_csv,
    write_text,
)
from quotient_manifolds.experiments.statistics import kendall
from quotient_manifolds.experiments.zoo import Progress, TrainedModel, draw_recipe, train_zoo
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.report import render
from quotient_manifolds.sharpness import SharpnessResult, cross_entropy, worst_case_sharpness
from quotient_manifolds.symmetries import Proof, Symmetries, find_symmetries, prove_symmetries, random_move
from quotient_manifolds.version import VERSION

MODELS = 24  # at least 12; more make the interval of tau narrower
STEPS = 20
RADIUS = 0.5
EUCLIDEAN_RADIUS = 0.1
SCALES = (0.01, 0.1, 1.0, 10.0, 100.0)
DTYPES = {"float32": torch.float32, "float64": torch.float64}

# key in the records: name for readers, geometry; all but the first are matched to the same relative radius
GEOMETRIES: dict[str, tuple[str, Geometry]] = {
    "euclidean": ("Euclidean", Euclidean()),
    "adaptive": ("Adaptive", Adaptive()),
    "inv": ("Quotient inv", Quotient("inv", geodesic="second")),
    "mix": ("Quotient mix", Quotient("mix", geodesic="second")),
}
INVARIANT = ("inv", "mix")
ON_ORBIT = ("adaptive", *INVARIANT)


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
    Raises ValueError for settings that make no sense.
    """
    settings = Settings(
        models=models,
        seed=seed,
        device=str(device),
        dtype=_dtype_name(dtype),
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
    if models < 2:
        raise ValueError(f"Ranking needs at least 2 models, found models={models}.")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    run = _Run(settings, progress or _silent)
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


def _dtype_name(dtype: str | torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, found {name!r}.")
    return name


def _call(out: Path, settings: Settings) -> str:
    """The call that gives these numbers again, with the settings that a reader may want to change."""
    shown = ("models", "seed", "device", "dtype", "steps", "radius", "euclidean_radius")
    arguments = ", ".join(f"{name}={getattr(settings, name)!r}" for name in shown)
    return f"run_demo(Path({out.name!r}), {arguments})"


def _silent(what: str, finished: int, total: int) -> None:
    pass


@dataclass
class _Run:
    """One run: its settings, the data, and the time each stage took."""

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
            orbit = self.move_along_orbit(reference, symmetries, batches)
        with self.timed("measuring"):
            rows, curves = self.measure_zoo(zoo, batches)
        with self.timed("ranking"):
            correlations = self.rank(rows)
        return DemoResult(
            settings=settings,
            provenance=self.provenance(command, zoo),
            parameters=sum(p.numel() for p in reference.parameters()),
            measures=tuple(Measure(key, label, self.radius(key)) for key, (label, _) in GEOMETRIES.items()),
            pairs=_pair_rows(symmetries, proof),
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

    def radius(self, key: str) -> float:
        return self.settings.euclidean_radius if key == "euclidean" else self.settings.radius

    def train(self, cache: Path, digits: Digits) -> list[TrainedModel]:
        settings = self.settings
        recipes = [
            draw_recipe(index, seed=settings.seed, steps=settings.training_steps) for index in range(settings.models)
        ]
        return train_zoo(recipes, digits, cache, progress=self.progress)

    def prove(self, model: nn.Module, batch: Batch) -> tuple[Symmetries, Proof]:
        symmetries = find_symmetries(model)
        self.progress("proving symmetries", 0, 1)
        inputs = {"pixel_values": batch["pixel_values"][:8].to(self.settings.device)}
        proof = prove_symmetries(model, inputs, symmetries, seed=self.settings.seed)
        self.progress("proving symmetries", 1, 1)
        return symmetries, proof

    def sharpness(self, model: nn.Module, key: str, batches: tuple[Batch, ...]) -> SharpnessResult:
        return worst_case_sharpness(
            model,
            cross_entropy,
            [_like(batch, model) for batch in batches],
            geometry=GEOMETRIES[key][1],
            radius=self.radius(key),
            steps=self.settings.steps,
            seed=self.settings.seed,
        )

    def move_along_orbit(
        self, model: nn.Module, symmetries: Symmetries, batches: tuple[Batch, ...]
    ) -> tuple[OrbitRow, ...]:
        """Sharpness of the model and of the same function elsewhere on its orbit, in both precisions, first batch."""
        scales, rows = self.settings.scales, []
        total = len(DTYPES) * (1 + len(scales))
        for place, (name, dtype) in enumerate(DTYPES.items()):
            start = copy.deepcopy(model).to(dtype)
            self.progress("moving along the orbit", place * (1 + len(scales)), total)
            before = {key: self.sharpness(start, key, batches[:1]) for key in ON_ORBIT}
            for index, scale in enumerate(scales):
                self.progress("moving along the orbit", place * (1 + len(scales)) + 1 + index, total)
                moved = copy.deepcopy(start)
                there = random_move(start, symmetries, scale=scale, seed=self.settings.seed)
                moved.load_state_dict(there, strict=False)  # buffers stay
                after = {key: self.sharpness(moved, key, batches[:1]) for key in ON_ORBIT}
                rows += [_orbit_row(name, key, scale, before[key], after[key]) for key in ON_ORBIT]
        self.progress("moving along the orbit", total, total)
        return tuple(rows)

    def measure_zoo(
        self, zoo: list[TrainedModel], batches: tuple[Batch, ...]
    ) -> tuple[tuple[ModelRow, ...], dict[str, tuple[float, ...]]]:
        rows: list[ModelRow] = []
        curves: dict[str, tuple[float, ...]] = {}
        total, done = len(zoo) * len(GEOMETRIES), 0
        for trained in zoo:
            model = trained.load().to(device=self.settings.device, dtype=DTYPES[self.settings.dtype])
            values: dict[str, Sharpness] = {}
            for key in GEOMETRIES:
                self.progress("measuring", done, total)
                result = self.sharpness(model, key, batches)
                values[key] = Sharpness(result.mean, result.standard_error if len(batches) > 1 else None)
                curves.setdefault(key, tuple(float(loss) for loss in result.loss_steps[0]))
                done += 1
            rows.append(ModelRow(f"model {len(rows)}", trained.recipe, trained.scores, values))
        self.progress("measuring", total, total)
        return tuple(rows), curves

    def rank(self, rows: tuple[ModelRow, ...]) -> tuple[CorrelationRow, ...]:
        gaps: dict[str, Callable[[ModelRow], float]] = {
            "error_gap": lambda row: row.scores.error_gap,
            "loss_gap": lambda row: row.scores.loss_gap,
        }
        return tuple(
            CorrelationRow(
                key,
                gap,
                kendall(
                    [row.sharpness[key].mean for row in rows],
                    [value(row) for row in rows],
                    resamples=self.settings.resamples,
                    seed=self.settings.seed,
                ),
            )
            for gap, value in gaps.items()
            for key in GEOMETRIES
        )

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


def _like(batch: Batch, model: nn.Module) -> dict[str, Any]:
    """The batch on the model's device, its images in the model's dtype."""
    parameter = next(model.parameters())
    return {
        "pixel_values": batch["pixel_values"].to(parameter),
        "labels": batch["labels"].to(parameter.device),
    }


def _orbit_row(dtype: str, key: str, scale: float, before: SharpnessResult, after: SharpnessResult) -> OrbitRow:
    return OrbitRow(
        dtype, key, scale, before.mean, after.mean, float(before.base_losses[0]), float(after.base_losses[0])
    )


def _pair_rows(symmetries: Symmetries, proof: Proof) -> tuple[PairRow, ...]:
    return tuple(
        PairRow(pair.name, pair.kind, pair.group, pair.n, pair.m, proved.change, proved.control, proved.verdict)
        for pair, proved in zip(symmetries.pairs, proof.pairs, strict=True)
    )
