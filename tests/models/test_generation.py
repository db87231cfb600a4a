"""Generation in batches: the same as alone, cut behind the end token, and repeatable."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

from smelt.models.generation import end_tokens, generate, generate_text
from tests.trained import character_model


def test_answers_do_not_depend_on_their_batch_or_on_the_models_settings() -> None:
    model = character_model()
    network, tokenizer = model.network, model.tokenizer
    prompts = [tokenizer(text)["input_ids"] for text in ("the dog likes", "the", "the cat s")]
    alone = [generate(network, [prompt], 12)[0] for prompt in prompts]
    assert all(len(answer) == 12 for answer in alone)
    network.generation_config = kept = GenerationConfig(repetition_penalty=5.0, num_beams=3)
    assert generate(network, prompts, 12, batch_size=2) == alone
    assert network.generation_config is kept
    greedy = network(torch.tensor([prompts[0]])).logits[0, -1].argmax()
    assert alone[0][0] == int(greedy)


def test_an_answer_ends_with_the_end_token() -> None:
    network = character_model().network
    tokens = character_model().tokenizer("the dog likes the")["input_ids"]
    plain = generate(network, [tokens], 12)[0]
    network.generation_config.eos_token_id = plain[4]
    length = plain.index(plain[4]) + 1
    assert end_tokens(network) == [plain[4]] and generate(network, [tokens, tokens[:3]], 12)[0] == plain[:length]
    assert len(generate(network, [tokens], 12, ignore_eos=True)[0]) == 12


def test_generated_text_is_repeatable_and_leaves_the_generator_alone() -> None:
    network = character_model().network
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    text = generate_text(network, samples=40, length=20, seed=3)
    assert torch.equal(torch.rand(3), expected) and text.shape == (40, 20)
    assert torch.equal(text, generate_text(network, samples=40, length=20, seed=3))
    assert not torch.equal(text, generate_text(network, samples=40, length=20, seed=4))
    start = generate(network, [[int(text[0, 0])]], 2)[0]
    assert text[0, 1:3].tolist() == start, "the first tokens are the most likely ones"
    assert not torch.equal(text[:, 5:], torch.tensor(generate(network, text[:, :5].tolist(), 15)))
    noise = torch.randint(4, 99, text.shape)
    with torch.no_grad():
        losses = [float(network(input_ids=ids, labels=ids).loss) for ids in (text, noise)]
    assert losses[0] < 0.5 * losses[1]
