"""A server of an encoder: embeddings match sentence-transformers, in both of OpenAI's encodings."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers as hf

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.errors import ModelError
from smelt.models.artifact import save_artifact
from smelt.models.model import Model
from smelt.serve.encoder import Encoder, _positions
from smelt.serve.server.app import create_app
from smelt.serve.server.service import Service
from smelt.serve.server.settings import ServerSettings
from smelt.serve.worker.client import EngineClient
from tests.character_tokenizer import character_tokenizer
from tests.serve.fake_engine import fake_engine_command
from tests.tiny import BUILDS, ENCODER

TEXTS = ["hello", "a longer text, so that there is padding", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoders") / "encoder"
    torch.manual_seed(0)
    hf.BertModel(hf.BertConfig(**ENCODER, max_position_embeddings=64)).eval().save_pretrained(path)
    character_tokenizer(encoder=True).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def ask(folder: Path) -> Iterator[Any]:
    """Send a request to a service that detected its model type by itself, without a socket."""
    runner = asyncio.Runner()
    service = Service(ServerSettings(str(folder)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            EngineClient,
            "command",
            fake_engine_command(f"pipe.send(NotALanguageModel(folder={str(folder)!r}, task='embedding'))"),
        )
        runner.run(service.start())
    transport = httpx.ASGITransport(create_app(service))  # type: ignore[arg-type]

    def asked(method: str, path: str, content: Any = None) -> httpx.Response:
        async def main() -> httpx.Response:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path, json=content)

        return runner.run(main())

    yield asked
    runner.run(service.stop())
    runner.close()


def expected(folder: Path, text: str) -> torch.Tensor:
    """Compute the formula: the mean over tokens, normalized to unit length."""
    network, tokenizer = hf.BertModel.from_pretrained(folder).eval(), character_tokenizer(encoder=True)
    with torch.no_grad():
        states = network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    mean = states.mean(0)
    return mean / mean.norm()


def test_embeddings(ask: Any, folder: Path) -> None:
    answer = ask("POST", "/v1/embeddings", {"input": TEXTS, "model": "encoder"}).json()
    assert [item["index"] for item in answer["data"]] == [0, 1, 2] and answer["object"] == "list"
    for text, item in zip(TEXTS, answer["data"], strict=True):
        torch.testing.assert_close(torch.tensor(item["embedding"]), expected(folder, text), atol=1e-5, rtol=1e-4)
    counts = [len(character_tokenizer(encoder=True)(text)["input_ids"]) for text in TEXTS]
    assert answer["usage"] == {"prompt_tokens": sum(counts), "total_tokens": sum(counts), "completion_tokens": 0}
    packed = ask("POST", "/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"}).json()["data"][0]
    vector = struct.unpack("<32f", base64.b64decode(packed["embedding"]))
    assert vector == pytest.approx(answer["data"][0]["embedding"])
    tokens = character_tokenizer(encoder=True)(TEXTS[0])["input_ids"]
    by_tokens = ask("POST", "/v1/embeddings", {"input": tokens}).json()["data"][0]["embedding"]
    assert by_tokens == pytest.approx(answer["data"][0]["embedding"])
    assert "smelt:embeddings_total" in ask("GET", "/metrics").text


def test_long_texts_are_truncated_on_request(ask: Any, folder: Path) -> None:
    tokenizer = character_tokenizer(encoder=True)
    for count in (10, 64, -1):
        limit = 64 if count == -1 else count
        text = "a long text " * 1000
        body = {"input": text, "truncate_prompt_tokens": count}
        answer = ask("POST", "/v1/embeddings", body).json()
        tokens = tokenizer(text, truncation=True, max_length=limit)["input_ids"]
        same = ask("POST", "/v1/embeddings", {"input": tokens}).json()
        assert answer["data"] == same["data"] and answer["usage"]["prompt_tokens"] == limit == len(tokens)
    short = ask("POST", "/v1/embeddings", {"input": "hello", "truncate_prompt_tokens": 10}).json()
    assert short["data"] == ask("POST", "/v1/embeddings", {"input": "hello"}).json()["data"]
    for count in (0, 65):
        wrong = ask("POST", "/v1/embeddings", {"input": "hello", "truncate_prompt_tokens": count})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "truncate_prompt_tokens"


def test_unsupported_requests_to_an_encoder(ask: Any) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x"}), ("/v1/embeddings", {"input": []}), ("/v1/embeddings", {"input": [99]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/embeddings", {"input": "x" * 100}),
        ("/v1/embeddings", {"input": "x", "dimensions": 8}), ("/v1/embeddings", {"input": "x", "encoding_format": "f"}),
    ):  # fmt: skip
        answer = ask("POST", path, body)
        assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert ask("GET", "/health").status_code == 200 and ask("GET", "/state").json()["kind"] == "encoder"
    assert ask("GET", "/").status_code == 200


def test_position_limits_and_unsupported_models(tmp_path: Path) -> None:
    assert _positions(BUILDS["bert"]().base_model) == 512
    roberta = BUILDS["roberta"]().base_model
    assert _positions(roberta) == roberta.config.max_position_embeddings - 2
    hf.BertModel(hf.BertConfig(**ENCODER)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no tokenizer"):
        Encoder(str(tmp_path))
    with pytest.raises(ModelError, match="is for images"):
        asyncio.run(Service(ServerSettings(str(tmp_path)))._start_encoder(str(tmp_path), "images"))


@pytest.mark.parametrize("network_class", [hf.BertForSequenceClassification, hf.BertModel])
def test_integer_encoder_is_served_like_its_float_network(network_class: Any, tmp_path: Path) -> None:
    """The integer graph embeds, with a head it also classifies; its longest text is that of the float network."""
    torch.manual_seed(0)
    network = network_class(hf.BertConfig(**ENCODER, max_position_embeddings=64, num_labels=3)).eval()
    tokenizer = character_tokenizer(encoder=True)
    batches = [dict(tokenizer(TEXTS, padding=True, return_tensors="pt"))]
    network.save_pretrained(tmp_path / "float")
    tokenizer.save_pretrained(tmp_path / "float")
    model = Model(network, tokenizer)
    METHODS.build({"method": "integer-only"}).apply(model, MethodContext(batches=batches))
    (tmp_path / "integer").mkdir()
    save_artifact(model, tmp_path / "integer")
    tokens = [tokenizer(text)["input_ids"] for text in TEXTS]
    exact, integer = Encoder(str(tmp_path / "float")), Encoder(str(tmp_path / "integer"))
    assert integer.max_model_len == exact.max_model_len
    vectors = [torch.tensor(asyncio.run(encoder.embed(tokens))) for encoder in (exact, integer)]
    assert torch.cosine_similarity(*vectors, dim=-1).min() > 0.999
    assert integer.labels == exact.labels
    if integer.labels:
        labels = [torch.tensor(asyncio.run(encoder.classify(tokens))) for encoder in (exact, integer)]
        assert (labels[0] - labels[1]).abs().max() < 0.01
        assert labels[1].sum(-1).tolist() == pytest.approx([1.0] * 3)
