"""Operator costs match the published formulas."""

from __future__ import annotations

import pytest

from smelt.targets.operators import AttentionOp, FeedForwardOp


def test_the_cost_of_a_bert_head_matches_the_paper() -> None:
    def macs(heads: int) -> int:
        return AttentionOp(hidden=768, heads=heads, kv_heads=heads, head_dim=64, tokens=128).macs()

    tokens, hidden, head_dim = 128, 768, 64
    assert macs(5) - macs(4) == 3 * tokens * hidden * head_dim + 2 * tokens**2 * head_dim + tokens * head_dim * hidden
    assert macs(0) == 0


def test_a_group_of_llama_3_8b() -> None:
    group = AttentionOp(hidden=4096, heads=4, kv_heads=1, head_dim=128, tokens=256, causal=True, dtype="bfloat16")
    assert group.parameters() == 5_242_880
    assert group.bytes() == 2 * 5_242_880
    assert group.macs() == 256 * 5_242_880 + 4 * 128 * 256**2
    assert FeedForwardOp(hidden=4096, ffn_channels=1, gated=True, tokens=1).parameters() == 12_288


def test_feed_forward_grows_with_batch_tokens_and_gate() -> None:
    plain = FeedForwardOp(hidden=8, ffn_channels=16, gated=False, tokens=3, batch=2)
    gated = FeedForwardOp(hidden=8, ffn_channels=16, gated=True, tokens=3, batch=2)
    assert plain.macs() == 2 * 3 * 2 * 8 * 16 and gated.macs() == plain.macs() * 3 // 2
    assert plain.bytes() == 4 * 2 * 8 * 16


@pytest.mark.parametrize(
    "change", [{"dtype": "int3"}, {"heads": 3}, {"tokens": 0}, {"heads": -2, "kv_heads": -2}, {"kv_heads": 0}]
)
def test_invalid_attention_is_refused(change: dict[str, object]) -> None:
    sizes = {"hidden": 8, "heads": 4, "kv_heads": 2, "head_dim": 2, "tokens": 4}
    with pytest.raises(ValueError):
        AttentionOp(**{**sizes, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"dtype": "int3"}, {"ffn_channels": -1}, {"batch": 0}])
def test_invalid_feed_forward_is_refused(change: dict[str, object]) -> None:
    sizes = {"hidden": 8, "ffn_channels": 4, "gated": False, "tokens": 4}
    with pytest.raises(ValueError):
        FeedForwardOp(**{**sizes, **change})  # type: ignore[arg-type]
