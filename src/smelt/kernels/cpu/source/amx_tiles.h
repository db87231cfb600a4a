// GEMM for many tokens with AMX. Weights are the first operand, 16 rows at a time in memory order; inputs are the
// second, 16 tokens at a time. The partial sums of a group of columns are scaled in float32.
//
// Weights are unscaled values that are exact in bfloat16 or int8; or, for many tokens in bfloat16, dequantized to
// bfloat16 as for a dense product.
#pragma once

#include "amx_inputs.h"

#ifdef SMELT_TILES
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    explicit TileShapes(int depth) {  // bytes of a row of weights per product
        for (int tile = 0; tile < 8; ++tile) {
            row_bytes[tile] = uint16_t(tile == 4 || tile == 5 ? depth : 64);
            rows[tile] = uint8_t(tile >= 6 ? depth / 4 : TILE);
        }
    }
};

// bfloat16 values of 4-bit codes, repeated, so that the bits above a code do not matter.
inline __m512i word_table(__m512 values) {
    const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(values), 16));
    return _mm512_broadcast_i64x4(halves);
}

inline __m512 rounded_to_bfloat(__m512 values) {  // to nearest, ties away from zero
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(values), _mm512_set1_epi32(0x8000)));
}

// Write a row of weights to its row of each tile; `tiles` points to the row of the first tile. Scaled: write
// values * scale - shift, rounded to bfloat16; up to 4 bits, by scaling the table of a group.
template <int Bits, bool Scaled>
inline void write_float_tiles(
    const LinearPlan& plan, const uint8_t* codes, const float* scale, const float* shift, int64_t steps,
    uint8_t* tiles) {
    const __m512i four = _mm512_set1_epi64(0x0004000400040004), eight = _mm512_add_epi64(four, four);
    const __m512i quarters = _mm512_mask_mov_epi64(_mm512_maskz_mov_epi64(0x0c, four), 0x30, eight);
    const __m512i spread = _mm512_mask_add_epi64(quarters, 0xc0, eight, four);  // 0, 4, 8, 12, one per quarter
    Decoder<Bits, Bits == 8 ? CONVERT : LOOKUP> decoder(plan);
    const __m512 values = raw(decoder.table);
    const int64_t groups = Scaled ? plan.groups : 1, group = Scaled ? plan.group / 32 : steps;
    for (int64_t g = 0; g < groups; ++g) {
        const __m512 step = _mm512_set1_ps(scale[g]);
        const __m512 zero_shift = _mm512_set1_ps(Scaled && plan.zero ? shift[g] : 0.0f);
        const __m512 table = Scaled ? rounded_to_bfloat(_mm512_fmsub_ps(values, step, zero_shift)) : values;
        const __m512i words = word_table(table);
        decoder.table.part[0].raw = table;
        const int64_t end = g + 1 < groups ? (g + 1) * group : steps;
        for (int64_t tile = g * group; tile < end; ++tile) {
            const uint8_t* step_codes = codes + tile * 4 * Bits;
            prefetch_codes(step_codes, 0, 1);
            __m512i tile_line;
            if constexpr (Bits == 4) {
                const __m512i repeated = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)step_codes));
                tile_line = _mm512_permutexvar_epi16(_mm512_srlv_epi16(repeated, spread), words);
            } else {
                __m512 low = raw(lane_values(step_codes, decoder));
                __m512 high = raw(lane_values(step_codes + 2 * Bits, decoder));
                if constexpr (Scaled && Bits == 8) {
                    low = rounded_to_bfloat(_mm512_fmsub_ps(low, step, zero_shift));
                    high = rounded_to_bfloat(_mm512_fmsub_ps(high, step, zero_shift));
                }
                tile_line = pack_bfloat_pairs(low, high);
            }
            _mm512_store_si512(tiles + tile * TILE_BYTES, tile_line);
        }
    }
}

