"""A stream of frames on small vision-language models: against the plain network, and far beyond the capacity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from smelt.errors import ConfigError, DataError, ModelError, RequestError
from smelt.kvcache.streaming import InfiniPotV, RecentFrames, VideoStream
from smelt.kvcache.streaming.frame_rule import FrameTokens
from smelt.kvcache.streaming.position_ids import FramePositions
from smelt.kvcache.streaming.vision import FrameEncoder
from tests.kvcache.streaming.test_bounded_cache import everything, same
from tests.kvcache.streaming.vision_models import JOINED, PATCHES, SEEING, film, llava, qwen2_vl
from tests.serve.test_detokenizer import byte_tokenizer
from tests.tiny import BUILDS

FRAMES, KEEP = 8, 6
PREFIX, QUESTION = (3, 4, 5), (6, 7, 8, 9)
NAMES = tuple(SEEING)


def stream_of(name: str, **changes: Any) -> VideoStream:
    options: dict[str, Any] = {"max_frames": FRAMES, "keep_frames": KEEP, "prefix": PREFIX, "reserved": 16, **changes}
    return VideoStream(SEEING[name](), **options)


def plainly(name: str, network: Any, frames: Tensor) -> dict[str, Any]:
    """Return the network's own inputs for prefix, frames and question: placeholder tokens and pixels."""
    tokens = len(frames) // JOINED[name] * PATCHES[name] + (1 if name == "llava-onevision" else 0)
    placeholder = 97 if name in ("smolvlm", "llava") else 98
    ids = torch.tensor([[*PREFIX, *[placeholder] * tokens, *QUESTION]])
    if name == "smolvlm":
        return {"input_ids": ids, "pixel_values": frames[None]}
    if name == "llava":
        return {"input_ids": ids, "pixel_values": frames}
    if name.startswith("llava-"):
        return {"input_ids": ids, "pixel_values_videos": frames[None]}
    token_types = (ids == placeholder).int() * 2
    return {"input_ids": ids, "mm_token_type_ids": token_types, **FrameEncoder(network)._inputs(frames)}


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_stream_that_fits_matches_the_plain_network(name: str) -> None:
    stream = stream_of(name)
    frames = film(FRAMES * JOINED[name])
    expected = stream.network(**plainly(name, stream.network, frames)).logits[0, -len(QUESTION) :]
    for start in range(0, len(frames), 3):  # a frame of a split pair waits for the other
        stream.push(frames[start : start + 3])
    assert stream.num_seen == FRAMES and stream.num_compressions == 0 and stream._layout.patches == PATCHES[name]
    assert torch.allclose(stream.logits(QUESTION), expected, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_answers_match_the_networks_generate(name: str) -> None:
    stream = stream_of(name, max_frames=6, keep_frames=5, rule="recent")
    stream.network.generation_config.eos_token_id = None
    frames = film(6 * JOINED[name])
    inputs = plainly(name, stream.network, frames)
    expected = stream.network.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    stream.push(frames)
    assert torch.equal(stream.answer(QUESTION, 6), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_video_of_fifty_times_the_capacity_stays_bounded(name: str) -> None:
    stream = stream_of(name)
    stream.push(film(JOINED[name]))
    size, cap = stream.nbytes, len(PREFIX) + FRAMES * PATCHES[name] + len(stream._layout.trailing) + 16
    assert stream.cache is not None and stream.cache.capacity == cap
    assert size == 4 * 2 * cap * (2 * 8 * 4 + 8 + 4)  # layers, heads; keys and values, a token number and a score
    addresses = [tensor.data_ptr() for layer in stream.cache.layers for tensor in layer.tensors()]
    frames, longest = film(50 * FRAMES * JOINED[name] - JOINED[name], seed=1), 0
    for start in range(0, len(frames), 31):
        stream.push(frames[start : start + 31])
        longest = max(longest, stream.length)
        assert stream.nbytes == size
    assert stream.num_seen == 50 * FRAMES and longest == len(PREFIX) + FRAMES * PATCHES[name]
    assert [tensor.data_ptr() for layer in stream.cache.layers for tensor in layer.tensors()] == addresses
    assert stream.answer(QUESTION, 3).shape == (3,)


@pytest.mark.parametrize("name", ["qwen2-vl", "smolvlm"])
def test_heads_keep_complete_recent_frames_and_unchanged_keys(name: str) -> None:
    """After each push: time order, each token once, recent frames complete, keys and values unchanged."""
    stream, patches = stream_of(name), PATCHES[name]
    frames = film(40 * JOINED[name])
    first = len(PREFIX)
    kept: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
    for start in range(0, len(frames), JOINED[name]):
        before = stream.num_compressions
        stream.push(frames[start : start + JOINED[name]])
        assert stream.cache is not None
        for index, layer in enumerate(stream.cache.layers):
            for head in range(2):
                numbers = layer.token_indices[head, : stream.length].tolist()
                assert numbers[:first] == list(range(first)) and numbers == sorted(set(numbers))
                if stream.num_compressions > before:
                    recent = range(first + (stream.num_seen - 3) * patches, first + stream.num_seen * patches)
                    assert set(recent) <= set(numbers)  # two of eight, and the frame since then
                for slot, number in enumerate(numbers):
                    now = (layer.keys[head, slot].clone(), layer.values[head, slot].clone())
                    was = kept.setdefault((index, head, number), now)
                    assert torch.equal(now[0], was[0]) and torch.equal(now[1], was[1])
    assert stream.num_compressions > 10


def test_rules_receive_the_patch_of_each_token() -> None:
    """Whatever precedes the frames."""
    patches: list[Tensor] = []

    class Listening(RecentFrames):
        def select(self, tokens: FrameTokens, count: int) -> Tensor:
            patches.append(tokens.patch_index.clone())
            return super().select(tokens, count)

    stream = stream_of("smolvlm", rule=Listening())
    stream.push(film(20))
    assert len(patches) == stream.num_compressions * 4
    assert all(row.tolist() == [0, 1, 2, 3] * FRAMES for patch in patches for row in patch)


@pytest.mark.parametrize("pooling", [False, True])
def test_value_norms_are_recorded_while_frames_are_complete(pooling: bool) -> None:
    stream = stream_of("qwen2-vl", rule=InfiniPotV(pooling=pooling))
    frames = film(2 * 30)
    recorded: dict[tuple[int, int, int], float] = {}
    for start in range(0, 60, 2):
        stream.push(frames[start : start + 2])
        assert stream.cache is not None
        for index, layer in enumerate(stream.cache.layers):
            marked = slice(len(PREFIX), stream.length - stream._new_frames * 16)
            for head in range(2):
                for number, mark, value in zip(
                    layer.token_indices[head, marked].tolist(),
                    layer.token_scores[head, marked],
                    layer.values[head, marked],
                    strict=True,
                ):
                    assert recorded.setdefault((index, head, number), float(mark)) == float(mark)
                    if not pooling or index == 3:
                        assert torch.allclose(mark, value.norm(), atol=1e-5)
    assert len(recorded) > 0


def test_content_that_appeared_once_survives() -> None:
    """A still video except for one bright square in the first pair, on a network that does not rotate keys by time,
    where the first layer's keys show only redundancy. That pair survives the video, and most of the static content
    is evicted.
    """
    still = film(1).repeat(80, 1, 1, 1)
    still[:2, :, 8:16, 8:16] = 4.0
    stream = VideoStream(qwen2_vl([0, 2, 2]), max_frames=FRAMES, keep_frames=KEEP, rule=InfiniPotV(tar=0.7))
    stream.push(still)
    assert stream.cache is not None and stream.num_compressions > 10
    for row in stream.cache.layers[0].token_indices[:, : stream.length].tolist():
        assert set(range(16)) <= set(row)
        assert len(set(range(16, 16 * 30)) & set(row)) < 16 * 30 / 4


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_positions_match_the_full_video(name: str) -> None:
    """As the network numbers prefix, all frames and the question when it receives them together."""
    network: Any = SEEING[name]()
    shape = FrameEncoder(network).layout(film(1))
    numbering = FramePositions(network, len(PREFIX), shape)
    for count in (1, 3, 5, 6, 7, 20):
        actual = torch.cat((numbering.frames(0, count), numbering.text(count, 4)), dim=1)
        one_by_one = torch.cat([numbering.frames(frame, 1) for frame in range(count)], dim=1)
        assert torch.equal(actual[:, : one_by_one.shape[1]], one_by_one)
        if name.startswith("qwen"):
            inputs = plainly(name, network, film(2 * count))
            expected, _ = network.model.get_rope_index(
                inputs["input_ids"],
                mm_token_type_ids=inputs["mm_token_type_ids"],
                video_grid_thw=inputs["video_grid_thw"],
            )
            assert torch.equal(actual, expected[:, 0, len(PREFIX) :])
        else:
            assert actual.tolist() == [list(range(3, 3 + count * PATCHES[name] + 4))]


def test_text_positions_may_follow_the_longest_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network whose text continues after the highest position of its frames, be that time, row or column."""
    network: Any = SEEING["qwen2-vl"]()

    def highest(ids: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        rows = [torch.arange(3).expand(3, -1)]
        if kwargs["video_grid_thw"] is not None:
            times, height, width = (int(side) for side in kwargs["video_grid_thw"][0])
            grid = torch.cartesian_prod(torch.arange(times) * 2, torch.arange(height // 2), torch.arange(width // 2))
            rows.append(3 + grid.T)
        rows.append(1 + max(int(row.max()) for row in rows) + torch.zeros(3, 1, dtype=torch.int64))
        return torch.cat(rows, dim=1)[:, None], None

    monkeypatch.setattr(network.model, "get_rope_index", highest)
    numbering = FramePositions(network, len(PREFIX), FrameEncoder(network).layout(film(1)))
    positions = [int(numbering.text(count, 1)[0, 0]) for count in range(40)]
    assert positions == [3, *(3 + max(4, 2 * count - 1) for count in range(1, 40))]


def test_patches_match_loops() -> None:
    encoder, frames = FrameEncoder(SEEING["qwen2-vl"]()), torch.randn(4, 3, 16, 32)
    patches, grid = encoder._patches(frames)
    assert grid.tolist() == [[2, 4, 8]] and patches.shape == (64, 3 * 2 * 4 * 4)
    row = 0
    for time in range(2):
        for top in range(0, 16, 8):
            for left in range(0, 32, 8):
                for down in (0, 4):
                    for right in (0, 4):
                        y, x = top + down, left + right
                        expected = frames[2 * time : 2 * time + 2, :, y : y + 4, x : x + 4].transpose(0, 1)
                        assert torch.equal(patches[row], expected.flatten())
                        row += 1


def test_frames_are_encoded_in_batches_that_fit() -> None:
    stream = stream_of("smolvlm")
    counts: list[int] = []
    stream.network.model.vision_model.register_forward_pre_hook(
        lambda _, __, named: counts.append(len(named["pixel_values"])), with_kwargs=True
    )
    stream.push(film(60))
    assert max(counts) == FRAMES - KEEP and sum(counts) == 60 + 3  # three determine the shape


def test_all_zero_frames_treated_as_padding_are_refused() -> None:
    stream = stream_of("smolvlm")
    with pytest.raises(DataError, match="zero everywhere for padding, so normalize"):
        stream.push(torch.zeros(2, 3, 32, 32))
    stream.push(film(2))
    before = stream.num_seen
    with pytest.raises(DataError, match="zero everywhere for padding, so normalize"):
        stream.push(torch.cat((film(1), torch.zeros(1, 3, 32, 32))))
    assert stream.num_seen == before and stream.length == len(PREFIX) + 2 * 4


def test_the_last_frames_fill_the_cache() -> None:
    one, other = stream_of("smolvlm"), stream_of("smolvlm")
    for stream in (one, other):
        stream.push(film(FRAMES))
    one.push(film(1, seed=5))
    other.push(film(1, seed=5), last=True)
    assert one.length == len(PREFIX) + (KEEP + 1) * 4 and other.length == len(PREFIX) + FRAMES * 4
    odd = stream_of("qwen2-vl")
    odd.push(film(3))
    assert odd.num_seen == 1
    odd.push(film(2), last=True)
    assert odd.num_seen == 3  # the last frame is duplicated to complete its pair


@pytest.mark.parametrize("rule", ["infinipot-v", "recent", "uniform"])
def test_asking_leaves_the_cache_bit_identical(rule: str) -> None:
    stream = stream_of("llava-onevision", rule=rule)
    stream.push(film(30))
    assert stream.cache is not None
    before, length = everything(stream.cache), stream.length
    answer = stream.answer(QUESTION, 5)
    stream.logits(QUESTION)
    assert same(everything(stream.cache), before) and stream.length == length
    assert torch.equal(stream.answer(QUESTION, 5), answer)


def test_recent_keeps_only_the_last_frames() -> None:
    stream = stream_of("smolvlm", rule="recent", prefix=())
    stream.push(film(21))
    assert stream.cache is not None
    expected = list(range(21 * 4 - stream.length, 21 * 4))
    assert all(
        row.tolist() == expected for layer in stream.cache.layers for row in layer.token_indices[:, : stream.length]
    )


def test_frames_are_preprocessed_by_the_given_function() -> None:
    network: Any = SEEING["qwen2-vl"]()
    plain = VideoStream(network, max_frames=FRAMES, keep_frames=KEEP)
    preprocessed = VideoStream(
        network,
        max_frames=FRAMES,
        keep_frames=KEEP,
        preprocess=lambda frames: FrameEncoder(network)._inputs(frames / 2),
    )
    plain.push(film(6) / 2)
    preprocessed.push(film(6))
    assert torch.allclose(plain.logits(QUESTION), preprocessed.logits(QUESTION), atol=1e-5)


def test_text_in_and_out() -> None:
    network: Any = SEEING["smolvlm"]()
    network.resize_token_embeddings(300)
    stream = VideoStream(network, byte_tokenizer(), max_frames=FRAMES, keep_frames=KEEP, prefix="see: ")
    stream.push(film(5))
    ids = byte_tokenizer()("what?")["input_ids"]
    assert stream.length == 5 + 5 * 4
    assert stream.ask("what?", 4) == byte_tokenizer().decode(stream.answer(ids, 4), skip_special_tokens=True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"keep_frames": 8}, "of 8 frames 8 cannot be kept"),
        ({"keep_frames": 0}, "of 8 frames 0 cannot be kept"),
        ({"reserved": 0}, "0 tokens are reserved"),
        ({"rule": "best"}, "there is no frame rule 'best'; there are infinipot-v, recent, uniform"),
        ({"keep_frames": 3}, "2 recent frames do not fit"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        stream_of("smolvlm", **changes)


def test_impossible_requests_are_refused() -> None:
    stream = stream_of("qwen2-vl")
    with pytest.raises(RequestError, match="no frame was seen yet"):
        stream.answer(QUESTION)
    with pytest.raises(DataError, match=r"frames of 30 x 32 pixels cannot be cut into patches of 8"):
        stream.push(torch.randn(2, 3, 30, 32))
    assert stream.cache is None and stream.num_seen == 0
    stream.push(film(2))
    with pytest.raises(DataError, match=r"they are \[frames, ...\] of \[3, 32, 32\]"):
        stream.push(torch.randn(2, 3, 40, 32))
    with pytest.raises(RequestError, match="an answer of 500 do not fit"):
        stream.answer(QUESTION, 500)
    with pytest.raises(RequestError, match="the question is empty"):
        stream.answer(())
    with pytest.raises(ModelError, match="no tokenizer"):
        stream.ask("what?")


def test_unsupported_networks_are_refused() -> None:
    with pytest.raises(ModelError, match="no vision tower"):
        VideoStream(BUILDS["llama"]())
    with pytest.raises(ModelError, match="sliding"):
        VideoStream(BUILDS["mistral"]())
    with pytest.raises(ModelError, match="needs image_sizes beside pixels"):
        VideoStream(llava(hf.LlavaNextConfig, hf.LlavaNextForConditionalGeneration))
