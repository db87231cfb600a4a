// GEMV for up to four tokens: each row of the matrix is read once, dequantized to float32 in registers and multiplied
// with the inputs of all tokens. All in float32; the sums of a row do not depend on other rows, so that the result is
// the same for any number of threads. Codes are multiplied before scales: inputs beyond 1e36 overflow.
#pragma once

#include "simd.h"

#ifdef SMELT_LANES
constexpr int MAX_TOKENS = 4, BLOCK = 16;  // tokens at once; rows written at once

struct RowBuffers {        // per thread
    float *scale, *shift;  // [BLOCK, groups]
    uint8_t* padded_row;   // [row_bytes + 64] per row, for the last rows
};

inline RowBuffers row_buffers(const LinearPlan& plan) {
    static thread_local Scratch scale, shift, padded_row;
    const int64_t groups = BLOCK * plan.groups + 16;
    return {
        scale.get<float>(groups), shift.get<float>(groups), padded_row.get<uint8_t>(BLOCK * (plan.row_bytes() + 64))};
}

// Pointers to the rows of a block; beyond the end of the matrix, the last row is repeated.
inline void row_pointers(const LinearPlan& plan, int64_t row, const RowBuffers& buffers, const uint8_t* codes[BLOCK]) {
    for (int r = 0; r < BLOCK; ++r) {
        const int64_t source = row + r < plan.rows ? row + r : plan.rows - 1;
        codes[r] = padded_row_codes(plan, source, buffers.padded_row + r * (plan.row_bytes() + 64));
    }
}

struct RowInputs {
    float* x;     // [tokens, padded] in lane order
    float* sums;  // [tokens, padded_groups], sums of x
    int64_t padded, padded_groups;
};

template <int Bits>
inline RowInputs row_inputs(const LinearPlan& plan, const void* x, int64_t tokens) {
    static thread_local Scratch values, totals;
    const int64_t padded = round_up(plan.columns, 16), groups = round_up(plan.groups, 16);
    RowInputs in{values.get<float>(tokens * padded), totals.get<float>(tokens * groups), padded, groups};
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t g = 0; g < groups; ++g) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t k = g * plan.group; g < plan.groups && k < plan.group_end(g); k += 16) {
                const __m512 block = load_input_columns(plan, x, token, k);
                _mm512_store_ps(in.x + token * padded + k, to_lane_order<Bits>(block));
                sum = _mm512_add_ps(sum, block);
            }
            in.sums[token * groups + g] = plan.zero ? _mm512_reduce_add_ps(sum) : 0.0f;
        }
    return in;
}

// Sum the lanes of each of four registers.
inline __m128 sum_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 four = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
    return _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
}

// Zero point term, per lane: sum over groups of shift * sum of inputs.
inline __m512 zero_point_term(const LinearPlan& plan, const float* shift, const float* sums) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t g = 0; g < plan.groups; g += 16) {
        const __mmask16 valid = first_lanes(plan.groups - g);
        total = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(valid, shift + g), _mm512_load_ps(sums + g), total);
    }
    return total;
}

// Store the results of a block of rows for one token, with the bias.
inline void store_block(const LinearPlan& plan, void* y, int64_t token, int64_t row, __m512 values) {
    const int64_t rows_left = plan.rows - row;
    const __mmask16 valid = first_lanes(rows_left);
    if (plan.bias_type == FLOAT32)
        values = _mm512_add_ps(values, _mm512_maskz_loadu_ps(valid, static_cast<const float*>(plan.bias) + row));
    else if (plan.bias)
        for (int r = 0; r < BLOCK && r < rows_left; ++r) {
            const __m512 bias = _mm512_set1_ps(load_float(plan.bias, plan.bias_type, row + r));
            values = _mm512_mask_add_ps(values, __mmask16(1 << r), values, bias);
        }
    store_floats(y, plan.x_type, token * plan.rows + row, values, valid);
}

