// GEMM with int8 inputs on CPUs without AMX: the codes of some rows are unpacked once and multiplied with all tokens.
//
// Operations have the same order as in the GEMV, so that the result of a token is the same in any batch.
#pragma once

#include "int8_gemv.h"

// Rows and tokens multiplied at once, limited by the number of registers; tokens whose sums stay in cache.
constexpr int GEMM_ROWS = 2, GEMM_TOKENS = 4;
constexpr int64_t TOKEN_BLOCK = 16;

struct GemmBuffers {  // per thread
    uint8_t* bytes;   // [BLOCK / GEMM_ROWS, padded columns / 64, GEMM_ROWS, 64]
    float* total;     // [TOKEN_BLOCK, BLOCK, SUM_LANES]: sums of a token and a row
};

inline GemmBuffers gemm_buffers(int64_t padded) {
    static thread_local Scratch bytes, total;
    return {bytes.get<uint8_t>(BLOCK * padded), total.get<float>(TOKEN_BLOCK * BLOCK * SUM_LANES)};
}

// Call multiply(tokens, token) for each few tokens of a block; `tokens` is a compile-time constant.
template <class Multiply>
inline void for_token_tiles(int64_t count, Multiply multiply) {
    for (int token = 0; token < count; token += GEMM_TOKENS) switch (count - token) {
            case 1: multiply(std::integral_constant<int, 1>(), token); break;
            case 2: multiply(std::integral_constant<int, 2>(), token); break;
            case 3: multiply(std::integral_constant<int, 3>(), token); break;
            default: multiply(std::integral_constant<int, GEMM_TOKENS>(), token);
        }
}

// Subtract the zero point term, sum the lanes and store the results of a block of rows; `token` is that of the block.
inline void store_tokens(
    const LinearPlan& plan, const Int8Inputs& in, int64_t row, int64_t token, int64_t count, const float* total,
    const float* shift, void* y) {
    for (int64_t t = 0; t < count; ++t) {
        alignas(64) float sums[BLOCK];
        for (int r = 0; r < BLOCK; r += 4) {
            FloatRegister lanes[4];
            unroll<4>([&](auto i) SMELT_INLINE {
                FloatSums row_sums;
                unroll<SUMS>([&](auto h) SMELT_INLINE {
                    row_sums.half[h] =
                        hn::Load(Tag<float>(), total + (t * BLOCK + r + i) * SUM_LANES + h * PART_LANES);
                });
                const float *row_shift = shift + (r + i) * plan.groups,
                            *group_sums = in.sums + (token + t) * in.padded_groups;
                lanes[i] = without_zero_points(plan, add_halves(row_sums), row_shift, group_sums);
            });
            sum_lanes(lanes[0], lanes[1], lanes[2], lanes[3], sums + r);
        }
        store_block(plan, y, token + t, row, load(sums) * broadcast(in.scale[token + t]));
    }
}