template <CodeLayout Layout>
inline void write_int8_tiles(
    const LinearPlan& plan, const uint8_t* codes, const uint8_t* zero, int64_t steps, uint8_t* tiles) {
    const Segments segments(plan);
    ChunkGroups groups{};
    for (int64_t step = 0; step < steps; ++step) {
        groups = segments.next_groups(step * CHUNK / segments.columns, groups);
        prefetch_codes(codes, step * CHUNK * plan.bits / 8, step * CHUNK * plan.bits / 8 + 1);
        store(chunk_bytes<Layout>(plan, codes, step * CHUNK, zero, groups), tiles + step * TILE_BYTES);
    }
}

struct TileBuffers {  // per thread
    uint8_t *weights, *padded_row;
    float *scale, *shift, *part, *sum;
};

inline TileBuffers tile_buffers(const LinearPlan& plan, int64_t row_groups, int64_t steps) {
    static thread_local Scratch weights, padded_row, scale, shift, part, sum;
    const int64_t groups = ROW_BLOCK * row_groups + 16;
    return {
        weights.get<uint8_t>(2 * steps * TILE_BYTES),
        padded_row.get<uint8_t>(plan.row_bytes() + 64),
        scale.get<float>(groups),
        shift.get<float>(groups),
        part.get<float>(4 * TILE * TILE),
        sum.get<float>(4 * TILE * TILE)};
}

// Address of step `index` of a product: one step per tile, or two if groups are half as deep as a tile.
template <bool Half>
inline int64_t weight_offset(int64_t index) {
    return Half ? index / 2 * TILE_BYTES + index % 2 * 32 : index * TILE_BYTES;
}
template <bool Half>
inline int64_t input_offset(int64_t index, int num_terms) {
    return Half ? index * (TILE_BYTES / 2) : index * num_terms * TILE_BYTES;
}

// Multiply one group: two tiles of rows with one or two tiles of tokens, into tiles 0 to 3.
template <bool Int8, bool Half, int Blocks>
inline void group_product(
    const uint8_t* const weights[2], const uint8_t* const x[2], int64_t begin, int64_t end, int num_terms) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = begin; step < end; ++step) {
        _tile_loadd(4, weights[0] + weight_offset<Half>(step), 64);
        _tile_loadd(5, weights[1] + weight_offset<Half>(step), 64);
        for (int term = 0; term < num_terms; ++term) {
            const int64_t offset = input_offset<Half>(step, num_terms) + term * TILE_BYTES;
            _tile_loadd(6, x[0] + offset, 64);
            if constexpr (Int8) {
                _tile_dpbusd(0, 4, 6);
                _tile_dpbusd(1, 5, 6);
            } else {
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 5, 6);
            }
            if constexpr (Blocks == 2) {
                _tile_loadd(7, x[1] + offset, 64);
                if constexpr (Int8) {
                    _tile_dpbusd(2, 4, 7);
                    _tile_dpbusd(3, 5, 7);
                } else {
                    _tile_dpbf16ps(2, 4, 7);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
        }
    }
}

// Add the scaled products of a group to the sums of the 16 rows of `half` and the tokens of `block`.
template <bool Int8>
inline void add_group(
    const LinearPlan& plan, const TileInputs& in, int64_t block, int64_t g, int half, const float* part, float* sum,
    const TileBuffers& buffers) {
    const int64_t groups = plan.groups, offset = (block * groups + g) * TILE;
    const float *scale = buffers.scale + half * TILE * groups + g, *shift = buffers.shift + half * TILE * groups + g;
    const __m512 inputs = _mm512_load_ps(in.sums + offset);
    for (int r = 0; r < TILE; ++r) {
        __m512 product;
        if constexpr (Int8) {
            const __m512i sums = _mm512_load_si512(part + r * TILE);
            product = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_load_si512(in.offset_sums + offset)));
        } else {
            product = _mm512_load_ps(part + r * TILE);
        }
        __m512 total = _mm512_fmadd_ps(product, _mm512_set1_ps(scale[r * groups]), _mm512_load_ps(sum + r * TILE));
        if (plan.zero) total = _mm512_fnmadd_ps(_mm512_set1_ps(shift[r * groups]), inputs, total);
        _mm512_store_ps(sum + r * TILE, total);
    }
}