// Multiply `Rows` rows with `Tokens` tokens: sums [tokens, BLOCK], one column per row.
template <int Bits, int Rows, int Tokens>
inline void multiply_rows(
    const LinearPlan& plan, const uint8_t* const* codes, const float* scale, const float* shift, const RowInputs& in,
    int64_t token, float* sums) {
    const __m512 table = Bits == 8 ? _mm512_setzero_ps() : lane_table(plan);
    const __m512i shifts = lane_shifts<Bits>();
    const float* x = in.x + token * in.padded;
    __m512 total[Rows * Tokens];
    for (auto& acc : total) acc = _mm512_setzero_ps();
    for (int64_t g = 0; g < plan.groups; ++g) {
        __m512 part[Rows * Tokens];
        for (auto& acc : part) acc = _mm512_setzero_ps();
        const int64_t end = plan.group_end(g);
        for (int r = 0; r < Rows; ++r) prefetch_codes(codes[r], g * plan.group * Bits / 8, end * Bits / 8);
        for (int64_t k = g * plan.group; k < end; k += 16)
            for (int r = 0; r < Rows; ++r) {
                const __m512 weights = lane_values<Bits>(codes[r] + k / 8 * Bits, table, shifts);
                for (int t = 0; t < Tokens; ++t)
                    part[t * Rows + r] =
                        _mm512_fmadd_ps(weights, _mm512_load_ps(x + t * in.padded + k), part[t * Rows + r]);
            }
        for (int r = 0; r < Rows; ++r)
            for (int t = 0; t < Tokens; ++t)
                total[t * Rows + r] = _mm512_fmadd_ps(
                    part[t * Rows + r], _mm512_set1_ps(scale[r * plan.groups + g]), total[t * Rows + r]);
    }
    for (int t = 0; t < Tokens; ++t) {
        if (plan.zero)
            for (int r = 0; r < Rows; ++r) {
                const __m512 offset_sums =
                    zero_point_term(plan, shift + r * plan.groups, in.sums + (token + t) * in.padded_groups);
                total[t * Rows + r] = _mm512_sub_ps(total[t * Rows + r], offset_sums);
            }
        const __m512* row_sums = total + t * Rows;
        if constexpr (Rows == 4)
            _mm_store_ps(sums + t * BLOCK, sum_lanes(row_sums[0], row_sums[1], row_sums[2], row_sums[3]));
        else _mm_storel_pi((__m64*)(sums + t * BLOCK), sum_lanes(row_sums[0], row_sums[1], row_sums[0], row_sums[1]));
    }
}

template <int Bits, int Tokens>
inline void multiply_block(
    const LinearPlan& plan, int64_t row, const uint8_t* const* codes, const RowInputs& in, int64_t token, void* y,
    const RowBuffers& buffers) {
    constexpr int Rows = Tokens <= 2 ? 4 : 2;  // limited by the number of registers
    alignas(64) float sums[Tokens * BLOCK];
    for (int r = 0; r < BLOCK; r += Rows)
        multiply_rows<Bits, Rows, Tokens>(
            plan, codes + r, buffers.scale + r * plan.groups, buffers.shift + r * plan.groups, in, token, sums + r);
    for (int t = 0; t < Tokens; ++t) store_block(plan, y, token + t, row, _mm512_load_ps(sums + t * BLOCK));
}

template <int Bits>
inline void row_product(const LinearPlan& plan, const void* x, int64_t tokens, void* y, int threads) {
    const RowInputs in = row_inputs<Bits>(plan, x, tokens);
#pragma omp parallel num_threads(threads)
    {
        const RowBuffers buffers = row_buffers(plan);
#pragma omp for schedule(dynamic, dynamic_chunk(plan.rows, BLOCK))
        for (int64_t row = 0; row < plan.rows; row += BLOCK) {
            const uint8_t* codes[BLOCK];
            row_pointers(plan, row, buffers, codes);
            row_scales(plan, row, plan.rows - row < BLOCK ? plan.rows - row : BLOCK, buffers.scale, buffers.shift);
            for (int64_t token = 0; token < tokens; token += MAX_TOKENS) switch (tokens - token) {
                    case 1: multiply_block<Bits, 1>(plan, row, codes, in, token, y, buffers); break;
                    case 2: multiply_block<Bits, 2>(plan, row, codes, in, token, y, buffers); break;
                    case 3: multiply_block<Bits, 3>(plan, row, codes, in, token, y, buffers); break;
                    default: multiply_block<Bits, 4>(plan, row, codes, in, token, y, buffers);
                }
        }
    }
}

// `dequantize_rows`, 16 codes at a time.
template <int Bits>
inline void dequantize_lanes(const LinearPlan& plan, int64_t first, int64_t last, void* out, int threads) {
    const __m512 table = Bits == 8 ? _mm512_setzero_ps() : lane_table(plan);
    const __m512i shifts = lane_shifts<Bits>();
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = first; row < last; ++row) {
        const RowBuffers buffers = row_buffers(plan);
        const uint8_t* codes = padded_row_codes(plan, row, buffers.padded_row);
        row_scales(plan, row, 1, buffers.scale, buffers.shift);
        for (int64_t g = 0; g < plan.groups; ++g) {
            const __m512 scale = _mm512_set1_ps(buffers.scale[g]),
                         shift = _mm512_set1_ps(plan.zero ? buffers.shift[g] : 0.0f);
            for (int64_t k = g * plan.group; k < plan.group_end(g); k += 16) {
                const __m512 values = to_column_order<Bits>(lane_values<Bits>(codes + k / 8 * Bits, table, shifts));
                store_floats(
                    out, plan.x_type, (row - first) * plan.columns + k, _mm512_fmsub_ps(values, scale, shift),
                    first_lanes(plan.columns - k));
            }
        }
    }
}
#endif
