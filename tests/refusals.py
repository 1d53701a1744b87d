"""What a refusal must be: one sentence that says what is wrong."""

from __future__ import annotations


def one_sentence(message: str) -> bool:
    """Return whether it is a line of text and no page of a traceback."""
    return "\n" not in message.strip() and "Traceback" not in message and len(message) > 20
