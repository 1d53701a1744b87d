"""When Auto-PGD reconsiders its step size: numbers of steps done, ascending."""

from __future__ import annotations


def released_checkpoints(steps: int) -> tuple[int, ...]:
    """Stretches of int(0.22 steps), each int(0.03 steps) shorter than the last, at least int(0.06 steps) and 1 long."""
    length, shrink, least = (max(int(part * steps), 1) for part in (0.22, 0.03, 0.06))
    checks: list[int] = []
    done = length
    while done <= steps:
        checks.append(done)
        length = max(length - shrink, least)
        done += length
    return tuple(checks)


def stated_checkpoints(steps: int) -> tuple[int, ...]:
    """ceil(p_j steps) for p_0 = 0, p_1 = 0.22, p_j+1 = p_j + max(p_j - p_j-1 - 0.03, 0.06) <= 1, in hundredths."""
    earlier, p = 0, 22
    checks: list[int] = []
    while p <= 100:
        checks.append(-(-p * steps // 100))
        earlier, p = p, p + max(p - earlier - 3, 6)
    return tuple(sorted(set(checks)))


SCHEDULES = {"released": released_checkpoints, "stated": stated_checkpoints}
