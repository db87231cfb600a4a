"""A training script ends with exit code 0, also where threads of gloo get no time until the interpreter ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_tutorials import ENVIRONMENT

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from smelt.train import ExDyna, compress_gradients

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 1))
compress_gradients(model, ExDyna(density=0.05))
for _ in range(20):
    model(torch.randn(8, 64)).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_busy_machine_aborts_no_finished_training(tmp_path: Path) -> None:
    """Without waiting, about a third of the runs were aborted here."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        for _ in range(8):
            done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
    finally:
        for process in busy:
            process.kill()
            process.wait()
