"""The model as lm-eval sees it: log-likelihoods from the network, text from the engine's continuous batching."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from smelt.data.batches import pad_batch, padding_token_id
from smelt.errors import ConfigError, ModelError, install_command
from smelt.measure.logits import eval_mode, score_targets
from smelt.measure.perplexity import cache_factory
from smelt.models.model import Model
from smelt.progress import NullProgress, Progress
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import MAX_STOPS, SamplingParams

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(f"lm-eval, which brings datasets, is not installed: {install_command('harness')}.") from error

DEFAULT_MAX_LENGTH = 2048  # tokens, for a model that names no number of positions
MAX_GENERATED_TOKENS = 256  # of a task that names no limit, as in lm-eval
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_MAX_QUEUED = 2**31  # every request of a task may wait

Pair = tuple[Any, list[int], list[int]]  # the request, the tokens of its context, the tokens of its continuation


class HarnessModel(TemplateLM):
    """A language model for lm-eval. Contexts and continuations are split into tokens by lm-eval's own rules."""

    log_likelihood_backend = "module"
    generation_backend = "engine"

    def __init__(
        self, model: Model, *, batch_size: int = 8, max_length: int | None = None, seed: int = 0,
        progress: Progress | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if model.task != "language" or model.tokenizer is None:
            raise ModelError(
                f"{model.source or 'this model'} is no language model with a tokenizer: lm-eval needs one."
            )
        self.model, self.tokenizer = model, model.tokenizer
        self.batch_size, self.seed, self.progress = batch_size, seed, progress or NullProgress()
        positions = getattr(model.network.config.get_text_config(), "max_position_embeddings", None)
        self.max_length: int = max_length or positions or DEFAULT_MAX_LENGTH
        self._attention = model.network.config._attn_implementation
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The engine, built when the first task generates text."""
        if self._engine is None:
            self._engine = Engine(self.model, device=str(self.model.device), max_queued=_MAX_QUEUED)
        return self._engine

    @property
    def eot_token_id(self) -> int:
        token = self.tokenizer.eos_token_id
        if token is None:
            raise ModelError(f"the tokenizer of {self.model.source or 'this model'} has no end-of-text token.")
        return int(token)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: BOS if there is one, else EOS."""
        token = self.tokenizer.bos_token_id
        return self.eot_token_id if token is None else int(token)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokenize; special tokens as the tokenizer adds them, but no second BOS."""
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer(string, verbose=False, **options)["input_ids"])

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each text over windows of `max_length` tokens, each token scored once."""
        windows = [list(self._windows(request.args[0])) for request in requests]
        scores = iter(self._loglikelihood_tokens([pair for pairs in windows for pair in pairs]))
        return [sum(next(scores)[0] for _ in pairs) for pairs in windows]

    def _windows(self, text: str) -> Iterable[Pair]:
        for window in get_rolling_token_windows(
            token_list=self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length,
            context_len=1,
        ):  # fmt: skip
            yield (None, *make_disjoint_window(window))

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_: Any) -> list[tuple[float, bool]]:
        """Return for each pair the log-likelihood of the continuation and whether greedy decoding would write it."""
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index][1]) - len(requests[index][2]))
        groups = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        with eval_mode(self.model.network), self._own_attention():
            for group in self.progress.track(groups, "log-likelihoods"):
                for index, score in zip(group, self._score([requests[index] for index in group]), strict=True):
                    scores[index] = score
        return scores

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        """Let the network attend by itself; an engine replaces its attention by one that reads the paged KV cache."""
        network = self.model.network
        replaced = network.config._attn_implementation
        network.set_attn_implementation(self._attention)
        try:
            yield
        finally:
            network.set_attn_implementation(replaced)

    def _score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        # The last token is predicted, not read; what is too long loses its beginning.
        rows = [(context + continuation)[-(self.max_length + 1) :][:-1] for _, context, continuation in pairs]
        targets = [continuation[-len(row) :] for row, (_, _, continuation) in zip(rows, pairs, strict=True)]
        encoded = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        batch = pad_batch(encoded, padding_token_id(self.tokenizer))  # [pairs, longest]
        ends = torch.tensor([[len(row)] for row in rows])
        starts = ends - torch.tensor([[len(target)] for target in targets])
        positions = torch.arange(batch["input_ids"].shape[1])
        device, counts = self.model.device, [len(target) for target in targets]
        likelihoods, greedy = score_targets(
            self.model.network, batch["input_ids"].to(device), batch["attention_mask"].to(device),
            ((positions >= starts) & (positions < ends)).to(device),
            torch.tensor([token for target in targets for token in target], device=device),
            cache_factory(self.model, None),
        )  # fmt: skip
        parts = zip(likelihoods.split(counts), greedy.split(counts), strict=True)
        return [(float(likelihood.sum()), bool(same.all())) for likelihood, same in parts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Answer every request; those with the same sampling settings share the engine's batches."""
        groups: dict[str, tuple[SamplingParams, list[int]]] = {}
        stops: list[list[str]] = []
        repeats: Counter[str] = Counter()
        for index, request in enumerate(requests):
            context, options = request.args
            sampling, until = self._sampling(options, repeats[f"{context}\0{options}"])
            repeats[f"{context}\0{options}"] += 1
            groups.setdefault(repr(sampling), (sampling, []))[1].append(index)
            stops.append(until)
        texts = [""] * len(requests)
        for sampling, indices in self.progress.track(list(groups.values()), "generated answers"):
            prompts = [self._prompt(requests[index].args[0], sampling) for index in indices]
            for index, output in zip(indices, self.engine.generate(prompts, sampling), strict=True):
                texts[index] = postprocess_generated_text(output.text, stops[index], None)
        return texts

    def _prompt(self, context: str, sampling: SamplingParams) -> list[int]:
        """Tokenize; a context that leaves too little space for the answer loses its beginning."""
        assert sampling.max_tokens is not None
        space = self.engine.max_model_len - sampling.max_tokens
        if space < 1:
            positions = self.engine.max_model_len
            raise ConfigError(f"an answer of {sampling.max_tokens:,} tokens does not fit into {positions:,} positions.")
        return self.tok_encode(context)[-space:] or [self.prefix_token_id]

    def _sampling(self, options: dict[str, Any], repeat: int) -> tuple[SamplingParams, list[str]]:
        """Return the engine's settings for lm-eval's, and all stop strings; each repeat has its own seed."""
        settings = dict(normalize_gen_kwargs(options, MAX_GENERATED_TOKENS))
        until = [text for text in settings.pop("until") if text]
        max_tokens, sampled = settings.pop("max_gen_toks"), settings.pop("do_sample")
        chosen = {name: settings.pop(name) for name in _SAMPLING if name in settings}
        if settings:
            raise ConfigError(f"the generation setting '{next(iter(settings))}' of a task is not supported.")
        chosen = chosen | {"seed": self.seed + repeat} if sampled else {"temperature": 0}
        sampling = SamplingParams(
            max_tokens=max_tokens, stop=tuple(until[:MAX_STOPS]), stop_token_ids=(self.eot_token_id,), **chosen
        )
        return sampling, until

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )  # fmt: skip