template <bool Int8>
inline void store_tile(
    const LinearPlan& plan, const TileInputs& in, int64_t block, int64_t row, int64_t tokens, const float* sum,
    void* y) {
    if (row >= plan.rows) return;
    __m512i rows[TILE];
    for (int r = 0; r < TILE; ++r) {
        rows[r] = _mm512_load_si512(sum + r * TILE);
        if (!Int8) continue;
        const __m512 scaled = _mm512_mul_ps(_mm512_castsi512_ps(rows[r]), _mm512_load_ps(in.scale + block * TILE));
        rows[r] = _mm512_castps_si512(scaled);
    }
    transpose(rows);
    const int64_t rows_left = plan.rows - row, valid = tokens - block * TILE < TILE ? tokens - block * TILE : TILE;
    const __mmask16 row_mask = __mmask16(rows_left >= TILE ? 0xffff : (1u << rows_left) - 1);
    alignas(64) float bias[TILE] = {};
    for (int r = 0; plan.bias && r < TILE && r < rows_left; ++r)
        bias[r] = load_float(plan.bias, plan.bias_type, row + r);
    const __m512 bias_values = _mm512_load_ps(bias);
    for (int t = 0; t < valid; ++t) {
        const __m512 values = _mm512_add_ps(_mm512_castsi512_ps(rows[t]), bias_values);
        const int64_t offset = (block * TILE + t) * plan.rows + row;
        if (plan.x_type == FLOAT32) _mm512_mask_storeu_ps(static_cast<float*>(y) + offset, row_mask, values);
        else
            _mm256_mask_storeu_epi16(static_cast<uint16_t*>(y) + offset, row_mask, (__m256i)_mm512_cvtneps_pbh(values));
    }
}

// Multiply 32 rows with one or two blocks of 16 tokens. Direct: one unscaled group, whose products are the results.
template <bool Int8, bool Half, bool Direct, int Blocks>
inline void tile_block(
    const LinearPlan& plan, const TileInputs& in, int64_t block, int64_t row, int64_t tokens, void* y,
    const TileBuffers& buffers) {
    const int64_t depth = Half ? 32 : Int8 ? CHUNK : 32, size = in.steps * in.num_terms * TILE_BYTES;
    const uint8_t* weights[2] = {buffers.weights, buffers.weights + in.steps * TILE_BYTES};
    const uint8_t* x[2] = {in.tiles + block * size, in.tiles + (block + Blocks - 1) * size};
    constexpr int SIZE = TILE * TILE;
    if (!Direct) std::memset(buffers.sum, 0, 2 * Blocks * SIZE * sizeof(float));
    for (int64_t g = 0; g < plan.groups; ++g) {
        const int64_t end = (plan.group_end(g) + depth - 1) / depth;
        group_product<Int8, Half, Blocks>(weights, x, g * plan.group / depth, end, in.num_terms);
        _tile_stored(0, buffers.part, 64);
        _tile_stored(1, buffers.part + SIZE, 64);
        if constexpr (Blocks == 2) {
            _tile_stored(2, buffers.part + 2 * SIZE, 64);
            _tile_stored(3, buffers.part + 3 * SIZE, 64);
        }
        for (int part = 0; !Direct && part < 2 * Blocks; ++part)
            add_group<Int8>(
                plan, in, block + part / 2, g, part % 2, buffers.part + part * SIZE, buffers.sum + part * SIZE,
                buffers);
    }
    const float* results = Direct ? buffers.part : buffers.sum;
    for (int part = 0; part < 2 * Blocks; ++part)
        store_tile<Int8>(plan, in, block + part / 2, row + part % 2 * TILE, tokens, results + part * SIZE, y);
}

