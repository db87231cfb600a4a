// Products in float32. Few tokens: each row of the matrix is read once, decoded in registers and multiplied with the
// inputs of up to four tokens. Many tokens: blocks of rows are decoded to memory once and multiplied with all of them.
// The sum of a row and a token does not depend on others, so that the result is the same for any number of threads and
// of tokens. Codes are multiplied before scales: inputs beyond 1e36 overflow.
#pragma once

#include "lanes.h"

constexpr int MAX_TOKENS = 4, BLOCK = 16;    // tokens at once; rows written at once
constexpr int64_t MIN_DECODED_TOKENS = 12;   // fewest tokens for which rows are decoded to memory
constexpr int64_t CACHED_INPUT_BYTES = 512 * 1024;  // of the inputs of tokens that stay in the cache meanwhile

struct RowBuffers {        // per thread
    float *scale, *shift;  // [BLOCK, groups]
    uint8_t* padded_row;   // [row_bytes + 64] per row, for the last rows
    float* values;         // [BLOCK, padded columns], decoded
};

inline RowBuffers row_buffers(const LinearPlan& plan) {
    static thread_local Scratch scale, shift, padded_row, values;
    const int64_t groups = BLOCK * plan.groups + 16;
    return {
        scale.get<float>(groups), shift.get<float>(groups), padded_row.get<uint8_t>(BLOCK * (plan.row_bytes() + 64)),
        values.get<float>(BLOCK * round_up(plan.columns, LANES))};
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
inline RowInputs row_inputs(const LinearPlan& plan, const void* x, int64_t tokens, int threads) {
    static thread_local Scratch values, totals;
    const int64_t padded = round_up(plan.columns, LANES), groups = round_up(plan.groups, LANES);
    RowInputs in{values.get<float>(tokens * padded), totals.get<float>(tokens * groups), padded, groups};
#pragma omp parallel for num_threads(threads) if (tokens > MAX_TOKENS) schedule(static)
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t g = 0; g < groups; ++g) {
            F32x16 sum = zero<float>();
            for (int64_t k = g * plan.group; g < plan.groups && k < plan.group_end(g); k += LANES) {
                const F32x16 block = load_input_columns(plan, x, token, k);
                store(to_lane_order<Bits>(block), in.x + token * padded + k);
                sum = sum + block;
            }
            in.sums[token * groups + g] = plan.zero ? reduce_add(sum) : 0.0f;
        }
    return in;
}

// Subtract the zero point term, the sum over groups of shift * sum of inputs, from the lanes of a row.
HWY_INLINE FloatRegister without_zero_points(
    const LinearPlan& plan, FloatRegister lanes, const float* shift, const float* sums) {
    if (!plan.zero) return lanes;
    const Tag<float> tag;
    FloatRegister term = hn::Zero(tag);
    int64_t g = 0;
    for (; g + PART_LANES <= plan.groups; g += PART_LANES)
        term = hn::MulAdd(hn::LoadU(tag, shift + g), hn::LoadU(tag, sums + g), term);
    if (g < plan.groups)
        term = hn::MulAdd(hn::LoadN(tag, shift + g, size_t(plan.groups - g)), hn::LoadU(tag, sums + g), term);
    return hn::Sub(lanes, term);
}

// Store the results of a block of rows for one token, with the bias.
inline void store_block(const LinearPlan& plan, void* y, int64_t token, int64_t row, F32x16 values) {
    const int64_t rows_left = plan.rows - row;
    if (plan.bias) values = values + load_floats(plan.bias, plan.bias_type, row, rows_left);
    store_floats(y, plan.x_type, token * plan.rows + row, values, rows_left);
}

// Where the values of rows come from: codes, which are decoded, or memory.
template <int Bits, Decoding How>
struct CodedRows {
    const uint8_t* const* codes;
    const Decoder<Bits, How>& decoder;

    void prefetch(int rows, int64_t begin, int64_t end) const {
        for (int r = 0; r < rows; ++r) prefetch_codes(codes[r], begin * Bits / 8, end * Bits / 8);
    }
    HWY_INLINE F32x16 at(int r, int64_t k) const { return lane_values(codes[r] + (k >> 3) * Bits, decoder); }
    CodedRows from(int r) const { return {codes + r, decoder}; }
};

