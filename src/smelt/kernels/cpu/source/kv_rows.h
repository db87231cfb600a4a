// The key or value of one head in a page: a row of floats, or codes followed by their quantization parameters, as
// defined by `smelt.kernels.kv_quant`. A value is scale * (code - zero).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "simd.h"

#ifdef SMELT_LANES
constexpr int32_t INT8_ROWS = 16, FP8_ROWS = 17, INT4_ROWS = 18;  // page types of quantized rows, besides DType
constexpr int64_t MAX_HEAD_DIM = 256;                             // largest supported

struct RowShape {
    int64_t head_dim, half_dim, bytes;  // values; int4 codes in low nibbles; bytes of a row
};

inline const uint8_t* row_bytes_at(const void* pages, const RowShape& s, int64_t row) {
    return static_cast<const uint8_t*>(pages) + row * s.bytes;
}

template <int32_t PageType>
constexpr bool is_packed() {
    return PageType >= INT8_ROWS;
}

template <int32_t PageType>
inline float row_scale(const void* pages, const RowShape& s, int64_t row) {
    const uint8_t* word = row_bytes_at(pages, s, row) + s.bytes - 4;
    float scale;
    uint16_t half_scale;
    if (PageType != INT4_ROWS) return std::memcpy(&scale, word, 4), scale;
    return std::memcpy(&half_scale, word, 2), _cvtsh_ss(half_scale);
}

template <int32_t PageType>
inline float row_zero(const void* pages, const RowShape& s, int64_t row) {
    return PageType == INT4_ROWS ? float(row_bytes_at(pages, s, row)[s.bytes - 2]) : 0.0f;
}

// E4M3 is a truncated float32, up to the exponent bias.
inline __m512 e4m3_values(__m512i code) {
    const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(code, _mm512_set1_epi32(0x80)), 24),
                  magnitude = _mm512_slli_epi32(_mm512_and_si512(code, _mm512_set1_epi32(0x7f)), 20);
    return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_or_si512(sign, magnitude)), _mm512_set1_ps(0x1p120f));
}

inline __m512i e4m3_codes(__m512 values) {  // of magnitude up to 448; ties to even
    const __m512i bits = _mm512_castps_si512(_mm512_mul_ps(values, _mm512_set1_ps(0x1p-120f))),
                  magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)),
                  odd = _mm512_and_si512(_mm512_srli_epi32(magnitude, 20), _mm512_set1_epi32(1)),
                  nearest = _mm512_srli_epi32(
                      _mm512_add_epi32(magnitude, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff))), 20),
                  sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
    return _mm512_or_si512(sign, _mm512_min_epi32(nearest, _mm512_set1_epi32(0x7e)));
}

// Load 16 values of a row from the k-th on; of quantized rows, codes minus the zero point.
template <int32_t PageType>
inline __m512 load_row(const void* pages, const RowShape& s, int64_t row, int64_t k, __mmask16 valid, float zero) {
    if (!is_packed<PageType>()) return load_floats(pages, DType(PageType), row * s.head_dim + k, valid);
    const uint8_t* codes = row_bytes_at(pages, s, row);
    if (PageType != INT4_ROWS) {
        const __m128i bytes = _mm_maskz_loadu_epi8(valid, codes + k);
        return PageType == INT8_ROWS ? _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
                                     : e4m3_values(_mm512_cvtepu8_epi32(bytes));
    }
    const __m512i bytes =
                      _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(valid, codes + (k < s.half_dim ? k : k - s.half_dim))),
                  code = k < s.half_dim ? _mm512_and_si512(bytes, _mm512_set1_epi32(15)) : _mm512_srli_epi32(bytes, 4);
    return _mm512_sub_ps(_mm512_cvtepi32_ps(code), _mm512_set1_ps(zero));
}

inline void min_max(const float* x, int64_t head_dim, float& high, float& low) {
    __m512 high_lanes = _mm512_setzero_ps(), low_lanes = _mm512_setzero_ps();  // the range includes zero
    for (int64_t k = 0; k < head_dim; k += 16) {
        const __m512 values = _mm512_maskz_loadu_ps(first_lanes(head_dim - k), x + k);
        high_lanes = _mm512_max_ps(high_lanes, values), low_lanes = _mm512_min_ps(low_lanes, values);
    }
    high = _mm512_reduce_max_ps(high_lanes), low = _mm512_reduce_min_ps(low_lanes);
}

inline void quantize_int4(const float* x, const RowShape& s, float high, float low, uint8_t* out) {
    const uint16_t half_scale = _cvtss_sh(std::max((high - low) / 15, 1e-7f), _MM_FROUND_TO_NEAREST_INT);
    const float scale = _cvtsh_ss(half_scale), zero = std::min(std::max(std::nearbyint(-low / scale), 0.0f), 15.0f);
    alignas(64) uint8_t codes[2 * MAX_HEAD_DIM] = {};
    for (int64_t k = 0; k < s.head_dim; k += 16) {
        const __mmask16 valid = first_lanes(s.head_dim - k);
        const __m512 steps = _mm512_roundscale_ps(
            _mm512_div_ps(_mm512_maskz_loadu_ps(valid, x + k), _mm512_set1_ps(scale)), _MM_FROUND_TO_NEAREST_INT);
        const __m512 code = _mm512_min_ps(
            _mm512_max_ps(_mm512_add_ps(steps, _mm512_set1_ps(zero)), _mm512_setzero_ps()), _mm512_set1_ps(15.0f));
        _mm512_mask_cvtepi32_storeu_epi8(codes + k, valid, _mm512_cvtps_epi32(code));
    }
    for (int64_t k = 0; k < s.half_dim; ++k) out[k] = codes[k] | codes[k + s.half_dim] << 4;
    const uint16_t word[2] = {half_scale, uint16_t(zero)};
    std::memcpy(out + s.bytes - 4, word, 4);
}

// Quantize and store a row of float32.
inline void quantize_row(int32_t page_type, const float* x, const RowShape& s, void* pages, int64_t row) {
    uint8_t* out = static_cast<uint8_t*>(pages) + row * s.bytes;
    float high, low;
    min_max(x, s.head_dim, high, low);
    if (page_type == INT4_ROWS) return quantize_int4(x, s, high, low, out);
    const float scale = std::max(std::max(high, -low) / (page_type == INT8_ROWS ? 127.0f : 448.0f), 1e-30f);
    for (int64_t k = 0; k < s.head_dim; k += 16) {
        const __mmask16 valid = first_lanes(s.head_dim - k);
        const __m512 steps = _mm512_div_ps(_mm512_maskz_loadu_ps(valid, x + k), _mm512_set1_ps(scale));
        _mm512_mask_cvtepi32_storeu_epi8(
            out + k, valid, page_type == INT8_ROWS ? _mm512_cvtps_epi32(steps) : e4m3_codes(steps));
    }
    std::memcpy(out + s.bytes - 4, &scale, 4);
}
#endif
