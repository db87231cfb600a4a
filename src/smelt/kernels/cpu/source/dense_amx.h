// GEMM with bfloat16 matrices for many tokens with AMX: weights are read in memory order.
#pragma once

#include "dense_gemv.h"
#include "amx_tiles.h"

#ifdef SMELT_TILES
inline bool has_dense_tiles(const DenseMatrix& d, int64_t tokens) {
    const bool bfloat16 = d.weight_type == BFLOAT16 && d.x_type == BFLOAT16;
    return bfloat16 && tokens > 4 && d.columns % 32 == 0 && d.rows % 16 == 0 && tiles_granted();
}

// Pack inputs [tokens, columns] as tiles [blocks of 16 tokens, steps of 32 columns, TILE_BYTES]: two columns per row.
inline const uint8_t* dense_tile_inputs(const DenseMatrix& d, const void* x, int64_t tokens) {
    static thread_local Scratch buffer;
    const int64_t blocks = (tokens + TILE - 1) / TILE, steps = d.columns / 32;
    uint8_t* tiles = buffer.get<uint8_t>(blocks * steps * TILE_BYTES);
    const uint16_t* source = static_cast<const uint16_t*>(x);
    for (int64_t block = 0; block < blocks; ++block)
        for (int64_t step = 0; step < steps; ++step) {
            __m512i words[TILE];
            for (int t = 0; t < TILE; ++t) {
                const int64_t token = block * TILE + t;
                words[t] = token < tokens ? _mm512_loadu_si512(source + token * d.columns + step * 32)
                                          : _mm512_setzero_si512();
            }
            transpose(words);
            for (int r = 0; r < TILE; ++r)
                _mm512_store_si512(tiles + (block * steps + step) * TILE_BYTES + r * 64, words[r]);
        }
    return tiles;
}

// Store sums [16 rows, 16 tokens] with the bias.
inline void store_dense_tile(
    const DenseMatrix& d, const float* sums, int64_t row, int64_t token, int64_t tokens, void* y) {
    __m512i lines[TILE];
    for (int r = 0; r < TILE; ++r) lines[r] = _mm512_load_si512(sums + r * TILE);
    transpose(lines);
    for (int t = 0; t < TILE && token + t < tokens; ++t) {
        F32x16 values{{_mm512_castsi512_ps(lines[t])}};
        if (d.bias) values = values + load_floats(d.bias, d.bias_type, row);
        store_floats(y, d.y_type, (token + t) * d.rows + row, values);
    }
}

// Multiply 16 rows with up to two blocks of tokens.
template <int Blocks>
inline void dense_tile_rows(
    const DenseMatrix& d, const uint8_t* inputs, int64_t row, int64_t block, int64_t tokens, void* y, float* sums) {
    const int64_t steps = d.columns / 32, stride = d.columns * 2;
    const uint8_t* weights = static_cast<const uint8_t*>(d.weight) + row * stride;
    const uint8_t* x = inputs + block * steps * TILE_BYTES;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t step = 0; step < steps; ++step) {
        _tile_loadd(4, weights + step * 64, stride);
        _tile_loadd(6, x + step * TILE_BYTES, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (Blocks == 2) {
            _tile_loadd(7, x + (steps + step) * TILE_BYTES, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
    }
    _tile_stored(0, sums, 64);
    store_dense_tile(d, sums, row, block * TILE, tokens, y);
    if constexpr (Blocks == 2) {
        _tile_stored(1, sums, 64);
        store_dense_tile(d, sums, row, (block + 1) * TILE, tokens, y);
    }
}

inline void dense_tiles(const DenseMatrix& d, const void* x, int64_t tokens, void* y, int threads) {
    const uint8_t* inputs = dense_tile_inputs(d, x, tokens);
    const int64_t blocks = (tokens + TILE - 1) / TILE;
#pragma omp parallel num_threads(threads)
    {
        alignas(64) float sums[TILE * TILE];
        const TileShapes shapes(64);
        _tile_loadconfig(&shapes);
#pragma omp for schedule(dynamic, dynamic_chunk(d.rows, TILE))
        for (int64_t row = 0; row < d.rows; row += TILE) {
            int64_t block = 0;
            for (; block + 2 <= blocks; block += 2) dense_tile_rows<2>(d, inputs, row, block, tokens, y, sums);
            if (block < blocks) dense_tile_rows<1>(d, inputs, row, block, tokens, y, sums);
        }
        _tile_release();
    }
}
#endif
