"""Token eviction for frames: the formulas as loops, and videos of known redundancy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.errors import ConfigError
from smelt.kvcache.streaming import InfiniPotV, RecentFrames, UniformFrames
from smelt.kvcache.streaming.frame_rule import FrameTokens
from smelt.kvcache.streaming.infinipot_v import pool_by_depth, temporal_novelty, value_norms

HEADS, FRAMES, PATCHES, WIDTH = 2, 8, 6, 5
KEEP = 5  # frames


def frame_tokens(keys: Tensor, marks: Tensor, patch: Tensor | None = None) -> FrameTokens:
    """Return complete frames unless the patch of each token is given."""
    plain = torch.arange(keys.shape[1]).expand(len(keys), -1) % PATCHES
    return FrameTokens(keys, plain if patch is None else patch, marks, PATCHES)


def random_frames(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(HEADS, FRAMES * PATCHES, WIDTH, generator=generator)
    return keys, torch.rand(HEADS, FRAMES * PATCHES, generator=generator)


def still(seed: int = 0) -> Tensor:
    """Return the keys of one frame, repeated FRAMES times. [heads, tokens, head_dim]"""
    return torch.randn(HEADS, 1, PATCHES, WIDTH, generator=torch.Generator().manual_seed(seed)).repeat(
        1, FRAMES, 1, 1
    ).flatten(1, 2)  # fmt: skip


def test_tar_matches_loops_when_heads_have_lost_tokens() -> None:
    """Tokens of older frames are scattered: each is compared with its own patch, wherever it is stored now."""
    keys, _ = random_frames()
    recent = torch.randn(HEADS, 3, PATCHES, WIDTH)
    patch = torch.randint(0, PATCHES, (HEADS, FRAMES * PATCHES))
    actual = temporal_novelty(keys, patch, recent)
    for head in range(HEADS):
        for token in range(FRAMES * PATCHES):
            same = recent[head, :, patch[head, token]]  # [3, head_dim]
            expected = -F.cosine_similarity(keys[head, token].expand(3, -1), same, dim=-1).mean()
            assert abs(float(actual[head, token] - expected)) < 2e-5


def test_equal_frames_are_redundant_and_value_norms_decide() -> None:
    keys, (_, marks) = still(), random_frames()
    recent = keys[:, -2 * PATCHES :].unflatten(1, (2, PATCHES))
    assert bool((temporal_novelty(keys, frame_tokens(keys, marks).patch_index, recent) == -1).all())
    count = KEEP * PATCHES
    kept = InfiniPotV().select(frame_tokens(keys, marks), count)
    for head in range(HEADS):
        older = (FRAMES - 2) * PATCHES  # a quarter of the frames is recent and stays
        best = marks[head, :older].argsort(descending=True)[: count - 2 * PATCHES]
        assert kept[head].tolist() == [*best.sort().values.tolist(), *range(older, FRAMES * PATCHES)]


def test_moving_patches_stay() -> None:
    """One patch per frame changes, always another patch, and values carry no information about it."""
    keys, moving = still().unflatten(1, (FRAMES, PATCHES)), []
    for frame in range(FRAMES - 2):
        keys[:, frame, frame % PATCHES] *= -1
        moving.append(frame * PATCHES + frame % PATCHES)
    marks = torch.ones(HEADS, FRAMES * PATCHES)
    marks[:, moving] = 0.0
    kept = InfiniPotV(tar=0.6).select(frame_tokens(keys.flatten(1, 2), marks), 4 * PATCHES)
    assert all(set(moving[:2]) <= set(row.tolist()) for row in kept)
    enough = InfiniPotV(tar=0.9).select(frame_tokens(keys.flatten(1, 2), marks), 4 * PATCHES)
    assert all(set(moving) <= set(row.tolist()) for row in enough)


@pytest.mark.parametrize(("tar", "recent"), [(0.5, 0.25), (0.8, 0.125), (1.0, 0.5), (0.7, 0.25)])
def test_the_full_rule_matches_loops(tar: float, recent: float) -> None:
    keys, marks = random_frames(1)
    patch = torch.randint(0, PATCHES, (HEADS, FRAMES * PATCHES))
    last = int(recent * FRAMES) * PATCHES
    patch[:, -last:] = torch.arange(last) % PATCHES
    rule, count, older = InfiniPotV(tar=tar, recent=recent), KEEP * PATCHES, FRAMES * PATCHES - last
    kept = rule.select(frame_tokens(keys, marks, patch), count)
    for head in range(HEADS):
        scores = []
        for token in range(older):
            same_patch = [t for t in range(older, FRAMES * PATCHES) if patch[head, t] == patch[head, token]]
            cosines = F.cosine_similarity(keys[head, token].expand(len(same_patch), -1), keys[head, same_patch], dim=-1)
            scores.append(-float(cosines.mean()))
        by_tar = count - round((1 - tar) * count) - last
        selected = set(sorted(range(older), key=lambda t: -scores[t])[:by_tar]) | set(range(older, FRAMES * PATCHES))
        others = [t for t in marks[head].argsort(descending=True).tolist() if t not in selected]
        assert kept[head].tolist() == sorted(selected | set(others[: count - len(selected)]))


def test_value_norms_are_pooled_over_neighbors() -> None:
    values = torch.randn(HEADS, 5, 4, 4, WIDTH)
    norms = value_norms(values)
    assert torch.allclose(norms, values.square().sum(-1).sqrt(), atol=1e-6)
    layers = 8
    kernel = 3  # the largest odd size within four rows and columns
    padded = F.pad(norms, (1, 1, 1, 1, 1, 1))
    for frame, row, column in ((0, 0, 0), (2, 1, 3), (4, 3, 2)):
        cell = (slice(None), frame, row, column)
        cube = padded[:, frame : frame + 3, row : row + 3, column : column + 3].sum((1, 2, 3)) / kernel**3
        plane = padded[:, frame + 1, row : row + 3, column : column + 3].sum((1, 2)) / kernel**2
        index = (frame * 4 + row) * 4 + column
        line = F.pad(norms.flatten(1), (1, 1))[:, index : index + 3].sum(1) / kernel
        expected = (cube, cube, plane, plane, line, line, norms[cell], norms[cell])
        for layer in range(layers):
            assert torch.allclose(pool_by_depth(norms, layer, layers)[cell], expected[layer], atol=1e-6)


def test_pooling_kernels_are_seven_five_and_three_where_they_fit() -> None:
    one = torch.zeros(1, 9, 9, 9)
    one[0, 4, 4, 4] = 1.0
    touched = [int((pool_by_depth(one, layer, 4) > 0).sum()) for layer in range(4)]
    assert touched == [7**3, 5**2, 3, 1]
    assert torch.equal(pool_by_depth(one[:, :1], 0, 4), one[:, :1])  # one frame: a kernel of one


def test_pooling_is_an_option_and_depends_on_depth() -> None:
    values = torch.randn(HEADS, 3, 3, 3, WIDTH)
    assert torch.equal(InfiniPotV().token_scores(values, 0, 4), value_norms(values))
    pooled = InfiniPotV(pooling=True)
    assert torch.equal(pooled.token_scores(values, 0, 4), pool_by_depth(value_norms(values), 0, 4))
    assert pooled.needs_grid and not InfiniPotV().needs_grid


def test_baselines() -> None:
    tokens = frame_tokens(*random_frames())
    assert RecentFrames().select(tokens, 4).tolist() == [[44, 45, 46, 47]] * HEADS
    assert UniformFrames().select(tokens, 5).tolist() == [[0, 9, 19, 28, 38]] * HEADS


@pytest.mark.parametrize(
    ("parameters", "frames", "keep", "sentence"),
    [
        ({"tar": 0.0}, 8, 6, "tar is 0; it is a share"),
        ({"recent": 1.2}, 8, 6, "recent is 1.2; it is a share"),
        ({}, 3, 2, "0.25 of 3 frames is none"),
        ({"recent": 0.5}, 8, 6, "4 recent frames do not fit into the share 0.5 of 6"),
    ],
)
def test_impossible_rules_are_refused(parameters: dict[str, Any], frames: int, keep: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        InfiniPotV(**parameters).check(frames, keep)
