// Products with unquantized matrices: x [tokens, columns] -> y [tokens, rows], weights in 16 or 32 bits.
//
// The sum of a row and a token does not depend on other tokens, so that results are the same in any batch.
#pragma once

#include "simd.h"

#ifdef SMELT_LANES
struct DenseMatrix {
    int64_t rows, columns;
    DType weight_type, bias_type, x_type, y_type;
    const void *weight, *bias;  // [rows, columns], [rows]
};

template <int Rows, int Tokens>
inline void dense_block(const DenseMatrix& d, int64_t row, const float* x, int64_t padded, int64_t token, void* y) {
    __m512 total[Rows * Tokens];
    for (auto& acc : total) acc = _mm512_setzero_ps();
    for (int64_t k = 0; k < d.columns; k += 16) {
        const __mmask16 valid = first_lanes(d.columns - k);
        __m512 weights[Rows];
        for (int r = 0; r < Rows; ++r)
            weights[r] = load_floats(d.weight, d.weight_type, (row + r) * d.columns + k, valid);
        for (int t = 0; t < Tokens; ++t) {
            const __m512 values = _mm512_load_ps(x + (token + t) * padded + k);
            for (int r = 0; r < Rows; ++r)
                total[t * Rows + r] = _mm512_fmadd_ps(weights[r], values, total[t * Rows + r]);
        }
    }
    for (int t = 0; t < Tokens; ++t)
        for (int r = 0; r < Rows; ++r) {
            float sum = _mm512_reduce_add_ps(total[t * Rows + r]);
            if (d.bias) sum += load_float(d.bias, d.bias_type, row + r);
            const int64_t index = (token + t) * d.rows + row + r;
            if (d.y_type == FLOAT32) static_cast<float*>(y)[index] = sum;
            else static_cast<uint16_t*>(y)[index] = float_to_bfloat(sum);
        }
}

template <int Rows>
inline void dense_rows(const DenseMatrix& d, int64_t row, const float* x, int64_t padded, int64_t tokens, void* y) {
    int64_t token = 0;
    for (; token + 4 <= tokens; token += 4) dense_block<Rows, 4>(d, row, x, padded, token, y);
    for (; token < tokens; ++token) dense_block<Rows, 1>(d, row, x, padded, token, y);
}

inline void dense_product(const DenseMatrix& d, const void* x, int64_t tokens, void* y, int threads) {
    static thread_local Scratch buffer;
    const int64_t padded = round_up(d.columns, 16);
    float* values = buffer.get<float>(tokens * padded);
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t k = 0; k < d.columns; k += 16)
            _mm512_store_ps(
                values + token * padded + k,
                load_floats(x, d.x_type, token * d.columns + k, first_lanes(d.columns - k)));
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, dynamic_chunk(d.rows, 4))
        for (int64_t first = 0; first < d.rows; first += 4) {
            if (first + 4 <= d.rows) dense_rows<4>(d, first, values, padded, tokens, y);
            else
                for (int64_t row = first; row < d.rows; ++row) dense_rows<1>(d, row, values, padded, tokens, y);
        }
    }
}
#endif
