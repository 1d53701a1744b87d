"""Propose wires by a walk through a recorded program, and decide by Noether charges at generic points what acts on them."""
