"""The program on the page about large models runs as it stands there, by the command that stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quotient_manifolds import next_token_cross_entropy
from tests.sharded.made import llama

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "large_models.md").read_text()


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```text\n# sharpness\.py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    # Threads of gloo abort every few processes that have sharded a model as they exit, without this package too.
    (tmp_path / "sharpness.py").write_text(program + "\nsys.stdout.flush()\n__import__('os')._exit(0)\n")
    model = llama(torch.float32)
    model.save_pretrained(tmp_path / "model")
    assert "torchrun --standalone --nproc-per-node 2 sharpness.py" in PAGE
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "sharpness.py"]
    done = subprocess.run(
        [*command, "model"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (printed,) = re.findall(r"^sharpness \d+\.\d{4}, loss (\d+\.\d{4})$", done.stdout, re.MULTILINE)
    ids = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(1))  # as on the page
    loss = next_token_cross_entropy(model.eval(), {"input_ids": ids, "labels": ids})
    assert float(printed) == pytest.approx(loss.item(), abs=2e-4)  # every process has its part of the weights
