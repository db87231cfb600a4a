"""Compute the logits of selected tokens in slices, so that a large vocabulary does not exhaust memory.

All logits of a window of 4,096 tokens with a vocabulary of 150,000 take 2.5 GB. Most language models end in a plain
linear head: the network runs once up to the head, and the head runs over a few hundred rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Cache, PreTrainedModel

_MAX_LOGITS_BYTES = 2**26

LogitRows = Callable[[slice], Tensor]
NewCache = Callable[[], Cache]  # creates the KV cache of a forward, if not the network's own


@contextmanager
def eval_mode(network: PreTrainedModel) -> Iterator[None]:
    """Disable gradients and dropout; restore the network's mode afterwards."""
    training = network.training
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        network.train(training)


def logit_rows(
    network: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, keep: Tensor, cache: NewCache | None = None
) -> LogitRows:
    """Run the network and return a function from a slice of the tokens marked in `keep` to their float32 logits."""
    # All three inputs are [batch, tokens]; kept tokens are numbered through the batch in order.
    hidden: list[Tensor] = []
    head = network.get_output_embeddings()

    def keep_last_position(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden.append(inputs[0])
        return (inputs[0][:, -1:], *inputs[1:])

    def run() -> Tensor:
        cache_arguments = {} if cache is None else {"past_key_values": cache()}
        logits: Tensor = network(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **cache_arguments
        ).logits
        return logits

    if head is None:  # inside a program
        logits = run()[keep]
        return lambda part: logits[part].float()
    handle = head.register_forward_pre_hook(keep_last_position)
    try:
        last = run()  # [batch, 1, vocabulary]
    finally:
        handle.remove()
    if torch.equal(last, head(hidden[0][:, -1:])):
        rows = hidden[0][keep]  # [kept, hidden size]
        return lambda part: head(rows[part]).float()
    # Some networks scale or cap the head's output, so only a full forward is correct.
    logits = run()[keep]
    return lambda part: logits[part].float()


def slices(rows: int, vocab_size: int) -> Iterator[slice]:
    """Yield slices over `rows` whose logits take at most about 64 MiB each."""
    size = max(1, _MAX_LOGITS_BYTES // (4 * vocab_size))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def token_losses(
    network: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, scored: Tensor, cache: NewCache | None = None
) -> Tensor:
    """Return the negative log-likelihood of each token marked in `scored`. [scored tokens], float64

    The first token of a row has no context and must not be marked.
    """
    # The logits at one position predict the next token.
    keep = scored.roll(-1, dims=1)
    targets = input_ids[scored]
    rows = logit_rows(network, input_ids, attention_mask, keep, cache)
    losses = [
        cross_entropy(rows(part), targets[part], reduction="none").double()
        for part in slices(len(targets), network.config.get_text_config().vocab_size)
    ]
    return torch.cat(losses) if losses else torch.zeros(0, dtype=torch.float64)


def score_targets(
    network: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, keep: Tensor, targets: Tensor,
    cache: NewCache | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the log-likelihood of a target after each token marked in `keep`, and whether no token is more likely.

    The targets and both results are numbered through the batch in order. [kept tokens], float64 and bool
    """
    rows = logit_rows(network, input_ids, attention_mask, keep, cache)
    likelihoods, greedy = [], []
    for part in slices(len(targets), network.config.get_text_config().vocab_size):
        logits = rows(part)
        likelihoods.append(-cross_entropy(logits, targets[part], reduction="none").double())
        greedy.append(logits.argmax(dim=1) == targets[part])
    return torch.cat(likelihoods), torch.cat(greedy)