// `pack(block)` packs the inputs of 16 tokens; `write_weights(row, buffers)` writes 32 rows from `row` on and their
// scales.
template <bool Int8, bool Half, bool Direct, class Pack, class WriteWeights>
inline void tile_product(
    const LinearPlan& plan, int64_t groups, const TileInputs& in, int64_t tokens, void* y, int threads, Pack pack,
    WriteWeights write_weights) {
    const TileShapes shapes(Half ? 32 : 64);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < in.blocks; ++block) pack(block);
        const TileBuffers buffers = tile_buffers(plan, groups, in.steps);
        _tile_loadconfig(&shapes);
#pragma omp for schedule(dynamic, dynamic_chunk(plan.rows, ROW_BLOCK))
        for (int64_t row = 0; row < plan.rows; row += ROW_BLOCK) {
            write_weights(row, buffers);
            int64_t block = 0;
            for (; block + 2 <= in.blocks; block += 2)
                tile_block<Int8, Half, Direct, 2>(plan, in, block, row, tokens, y, buffers);
            if (block < in.blocks) tile_block<Int8, Half, Direct, 1>(plan, in, block, row, tokens, y, buffers);
        }
        _tile_release();
    }
}

inline int64_t rows_in_block(const LinearPlan& plan, int64_t row) {
    return plan.rows - row < ROW_BLOCK ? plan.rows - row : ROW_BLOCK;
}

inline uint8_t* tile_row(const TileBuffers& buffers, int64_t r, int64_t steps) {
    return buffers.weights + r / TILE * steps * TILE_BYTES + r % TILE * 64;
}

template <int Bits, bool Scaled>
inline void float_tiles(const LinearPlan& plan, const void* x, int64_t tokens, void* y, int threads) {
    LinearPlan product = plan;
    if (Scaled) product.group = plan.columns, product.groups = 1, product.zero = nullptr;
    const TileInputs in = allocate_tile_inputs(product, tokens, 32, plan.x_type == BFLOAT16 ? 1 : 3);
    auto write_weights = [&](int64_t row, const TileBuffers& buffers) {
        const int64_t count = rows_in_block(plan, row);
        row_scales(plan, row, count, buffers.scale, buffers.shift);
        for (int64_t r = 0; r < count; ++r) {
            const float *scale = buffers.scale + r * plan.groups, *shift = buffers.shift + r * plan.groups;
            const uint8_t* codes = padded_row_codes(plan, row + r, buffers.padded_row);
            write_float_tiles<Bits, Scaled>(plan, codes, scale, shift, in.steps, tile_row(buffers, r, in.steps));
        }
    };
    auto pack = [&](int64_t block) { pack_floats<Bits>(product, x, tokens, block, in); };
    tile_product<false, false, Scaled>(product, plan.groups, in, tokens, y, threads, pack, write_weights);
}

template <CodeLayout Layout, bool Half>
inline void int8_tiles(const LinearPlan& plan, const void* x, int64_t tokens, void* y, int threads) {
    const TileInputs in = allocate_tile_inputs(plan, tokens, CHUNK, 1);
    auto write_weights = [&](int64_t row, const TileBuffers& buffers) {
        int8_scales(plan, row, rows_in_block(plan, row), buffers.scale, buffers.shift);
        for (int r = 0; r < rows_in_block(plan, row); ++r) {
            const uint8_t* codes = padded_row_codes(plan, row + r, buffers.padded_row);
            const uint8_t* zero = row_zero_points(plan, row + r);
            write_int8_tiles<Layout>(plan, codes, zero, in.steps, tile_row(buffers, r, in.steps));
        }
    };
    auto pack = [&](int64_t block) { pack_int8(plan, x, tokens, block, in); };
    tile_product<true, Half, false>(plan, plan.groups, in, tokens, y, threads, pack, write_weights);
}
#endif
