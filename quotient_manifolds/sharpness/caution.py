"""Warn of measured values that need to be read with care."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from quotient_manifolds.sharpness.result import Result

Settings = ParamSpec("Settings")


class SharpnessWarning(UserWarning):
    """Warn that a measured value needs to be read with care; the subclasses say why."""


class TruncationWarning(SharpnessWarning):
    """Warn of truncated geodesics followed too far (`Result.reach`): take a smaller radius, or exact geodesics."""


class ConvergenceWarning(SharpnessWarning):
    """Warn of an ascent that has not converged (`Result.relative_gap`), or of a loss that bends down inside the ball.

    The latter is `Result.promise_kept` below 1/2. Take more steps, a smaller radius, or restarts.
    """


class RoundingWarning(SharpnessWarning):
    """Warn of an increase in loss so small that rounding decides its first digits."""


def warned(result: Result, above: int = 0) -> Result:
    """Return the result after issuing its warnings, attributed to the caller of the public function that called this.

    above: the number of decorators of that function.
    """
    for category, sentence in (
        (TruncationWarning, result.truncation_warning),
        (ConvergenceWarning, result.convergence_warning),
        (RoundingWarning, result.rounding_warning),
    ):
        if sentence is not None:
            warnings.warn(sentence, category, stacklevel=3 + above)
    return result


def takes_instead(**others: str) -> Callable[[Callable[Settings, Result]], Callable[Settings, Result]]:
    """Make a function raise TypeError for settings of other measures, naming the setting that it takes instead."""

    def named(function: Callable[Settings, Result]) -> Callable[Settings, Result]:
        @wraps(function)
        def checked(*args: Settings.args, **settings: Settings.kwargs) -> Result:
            if wrong := [name for name in others if name in settings]:
                raise TypeError(f"{function.__name__}() takes {others[wrong[0]]} instead. Found {wrong[0]}")
            return function(*args, **settings)

        return checked

    return named
