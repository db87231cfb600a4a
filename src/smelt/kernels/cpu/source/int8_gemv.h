// GEMV with int8 inputs and per-token scales: integer products and sums are exact, then scaled.
//
// A chunk is 64 codes. 8-bit codes are multiplied in memory order; 4-bit codes are unpacked to bytes, the first 32
// columns in the lower half. `offset` makes all bytes unsigned, as the instruction requires for weights; its
// contribution, a multiple of the sum of the inputs, is subtracted beforehand, in integers.
#pragma once

#include "gemv.h"

#if defined(SMELT_LANES) && defined(__AVX512VNNI__)
#define SMELT_INT8 1
constexpr int CHUNK = 64;

// Whether the product can be computed in integers.
inline bool has_int8(const LinearPlan& plan) {
    const bool uniform = plan.dequant_mode == UNIFORM && (plan.bits == 4 || plan.bits == 8);
    const bool denormal = plan.dequant_mode == DENORMAL && plan.bits == 4 && (!plan.zero || plan.zero_type == BYTE);
    return plan.inputs != FLOAT_INPUTS && (uniform || denormal) && plan.groups_align(32);
}

inline int column_in_chunk(int bits, int position) {
    if (bits == 8) return position;
    return position / 32 * 32 + 2 * (position % 16) + position % 32 / 16;
}

inline int unsigned_offset(const LinearPlan& plan) {
    return plan.dequant_mode == DENORMAL ? 32 : plan.bits == 8 ? 128 : 8;
}

// dINT: twice the value plus the offset, one table per zero point. [16 zero points][16 codes]
struct DoubledTables {
    alignas(64) uint8_t bytes[16][16];
    DoubledTables() {
        for (int zero = 0; zero < 16; ++zero)
            for (int code = 0; code < 16; ++code)
                bytes[zero][code] = uint8_t(32 + (code == 14 ? 1 : code == 15 ? -1 : 2 * (code - zero)));
    }
};
inline const DoubledTables& doubled_tables() {
    static const DoubledTables tables;
    return tables;
}

inline __m512i nibbles(const uint8_t* codes) {  // 32 bytes -> 64 codes in the order of `column_in_chunk`
    const __m512i pairs = _mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3),
                  shifts = _mm512_setr_epi64(
                      0, 0, 0x0004000400040004, 0x0004000400040004, 0, 0, 0x0004000400040004, 0x0004000400040004);
    const __m512i bytes = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)codes));
    return _mm512_and_si512(_mm512_srlv_epi16(_mm512_permutexvar_epi64(pairs, bytes), shifts), _mm512_set1_epi8(15));
}

enum CodeLayout { BYTES, NIBBLES, DOUBLED };  // 8-bit codes, 4-bit codes, 4-bit dINT

inline CodeLayout code_layout_of(const LinearPlan& plan) {
    return plan.dequant_mode == DENORMAL ? DOUBLED : plan.bits == 4 ? NIBBLES : BYTES;
}

// Groups of the two halves of a chunk, advancing along a row.
struct GroupCursor {
    const LinearPlan& plan;
    int64_t low = 0, high = 0;
    void advance_to(int64_t k) {
        while (low + 1 < plan.groups && (low + 1) * plan.group <= k) ++low;
        high = low + 1 < plan.groups && (low + 1) * plan.group <= k + 32 ? low + 1 : low;
    }
};

// Load a chunk of a row as unsigned bytes; `zero`: the zero points of the row (dINT).
template <CodeLayout Layout>
inline __m512i chunk_bytes(
    const LinearPlan& plan, const uint8_t* codes, int64_t k, const uint8_t* zero, const GroupCursor& cursor) {
    if constexpr (Layout == BYTES) return _mm512_loadu_si512(codes + k);
    const __m512i codes_64 = nibbles(codes + k / 2);
    if constexpr (Layout == NIBBLES) return codes_64;
    const auto& tables = doubled_tables().bytes;
    const int low = zero ? zero[cursor.low] & 15 : int(plan.center),
              high = zero ? zero[cursor.high] & 15 : int(plan.center);
    const __m512i lower = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)tables[low]));
    const __m512i both = _mm512_mask_broadcast_i32x4(lower, 0xff00, _mm_load_si128((const __m128i*)tables[high]));
    return _mm512_shuffle_epi8(both, codes_64);
}

