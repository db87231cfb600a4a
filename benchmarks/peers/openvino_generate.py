"""Greedy generation by OpenVINO GenAI, run by benchmarks/serve/cpu_engine.py in an environment that has it.

    python openvino_generate.py MODEL.gguf PROMPTS.json RESULT.json THREADS

PROMPTS holds texts and how many tokens each is answered with. One text goes through LLMPipeline, several at once
through continuous batching. RESULT gets the seconds of everything.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import openvino_genai as genai


def main(model: str, prompts: str, result: str, threads: str) -> None:
    asked = json.loads(Path(prompts).read_text())
    config = genai.GenerationConfig()
    config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
    properties = {"INFERENCE_NUM_THREADS": int(threads)}
    rows = []
    for texts in asked["texts"]:
        if len(texts) == 1:
            pipeline = genai.LLMPipeline(model, "CPU", **properties)
        else:
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size, scheduler.max_num_seqs = 1, len(texts)
            pipeline = genai.LLMPipeline(model, "CPU", scheduler_config=scheduler, **properties)
        config.max_new_tokens = 4
        pipeline.generate(texts, config)  # warms up
        config.max_new_tokens = asked["answer"]
        start = time.perf_counter()
        pipeline.generate(texts, config)
        rows.append({"seconds": time.perf_counter() - start})
        del pipeline
    Path(result).write_text(json.dumps({"version": genai.__version__, "rows": rows}))


if __name__ == "__main__":
    main(*sys.argv[1:])
