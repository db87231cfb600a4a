"""One model over several processes gives the tokens of one, and a process that dies is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smelt.errors import ModelError
from smelt.method import Context
from smelt.models.artifact import save_artifact
from smelt.models.load import load
from smelt.models.model import Model
from smelt.quantize.rtn import RoundToNearest
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.parallel import shard
from tests.serve.test_engine import GREEDY, SMALL, answers, expected, prompts
from tests.tiny import BUILDS


def saved(name: str, folder: Path) -> str:
    folder.mkdir()
    save_artifact(Model(BUILDS[name](), source=name), folder)
    return str(folder)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_two_processes_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "model")
    wanted = [expected(load(folder).network, text) for text in prompts(3)]
    engine = Engine(folder, devices=2, **SMALL)
    runner: Any = engine.runner
    try:
        assert runner.path == "module on 2 devices"
        assert answers(engine, prompts(3)) == wanted
        runner._others[0].kill()
        runner._others[0].wait()
        engine.submit(prompts()[0], GREEDY)
        with pytest.raises(RuntimeError, match="ended with -9"):
            engine.step()
    finally:
        from torch import distributed

        runner._others[0].kill()
        distributed.destroy_process_group()


def test_what_cannot_be_split() -> None:
    model = Model(BUILDS["llama"]())
    with pytest.raises(ModelError, match="2 heads, too few for 3"):
        shard(model, 0, 3)
    RoundToNearest(bits=4, group=16).apply(model, Context())
    with pytest.raises(ModelError, match="quantised"):
        shard(model, 0, 2)
