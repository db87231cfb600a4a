// Many tokens: the matrix units (AMX). Weights are the first operand, 16 rows at a time as they lie in memory; inputs
// are the second, 16 tokens at a time, packed once for all rows. What a group of columns gives is scaled in float32.
//
// The weights are whole numbers (or values of few bits), exact in bfloat16 or int8. Inputs in bfloat16 are taken as
// they are; a float32 input is the exact sum of three bfloat16 pieces, so that nothing is lost but float32 rounding.
#pragma once

#include "integers.h"

#if defined(SMELT_INTEGERS) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define SMELT_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

constexpr int TILE = 16, TILE_BYTES = 1024, PAIR = 32;  // rows of a tile, its bytes, rows that are computed together

inline bool tiles_granted() {  // the system hands out the units' registers on demand
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
}

inline bool exact_in_bfloat(const Plan& plan) {
    if (plan.values != TABLE) return true;
    for (int code = 0; code < 1 << plan.bits; ++code)
        if (bfloat_to_float(float_to_bfloat(plan.table[code])) != plan.table[code]) return false;
    return true;
}

inline bool has_float_tiles(const Plan& plan) {
    return has_lanes(plan) && plan.groups_of(32) && fills_up(plan, 32) && exact_in_bfloat(plan) && tiles_granted();
}
inline bool has_integer_tiles(const Plan& plan) {
    return has_integers(plan) && plan.group <= 32768 && tiles_granted();
}

struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    explicit TileShapes(int depth) {  // bytes of a row of weights that one product takes
        for (int tile = 0; tile < 8; ++tile) {
            row_bytes[tile] = uint16_t(tile == 4 || tile == 5 ? depth : 64);
            rows[tile] = uint8_t(tile >= 6 ? depth / 4 : TILE);
        }
    }
};

