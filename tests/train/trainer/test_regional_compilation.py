"""Which modules are compiled for training, and that they are eager again after it."""

from __future__ import annotations

from torch import nn

from smelt.train.trainer.regional_compilation import compile_network, repeated_blocks, restore_eager
from tests.tiny import BUILDS


def test_the_blocks_of_a_transformer_are_compiled_and_a_cnn_as_a_whole() -> None:
    llama, resnet = BUILDS["llama"](), BUILDS["resnet"]()
    assert repeated_blocks(llama) == list(llama.model.layers)
    assert repeated_blocks(resnet) == []
    assert compile_network(resnet) == [resnet]
    blocks = compile_network(llama)
    assert blocks == list(llama.model.layers) and llama._compiled_call_impl is None
    assert all(block._compiled_call_impl is not None for block in blocks)
    restore_eager(blocks)
    assert all(module._compiled_call_impl is None for module in llama.modules())


def test_blocks_of_other_shapes_and_small_lists_are_not_repeated_blocks() -> None:
    differing = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 8)])})
    small = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "head": nn.Linear(64, 64)})
    beside_embeddings = nn.ModuleDict({"layers": small["layers"], "embed": nn.Embedding(64, 64)})
    assert repeated_blocks(differing) == [] and repeated_blocks(small) == []
    assert repeated_blocks(beside_embeddings) == list(small["layers"])


def test_blocks_with_hooks_share_no_graph() -> None:
    llama = BUILDS["llama"]()
    handle = llama.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: None)
    assert repeated_blocks(llama) == []
    handle.remove()
    assert repeated_blocks(llama) == list(llama.model.layers)
