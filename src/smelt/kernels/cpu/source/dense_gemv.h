// Products with unquantized matrices: x [tokens, columns] -> y [tokens, rows], weights in 16 or 32 bits.
//
// The sum of a row and a token does not depend on other tokens, so that results are the same in any batch.
#pragma once

#include "simd.h"

struct DenseMatrix {
    int64_t rows, columns;
    DType weight_type, bias_type, x_type, y_type;
    const void *weight, *bias;  // [rows, columns], [rows]
};

template <DType Weights, int Rows, int Tokens>
inline void dense_block(const DenseMatrix& d, int64_t row, const float* x, int64_t padded, int64_t token, void* y) {
    F32x16 total[Rows * Tokens];
    unroll<Rows * Tokens>([&](auto i) SMELT_INLINE { total[i] = zero<float>(); });
    for_blocks(d.columns, [&](int64_t k, int64_t lanes) SMELT_INLINE {
        F32x16 weights[Rows];
        unroll<Rows>([&](auto r) SMELT_INLINE {
            weights[r] = load_floats(d.weight, Weights, (row + r) * d.columns + k, lanes);
        });
        unroll<Tokens>([&](auto t) SMELT_INLINE {
            const F32x16 values = load(x + (token + t) * padded + k);
            unroll<Rows>([&](auto r) SMELT_INLINE {
                constexpr int i = t * Rows + r;
                total[i] = mul_add(weights[r], values, total[i]);
            });
        });
    });
    unroll<Tokens>([&](auto t) SMELT_INLINE {
        constexpr int i = t * Rows;
        float sums[4];
        sum_lanes(total[i], total[i + 1 % Rows], total[i + 2 % Rows], total[i + 3 % Rows], sums);
        for (int r = 0; r < Rows; ++r) {
            if (d.bias) sums[r] += load_float(d.bias, d.bias_type, row + r);
            const int64_t index = (token + t) * d.rows + row + r;
            if (d.y_type == FLOAT32) static_cast<float*>(y)[index] = sums[r];
            else static_cast<uint16_t*>(y)[index] = float_to_bfloat(sums[r]);
        }
    });
}

// Multiply four rows; sums of four tokens at once do not fit into the registers with AVX2 or NEON.
template <DType Weights>
inline void dense_rows(const DenseMatrix& d, int64_t row, const float* x, int64_t padded, int64_t tokens, void* y) {
    constexpr int ROWS = SMELT_AVX512 ? 4 : 2, TOKENS = SMELT_AVX512 ? 4 : 2;
    int64_t token = 0;
    for (; token + TOKENS <= tokens; token += TOKENS)
        for (int r = 0; r < 4; r += ROWS) dense_block<Weights, ROWS, TOKENS>(d, row + r, x, padded, token, y);
    for (; token < tokens; ++token) dense_block<Weights, 4, 1>(d, row, x, padded, token, y);
}

template <DType Weights>
inline void dense_product(const DenseMatrix& d, const void* x, int64_t tokens, void* y, int threads) {
    static thread_local Scratch buffer;
    const int64_t padded = round_up(d.columns, LANES);
    float* values = buffer.get<float>(tokens * padded);
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t k = 0; k < d.columns; k += LANES)
            store(load_floats(x, d.x_type, token * d.columns + k, d.columns - k), values + token * padded + k);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, dynamic_chunk(d.rows, 4))
        for (int64_t first = 0; first < d.rows; first += 4) {
            if (first + 4 <= d.rows) dense_rows<Weights>(d, first, values, padded, tokens, y);
            else
                for (int64_t row = first; row < d.rows; ++row)
                    for (int64_t token = 0; token < tokens; ++token)
                        dense_block<Weights, 1, 1>(d, row, values, padded, token, y);
        }
    }
}

inline void dense_product(const DenseMatrix& d, const void* x, int64_t tokens, void* y, int threads) {
    switch (d.weight_type) {
        case FLOAT32: return dense_product<FLOAT32>(d, x, tokens, y, threads);
        case FLOAT16: return dense_product<FLOAT16>(d, x, tokens, y, threads);
        default: return dense_product<BFLOAT16>(d, x, tokens, y, threads);
    }
}
