"""Tile sizes of Hopper's kernels: what a launch needs for them, and which are the fastest."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

from smelt.kernels.gpu.hopper_layout import TILE_K, Layout, ShuffledMatrix

TILE_N = (8, 16, 32, 64, 96, 128)  # rows of x per block
STREAM_K_N = (64, 96, 128, 160, 192, 224, 256)  # the same for stream-K
WIDE_N = (128, 144, 160, 192, 256)  # the same for more than 128 rows without stream-K
WIDE_TEAMS = ((1, 2), (2, 1), (3, 1), (1, 3), (2, 2))  # weight tiles of a block, teams of warpgroups
_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class Config:
    """The tiles of a launch."""

    tile_n: int  # rows of x
    row_tiles: int  # tiles of weight rows
    m_tiles: int  # of them, tiles of one warpgroup
    k_tiles: int  # tiles of columns in a step
    k_groups: int  # teams of warpgroups that take turns over the columns
    stages: int  # copies in flight
    split_k: int  # blocks of a cluster, each with a part of the columns
    flush: bool = True  # apply scales of integer groups to sums rather than to weights
    mma: bool = False  # products of single warps, for few rows of x

    def threads(self) -> int:
        warpgroups = self.row_tiles // self.m_tiles * self.k_groups
        return 128 * warpgroups + (128 if warpgroups == 2 and self.tile_n > 64 else 32)

    def shared_bytes(self, layout: Layout) -> int:
        stage = self.k_tiles * (self.tile_n * TILE_K * layout.operand_bytes + self.row_tiles * layout.tile_bytes)
        sums = self.k_groups * self.tile_n * (64 * self.row_tiles + 4) * 4
        return layout.lookup_bytes + max(self.stages * stage + 16 * self.stages, sums)


@dataclass(frozen=True)
class StreamKConfig:
    """The tiles of a stream-K launch; see Config."""

    tile_n: int
    stages: int
    row_tiles: int = 2

    def threads(self) -> int:
        return 128 * (self.row_tiles + 1)

    def shared_bytes(self, layout: Layout) -> int:
        return layout.lookup_bytes + self.stages * self.stage_bytes(layout)

    def stage_bytes(self, layout: Layout) -> int:
        return self.tile_n * TILE_K * layout.operand_bytes + self.row_tiles * layout.tile_bytes + 16

    def tiles(self, batch: int, row_tiles: int) -> int:
        """Return the number of output tiles."""
        return -(-row_tiles // self.row_tiles) * -(-batch // self.tile_n)

    def blocks(self, batch: int, row_tiles: int, k_tiles: int, num_sms: int) -> int:
        """Return the size of the grid: at most eight blocks per tile, since one of them adds up the others' sums."""
        return min(num_sms, self.tiles(batch, row_tiles) * min(8, k_tiles))


