"""A text stream beside an engine's requests: both run the same network in turns without disturbing each other."""

from __future__ import annotations

import pytest
import torch

from smelt.kvcache.streaming import InfiniPot, TextStream
from smelt.models.model import Model
from smelt.serve.engine.engine import Engine
from tests.serve.test_engine import SMALL, answers, expected, prompts
from tests.tiny import BUILDS


@pytest.mark.parametrize("compiled", [True, False])
def test_a_stream_and_requests_in_turns(compiled: bool) -> None:
    engine = Engine(Model(BUILDS["llama"]()), compiled=compiled, **SMALL)
    rule, words = InfiniPot(prompt=(5, 6, 7)), torch.randint(3, 99, (200,), generator=torch.Generator().manual_seed(0))
    stream = engine.stream(40, keep=14, reserved=8, method=rule)
    alone = TextStream(Model(BUILDS["llama"]()), 40, keep=14, reserved=8, method=rule)
    texts = prompts(3)
    reference = [expected(BUILDS["llama"](), text) for text in texts]
    size = stream.nbytes
    for chunk in words.split(50):
        stream.push(chunk)
        alone.push(chunk)
        assert answers(engine, texts) == reference
        assert torch.equal(stream.answer([9, 10], 4), alone.answer([9, 10], 4))
    assert stream.num_seen == 200 and stream.num_compressions > 3 and stream.nbytes == size