inline void transpose(__m512i rows[16]) {  // 16 x 16 words of 32 bits
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            rows[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 8; j += 4) {
            t[2 * j + i] = _mm512_shuffle_i32x4(rows[2 * j + i], rows[2 * j + i + 4], 0x88);
            t[2 * j + i + 4] = _mm512_shuffle_i32x4(rows[2 * j + i], rows[2 * j + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; ++i) {
        rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

struct TileInputs {
    uint8_t* tiles;   // [blocks of 16 tokens, steps, pieces, TILE_BYTES]
    float* sums;      // [blocks, groups, 16 tokens]: of the inputs, or of their codes
    int32_t* taken;   // [blocks, groups, 16 tokens]: the offset times the sum of the codes
    float* scale;     // [blocks, 16 tokens], of codes
    int64_t blocks, steps;
    int pieces;
};

inline TileInputs tile_room(const Plan& plan, int64_t tokens, int columns, int pieces) {
    static thread_local Scratch tiles, sums, taken, scale;
    const int64_t blocks = (tokens + TILE - 1) / TILE, steps = (plan.columns + columns - 1) / columns;
    return {tiles.take<uint8_t>(blocks * steps * pieces * TILE_BYTES), sums.take<float>(blocks * plan.groups * TILE),
            taken.take<int32_t>(blocks * plan.groups * TILE), scale.take<float>(blocks * TILE), blocks, steps, pieces};
}

// What is left of numbers without the part that a bfloat16 holds; nothing of infinity and NaN.
inline __m512 without_upper_half(__m512 x) {
    const __m512i upper = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(int(0xffff0000)));
    const __mmask16 finite = _mm512_fpclass_ps_mask(x, 0x99) ^ 0xffff;
    return _mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(upper));
}

// Two registers of numbers as 32 in bfloat16, by their upper halves: those of `low` in the lower half of each word.
inline __m512i pair_up(__m512 low, __m512 high) {
    const __m512i lower = _mm512_srli_epi32(_mm512_castps_si512(low), 16);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, lower, _mm512_castps_si512(high));
}

// The order in which 32 weights are laid into the line of a tile. Four-bit codes: column 4 w + i at position 8 i + w,
// which is one shift and one look-up. Others: lanes of the first 16 and of the second 16 in turns.
template <int Bits> inline void order_inputs(__m512& low, __m512& high) {
    if constexpr (Bits == 4) {
        const __m512i even = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
        const __m512 first = _mm512_permutex2var_ps(low, even, high);
        high = _mm512_permutex2var_ps(low, _mm512_add_epi32(even, _mm512_set1_epi32(4)), high);
        low = first;
    }
}

template <int Bits>
inline void pack_floats(const Plan& plan, const void* x, int64_t tokens, int64_t block, const TileInputs& in) {
    float* sums = in.sums + block * plan.groups * TILE;
    std::memset(sums, 0, plan.groups * TILE * sizeof(float));
    for (int64_t step = 0; step < in.steps; ++step) {
        __m512i words[3][TILE];
        for (int t = 0; t < TILE; ++t) {
            const int64_t token = block * TILE + t, k = step * 32;
            const bool there = token < tokens;
            __m512 low = there ? inputs_at(plan, x, token, k) : _mm512_setzero_ps();
            __m512 high = there && k + 16 < plan.columns ? inputs_at(plan, x, token, k + 16) : _mm512_setzero_ps();
            if (plan.zero) sums[k / plan.group * TILE + t] += _mm512_reduce_add_ps(_mm512_add_ps(low, high));
            order_inputs<Bits>(low, high);
            for (int piece = 0; piece < in.pieces; ++piece) {
                words[piece][t] = pair_up(low, high);
                low = without_upper_half(low), high = without_upper_half(high);
            }
        }
        for (int piece = 0; piece < in.pieces; ++piece) {
            transpose(words[piece]);
            uint8_t* tile = in.tiles + ((block * in.steps + step) * in.pieces + piece) * TILE_BYTES;
            for (int r = 0; r < TILE; ++r) _mm512_store_si512(tile + r * 64, words[piece][r]);
        }
    }
}

inline void pack_integers(const Plan& plan, const void* x, int64_t tokens, int64_t block, const TileInputs& in) {
    const int64_t present = tokens - block * TILE < TILE ? tokens - block * TILE : TILE, padded = in.steps * CHUNK;
    const int64_t width = plan.x_type == FLOAT32 ? 4 : 2;
    const void* first = static_cast<const uint8_t*>(x) + block * TILE * plan.columns * width;
    const IntegerInputs plain = integer_inputs(plan, first, present);
    for (int t = 0; t < TILE; ++t) {
        in.scale[block * TILE + t] = t < present ? plain.scale[t] : 0.0f;
        for (int64_t g = 0; g < plan.groups; ++g) {
            const float sum = t < present ? plain.sums[t * plain.padded_groups + g] : 0.0f;
            in.sums[(block * plan.groups + g) * TILE + t] = sum;
            in.taken[(block * plan.groups + g) * TILE + t] = int32_t(sum) * offset_of(plan);
        }
    }
    for (int64_t step = 0; step < in.steps; ++step) {
        __m512i words[TILE];
        for (int t = 0; t < TILE; ++t)
            words[t] = t < present ? _mm512_load_si512(plain.codes + t * padded + step * CHUNK) : _mm512_setzero_si512();
        transpose(words);
        uint8_t* tile = in.tiles + (block * in.steps + step) * TILE_BYTES;
        for (int r = 0; r < TILE; ++r) _mm512_store_si512(tile + r * 64, words[r]);
    }
}

// The values of four-bit codes in bfloat16, twice: what lies above a code's four bits does not matter then.
inline __m512i word_table(__m512 values) { return (__m512i)_mm512_cvtne2ps_pbh(values, values); }

// A row of weights into its line of each tile: `tiles` is the line in the first one.
template <int Bits> inline void lay_floats(const Plan& plan, const uint8_t* codes, int64_t steps, uint8_t* tiles) {
    const __m512i four = _mm512_set1_epi64(0x0004000400040004), zero = _mm512_setzero_si512();
    const __m512i eight = _mm512_add_epi64(four, four), twelve = _mm512_add_epi64(eight, four);
    const __m512i spread = _mm512_mask_mov_epi64(
        _mm512_mask_mov_epi64(_mm512_mask_mov_epi64(zero, 0x0c, four), 0x30, eight), 0xc0, twelve);
    const __m512 table = Bits == 8 ? _mm512_setzero_ps() : lane_table(plan);
    const __m512i shifts = lane_shifts<Bits>(), words = word_table(table);
    for (int64_t step = 0; step < steps; ++step) {
        const uint8_t* place = codes + step * 4 * Bits;
        fetch_ahead(place, 0, 1);
        __m512i line;
        if constexpr (Bits == 4) {
            const __m512i many = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)place));
            line = _mm512_permutexvar_epi16(_mm512_srlv_epi16(many, spread), words);
        } else {
            line = pair_up(lane_values<Bits>(place, table, shifts), lane_values<Bits>(place + 2 * Bits, table, shifts));
        }
        _mm512_store_si512(tiles + step * TILE_BYTES, line);
    }
}

template <Kind K>
inline void lay_integers(const Plan& plan, const uint8_t* codes, const uint8_t* zero, int64_t steps, uint8_t* tiles) {
    Walk walk{plan};
    for (int64_t step = 0; step < steps; ++step) {
        walk.to(step * CHUNK);
        fetch_ahead(codes, step * CHUNK * plan.bits / 8, step * CHUNK * plan.bits / 8 + 1);
        _mm512_store_si512(tiles + step * TILE_BYTES, chunk_bytes<K>(plan, codes, step * CHUNK, zero, walk));
    }
}