struct DecodedRows {
    const float* values;
    int64_t stride;

    void prefetch(int, int64_t, int64_t) const {}
    HWY_INLINE F32x16 at(int r, int64_t k) const { return load(values + r * stride + k); }
    DecodedRows from(int r) const { return {values + r * stride, stride}; }
};

// Multiply `Rows` rows with `Tokens` tokens: sums [tokens, BLOCK], one column per row.
template <int Rows, int Tokens, class Source>
inline void multiply_rows(
    const LinearPlan& plan, const Source& rows, const float* scale, const float* shift, const RowInputs& in,
    int64_t token, float* sums) {
    const float *x = in.x + token * in.padded, *input_sums = in.sums + token * in.padded_groups;
    const Tag<float> tag;
    FloatRegister total[Rows * Tokens];
    unroll<Rows * Tokens>([&](auto i) SMELT_INLINE { total[i] = hn::Zero(tag); });
    for (int64_t g = 0; g < plan.groups; ++g) {
        F32x16 part[Rows * Tokens];
        unroll<Rows * Tokens>([&](auto i) SMELT_INLINE { part[i] = zero<float>(); });
        const int64_t end = plan.group_end(g);
        rows.prefetch(Rows, g * plan.group, end);
        for (int64_t k = g * plan.group; k < end; k += LANES)
            unroll<Rows>([&](auto r) SMELT_INLINE {
                const F32x16 weights = rows.at(r, k);
                unroll<Tokens>([&](auto t) SMELT_INLINE {
                    constexpr int i = t * Rows + r;
                    part[i] = mul_add(weights, load(x + t * in.padded + k), part[i]);
                });
            });
        unroll<Rows * Tokens>([&](auto i) SMELT_INLINE {
            total[i] = hn::MulAdd(add_parts(part[i]), hn::Set(tag, scale[i % Rows * plan.groups + g]), total[i]);
        });
    }
    unroll<Tokens>([&](auto t) SMELT_INLINE {
        FloatRegister lanes[4];
        unroll<4>([&](auto i) SMELT_INLINE {
            constexpr int r = i % Rows;
            const float *row_shift = shift + r * plan.groups, *group_sums = input_sums + t * in.padded_groups;
            lanes[i] = i < Rows ? without_zero_points(plan, total[t * Rows + r], row_shift, group_sums) : total[0];
        });
        float four[4];
        sum_lanes(lanes[0], lanes[1], lanes[2], lanes[3], four);
        std::memcpy(sums + t * BLOCK, four, Rows * sizeof(float));
    });
}

template <int Tokens, int Bits, Decoding How>
inline void multiply_block(
    const LinearPlan& plan, const CodedRows<Bits, How>& rows, int64_t row, const RowInputs& in, int64_t token, void* y,
    const RowBuffers& buffers) {
    constexpr int MAX_ROWS = SMELT_AVX512 ? 8 / Tokens : 4 / Tokens;  // limited by the number of registers
    constexpr int Rows = MAX_ROWS >= 4 ? 4 : MAX_ROWS >= 2 ? 2 : 1;
    alignas(64) float sums[Tokens * BLOCK];
    for (int r = 0; r < BLOCK; r += Rows)
        multiply_rows<Rows, Tokens>(
            plan, rows.from(r), buffers.scale + r * plan.groups, buffers.shift + r * plan.groups, in, token, sums + r);
    for (int t = 0; t < Tokens; ++t) store_block(plan, y, token + t, row, load(sums + t * BLOCK));
}

