"""Calls of the command line, and what a user may write into a module."""

from __future__ import annotations

import hashlib
from pathlib import Path

from click.testing import CliRunner, Result

from quotient_manifolds.cli.app import cli

TEXTS = [
    ("a very good film", "POS"),
    ("not a good film", "NEG"),
    ("very bad", "NEG"),
    ("good not bad", "POS"),
    ("a film", "POS"),
]
FAST = ("--steps", 2)

MINE = """
import torch
from torch import nn

def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 3))

def layer():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)

def one_token():
    return torch.zeros(2, 1, 8)

def narrow():
    return torch.zeros(2, 5, 7)

def raises():
    raise KeyError("weights")

def inputs():
    torch.manual_seed(1)
    return torch.randn(4, 5, 8)

def batches():
    torch.manual_seed(1)
    return [(torch.randn(4, 5, 8), torch.tensor([0, 1, 2, 0])) for _ in range(2)]

def no_batch():
    return []

def squares(model, batch):
    return model(batch[0]).pow(2).mean()

class Broken(nn.Linear):
    def forward(self, x):
        return x.no_such_method()

def broken():
    return Broken(8, 3)

class Writing(nn.Sequential):
    def forward(self, x):
        self[0].weight.data.mul_(0.5)
        return super().forward(x.mul_(0.5).flatten(1))

def writing():
    torch.manual_seed(0)
    return Writing(nn.Linear(40, 3))

def swapped(model):
    import quotient_manifolds as qm
    return qm.find_symmetries(model.eval(), torch.randn(2, 5, 8, dtype=next(model.parameters()).dtype))

def undeclared(model):
    return 3

def crooked_loss(model, batch):
    raise KeyError("weights")
"""


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def digest(directory: Path) -> dict[str, str]:
    """What is in the files of a directory, to tell whether a command changed them."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


def refused(shown: Result, *words: str) -> None:
    """The command left with 2 and one sentence, which has the words, and printed nothing else."""
    assert shown.exit_code == 2, shown.output
    sentence = shown.stderr.strip().splitlines()[-1]
    assert sentence.startswith("Error: ")
    for word in words:
        assert word in sentence, sentence
    assert shown.stdout == ""
    assert "Traceback" not in shown.output
    assert isinstance(shown.exception, SystemExit)
