"""The command of a training run: its arguments, and how a rank ends: one sentence and an exit code, never a hang."""

from __future__ import annotations

import argparse
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
from smelt.logs import show_logs
from smelt.train.trainer.config import PRECISIONS, TrainConfig
from smelt.train.trainer.distributed import exit_on_signal, init_distributed, print_error, report_lost_workers

NOT_STARTED = "training had not begun, so start it again."


class ResumeHint:
    """How to continue after a stop: a sentence that follows how far the run has come."""

    def __init__(self) -> None:
        self.current: Callable[[], str] = lambda: NOT_STARTED

    def __call__(self) -> str:
        return self.current()


def build_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Build the parser of the options that do not depend on how ranks are started."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("config", type=Path, help="a YAML file, see docs/training.md")
    parser.add_argument(
        "--gradients", help="none, auto, bf16 or a compressor such as exdyna:density=0.001; overrides the file"
    )
    parser.add_argument("--precision", choices=PRECISIONS, help="of forward and backward; overrides the file")
    parser.add_argument("--out", type=Path, help="the folder of the run (default: runs/NAME of the file)")
    parser.add_argument("--resume", action="store_true", help="continue the run in that folder, if there is one")
    parser.add_argument("--resplit", action="store_true", help="continue with another number of ranks")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = build_parser("python -m smelt.train", "Train a model; start it with torchrun.").parse_args(argv)
    options = {key: value for key, value in vars(args).items() if key not in ("config", "debug")}
    exit_process(run_and_report(lambda: train(args.config, **options), args.debug))


def train(
    path: Path, *, gradients: str | None, precision: str | None, out: Path | None, resume: bool, resplit: bool
) -> None:
    """Train by a configuration file in a process that torchrun has started, or in a single one."""
    config = TrainConfig.load(path, gradients, precision)
    resume_hint = ResumeHint()
    exit_on_signal(resume_hint)
    run_worker(
        config,
        run_folder_path(path, out),
        lambda: init_distributed(config.device, config.timeout),
        resume_hint,
        resume=resume,
        resplit=resplit,
    )
    distributed.destroy_process_group()


def run_folder_path(config: Path, out: Path | None) -> Path:
    """Return the folder of a run: `out`, or runs/NAME."""
    return out or Path("runs") / config.stem


def run_worker(
    config: TrainConfig,
    out: Path,
    init: Callable[[], torch.device],
    resume_hint: ResumeHint,
    *,
    resume: bool,
    resplit: bool,
) -> None:
    """Join the other ranks by `init`, and train."""
    warnings.filterwarnings("ignore", "Grad strides do not match")  # of 1x1 convolutions in DDP: nobody can act on it
    import transformers  # slow, as is what follows: a wrong configuration is reported before

    from smelt.train.trainer.trainer import Trainer

    device = init()
    transformers.logging.set_verbosity_error()
    with report_lost_workers(resume_hint):
        if distributed.get_rank() == 0:
            show_logs()
        trainer = Trainer(config, out, device, resume=resume, resplit=resplit)
        resume_hint.current = trainer.resume_hint
        trainer.train()
        distributed.barrier()  # nobody ends before the model is saved


def run_and_report(run: Callable[[], None], debug: bool) -> int:
    """Run, and return 0, or after printing an error 2, or 1 if it is a bug."""
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


def exit_process(code: int) -> NoReturn:
    """End at once: threads of a backend that wait for lost ranks must not keep the process alive."""
    sys.stderr.flush()
    os._exit(code)
