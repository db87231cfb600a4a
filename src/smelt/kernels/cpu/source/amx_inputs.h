// Pack the inputs of many tokens for AMX, once for all rows of the matrix.
//
// bfloat16 inputs are used directly; a float32 input is split into three bfloat16 values whose sum is exact, so that
// only float32 rounding is lost. Quantized inputs are int8.
#pragma once

#include "int8_gemv.h"

#if SMELT_AVX512 && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define SMELT_TILES 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

constexpr int TILE = 16, TILE_BYTES = 1024, ROW_BLOCK = 32;  // rows per tile, bytes per tile, rows computed together

inline __m512 raw(F32x16 v) {
    return v.part[0].raw;
}

inline bool tiles_granted() {  // the OS grants AMX registers on request
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
}

inline bool exact_in_bfloat(const LinearPlan& plan) {
    if (plan.dequant_mode != TABLE) return true;
    for (int code = 0; code < 1 << plan.bits; ++code)
        if (bfloat_to_float(float_to_bfloat(plan.table[code])) != plan.table[code]) return false;
    return true;
}

inline bool has_float_tiles(const LinearPlan& plan) {
    return has_lanes(plan) && plan.groups_align(32) && can_pad(plan, 32) && exact_in_bfloat(plan) && tiles_granted();
}
// With bfloat16 inputs, scaled weights may be bfloat16 too: as exact as a dense product in that dtype.
inline bool has_scaled_tiles(const LinearPlan& plan) {
    return has_lanes(plan) && plan.groups_align(32) && can_pad(plan, 32) && plan.x_type == BFLOAT16 && tiles_granted();
}
inline bool has_int8_tiles(const LinearPlan& plan) {
    return has_int8(plan) && plan.group <= 32768 && tiles_granted();
}

inline void transpose(__m512i rows[16]) {  // 16 x 16 32-bit words
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
    uint8_t* tiles;        // [blocks of 16 tokens, steps, num_terms, TILE_BYTES]
    float* sums;           // [blocks, groups, 16 tokens]: sums of inputs or of their codes
    int32_t* offset_sums;  // [blocks, groups, 16 tokens]: offset * sum of codes
    float* scale;          // [blocks, 16 tokens]: scale of the codes
    int64_t blocks, steps;
    int num_terms;
};

inline TileInputs allocate_tile_inputs(const LinearPlan& plan, int64_t tokens, int columns, int num_terms) {
    static thread_local Scratch tiles, sums, offset_sums, scale;
    const int64_t blocks = (tokens + TILE - 1) / TILE, steps = (plan.columns + columns - 1) / columns;
    return {
        tiles.get<uint8_t>(blocks * steps * num_terms * TILE_BYTES),
        sums.get<float>(blocks * plan.groups * TILE),
        offset_sums.get<int32_t>(blocks * plan.groups * TILE),
        scale.get<float>(blocks * TILE),
        blocks,
        steps,
        num_terms};
}

// Subtract the part that bfloat16 represents (truncated); 0 for infinity and NaN.
inline __m512 bfloat_remainder(__m512 x) {
    const __m512i upper = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(int(0xffff0000)));
    const __mmask16 finite = _mm512_fpclass_ps_mask(x, 0x99) ^ 0xffff;
    return _mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(upper));
}

// Truncate two registers of float32 to 32 bfloat16 values, `low` in the lower half of each word.
inline __m512i pack_bfloat_pairs(__m512 low, __m512 high) {
    const __m512i lower = _mm512_srli_epi32(_mm512_castps_si512(low), 16);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, lower, _mm512_castps_si512(high));
}

// Order of 32 weights in a tile row. 4-bit codes: column 4 w + i at position 8 i + w, which takes one shift and one
// lookup. Others: lanes of the first 16 and of the second 16 interleaved.
template <int Bits>
inline void order_inputs(__m512& low, __m512& high) {
    if constexpr (Bits == 4) {
        const __m512i even = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
        const __m512 first = _mm512_permutex2var_ps(low, even, high);
        high = _mm512_permutex2var_ps(low, _mm512_add_epi32(even, _mm512_set1_epi32(4)), high);
        low = first;
    }
}

template <int Bits>
inline void pack_floats(const LinearPlan& plan, const void* x, int64_t tokens, int64_t block, const TileInputs& in) {
    float* sums = in.sums + block * plan.groups * TILE;
    std::memset(sums, 0, plan.groups * TILE * sizeof(float));
    for (int64_t step = 0; step < in.steps; ++step) {
        __m512i words[3][TILE];
        for (int t = 0; t < TILE; ++t) {
            const int64_t token = block * TILE + t, k = step * 32;
            const bool valid = token < tokens;
            __m512 low = valid ? raw(load_input_columns(plan, x, token, k)) : _mm512_setzero_ps();
            const bool has_high = valid && k + 16 < plan.columns;
            __m512 high = has_high ? raw(load_input_columns(plan, x, token, k + 16)) : _mm512_setzero_ps();
            if (plan.zero) sums[k / plan.group * TILE + t] += _mm512_reduce_add_ps(_mm512_add_ps(low, high));
            order_inputs<Bits>(low, high);
            for (int term = 0; term < in.num_terms; ++term) {
                words[term][t] = pack_bfloat_pairs(low, high);
                low = bfloat_remainder(low), high = bfloat_remainder(high);
            }
        }
        for (int term = 0; term < in.num_terms; ++term) {
            transpose(words[term]);
            uint8_t* tile = in.tiles + ((block * in.steps + step) * in.num_terms + term) * TILE_BYTES;
            for (int r = 0; r < TILE; ++r) _mm512_store_si512(tile + r * 64, words[term][r]);
        }
    }
}

inline void pack_int8(const LinearPlan& plan, const void* x, int64_t tokens, int64_t block, const TileInputs& in) {
    const int64_t valid_tokens = tokens - block * TILE < TILE ? tokens - block * TILE : TILE, padded = in.steps * CHUNK;
    const int64_t width = plan.x_type == FLOAT32 ? 4 : 2;
    const void* first = static_cast<const uint8_t*>(x) + block * TILE * plan.columns * width;
    const Int8Inputs quantized = int8_inputs(plan, first, valid_tokens);
    for (int t = 0; t < TILE; ++t) {
        in.scale[block * TILE + t] = t < valid_tokens ? quantized.scale[t] : 0.0f;
        for (int64_t g = 0; g < plan.groups; ++g) {
            const float sum = t < valid_tokens ? quantized.sums[t * quantized.padded_groups + g] : 0.0f;
            in.sums[(block * plan.groups + g) * TILE + t] = sum;
            in.offset_sums[(block * plan.groups + g) * TILE + t] = int32_t(sum) * code_offset(plan);
        }
    }
    for (int64_t step = 0; step < in.steps; ++step) {
        __m512i words[TILE];
        for (int t = 0; t < TILE; ++t)
            words[t] = t < valid_tokens ? _mm512_load_si512(quantized.codes + t * padded + step * CHUNK)
                                        : _mm512_setzero_si512();
        transpose(words);
        uint8_t* tile = in.tiles + (block * in.steps + step) * TILE_BYTES;
        for (int r = 0; r < TILE; ++r) _mm512_store_si512(tile + r * 64, words[r]);
    }
}
#endif
