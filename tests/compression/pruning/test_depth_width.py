"""Whole blocks (ShortGPT, Minitron), hidden size (SliceGPT) and equal widths (Minitron): by hand, exactness, order."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.nn import functional as F

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.methods import pruning  # noqa: F401  (puts the methods on the list)
from smelt.compression.pruning.shortgpt import block_influence
from smelt.compression.pruning.slicegpt import principal_components, stream_covariance
from smelt.errors import BudgetError, DataError, ModelError, RecipeError
from smelt.measure.cost import block_parameters
from smelt.measure.perplexity import perplexity
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.depth import keep_blocks
from smelt.models.model import Model
from smelt.models.verify import verify
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from tests.tiny import BUILDS, inputs, labeled
from tests.trained import HELD_OUT, character_batches, character_model

RMS = ("llama", "llama-tied", "mistral", "qwen2", "qwen3")
CHAINS = ("bert", "distilbert", "mpnet", "gpt2", "opt", "llama-tied", "qwen2", "qwen3")


def context(name: str, **more: Any) -> MethodContext:
    return MethodContext(batches=[labeled(name, seed) for seed in range(3)], **more)


@torch.no_grad()
def logits(network: Any, batch: dict[str, Tensor]) -> Tensor:
    result: Tensor = network(**batch).logits
    return result


@pytest.mark.parametrize("name", ["llama", "mpnet"])
def test_block_influence_by_hand(name: str) -> None:
    """One minus the mean cosine between the hidden states before and after each block, without padding.

    A block of MPNet returns a tuple.
    """
    network, batch = BUILDS[name](), inputs(name)
    batch["attention_mask"][0, 8:] = 0
    with torch.no_grad():
        states = list(network(**batch, output_hidden_states=True).hidden_states)
        if name == "llama":  # the last of them is normalized
            network.model.norm = torch.nn.Identity()
            states[-1] = network(**batch, output_hidden_states=True).hidden_states[-1]
    expected = []
    for x, y in itertools.pairwise(states):
        cosines = [
            float(x[row, token] @ y[row, token] / (x[row, token].norm() * y[row, token].norm()))
            for row in range(3) for token in range(11) if batch["attention_mask"][row, token]
        ]  # fmt: skip
        expected.append(1 - float(np.mean(cosines)))
    model = Model(BUILDS[name]())
    assert block_influence(model, MethodContext(batches=[batch])) == pytest.approx(expected, abs=1e-5)


def test_block_influence_of_a_network_of_images() -> None:
    """Images have no mask: all patches count, and images of both batches alike."""
    network, batch = BUILDS["vit"](), inputs("vit")
    with torch.no_grad():
        states = network(**batch, output_hidden_states=True).hidden_states
    expected = [1 - float(F.cosine_similarity(x, y, dim=-1).mean()) for x, y in itertools.pairwise(states)]
    batches = [{"pixel_values": images} for images in batch["pixel_values"].split([1, 2])]
    assert block_influence(Model(network), MethodContext(batches=batches)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", CHAINS)
def test_removed_blocks_are_skipped_blocks(name: str, tmp_path: Path) -> None:
    """Removing equals passing the input through; the shorter network saves, reloads and numbers its KV cache."""
    network, batch = BUILDS[name](), inputs(name)
    skipped = copy.deepcopy(network)
    block = anatomy_of(skipped).blocks[1].module
    block.register_forward_hook(
        lambda _, args, output: (args[0], *output[1:]) if isinstance(output, tuple) else args[0]
    )
    keep_blocks(anatomy_of(network), [0, 2])
    assert len(anatomy_of(network).blocks) == 2 == network.config.num_hidden_layers
    assert torch.equal(logits(network, batch), logits(skipped, batch))
    save_artifact(Model(network), tmp_path)
    loaded = load_artifact(tmp_path).network
    assert torch.equal(logits(loaded, batch), logits(network, batch))
    if network.can_generate() and name != "bert":
        whole = loaded.generate(batch["input_ids"][:1], max_new_tokens=4, do_sample=False, use_cache=True)
        plain = loaded.generate(batch["input_ids"][:1], max_new_tokens=4, do_sample=False, use_cache=False)
        assert whole.equal(plain)


def useless_block() -> Any:
    network = BUILDS["llama"]()
    with torch.no_grad():
        network.model.layers[1].self_attn.o_proj.weight.zero_()
        network.model.layers[1].mlp.down_proj.weight.zero_()
    return network


def test_a_block_that_changes_nothing_goes_first() -> None:
    network = useless_block()
    expected = logits(network, inputs("llama"))
    facts = METHODS.build({"method": "shortgpt", "budget": "parameters=0.7"}).apply(Model(network), context("llama"))
    assert facts["blocks_removed"] == [1] and abs(facts["importance"][1]) < 1e-6 < facts["importance"][0]
    assert torch.equal(logits(network, inputs("llama")), expected)
    assert facts["parameters_removed"] == facts["block_parameters_before"] // 3


def test_minitron_depth_measures_the_loss_without_each_block() -> None:
    network, data = useless_block(), context("llama")
    losses = []
    for kept in ([0, 1, 2], [1, 2], [0, 2], [0, 1]):
        shorter = useless_block()
        keep_blocks(anatomy_of(shorter), kept)
        with torch.no_grad():
            losses.append(float(np.mean([float(shorter(**batch).loss) for batch in data.batches])))
    facts = METHODS.build({"method": "minitron-depth", "budget": "parameters=0.7"}).apply(Model(network), data)
    assert facts["importance"] == pytest.approx([loss - losses[0] for loss in losses[1:]], abs=1e-5)
    assert facts["blocks_removed"] == [int(np.argmin(losses[1:]))] and abs(facts["importance"][1]) < 1e-6


def test_the_loss_without_a_block_whose_output_is_a_tuple() -> None:
    """The mean is over sequences: the batches differ in size."""
    batches = [{key: tensor[rows] for key, tensor in labeled("mpnet").items()} for rows in (slice(1), slice(1, 3))]
    losses = []
    for kept in ([0, 1, 2], [1, 2], [0, 2], [0, 1]):
        shorter = BUILDS["mpnet"]()
        keep_blocks(anatomy_of(shorter), kept)
        with torch.no_grad():
            losses.append(float(shorter(**labeled("mpnet")).loss))
    step: Any = METHODS.build({"method": "minitron-depth", "budget": "parameters=0.7"})
    measured = step.importance(Model(BUILDS["mpnet"]()), MethodContext(batches=batches))
    assert measured == pytest.approx([loss - losses[0] for loss in losses[1:]], abs=1e-6)


def observe(method: str, network: Any, batches: list[dict[str, Tensor]]) -> Tensor:
    step: Any = METHODS.build({"method": method, "budget": "parameters=0.7"})
    model = Model(network)
    if method == "minitron":
        return torch.cat(step.observe(model.anatomy, MethodContext(batches=batches)))
    return torch.from_numpy(step.importance(model, MethodContext(batches=batches)))


def hooks(network: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in network.modules())


@pytest.mark.parametrize("method", ["shortgpt", "minitron-depth", "minitron"])
def test_observing_a_network_leaves_it_as_it_was(method: str) -> None:
    """Without dropout; the mode comes back, and no hook stays, also when a batch fails."""
    training, batches = BUILDS["bert"]().train(), [labeled("bert")]
    assert torch.equal(observe(method, training, batches), observe(method, BUILDS["bert"](), batches))
    assert training.training and hooks(training) == hooks(BUILDS["bert"]())
    bad = {**labeled("bert"), "input_ids": torch.full((3, 11), 99)}
    for network in (training, BUILDS["bert"]()):
        mode = network.training
        with pytest.raises(IndexError):
            observe(method, network, [*batches, bad])
        assert network.training is mode and hooks(network) == hooks(BUILDS["bert"]())


def test_removing_low_influence_beats_removing_high_influence() -> None:
    batches = character_batches(samples=8)
    influence = block_influence(character_model(), MethodContext(batches=batches))
    order = np.argsort(influence)
    losses = []
    for gone in (order[0], order[-1]):
        model = character_model()
        keep_blocks(model.anatomy, [index for index in range(3) if index != gone])
        losses.append(perplexity(model, HELD_OUT, context=64, limit=1000).value)
    assert losses[0] < 0.8 * losses[1], losses


@pytest.mark.parametrize("name", RMS)
def test_the_rotation_of_slicegpt_changes_nothing(name: str) -> None:
    network, batch = BUILDS[name](), inputs(name)
    expected = logits(network, batch)
    before = network.get_output_embeddings().weight.clone()
    facts = METHODS.build({"method": "slicegpt", "budget": "parameters=1.0"}).apply(Model(network), context(name))
    assert torch.allclose(logits(network, batch), expected, atol=1e-4)
    assert not torch.allclose(network.get_output_embeddings().weight, before, atol=1e-2), "it was rotated"
    assert facts["variance_kept"] == pytest.approx(1) and facts["hidden_size_after"] == 32


@pytest.mark.parametrize("name", RMS)
def test_a_stream_of_low_rank_is_sliced_without_loss(name: str) -> None:
    """If everything that writes the residual stream has rank 16, half of the dimensions carry nothing."""
    network, batch = BUILDS[name](), inputs(name)
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(32, 16, generator=generator)).Q
    projector = basis @ basis.T
    with torch.no_grad():
        network.model.embed_tokens.weight.copy_(network.model.embed_tokens.weight @ projector)
        for part in anatomy_of(network).parts:
            part.output.weight.copy_(projector @ part.output.weight)
            if part.output.bias is not None:
                part.output.bias.copy_(projector @ part.output.bias)
    expected = logits(network, batch)
    model = Model(network)
    facts = METHODS.build({"method": "slicegpt", "budget": "parameters=0.51"}).apply(model, context(name))
    assert facts["hidden_size_after"] == 16 == network.config.hidden_size
    assert facts["variance_kept"] == pytest.approx(1, abs=1e-6)
    assert torch.allclose(logits(network, batch), expected, atol=1e-4)


def test_principal_components_are_ordered_and_orthogonal() -> None:
    model = Model(BUILDS["llama"]())
    batches = [labeled("llama", 0)]
    covariance = stream_covariance(model, MethodContext(batches=batches))
    assert float(covariance.trace()) == pytest.approx(7 * 33 * 32, rel=1e-4), "7 norms, 33 tokens, mean square 1"
    rotation, values = principal_components(covariance)
    assert torch.allclose(rotation.T @ rotation, torch.eye(32, dtype=torch.float64), atol=1e-10)
    assert bool((values.diff() <= 0).all())
    assert torch.allclose(rotation.T @ covariance @ rotation, values.diag(), atol=1e-6)


@pytest.mark.parametrize("method", ["slicegpt", "shortgpt", "minitron"])
def test_a_smaller_model_saves_reloads_and_is_served(method: str, tmp_path: Path) -> None:
    model = character_model()
    before = block_parameters(model.anatomy)
    budget = {"shortgpt": 0.67, "slicegpt": 0.75, "minitron": 0.75}[method]
    more = {"ffn_multiple": 1} if method == "minitron" else {}
    step = METHODS.build({"method": method, "budget": {"parameters": budget}, **more})
    facts = step.apply(model, MethodContext(batches=character_batches(samples=8)))
    assert block_parameters(model.anatomy) <= budget * before
    assert facts["parameters_removed"] == before - block_parameters(model.anatomy) > 0
    save_artifact(model, tmp_path)
    verify(model, tmp_path)
    loaded = load_artifact(tmp_path)
    if method != "minitron":  # transformers reads it, too: no shape of its own
        plain = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.allclose(logits(plain, inputs("llama")), logits(loaded.network, inputs("llama")), atol=1e-5)
    loaded.network.generation_config.eos_token_id = None
    prompt = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        greedy = loaded.network.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    engine = Engine(loaded, block_size=4, max_model_len=64, kv_cache_bytes=10**6)
    request = engine.submit(prompt[0].tolist(), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))[0]
    while engine.busy:
        engine.step()
    assert request.output == greedy[0, 4:].tolist()


def test_minitron_scores_by_hand() -> None:
    """The mean absolute activation over a sequence, then the L2 norm over sequences; of heads, the norm of outputs.

    Padding is left out of the mean.
    """
    network, batches = BUILDS["llama"](), [labeled("llama", 0), labeled("llama", 1)]
    batches[1]["attention_mask"][1, 6:] = 0
    method: Any = METHODS.build({"method": "minitron", "budget": "parameters=0.8"})
    model = Model(network)
    scores = method.scores(model.anatomy, method.observe(model.anatomy, MethodContext(batches=batches)), None)
    seen: dict[str, list[Tensor]] = {"o": [], "down": []}
    layer = network.model.layers[1]
    layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen["o"].extend(args[0]))
    layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: seen["down"].extend(args[0]))
    for batch in batches:
        logits(network, batch)
    lengths = [11, 11, 11, 11, 6, 11]
    down = torch.stack([x[:n].abs().mean(0) for x, n in zip(seen["down"], lengths, strict=True)]).norm(dim=0)
    outputs = [x[:n].unflatten(-1, (2, 16)) for x, n in zip(seen["o"], lengths, strict=True)]
    groups = torch.stack([x.norm(dim=-1).mean(0) for x in outputs]).norm(dim=0)
    assert scores[2] == pytest.approx(groups.numpy(), rel=1e-4) and scores[3] == pytest.approx(down.numpy(), rel=1e-4)
    unmasked = [{"input_ids": batch["input_ids"]} for batch in batches[:1]]
    masked = method.observe(model.anatomy, MethodContext(batches=batches[:1]))
    assert all(map(torch.equal, method.observe(model.anatomy, MethodContext(batches=unmasked)), masked))


@pytest.mark.parametrize(
    ("step", "name", "error", "words"),
    [
        ({"method": "shortgpt", "budget": "macs=0.5"}, "llama", RecipeError, "budget of parameters"),
        ({"method": "slicegpt", "budget": "latency=0.5"}, "llama", RecipeError, "budget of parameters"),
        ({"method": "shortgpt", "budget": "parameters=0.2"}, "llama", BudgetError, "allow at least parameters=0.34"),
        ({"method": "shortgpt", "budget": "parameters=0.6", "protected": 1}, "llama", BudgetError, "2 of 3 blocks"),
        ({"method": "slicegpt", "budget": "parameters=0.1"}, "llama", BudgetError, "allow at least parameters=0.2"),
        ({"method": "slicegpt", "budget": "parameters=0.7"}, "gpt2", ModelError, "RMSNorm"),
        ({"method": "slicegpt", "budget": "parameters=0.7"}, "bert", ModelError, "post-norm"),
        ({"method": "shortgpt", "budget": "parameters=0.7"}, "resnet", ModelError, "one list of blocks"),
        ({"method": "minitron", "budget": "parameters=0.7"}, "resnet", ModelError, "dense FFN channels"),
    ],
)
def test_what_cannot_work(step: dict[str, Any], name: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        METHODS.build(step).check(anatomy_of(BUILDS[name]()))


def test_data_without_labels_and_quantized_models() -> None:
    step = METHODS.build({"method": "minitron-depth", "budget": "parameters=0.7"})
    with pytest.raises(DataError, match="no labels"):
        step.apply(Model(BUILDS["llama"]()), MethodContext(batches=[inputs("llama")]))
    model = Model(BUILDS["llama"]())
    METHODS.build("rtn", bits=8, group_size=-1).apply(model, MethodContext())
    for method in ("shortgpt", "slicegpt", "minitron"):
        with pytest.raises(ModelError, match=r"quantized already|already quantized"):
            METHODS.build({"method": method, "budget": "parameters=0.7"}).check(model.anatomy)