// Multiply a block of decoded rows with tokens `first` to `last`: a few rows, which stay in the nearest cache, with all
// of these tokens.
inline void multiply_tile(
    const LinearPlan& plan, const DecodedRows& rows, int64_t row, const RowInputs& in, int64_t first, int64_t last,
    void* y, const RowBuffers& buffers) {
    static thread_local Scratch results;
    constexpr int ROWS = SMELT_AVX512 ? 4 : 2, TOKENS = SMELT_AVX512 ? 3 : 2;  // limited by the number of registers
    float* sums = results.get<float>((last - first) * BLOCK);
    for (int r = 0; r < BLOCK; r += ROWS) {
        const float *scale = buffers.scale + r * plan.groups, *shift = buffers.shift + r * plan.groups;
        float* target = sums + r;
        int64_t token = first;
        for (; token + TOKENS <= last; token += TOKENS, target += TOKENS * BLOCK)
            multiply_rows<ROWS, TOKENS>(plan, rows.from(r), scale, shift, in, token, target);
        for (; token < last; ++token, target += BLOCK)
            multiply_rows<ROWS, 1>(plan, rows.from(r), scale, shift, in, token, target);
    }
    for (int64_t token = first; token < last; ++token)
        store_block(plan, y, token, row, load(sums + (token - first) * BLOCK));
}

template <int Bits, Decoding How>
inline void decode_rows(const LinearPlan& plan, const CodedRows<Bits, How>& rows, int64_t padded, float* values) {
    for (int r = 0; r < BLOCK; ++r)
        for (int64_t k = 0; k < plan.columns; k += LANES) store(rows.at(r, k), values + r * padded + k);
}

template <int Bits, Decoding How>
inline void row_product(
    const LinearPlan& plan, const Decoder<Bits, How>& decoder, const void* x, int64_t tokens, void* y, int threads) {
    const RowInputs in = row_inputs<Bits>(plan, x, tokens, threads);
    const int64_t fitting = CACHED_INPUT_BYTES / (in.padded * int64_t(sizeof(float))),
                  tile = tokens < MIN_DECODED_TOKENS || fitting > tokens ? tokens : fitting < 48 ? 48 : fitting;
#pragma omp parallel num_threads(threads)
    for (int64_t first = 0; first < tokens; first += tile) {
        const RowBuffers buffers = row_buffers(plan);
        const int64_t last = first + tile < tokens ? first + tile : tokens;
#pragma omp for schedule(dynamic, dynamic_chunk(plan.rows, BLOCK)) nowait
        for (int64_t row = 0; row < plan.rows; row += BLOCK) {
            const uint8_t* codes[BLOCK];
            row_pointers(plan, row, buffers, codes);
            row_scales(plan, row, plan.rows - row < BLOCK ? plan.rows - row : BLOCK, buffers.scale, buffers.shift);
            const CodedRows<Bits, How> rows{codes, decoder};
            if (tokens >= MIN_DECODED_TOKENS) {
                decode_rows(plan, rows, in.padded, buffers.values);
                multiply_tile(plan, DecodedRows{buffers.values, in.padded}, row, in, first, last, y, buffers);
                continue;
            }
            for (int64_t token = first; token < last; token += MAX_TOKENS) switch (last - token) {
                    case 1: multiply_block<1>(plan, rows, row, in, token, y, buffers); break;
                    case 2: multiply_block<2>(plan, rows, row, in, token, y, buffers); break;
                    case 3: multiply_block<3>(plan, rows, row, in, token, y, buffers); break;
                    default: multiply_block<4>(plan, rows, row, in, token, y, buffers);
                }
        }
    }
}

// `dequantize_rows`, 16 codes at a time.
template <int Bits, Decoding How>
inline void dequantize_lanes(
    const LinearPlan& plan, const Decoder<Bits, How>& decoder, int64_t first, int64_t last, void* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = first; row < last; ++row) {
        const RowBuffers buffers = row_buffers(plan);
        const uint8_t* codes = padded_row_codes(plan, row, buffers.padded_row);
        row_scales(plan, row, 1, buffers.scale, buffers.shift);
        for (int64_t g = 0; g < plan.groups; ++g) {
            const F32x16 scale = broadcast(buffers.scale[g]), shift = broadcast(plan.zero ? buffers.shift[g] : 0.0f);
            for (int64_t k = g * plan.group; k < plan.group_end(g); k += LANES) {
                const F32x16 values = to_column_order<Bits>(lane_values(codes + (k >> 3) * Bits, decoder));
                store_floats(
                    out, plan.x_type, (row - first) * plan.columns + k, mul_sub(values, scale, shift),
                    plan.columns - k);
            }
        }
    }
}
