"""Propose wires by a walk through a recorded program, and read charges off replays of it."""