// Multiply `Rows` rows from `row` on with `Tokens` tokens from `token` on, both in the block, as in `int8_dot`. `first`
// is the first token of the block.
template <CodeLayout Layout, int Rows, int Tokens>
inline void multiply_tokens(
    const Segments& segments, const Int8Inputs& in, const float* scale, const GemmBuffers& buffers, int64_t first,
    int row, int token) {
    const Tag<float> floats;
    const Tag<int32_t> ints;
    const int64_t num_groups = segments.plan.groups, token_stride = segments.count * SUM_LANES;
    const float* row_scale = scale + row * num_groups;
    for (int h = 0; h < SUMS; ++h) {
        const int64_t offset = h * PARTS_PER_SUM * 4 * PART_LANES;
        const uint8_t* weights = buffers.bytes + row * in.padded + offset;
        const int8_t* x = in.at(first + token, 0) + offset;
        const int32_t* start = in.offset_sums + (first + token) * token_stride + h * PART_LANES;
        IntRegister part[Rows * Tokens];
        FloatRegister total[Rows * Tokens];
        unroll<Rows * Tokens>([&](auto i) SMELT_INLINE {
            part[i] = hn::Load(ints, start + i / Rows * token_stride);
            total[i] = hn::Zero(floats);
        });
        ChunkGroups groups = segments.next_groups(0, {});
        for (int64_t k = 0, segment = 0, end = segments.end(0); k < in.padded; k += CHUNK) {
            unroll<PARTS_PER_SUM>([&](auto p) SMELT_INLINE {
                ByteRegister w[Rows];
                unroll<Rows>([&](auto r) SMELT_INLINE {
                    w[r] = hn::Load(Tag<uint8_t>(), weights + k * Rows + r * CHUNK + p * 4 * PART_LANES);
                });
                unroll<Tokens>([&](auto t) SMELT_INLINE {
                    const auto values =
                        hn::Load(Tag<int8_t>(), x + k * GEMM_TOKENS + t * CHUNK + p * 4 * PART_LANES);
                    unroll<Rows>([&](auto r) SMELT_INLINE {
                        part[t * Rows + r] = dot_bytes<Layout>(w[r], values, part[t * Rows + r]);
                    });
                });
            });
            if (k + CHUNK < end) continue;
            start += SUM_LANES;
            FloatRegister steps[Rows];
            unroll<Rows>([&](auto r) SMELT_INLINE {
                steps[r] = segments.steps(row_scale + r * num_groups, groups, h);
            });
            unroll<Rows * Tokens>([&](auto i) SMELT_INLINE {
                total[i] = hn::MulAdd(hn::ConvertTo(floats, part[i]), steps[i % Rows], total[i]);
                part[i] = hn::Load(ints, start + i / Rows * token_stride);
            });
            end = segments.end(++segment), groups = segments.next_groups(segment, groups);
        }
        float* totals = buffers.total + (token * BLOCK + row) * SUM_LANES + h * PART_LANES;
        unroll<Rows * Tokens>([&](auto i) SMELT_INLINE {
            hn::Store(total[i], floats, totals + (i / Rows * BLOCK + i % Rows) * SUM_LANES);
        });
    }
}

// Write the codes of a block of rows as bytes.
template <CodeLayout Layout>
inline void unpack_rows(
    const LinearPlan& plan, const Segments& segments, int64_t row, const uint8_t* const* codes, uint8_t* bytes) {
    for (int r = 0; r < BLOCK; ++r) {
        const uint8_t* zeros = row_zero_points(plan, std::min(row + r, plan.rows - 1));
        uint8_t* row_bytes = bytes + r / GEMM_ROWS * segments.padded * GEMM_ROWS + r % GEMM_ROWS * CHUNK;
        ChunkGroups groups{};
        prefetch_codes(codes[r], 0, plan.row_bytes());
        for (int64_t segment = 0; segment < segments.count; ++segment) {
            groups = segments.next_groups(segment, groups);
            for (int64_t k = segment * segments.columns; k < segments.end(segment); k += CHUNK)
                store(chunk_bytes<Layout>(plan, codes[r], k, zeros, groups), row_bytes + k * GEMM_ROWS);
        }
    }
}

template <CodeLayout Layout>
inline void int8_gemm(const LinearPlan& plan, const void* x, int64_t tokens, void* y, int threads) {
    const Int8Inputs in = int8_inputs(plan, x, tokens, GEMM_TOKENS, threads);
    const Segments segments(plan);
#pragma omp parallel num_threads(threads)
    {
        const RowBuffers rows = row_buffers(plan);
        const GemmBuffers buffers = gemm_buffers(in.padded);
#pragma omp for schedule(dynamic, dynamic_chunk(plan.rows, BLOCK))
        for (int64_t row = 0; row < plan.rows; row += BLOCK) {
            const uint8_t* codes[BLOCK];
            row_pointers(plan, row, rows, codes);
            int8_scales(plan, row, std::min<int64_t>(plan.rows - row, BLOCK), rows.scale, rows.shift);
            unpack_rows<Layout>(plan, segments, row, codes, buffers.bytes);
            for (int64_t token = 0; token < tokens; token += TOKEN_BLOCK) {
                const int64_t count = std::min(tokens - token, TOKEN_BLOCK);
                for_token_tiles(count, [&](auto tile_tokens, int tile) {
                    for (int r = 0; r < BLOCK; r += GEMM_ROWS)
                        multiply_tokens<Layout, GEMM_ROWS, decltype(tile_tokens)::value>(
                            segments, in, rows.scale, buffers, token, r, tile);
                });
                store_tokens(plan, in, row, token, count, buffers.total, rows.shift, y);
            }
        }
    }
}
