"""The command of a training run: its arguments, and how a worker ends: one sentence and a code, never a hang."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as distributed

from smelt.errors import SmeltError
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.join import join, lost_workers_told, stop_when_told, tell

BEFORE = "it had not begun, so start it again."


def parser_of(program: str, description: str) -> argparse.ArgumentParser:
    """What a run can be told, however its workers are started."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("config", type=Path, help="a YAML file, see docs/training.md")
    parser.add_argument(
        "--gradients", help="none, auto, bf16 or a compressor: exdyna:density=0.001; in place of what the file says"
    )
    parser.add_argument("--out", type=Path, help="the folder of the run; runs/NAME of the file unless told otherwise")
    parser.add_argument("--resume", action="store_true", help="go on with the run in that folder, if there is one")
    parser.add_argument("--resplit", action="store_true", help="go on with another number of workers")
    parser.add_argument("--debug", action="store_true", help="show the whole traceback of an error")
    return parser


def main(words: list[str] | None = None) -> None:
    given = parser_of("python -m smelt.train", "Train a model; start it with torchrun.").parse_args(words)
    end(code_of(lambda: train(given), given.debug))


def train(given: argparse.Namespace) -> None:
    """The whole run, in a worker that torchrun has started."""
    config = TrainConfig.load(given.config, given.gradients)
    way_out = [lambda: BEFORE]
    stop_when_told(lambda: way_out[0]())
    out = folder_of(given.config, given.out)
    work(config, out, lambda: join(config.device, config.timeout), way_out, resume=given.resume, resplit=given.resplit)
    distributed.destroy_process_group()


def folder_of(config: Path, out: Path | None) -> Path:
    """Of the run, unless it was told."""
    return out or Path("runs") / config.stem


def work(
    config: TrainConfig,
    out: Path,
    meet: Callable[[], torch.device],
    way_out: list[Callable[[], str]],
    *,
    resume: bool,
    resplit: bool,
) -> None:
    """What a worker does: it meets the others and goes through the loop; `way_out` follows how far it has come."""
    warnings.filterwarnings("ignore", "Grad strides do not match")  # of 1x1 convolutions in DDP: nobody can act on it
    import transformers  # slow, as what follows: a wrong configuration is told before

    from smelt.train.trainer.run import Loop

    device = meet()
    transformers.logging.set_verbosity_error()
    with lost_workers_told(lambda: way_out[0]()):
        if distributed.get_rank() == 0:
            logging.basicConfig(format="  %(message)s")
            logging.getLogger("smelt.train").setLevel(logging.INFO)
        loop = Loop(config, out, device, resume=resume, resplit=resplit)
        way_out[0] = loop.way_out
        loop.run()
        distributed.barrier()  # nobody ends before the model is saved


def code_of(run: Callable[[], None], debug: bool) -> int:
    """How a run ends: with 0, or with a sentence and 2, or 1 where it is our fault."""
    try:
        run()
        return 0
    except SmeltError as error:
        if debug:
            traceback.print_exc()
        tell(str(error))
        return 2
    except Exception as error:
        traceback.print_exc()
        tell(f"{type(error).__name__}: {error}: this is a bug.")
        return 1


def end(code: int) -> NoReturn:
    """At once: threads of a backend that wait for lost workers must not keep the process."""
    sys.stderr.flush()
    os._exit(code)
