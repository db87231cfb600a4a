// Load and dequantize 16 codes of a row at once with AVX-512.
//
// Any order works as long as inputs are laid out the same way. 4-bit codes come in the order 0 8 1 9 ..., which takes
// one shift and one table lookup; all others in column order.
#pragma once

#include "dequantize.h"

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define SMELT_LANES 1

// Values of codes of up to 4 bits, repeated to 16: the bits above a code belong to its neighbor.
inline __m512 lane_table(const LinearPlan& plan) {
    alignas(64) float values[16];
    for (int index = 0; index < 16; ++index) {
        const int code = plan.bits < 4 ? index & ((1 << plan.bits) - 1) : index;
        values[index] = plan.dequant_mode == TABLE ? plan.table[code] : float(code) - plan.center;
        if (plan.dequant_mode == DENORMAL && code >= (1 << plan.bits) - 2) values[index] = code % 2 ? -0.5f : 0.5f;
    }
    return _mm512_load_ps(values);
}

template <int Bits>
inline __m512i lane_shifts() {
    alignas(64) int32_t shifts[16];
    for (int lane = 0; lane < 16; ++lane)
        shifts[lane] = Bits == 4 ? 4 * (lane / 2) : Bits * (Bits == 3 ? lane % 8 : lane);
    return _mm512_load_si512(shifts);
}

template <class T>
inline T unaligned(const uint8_t* bytes) {
    T value;
    std::memcpy(&value, bytes, sizeof(T));
    return value;
}

// Values of 16 codes that start at a byte boundary. Reads at most 16 bytes, possibly beyond the codes.
template <int Bits>
inline __m512 lane_values(const uint8_t* codes, __m512 table, __m512i shifts) {
    if constexpr (Bits == 8) {
        const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
        return _mm512_cvtepi32_ps(_mm512_sub_epi32(wide, _mm512_set1_epi32(128)));
    } else {
        __m512i words;
        if constexpr (Bits == 4) words = _mm512_set1_epi64(unaligned<int64_t>(codes));
        else if constexpr (Bits == 2) words = _mm512_set1_epi32(unaligned<int32_t>(codes));
        else
            words = _mm512_mask_set1_epi32(
                _mm512_set1_epi32(unaligned<int32_t>(codes)), 0xff00, unaligned<int32_t>(codes + 3));
        return _mm512_permutexvar_ps(_mm512_srlv_epi32(words, shifts), table);
    }
}

// Whether columns can be padded to a multiple of `step`: inputs there are zero, so that no code may be NaN.
inline bool can_pad(const LinearPlan& plan, int64_t step) {
    if (plan.columns % step == 0 || plan.dequant_mode != TABLE) return true;
    for (int code = 0; code < 1 << plan.bits; ++code)
        if (std::isnan(plan.table[code])) return false;
    return true;
}

// Supported formats: up to 4 bits by a table, 8 bits as integers minus 128.
inline bool has_lanes(const LinearPlan& plan) {
    const bool tabled =
        plan.dequant_mode == UNIFORM || plan.dequant_mode == TABLE || (plan.dequant_mode == DENORMAL && !plan.zero);
    const bool narrow = plan.bits >= 2 && plan.bits <= 4 && tabled;
    const bool wide = plan.bits == 8 && plan.dequant_mode == UNIFORM;
    return (narrow || wide) && plan.groups_align(16) && can_pad(plan, 16);
}

// Codes of a row, readable 64 bytes beyond the end: the last rows of a matrix are copied to a padded buffer.
inline const uint8_t* padded_row_codes(const LinearPlan& plan, int64_t row, uint8_t* padded_row) {
    const int64_t bytes = plan.row_bytes();
    if ((plan.rows - row - 1) * bytes >= 64) return plan.row_codes(row);
    std::memcpy(padded_row, plan.row_codes(row), bytes);
    std::memset(padded_row + bytes, 0, 64);
    return padded_row;
}

// Prefetch codes of later rows, which are contiguous, to overlap loads with computation. Measured: shorter distances
// are too late.
constexpr int64_t PREFETCH_BYTES = 8192;

inline void prefetch_codes(const uint8_t* codes, int64_t begin, int64_t end) {
    for (int64_t offset = begin; offset < end; offset += 64)
        _mm_prefetch((const char*)(codes + offset + PREFETCH_BYTES), _MM_HINT_T0);
}

inline __m512 load_inputs(const LinearPlan& plan, const void* x, int64_t index) {
    if (plan.x_type == FLOAT32) return _mm512_loadu_ps(static_cast<const float*>(x) + index);
    const __m256i narrow = _mm256_loadu_si256((const __m256i*)(static_cast<const uint16_t*>(x) + index));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// Load columns k to k + 16 of a token in float32, 0 beyond the last.
inline __m512 load_input_columns(const LinearPlan& plan, const void* x, int64_t token, int64_t k) {
    if (k + 16 <= plan.columns) return load_inputs(plan, x, token * plan.columns + k);
    alignas(64) float values[16] = {};
    for (int lane = 0; k + lane < plan.columns; ++lane)
        values[lane] = load_float(x, plan.x_type, token * plan.columns + k + lane);
    return _mm512_load_ps(values);
}

template <int Bits>
inline __m512 to_lane_order(__m512 inputs) {
    if constexpr (Bits != 4) return inputs;
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15), inputs);
}

template <int Bits>
inline __m512 to_column_order(__m512 lanes) {  // the inverse
    if constexpr (Bits != 4) return lanes;
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15), lanes);
}
#endif
