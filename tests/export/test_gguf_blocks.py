"""GGML blocks: bit for bit against the `gguf` package, SNR against the method card, and layouts by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from smelt.export import gguf_blocks
from smelt.export.gguf_writer import GGML_TYPES
from smelt.models.gguf.blocks import FORMATS, dequantize

Quantizer = Callable[[NDArray[np.float32]], NDArray[np.uint8]]
SIMPLE: dict[str, Quantizer] = {
    "Q4_0": gguf_blocks.quantize_q4_0,
    "Q4_1": gguf_blocks.quantize_q4_1,
    "Q5_0": gguf_blocks.quantize_q5_0,
    "Q8_0": gguf_blocks.quantize_q8_0,
}
SEARCHED: dict[str, Quantizer] = {"Q4_K": gguf_blocks.quantize_q4_k, "Q6_K": gguf_blocks.quantize_q6_k}
CARD = {"Q4_0": 21.3, "Q8_0": 45.5, "Q4_K": 22.9, "Q6_K": 35.0}  # decibel on N(0, 1)


def gaussian(rows: int = 1024) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((rows, 256)).astype(np.float32)


def edge_cases() -> NDArray[np.float32]:
    """Return zeros, equal weights, one sign only, tiny, huge, and a single nonzero weight."""
    x = gaussian(64)
    x[0], x[1], x[2], x[3] = 0, 3, -0.25, np.abs(x[3])
    x[4], x[5], x[6] = x[4] * 1e-9, x[5] * 1e4, -np.abs(x[6])
    x[7], x[7, 17] = 0, -5
    return x


def read_back(name: str, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    block_format = FORMATS[GGML_TYPES[name]]
    assert data.shape[1] == block_format.bytes
    return dequantize(data.reshape(-1), block_format, (-1, 256))


def snr_db(x: NDArray[np.float32], y: NDArray[np.float32]) -> float:
    noise = max(((x - y).astype(float) ** 2).sum(), 1e-30)
    return float(10 * np.log10((x.astype(float) ** 2).sum() / noise))


@pytest.mark.parametrize("name", SIMPLE)
def test_bytes_match_the_gguf_package(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    x = np.concatenate([gaussian(), edge_cases()])
    ggml_type = getattr(gguf.GGMLQuantizationType, name)
    assert np.array_equal(SIMPLE[name](x.reshape(-1, 32)).reshape(len(x), -1), gguf.quants.quantize(x, ggml_type))


@pytest.mark.parametrize("name", SEARCHED)
def test_the_gguf_package_reads_the_same_weights(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    data = SEARCHED[name](edge_cases())
    reference_values = gguf.quants.dequantize(data, getattr(gguf.GGMLQuantizationType, name))
    assert np.array_equal(read_back(name, data), reference_values)


@pytest.mark.parametrize("name", CARD)
def test_snr_matches_the_card(name: str) -> None:
    x = gaussian()
    encode = {**SIMPLE, **SEARCHED}[name]
    data = encode(x.reshape(-1, 32) if name in SIMPLE else x)
    assert snr_db(x, read_back(name, data)) == pytest.approx(CARD[name], abs=0.1)


@pytest.mark.parametrize("name", SEARCHED)
def test_edge_case_weights_stay_close(name: str) -> None:
    x = edge_cases()
    result = read_back(name, SEARCHED[name](x))
    assert np.array_equal(result[0], x[0])
    for row in (1, 2, 3, 5, 6, 7):
        assert snr_db(x[row], result[row]) > 18, row
    assert np.isfinite(result).all()


@pytest.mark.parametrize("name", SEARCHED)
def test_requantizing_read_weights_is_nearly_exact(name: str) -> None:
    once = read_back(name, SEARCHED[name](gaussian(128)))
    assert snr_db(once, read_back(name, SEARCHED[name](once))) > 60


def test_the_search_beats_min_max_scales() -> None:
    """Without the search Q4_K would be Q4_1 with coarser scales."""
    x = gaussian()
    plain = read_back("Q4_1", gguf_blocks.quantize_q4_1(x.reshape(-1, 32)))
    assert snr_db(x, read_back("Q4_K", gguf_blocks.quantize_q4_k(x))) > snr_db(x, plain) + 0.5


@pytest.mark.parametrize(
    ("pack", "name", "lowest", "highest"),
    [
        (gguf_blocks.pack_q4_0, "Q4_0", -8, 7),
        (gguf_blocks.pack_q5_0, "Q5_0", -16, 15),
        (gguf_blocks.pack_q8_0, "Q8_0", -128, 127),
    ],
)
def test_codes_and_scales_are_stored_exactly(
    pack: Callable[..., NDArray[np.uint8]], name: str, lowest: int, highest: int
) -> None:
    generator = np.random.default_rng(1)
    levels = generator.integers(lowest, highest + 1, (64, 32)).astype(np.int16)
    levels[0, :2] = lowest, highest
    scale = generator.standard_normal(64).astype(np.float16).astype(np.float32)
    result = read_back(name, pack(levels, scale)).reshape(64, 32)
    assert np.array_equal(result, levels * scale[:, None])


def test_a_block_by_hand() -> None:
    """Element 0 and 16 share a byte: the first in its low half."""
    levels = np.zeros((1, 32), dtype=np.int16)
    levels[0, 0], levels[0, 16] = 1, 2
    data = gguf_blocks.pack_q4_1(levels, np.array([1.0], np.float32), np.array([-2.0], np.float32))
    assert data[0, :5].tolist() == [0x00, 0x3C, 0x00, 0xC0, 0x21]
