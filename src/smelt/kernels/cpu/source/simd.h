// AVX-512 helpers: load and store 16 values of any dtype as float32, the exponential function, sums.
#pragma once

#include <initializer_list>

#include "lanes.h"

#ifdef SMELT_LANES
inline __mmask16 first_lanes(int64_t count) {
    return __mmask16(count >= 16 ? 0xffff : (1u << count) - 1);
}

inline __m512 load_floats(const void* data, DType type, int64_t index, __mmask16 valid = 0xffff) {
    if (type == FLOAT32) return _mm512_maskz_loadu_ps(valid, static_cast<const float*>(data) + index);
    const __m256i narrow = _mm256_maskz_loadu_epi16(valid, static_cast<const uint16_t*>(data) + index);
    if (type == FLOAT16) return _mm512_cvtph_ps(narrow);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

inline void store_floats(void* data, DType type, int64_t index, __m512 values, __mmask16 valid = 0xffff) {
    if (type == FLOAT32) return _mm512_mask_storeu_ps(static_cast<float*>(data) + index, valid, values);
    uint16_t* target = static_cast<uint16_t*>(data) + index;
    if (type == FLOAT16) {
        const __m256i narrow = _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        return _mm256_mask_storeu_epi16(target, valid, narrow);
    }
    const __m512i bits = _mm512_castps_si512(values),
                  odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));  // ties to even
    const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    nearest = _mm512_mask_or_epi32(nearest, is_nan, bits, _mm512_set1_epi32(0x400000));
    _mm512_mask_cvtepi32_storeu_epi16(target, valid, _mm512_srli_epi32(nearest, 16));
}

// e^x to about one ulp; 0 below -87, infinity above 88.
inline __m512 exp_ps(__m512 x) {
    const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
    const __mmask16 huge = _mm512_cmp_ps_mask(x, _mm512_set1_ps(88.0f), _CMP_GT_OQ);
    x = _mm512_min_ps(x, _mm512_set1_ps(88.0f));
    const __m512 exponent = _mm512_roundscale_ps(
        _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(exponent, _mm512_set1_ps(0.693359375f), x);  // ln 2 in two parts
    r = _mm512_fnmadd_ps(exponent, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 sum = _mm512_set1_ps(1.0f / 5040);  // Taylor series, for |r| <= 0.35
    for (const float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(coefficient));
    const __m512 result = _mm512_mask_mov_ps(_mm512_scalef_ps(sum, exponent), tiny, _mm512_setzero_ps());
    return _mm512_mask_mov_ps(result, huge, _mm512_set1_ps(INFINITY));
}
#endif