struct TileBuffers {  // of a thread
    uint8_t *weights, *aside;
    float *scale, *shift, *part, *sum;
};

inline TileBuffers tile_buffers(const Plan& plan, int64_t steps) {
    static thread_local Scratch weights, aside, scale, shift, part, sum;
    const int64_t groups = PAIR * plan.groups + 16;
    return {weights.take<uint8_t>(2 * steps * TILE_BYTES), aside.take<uint8_t>(plan.row_bytes() + 64), scale.take<float>(groups),
            shift.take<float>(groups), part.take<float>(4 * TILE * TILE), sum.take<float>(4 * TILE * TILE)};
}

// Where step `index` of a product lies: a tile a step, or two steps a tile where groups are half as deep as one.
template <bool Half> inline int64_t weight_place(int64_t index) { return Half ? index / 2 * TILE_BYTES + index % 2 * 32 : index * TILE_BYTES; }
template <bool Half> inline int64_t input_place(int64_t index, int pieces) {
    return Half ? index * (TILE_BYTES / 2) : index * pieces * TILE_BYTES;
}

// The products of one group: two tiles of rows with one or two tiles of tokens, into tiles 0 to 3.
template <bool Whole, bool Half, int Blocks>
inline void group_product(const uint8_t* const weights[2], const uint8_t* const x[2], int64_t begin, int64_t end, int pieces) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = begin; step < end; ++step) {
        _tile_loadd(4, weights[0] + weight_place<Half>(step), 64);
        _tile_loadd(5, weights[1] + weight_place<Half>(step), 64);
        for (int piece = 0; piece < pieces; ++piece) {
            const int64_t place = input_place<Half>(step, pieces) + piece * TILE_BYTES;
            _tile_loadd(6, x[0] + place, 64);
            if constexpr (Whole) {
                _tile_dpbusd(0, 4, 6);
                _tile_dpbusd(1, 5, 6);
            } else {
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 5, 6);
            }
            if constexpr (Blocks == 2) {
                _tile_loadd(7, x[1] + place, 64);
                if constexpr (Whole) {
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

// Add a group's products, scaled, to the sums of the block of 16 rows `half` and of the tokens `block`.
template <bool Whole>
inline void add_group(const Plan& plan, const TileInputs& in, int64_t block, int64_t g, int half, const float* part, float* sum, const TileBuffers& room) {
    const int64_t groups = plan.groups, place = (block * groups + g) * TILE;
    const float *scale = room.scale + half * TILE * groups + g, *shift = room.shift + half * TILE * groups + g;
    const __m512 inputs = _mm512_load_ps(in.sums + place);
    for (int r = 0; r < TILE; ++r) {
        __m512 product;
        if constexpr (Whole) {
            const __m512i whole = _mm512_load_si512(part + r * TILE);
            product = _mm512_cvtepi32_ps(_mm512_sub_epi32(whole, _mm512_load_si512(in.taken + place)));
        } else {
            product = _mm512_load_ps(part + r * TILE);
        }
        __m512 total = _mm512_fmadd_ps(product, _mm512_set1_ps(scale[r * groups]), _mm512_load_ps(sum + r * TILE));
        if (plan.zero) total = _mm512_fnmadd_ps(_mm512_set1_ps(shift[r * groups]), inputs, total);
        _mm512_store_ps(sum + r * TILE, total);
    }
}

inline void store_tile(const Plan& plan, const TileInputs& in, bool whole, int64_t block, int64_t row, int64_t tokens, const float* sum, void* y) {
    if (row >= plan.rows) return;
    __m512i rows[TILE];
    const __m512 scale = whole ? _mm512_load_ps(in.scale + block * TILE) : _mm512_set1_ps(1.0f);
    for (int r = 0; r < TILE; ++r) rows[r] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(sum + r * TILE), scale));
    transpose(rows);
    const int64_t present = plan.rows - row < TILE ? plan.rows - row : TILE;
    alignas(64) float bias[TILE] = {};
    for (int r = 0; plan.bias && r < present; ++r) bias[r] = number_at(plan.bias, plan.bias_type, row + r);
    for (int t = 0; t < TILE && block * TILE + t < tokens; ++t) {
        const __m512 values = _mm512_add_ps(_mm512_castsi512_ps(rows[t]), _mm512_load_ps(bias));
        const int64_t place = (block * TILE + t) * plan.rows + row;
        store_values(plan, y, place, present, values);
    }
}

// 32 rows with one or two blocks of 16 tokens.
template <bool Whole, bool Half, int Blocks>
inline void tile_block(const Plan& plan, const TileInputs& in, int64_t block, int64_t row, int64_t tokens, void* y, const TileBuffers& room) {
    const int64_t depth = Half ? 32 : Whole ? CHUNK : 32, size = in.steps * in.pieces * TILE_BYTES;
    const uint8_t* weights[2] = {room.weights, room.weights + in.steps * TILE_BYTES};
    const uint8_t* x[2] = {in.tiles + block * size, in.tiles + (block + Blocks - 1) * size};
    constexpr int SIZE = TILE * TILE;
    std::memset(room.sum, 0, 2 * Blocks * SIZE * sizeof(float));
    for (int64_t g = 0; g < plan.groups; ++g) {
        const int64_t end = (plan.group_end(g) + depth - 1) / depth;
        group_product<Whole, Half, Blocks>(weights, x, g * plan.group / depth, end, in.pieces);
        _tile_stored(0, room.part, 64);
        _tile_stored(1, room.part + SIZE, 64);
        if constexpr (Blocks == 2) {
            _tile_stored(2, room.part + 2 * SIZE, 64);
            _tile_stored(3, room.part + 3 * SIZE, 64);
        }
        for (int part = 0; part < 2 * Blocks; ++part)
            add_group<Whole>(plan, in, block + part / 2, g, part % 2, room.part + part * SIZE, room.sum + part * SIZE, room);
    }
    for (int part = 0; part < 2 * Blocks; ++part)
        store_tile(plan, in, Whole, block + part / 2, row + part % 2 * TILE, tokens, room.sum + part * SIZE, y);
}

// `pack(block)` packs the inputs of 16 tokens; `lay(row, room)` lays the 32 rows from `row` on, with their scales.
template <bool Whole, bool Half, class Pack, class Lay>
inline void tile_product(
    const Plan& plan, const TileInputs& in, int64_t tokens, void* y, int threads, Pack pack, Lay lay) {
    const TileShapes shapes(Half ? 32 : 64);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < in.blocks; ++block) pack(block);
        const TileBuffers room = tile_buffers(plan, in.steps);
        const Share share = share_of(plan.rows, PAIR);
        _tile_loadconfig(&shapes);
        for (int64_t row = share.first; row < share.last; row += PAIR) {
            lay(row, room);
            int64_t block = 0;
            for (; block + 2 <= in.blocks; block += 2) tile_block<Whole, Half, 2>(plan, in, block, row, tokens, y, room);
            if (block < in.blocks) tile_block<Whole, Half, 1>(plan, in, block, row, tokens, y, room);
        }
        _tile_release();
    }
}

