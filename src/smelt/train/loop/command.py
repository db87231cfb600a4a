"""The command of a training run: its arguments, and how a worker ends: one sentence and a code, never a hang."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch.distributed as distributed

from smelt.errors import SmeltError
from smelt.train.loop.config import TrainConfig
from smelt.train.loop.join import join, lost_workers_told, stop_when_told, tell

_BEFORE = "it had not begun, so start it again."


def arguments_of(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m smelt.train", description="Train a model; start it with torchrun.")
    parser.add_argument("config", type=Path, help="a YAML file, see docs/training.md")
    parser.add_argument(
        "--gradients", help="none, auto, bf16 or a compressor: exdyna:density=0.001; in place of what the file says"
    )
    parser.add_argument("--out", type=Path, help="the folder of the run; runs/NAME of the file unless told otherwise")
    parser.add_argument("--resume", action="store_true", help="go on with the run in that folder, if there is one")
    parser.add_argument("--resplit", action="store_true", help="go on with another number of workers")
    parser.add_argument("--debug", action="store_true", help="show the whole traceback of an error")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    given = arguments_of(words)
    code = _code_of(given)
    sys.stderr.flush()
    os._exit(code)  # threads of a backend that wait for lost workers must not keep the process


def train(given: argparse.Namespace) -> None:
    """The whole run."""
    config = TrainConfig.load(given.config, given.gradients)
    out = given.out or Path("runs") / given.config.stem
    way_out = [lambda: _BEFORE]
    stop_when_told(lambda: way_out[0]())
    warnings.filterwarnings("ignore", "Grad strides do not match")  # of 1x1 convolutions in DDP: nobody can act on it
    import transformers  # slow, as what follows: a wrong configuration is told before

    from smelt.train.loop.run import Loop

    device = join(config.device, config.timeout)
    transformers.logging.set_verbosity_error()
    with lost_workers_told(lambda: way_out[0]()):
        if distributed.get_rank() == 0:
            logging.basicConfig(format="  %(message)s")
            logging.getLogger("smelt.train").setLevel(logging.INFO)
        loop = Loop(config, out, device, resume=given.resume, resplit=given.resplit)
        way_out[0] = loop.way_out
        loop.run()
        distributed.barrier()  # nobody ends before the model is saved
    distributed.destroy_process_group()


def _code_of(given: argparse.Namespace) -> int:
    try:
        train(given)
        return 0
    except SmeltError as error:
        if given.debug:
            traceback.print_exc()
        tell(str(error))
        return 2
    except Exception as error:
        traceback.print_exc()
        tell(f"{type(error).__name__}: {error}: this is a bug.")
        return 1