inline const uint8_t* row_zero_points(const LinearPlan& plan, int64_t row) {
    return plan.zero ? static_cast<const uint8_t*>(plan.zero) + (plan.scale_stride ? row * plan.scale_stride : 0)
                     : nullptr;
}

// Scales and shifts as in `row_scales`; for dINT, bytes include zero points and are doubled.
inline void int8_scales(const LinearPlan& plan, int64_t row, int64_t count, float* scale, float* shift) {
    row_scales(plan, row, count, scale, shift);
    if (plan.dequant_mode != DENORMAL) return;
    for (int64_t i = 0; i < count * plan.groups; ++i) scale[i] *= 0.5f, shift[i] = 0.0f;
}

// Quantize the inputs of a token as `numerics.integer` does: codes [padded], 0 beyond the last column.
inline float quantize_inputs(const LinearPlan& plan, const void* x, int64_t token, int8_t* codes, int64_t padded) {
    float scale = plan.inputs == FIXED_SCALE ? *plan.x_scale : 0.0f;
    if (plan.inputs == PER_TOKEN_SCALE) {
        const __m512 infinity = _mm512_set1_ps(INFINITY);
        __m512 amax = _mm512_setzero_ps();
        __mmask16 is_nan = 0;
        for (int64_t k = 0; k < plan.columns; k += 16) {
            const __m512 magnitude = _mm512_abs_ps(load_input_columns(plan, x, token, k));
            is_nan |= _mm512_cmp_ps_mask(magnitude, magnitude, _CMP_UNORD_Q);
            amax = _mm512_mask_max_ps(amax, _mm512_cmp_ps_mask(magnitude, infinity, _CMP_LT_OQ), amax, magnitude);
        }
        scale = _mm512_reduce_max_ps(amax);
        scale = scale == 0 ? 1.0f : std::fmin(std::fmax(scale * plan.clip_ratio / plan.amax_code, 0x1p-126f), 3.4e38f);
        if (is_nan) scale = NAN;
    }
    const __m512 step = _mm512_set1_ps(scale), low = _mm512_set1_ps(plan.qmin), high = _mm512_set1_ps(plan.qmax);
    for (int64_t k = 0; k < padded; k += 16) {
        __m512 steps = _mm512_div_ps(load_input_columns(plan, x, token, k), step);
        steps = _mm512_roundscale_ps(steps, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        steps = _mm512_max_ps(_mm512_min_ps(steps, high), low);  // NaN becomes `high`; it is carried by the scale
        _mm_store_si128((__m128i*)(codes + k), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(steps)));
    }
    return scale;
}

struct Int8Inputs {
    int8_t* codes;         // [tokens, padded] in chunk order
    int32_t* offset_sums;  // [tokens, padded / 4]: -offset * sum of four codes, where sums start
    float* sums;           // [tokens, groups]
    float* scale;          // [tokens]
    int64_t padded, padded_groups;
};

inline Int8Inputs int8_inputs(const LinearPlan& plan, const void* x, int64_t tokens) {
    static thread_local Scratch column_codes, codes, offset_sums, sums, scale;
    const int64_t padded = round_up(plan.columns, CHUNK), groups = round_up(plan.groups, 16);
    Int8Inputs in{
        codes.get<int8_t>(tokens * padded),
        offset_sums.get<int32_t>(tokens * padded / 4),
        sums.get<float>(tokens * groups),
        scale.get<float>(tokens),
        padded,
        groups};
    int8_t* in_order = column_codes.get<int8_t>(padded);
    alignas(64) uint8_t order[CHUNK];
    for (int p = 0; p < CHUNK; ++p) order[p] = uint8_t(column_in_chunk(plan.bits, p));
    const __m512i offset = _mm512_set1_epi32(-unsigned_offset(plan)), ones = _mm512_set1_epi8(1);
    for (int64_t token = 0; token < tokens; ++token) {
        in.scale[token] = quantize_inputs(plan, x, token, in_order, padded);
        for (int64_t k = 0; k < padded; k += CHUNK) {
            alignas(64) int8_t chunk[CHUNK];
            for (int p = 0; p < CHUNK; ++p) chunk[p] = in_order[k + order[p]];
            const __m512i ordered = _mm512_load_si512(chunk);
            _mm512_store_si512(in.codes + token * padded + k, ordered);
            const __m512i sums_of_four = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, ordered);
            _mm512_store_si512(in.offset_sums + (token * padded + k) / 4, _mm512_mullo_epi32(sums_of_four, offset));
        }
        for (int64_t g = 0; g < groups; ++g) {
            int32_t sum = 0;
            for (int64_t k = g * plan.group; g < plan.groups && k < plan.group_end(g); ++k) sum += in_order[k];
            in.sums[token * groups + g] = float(sum);
        }
    }
    return in;
}

