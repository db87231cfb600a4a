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
from smelt.train.trainer.distributed import exit_on_signal, init_distributed, print_error, report_lost_workers

BEFORE = "it had not begun, so start it again."


def build_parser(program: str, description: str) -> argparse.ArgumentParser:
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
    given = build_parser("python -m smelt.train", "Train a model; start it with torchrun.").parse_args(words)
    end(exit_code_of(lambda: train(given), given.debug))


def train(given: argparse.Namespace) -> None:
    """The whole run, in a worker that torchrun has started."""
    config = TrainConfig.load(given.config, given.gradients)
    resume_hint = [lambda: BEFORE]
    exit_on_signal(lambda: resume_hint[0]())
    out = run_folder_path(given.config, given.out)
    work(
        config,
        out,
        lambda: init_distributed(config.device, config.timeout),
        resume_hint,
        resume=given.resume,
        resplit=given.resplit,
    )
    distributed.destroy_process_group()


def run_folder_path(config: Path, out: Path | None) -> Path:
    """Of the run, unless it was told."""
    return out or Path("runs") / config.stem


def work(
    config: TrainConfig,
    out: Path,
    meet: Callable[[], torch.device],
    resume_hint: list[Callable[[], str]],
    *,
    resume: bool,
    resplit: bool,
) -> None:
    """What a worker does: it meets the others and goes through the loop; `resume_hint` follows how far it has come."""
    warnings.filterwarnings("ignore", "Grad strides do not match")  # of 1x1 convolutions in DDP: nobody can act on it
    import transformers  # slow, as what follows: a wrong configuration is told before

    from smelt.train.trainer.trainer import Trainer

    device = meet()
    transformers.logging.set_verbosity_error()
    with report_lost_workers(lambda: resume_hint[0]()):
        if distributed.get_rank() == 0:
            logging.basicConfig(format="  %(message)s")
            logging.getLogger("smelt.train").setLevel(logging.INFO)
        loop = Trainer(config, out, device, resume=resume, resplit=resplit)
        resume_hint[0] = loop.resume_hint
        loop.run()
        distributed.barrier()  # nobody ends before the model is saved


def exit_code_of(run: Callable[[], None], debug: bool) -> int:
    """How a run ends: with 0, or with a sentence and 2, or 1 where it is our fault."""
    try:
        run()
        return 0
    except SmeltError as error:
        if debug:
            traceback.print_exc()
        print_error(str(error))
        return 2
    except Exception as error:
        traceback.print_exc()
        print_error(f"{type(error).__name__}: {error}: this is a bug.")
        return 1


def end(code: int) -> NoReturn:
    """At once: threads of a backend that wait for lost workers must not keep the process."""
    sys.stderr.flush()
    os._exit(code)