inline int64_t rows_there(const Plan& plan, int64_t row) { return plan.rows - row < PAIR ? plan.rows - row : PAIR; }

inline uint8_t* line_of(const TileBuffers& room, int r, int64_t steps) {
    return room.weights + r / TILE * steps * TILE_BYTES + r % TILE * 64;
}

template <int Bits> inline void float_tiles(const Plan& plan, const void* x, int64_t tokens, void* y, int threads) {
    const TileInputs in = tile_room(plan, tokens, 32, plan.x_type == BFLOAT16 ? 1 : 3);
    auto lay = [&](int64_t row, const TileBuffers& room) {
        row_scales(plan, row, rows_there(plan, row), room.scale, room.shift);
        for (int r = 0; r < rows_there(plan, row); ++r)
            lay_floats<Bits>(plan, readable_row(plan, row + r, room.aside), in.steps, line_of(room, r, in.steps));
    };
    auto pack = [&](int64_t block) { pack_floats<Bits>(plan, x, tokens, block, in); };
    tile_product<false, false>(plan, in, tokens, y, threads, pack, lay);
}

template <Kind K, bool Half> inline void integer_tiles(const Plan& plan, const void* x, int64_t tokens, void* y, int threads) {
    const TileInputs in = tile_room(plan, tokens, CHUNK, 1);
    auto lay = [&](int64_t row, const TileBuffers& room) {
        integer_scales(plan, row, rows_there(plan, row), room.scale, room.shift);
        for (int r = 0; r < rows_there(plan, row); ++r) {
            const uint8_t* codes = readable_row(plan, row + r, room.aside);
            lay_integers<K>(plan, codes, zeros_of(plan, row + r), in.steps, line_of(room, r, in.steps));
        }
    };
    auto pack = [&](int64_t block) { pack_integers(plan, x, tokens, block, in); };
    tile_product<true, Half>(plan, in, tokens, y, threads, pack, lay);
}
#endif
