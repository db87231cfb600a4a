"""Greedy generation by llama.cpp, run by benchmarks/serve/cpu_engine.py in an environment with its Python package.

    python llamacpp_generate.py MODEL.gguf PROMPTS.json RESULT.json THREADS

PROMPTS holds lists of token ids and how many tokens each is answered with; all of them are answered at once, in one
batch a step. RESULT gets the seconds of everything, of the decoding alone, and the tokens.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np


def main(model: str, prompts: str, result: str, threads: str) -> None:
    asked = json.loads(Path(prompts).read_text())
    rows = []
    for texts in asked["batches"]:
        engine = _Engine(model, len(texts), max(map(len, texts)) + asked["answer"] + 8, int(threads))
        engine.generate(texts, 4)  # warms up
        rows.append(engine.generate(texts, asked["answer"]))
        engine.close()
    Path(result).write_text(json.dumps({"version": llama_cpp.__version__, "rows": rows}))


class _Engine:
    def __init__(self, model: str, streams: int, length: int, threads: int) -> None:
        settings = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), settings)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_seq_max = length * streams, streams
        context.n_batch = context.n_ubatch = 512
        context.n_threads = context.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def generate(self, prompts: list[list[int]], answer: int) -> dict[str, object]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        start = time.perf_counter()
        tokens = [self._step([(token, place, row, place == len(text) - 1) for place, token in enumerate(text)])[-1]
                  for row, text in enumerate(prompts)]  # fmt: skip
        answers = [[token] for token in tokens]
        decoding = time.perf_counter()
        for step in range(answer - 1):
            fed = [(tokens[row], len(text) + step, row, True) for row, text in enumerate(prompts)]
            tokens = self._step(fed)
            for row, token in enumerate(tokens):
                answers[row].append(token)
        end = time.perf_counter()
        return {"seconds": end - start, "decoding": end - decoding, "answers": answers}

    def _step(self, fed: list[tuple[int, int, int, bool]]) -> list[int]:
        """The most likely next tokens of those that ask for them."""
        batch, wanted = self.batch, []
        batch.n_tokens = len(fed)
        for place, (token, position, sequence, wants) in enumerate(fed):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            batch.logits[place] = wants
            if wants:
                wanted.append(place)
        if llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        results = []
        for place in wanted:
            logits = llama_cpp.llama_get_logits_ith(self.context, place)
            values = np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.vocabulary,))
            results.append(int(values.argmax()))
        return results


if __name__ == "__main__":
    main(*sys.argv[1:])