// Multiply four rows with a token: sums [4].
template <CodeLayout Layout>
inline void int8_dot(
    const LinearPlan& plan, int64_t row, const uint8_t* const* codes, const float* scale, const float* shift,
    const Int8Inputs& in, int64_t token, float* sums) {
    const uint8_t* zero[4];
    __m512 total[4];
    for (int r = 0; r < 4; ++r) {
        zero[r] = row_zero_points(plan, row + r < plan.rows ? row + r : plan.rows - 1);
        total[r] = _mm512_setzero_ps();
    }
    const bool halves = plan.groups > 1 && plan.group % CHUNK;
    GroupCursor cursor{plan};
    for (int64_t k = 0; k < in.padded; k += CHUNK) {
        const __m512i x = _mm512_load_si512(in.codes + token * in.padded + k);
        const __m512i start = _mm512_load_si512(in.offset_sums + (token * in.padded + k) / 4);
        cursor.advance_to(k);
        for (int r = 0; r < 4; ++r) prefetch_codes(codes[r], k * plan.bits / 8, (k + CHUNK) * plan.bits / 8);
        for (int r = 0; r < 4; ++r) {
            const __m512i sum = _mm512_dpbusd_epi32(start, chunk_bytes<Layout>(plan, codes[r], k, zero[r], cursor), x);
            __m512 step = _mm512_set1_ps(scale[r * plan.groups + cursor.low]);
            if (halves) step = _mm512_mask_mov_ps(step, 0xff00, _mm512_set1_ps(scale[r * plan.groups + cursor.high]));
            total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), step, total[r]);
        }
    }
    for (int r = 0; plan.zero && r < 4; ++r)
        total[r] =
            _mm512_sub_ps(total[r], zero_point_term(plan, shift + r * plan.groups, in.sums + token * in.padded_groups));
    _mm_store_ps(sums, sum_lanes(total[0], total[1], total[2], total[3]));
}

template <CodeLayout Layout>
inline void int8_product(const LinearPlan& plan, const void* x, int64_t tokens, void* y, int threads) {
    const Int8Inputs in = int8_inputs(plan, x, tokens);
#pragma omp parallel num_threads(threads)
    {
        const RowBuffers buffers = row_buffers(plan);
#pragma omp for schedule(dynamic, dynamic_chunk(plan.rows, BLOCK))
        for (int64_t row = 0; row < plan.rows; row += BLOCK) {
            const uint8_t* codes[BLOCK];
            row_pointers(plan, row, buffers, codes);
            int8_scales(plan, row, plan.rows - row < BLOCK ? plan.rows - row : BLOCK, buffers.scale, buffers.shift);
            for (int64_t token = 0; token < tokens; ++token) {
                alignas(64) float sums[BLOCK];
                for (int r = 0; r < BLOCK; r += 4)
                    int8_dot<Layout>(
                        plan, row + r, codes + r, buffers.scale + r * plan.groups, buffers.shift + r * plan.groups, in,
                        token, sums + r);
                const __m512 scale = _mm512_set1_ps(in.scale[token]);
                store_block(plan, y, token, row, _mm512_mul_ps(_mm512_load_ps(sums), scale));
            }
        }
    }
}
#endif