@dataclass(frozen=True)
class GemvConfig:
    """The tiles of a GEMV; see Config."""

    k_tiles: int
    k_groups: int
    stages: int
    split_k: int
    gated: bool = False  # tiles of two rows of tiles at a time
    prefetch: int = 4  # stages that are copied before x is there: with more, loads of x wait behind them

    def shared_bytes(self, layout: Layout, k_tiles: int) -> int:
        tiles, row_tiles = -(-k_tiles // (self.k_tiles * self.split_k)) * self.k_tiles, 2 if self.gated else 1
        x = 2 * (tiles * TILE_K + 16) + 36 * tiles
        stages = self.stages * (self.k_tiles * row_tiles * layout.tile_bytes + 16)
        return layout.lookup_bytes + max(stages + x, self.k_groups * row_tiles * 256)


def choose_gemv_config(weights: ShuffledMatrix, num_sms: int, gated: bool = False) -> GemvConfig:
    """Return the tiles of a GEMV, tuned on an H200."""
    row_tiles, k_tiles = weights.tiles.shape[:2]
    blocks, k_steps = (row_tiles // 2, 1) if gated else (row_tiles, 2)
    config = GemvConfig(k_steps, 4, 12, 2 if blocks <= 0.75 * num_sms and k_tiles >= 16 else 1, gated)
    limit = _SHARED_BYTES - 1024  # sums of squares
    if blocks > 1.36 * num_sms:
        config = GemvConfig(k_steps, 3, 9, 1, gated)
        limit //= 2 if weights.layout.lookup_bytes else 1  # loads from the table need the threads of two blocks
    teams = config.k_groups
    while config.stages > teams and config.shared_bytes(weights.layout, k_tiles) > limit:
        config = replace(config, stages=config.stages - teams)
    return replace(config, prefetch=6) if weights.layout.bits == 8 else config


def stream_k_config(tile_n: int, layout: Layout) -> StreamKConfig:
    """Return the tiles with as many copies in flight as shared memory holds."""
    stage = StreamKConfig(tile_n, 1).stage_bytes(layout)
    return StreamKConfig(tile_n, min(8, (_SHARED_BYTES - layout.lookup_bytes) // stage))


@dataclass(frozen=True)
class _Times:
    """Microseconds on an H200, from a least-squares fit to the times of six formats, five shapes and all tiles."""

    start: float  # of a block, its end included
    tile: float  # of a weight tile and its products
    tile_row: float  # the same, per row of x
    share: float  # of adding up the sums of blocks that share a tile, per tile_n


_TIMES = {  # without stream-K and with it; 8-bit weights leave it too little shared memory
    "4-bit": (_Times(7.6, 0.134, 2.18e-3, 3.0e-3), _Times(6.7, 0.171, 2.21e-3, 1.00e-2)),
    "8-bit": (_Times(3.2, 0.170, 1.98e-3, 1.3e-2), None),
    "8-bit inputs": (_Times(6.1, 0.048, 1.28e-3, 7.0e-3), _Times(7.0, 0.126, 1.16e-3, 1.20e-2)),
}


@lru_cache(maxsize=4096)
def _wide_config(batch: int, layout: Layout, row_tiles: int, k_tiles: int, num_sms: int) -> Config | StreamKConfig:
    """Return the tiles with the shortest estimated time for many rows of x, with and without stream-K."""
    kind = "8-bit inputs" if layout.operand_bytes == 1 else "8-bit" if layout.bits == 8 else "4-bit"
    plain, stream_k = _TIMES[kind]
    times: dict[Config | StreamKConfig, float] = {}
    for tile_n, (rows, teams), split_k in itertools.product(WIDE_N, WIDE_TEAMS, (1, 2)):
        config = fit_stages(Config(tile_n, rows, 1, 1, teams, 8, split_k, flush=False), layout, k_tiles)
        if rows * teams > (4 if tile_n <= 128 else 2) or config.shared_bytes(layout) > _SHARED_BYTES:
            continue
        waves = -(-(-(-row_tiles // rows) * -(-batch // tile_n) * split_k) // num_sms)
        products = rows * -(-k_tiles // split_k) * (plain.tile + plain.tile_row * tile_n)
        times[config] = waves * (plain.start + (split_k - 1) * plain.share * rows * tile_n + products)
    if stream_k is None:
        return min(times, key=times.__getitem__)
    for tile_n in STREAM_K_N:
        shared = stream_k_config(tile_n, layout)
        tiles, blocks = shared.tiles(batch, row_tiles), shared.blocks(batch, row_tiles, k_tiles, num_sms)
        products = -(-tiles * k_tiles // blocks) * shared.row_tiles * (stream_k.tile + stream_k.tile_row * tile_n)
        times[shared] = stream_k.start + products + stream_k.share * (blocks / tiles - 1) * tile_n
    return min(times, key=times.__getitem__)


def choose_config(batch: int, weights: ShuffledMatrix, num_sms: int) -> Config | StreamKConfig:
    """Return the tiles for a batch size, tuned on an H200 (`benchmarks/gpu_gemm.py --tune` tries them all).

    A block has 64 weight rows as long as that fills the GPU at most once; beyond, fewer and larger blocks read x less
    often. If even such blocks are too few, two share their columns. More than 128 rows of x take the tiles with the
    shortest estimated time.
    """
    layout, (row_tiles, k_tiles) = weights.layout, weights.tiles.shape[:2]
    tile_n = next((size for size in TILE_N if size >= batch), TILE_N[-1])
    two_sums = layout.grouped and layout.operands == "int8"  # of a group and of all: too many registers
    if batch > 128 and not two_sums:
        return _wide_config(batch, layout, row_tiles, k_tiles, num_sms)
    if tile_n >= 64 and row_tiles >= 3 * num_sms and layout.bits < 8 and layout.operand_bytes == 2:
        return stream_k_config(tile_n, layout)
    return _narrow_config(tile_n, row_tiles * -(-batch // tile_n), layout, k_tiles, num_sms)


def choose_grouped_config(
    tile_n: int, expert_tiles: float, layout: Layout, row_tiles: int, k_tiles: int, num_sms: int
) -> Config:
    """Return the tiles of a grouped GEMM for tiles of at most `tile_n` rows of x, of which `expert_tiles` are expected;
    a matrix of an expert has `row_tiles` x `k_tiles` tiles. Tuned on an H200 (`benchmarks/gpu_experts.py --tune`).

    The matrices are small and blocks many: with one warpgroup each, and a quarter of the shared memory, some copy while
    others end.
    """
    blocks = row_tiles * expert_tiles
    if tile_n > 32 or blocks <= 1.36 * num_sms:
        return _narrow_config(tile_n, blocks, layout, k_tiles, num_sms)
    config = Config(tile_n, 1, 1, 2 if tile_n < 32 else 1, 1, 16, 1, mma=layout.element != "e4m3")
    return fit_stages(config, layout, k_tiles, _SHARED_BYTES // 4)


def _narrow_config(tile_n: int, blocks: float, layout: Layout, k_tiles: int, num_sms: int) -> Config:
    """Return the tiles for at most 128 rows of x; with 64 weight rows per block there would be so many `blocks`."""
    split_k = 2 if blocks <= 0.6 * num_sms and k_tiles >= 16 else 1
    many, very_many = blocks > 1.36 * num_sms, blocks > 3 * num_sms
    limit = _SHARED_BYTES if tile_n >= 64 else _SHARED_BYTES // 2
    if tile_n <= 32:
        k_steps, teams = (2, 2) if many and tile_n < 32 else (1, 2) if many else (1, 4)
        config = Config(tile_n, 1, 1, k_steps, teams, 16, split_k, mma=layout.element != "e4m3")
    elif tile_n == 64:
        config = Config(64, 1, 1, 1, 3, 9, split_k)
        if many:
            rows, m_tiles, teams = (4, 2, 1) if very_many else (2, 1, 2)
            config = Config(64, rows, m_tiles, 1, teams, 8, 1, flush=False)
    else:
        config = Config(tile_n, 1, 1, 1, 2, 8, split_k, flush=False)
        if many:
            rows, m_tiles = (4, 2) if very_many else (2, 1)
            config = Config(tile_n, rows, m_tiles, 1, 1, 8, 1, flush=False)
    return fit_stages(config, layout, k_tiles, limit)


def fit_stages(config: Config, layout: Layout, k_tiles: int, limit: int = _SHARED_BYTES) -> Config:
    """Reduce the copies in flight to what shared memory holds and the columns need.

    Every team has its own stages: waiting for one that another team has not left yet would end too early.
    """
    teams = config.k_groups
    stages = min(config.stages, max(2, -(-k_tiles // (config.k_tiles * config.split_k)))) // teams * teams
    while stages > 2 * teams and replace(config, stages=stages).shared_bytes(layout) > limit:
        stages -= teams
    return replace(config, stages=max(stages, teams))
