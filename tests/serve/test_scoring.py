"""Reranking, scores and classes of encoders, compared with transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers as hf
from torch.nn.functional import cosine_similarity

from smelt.serve.server.app import create_app
from smelt.serve.server.service import Service
from smelt.serve.server.settings import ServerSettings
from tests.serve.test_embeddings import character_tokenizer
from tests.tiny import ENCODER

QUERY, DOCUMENTS = "a query", ["one text", "a query", "x", "another much longer text with padding"]
Ask = Callable[[str, Any], httpx.Response]


def write_encoder(folder: Path, labels: int) -> Path:
    """Write an encoder: with a classification head of so many labels, or without one."""
    torch.manual_seed(0)
    names = {index: f"class {index}" for index in range(labels)}
    config = hf.BertConfig(**ENCODER, max_position_embeddings=64, num_labels=labels or 2, id2label=names or None)
    network: Any = hf.BertForSequenceClassification(config) if labels else hf.BertModel(config)
    if labels:
        network.classifier.weight.data.mul_(50)
    network.eval().save_pretrained(folder)
    character_tokenizer(encoder=True).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("scoring")
    return {labels: write_encoder(folder / f"labels{labels}", labels) for labels in (0, 1, 3)}


@pytest.fixture(scope="module")
def asks(folders: dict[int, Path]) -> Iterator[dict[int, Ask]]:
    """Send requests to the service of each encoder, without a socket."""
    with asyncio.Runner() as runner:

        def ask_of(labels: int) -> Ask:
            service = Service(ServerSettings(str(folders[labels])))
            task = "classification" if labels else "embedding"
            runner.run(service._start_encoder(str(folders[labels]), task))
            transport = httpx.ASGITransport(create_app(service))  # type: ignore[arg-type]

            def ask(path: str, content: Any) -> httpx.Response:
                async def main() -> httpx.Response:
                    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                        return await client.post(path, json=content)

                return runner.run(main())

            return ask

        yield {labels: ask_of(labels) for labels in folders}


def test_embeddings_score_by_their_cosine(asks: dict[int, Ask]) -> None:
    ask = asks[0]
    answer = ask("/v1/embeddings", {"input": [QUERY, *DOCUMENTS]}).json()
    vectors = torch.tensor([entry["embedding"] for entry in answer["data"]])
    expected = cosine_similarity(vectors[:1], vectors[1:]).tolist()
    for path in ("/score", "/v1/score"):
        scored = ask(path, {"text_1": QUERY, "text_2": DOCUMENTS}).json()
        assert [entry["score"] for entry in scored["data"]] == pytest.approx(expected, abs=1e-5)
        assert [entry["index"] for entry in scored["data"]] == [0, 1, 2, 3] and scored["usage"]["total_tokens"] > 0
    for names in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        renamed = ask("/score", dict(zip(names, (QUERY, DOCUMENTS), strict=True))).json()
        assert renamed["data"] == scored["data"]
    pairwise = ask("/score", {"text_1": DOCUMENTS, "text_2": DOCUMENTS}).json()
    assert [entry["score"] for entry in pairwise["data"]] == pytest.approx([1.0] * 4, abs=1e-5)

    for path in ("/rerank", "/v1/rerank"):
        ranked = ask(path, {"query": QUERY, "documents": DOCUMENTS}).json()["results"]
        order = sorted(range(4), key=lambda index: -expected[index])
        assert [result["index"] for result in ranked] == order and ranked[0]["index"] == 1
        assert [result["relevance_score"] for result in ranked] == pytest.approx(sorted(expected)[::-1], abs=1e-5)
        assert [result["document"]["text"] for result in ranked] == [DOCUMENTS[index] for index in order]
    body = {"query": QUERY, "documents": [{"text": text} for text in DOCUMENTS], "top_n": 2, "return_documents": False}
    two = ask("/rerank", body).json()["results"]
    assert [sorted(result) for result in two] == [["index", "relevance_score"]] * 2
    listed = ask("/rerank", {"query": QUERY, "texts": DOCUMENTS, "raw_scores": False, "return_text": True}).json()
    assert [(entry["index"], entry["text"]) for entry in listed] == [(index, DOCUMENTS[index]) for index in order]
    assert [entry["score"] for entry in listed] == pytest.approx(sorted(expected)[::-1], abs=1e-5)
    assert [sorted(entry) for entry in ask("/rerank", {"query": QUERY, "texts": DOCUMENTS}).json()] == [
        ["index", "score"]
    ] * 4


def test_a_cross_encoder_reads_both_texts(asks: dict[int, Ask], folders: dict[int, Path]) -> None:
    network = hf.BertForSequenceClassification.from_pretrained(folders[1]).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folders[1])
    with torch.no_grad():
        expected = [
            float(network(**tokenizer(QUERY, text, return_tensors="pt")).logits.sigmoid()) for text in DOCUMENTS
        ]
    assert len({round(value, 4) for value in expected}) == 4
    scored = asks[1]("/score", {"text_1": QUERY, "text_2": DOCUMENTS}).json()
    assert [entry["score"] for entry in scored["data"]] == pytest.approx(expected, abs=1e-5)
    ranked = asks[1]("/rerank", {"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    assert [result["index"] for result in ranked] == sorted(range(4), key=lambda index: -expected[index])
    long = asks[1]("/score", {"text_1": "a" * 40, "text_2": "b" * 40})
    assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"


def test_classes_are_those_of_transformers(asks: dict[int, Ask], folders: dict[int, Path]) -> None:
    network = hf.BertForSequenceClassification.from_pretrained(folders[3]).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folders[3])
    answer = asks[3]("/classify", {"input": DOCUMENTS}).json()
    for text, entry in zip(DOCUMENTS, answer["data"], strict=True):
        with torch.no_grad():
            expected = network(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0]
        assert entry["probs"] == pytest.approx(expected.tolist(), abs=1e-5) and entry["num_classes"] == 3
        assert entry["label"] == f"class {int(expected.argmax())}"
    assert len(asks[3]("/classify", {"input": "one text"}).json()["data"]) == 1


def test_what_a_model_cannot_do_is_refused(asks: dict[int, Ask]) -> None:
    for ask, path, body, sentence in (
        (asks[0], "/classify", {"input": "x"}, "no classification head"),
        (asks[3], "/score", {"text_1": "x", "text_2": "y"}, "3 classes"),
        (asks[3], "/v1/embeddings", {"input": "x"}, "use /classify"),
        (asks[0], "/score", {"text_1": ["x", "y"], "text_2": ["x"]}, "as many as"),
        (asks[0], "/rerank", {"query": "x", "documents": []}, "documents"),
        (asks[0], "/rerank", {"query": "x"}, "documents, or texts"),
        (asks[0], "/rerank", {"query": "x", "texts": ["x"], "raw_scores": True}, "raw_scores"),
        (asks[0], "/rerank", {"query": "x" * 1000, "documents": ["x"]}, "it must have|the limit is"),
        (asks[0], "/rerank", {"model": "other", "query": "x", "documents": ["x"]}, "no model of that name"),
    ):
        answer = ask(path, body)
        assert answer.status_code in (400, 404), answer.text
        assert any(words in answer.text for words in sentence.split("|")), answer.text
