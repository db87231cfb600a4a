// The key or value of one head in a page: a row of floats, or codes followed by their quantization parameters, as
// defined by `smelt.kernels.kv_quant`. A value is scale * (code - zero).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "simd.h"

// Page types of quantized rows, besides DType
constexpr int32_t INT8_ROWS = 16, FP8_ROWS = 17, INT4_ROWS = 18, INT3_ROWS = 19;
constexpr int64_t MAX_HEAD_DIM = 256;  // largest supported

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
constexpr bool has_zero() {
    return PageType == INT4_ROWS || PageType == INT3_ROWS;
}

template <int32_t PageType>
inline float row_scale(const void* pages, const RowShape& s, int64_t row) {
    const uint8_t* word = row_bytes_at(pages, s, row) + s.bytes - 4;
    float scale;
    uint16_t half_scale;
    if (!has_zero<PageType>()) return std::memcpy(&scale, word, 4), scale;
    return std::memcpy(&half_scale, word, 2), widen_half(half_scale);
}

template <int32_t PageType>
inline float row_zero(const void* pages, const RowShape& s, int64_t row) {
    return has_zero<PageType>() ? float(row_bytes_at(pages, s, row)[s.bytes - 2]) : 0.0f;
}

// E4M3 is a truncated float32, up to the exponent bias.
inline F32x16 e4m3_values(U32x16 code) {
    const U32x16 sign = shift_left<24>(code & broadcast<uint32_t>(0x80)),
                 magnitude = shift_left<20>(code & broadcast<uint32_t>(0x7f));
    return bit_cast<float>(sign | magnitude) * broadcast(0x1p120f);
}

inline U32x16 e4m3_codes(F32x16 values) {  // of magnitude up to 448; ties to even
    const U32x16 bits = bit_cast<uint32_t>(values * broadcast(0x1p-120f)),
                 magnitude = bits & broadcast<uint32_t>(0x7fffffff),
                 odd = shift_right<20>(magnitude) & broadcast<uint32_t>(1),
                 nearest = shift_right<20>(magnitude + odd + broadcast<uint32_t>(0x7ffff)),
                 sign = shift_right<24>(bits) & broadcast<uint32_t>(0x80);
    return sign | min(nearest, broadcast<uint32_t>(0x7e));
}

// 16 of the 32 codes in three words, the first or the second: lanes of words (a, b, c), and the bit where the code starts.
// Lanes 2 i and 2 i + 1 have the code of slot i in the two halves of a word; the last slot is in the top bits of all three.
struct Int3Lanes {
    uint32_t of_a[LANES], of_b[LANES], of_c[LANES], shifts[LANES];
};

constexpr Int3Lanes int3_lanes(int first_slot, int a, int b) {
    Int3Lanes lanes = {};
    for (int lane = 0; lane < LANES; ++lane) {
        const int slot = first_slot + lane / 2;
        lanes.of_a[lane] = slot / 5 == a ? ~0u : 0u;
        lanes.of_b[lane] = slot / 5 == b ? ~0u : 0u;
        lanes.of_c[lane] = slot == 15 ? ~0u : 0u;
        lanes.shifts[lane] = slot % 5 * 3 + lane % 2 * 16;
    }
    return lanes;
}

HWY_INLINE U32x16 int3_codes(const uint8_t* row, int64_t k) {
    static constexpr Int3Lanes tables[2] = {int3_lanes(0, 0, 1), int3_lanes(8, 1, 2)};
    uint32_t words[3];
    std::memcpy(words, row + k / 32 * 12, 12);
    const bool second = k % 32 != 0;
    const Int3Lanes& lanes = tables[second];
    const uint32_t top = 0x00010001u, last = (words[0] >> 15 & top) | (words[1] >> 15 & top) << 1 | (words[2] >> 15 & top) << 2;
    const U32x16 spread = (broadcast(words[second]) & load(lanes.of_a)) | (broadcast(words[second + 1]) & load(lanes.of_b)) |
                          (broadcast(last) & load(lanes.of_c));
    const U32x16 shifts = load(lanes.shifts);
    const U32x16 moved = for_parts<uint32_t>([&](auto p) SMELT_INLINE { return hn::Shr(spread.part[p], shifts.part[p]); });
    return moved & broadcast<uint32_t>(7);
}

// Load 16 values of a row from the k-th on, `lanes` of them in memory; of quantized rows, codes minus the zero point.
template <int32_t PageType>
HWY_INLINE F32x16 load_row(const void* pages, const RowShape& s, int64_t row, int64_t k, int64_t lanes, float zero) {
    if (!is_packed<PageType>()) return load_floats(pages, DType(PageType), row * s.head_dim + k, lanes);
    if (PageType == INT3_ROWS)
        return to_float(bit_cast<int32_t>(int3_codes(row_bytes_at(pages, s, row), k))) - broadcast(zero);
    const bool in_high_nibbles = PageType == INT4_ROWS && k >= s.half_dim;
    const uint8_t* codes = row_bytes_at(pages, s, row) + (in_high_nibbles ? k - s.half_dim : k);
    if (PageType == INT8_ROWS) {
        const auto* signed_codes = reinterpret_cast<const int8_t*>(codes);
        return to_float(read_padded(signed_codes, lanes, [](const int8_t* x) { return widen(x); }));
    }
    const U32x16 bytes = read_padded(codes, lanes, [](const uint8_t* x) { return widen(x); });
    if (PageType == FP8_ROWS) return e4m3_values(bytes);
    const U32x16 code = in_high_nibbles ? shift_right<4>(bytes) : bytes & broadcast<uint32_t>(15);
    return to_float(bit_cast<int32_t>(code)) - broadcast(zero);
}

inline void min_max(const float* x, int64_t head_dim, float& high, float& low) {
    F32x16 high_lanes = zero<float>(), low_lanes = zero<float>();  // the range includes zero
    for_blocks(head_dim, [&](int64_t k, int64_t lanes) SMELT_INLINE {
        const F32x16 values = load_first(x + k, lanes);
        high_lanes = max(high_lanes, values), low_lanes = min(low_lanes, values);
    });
    high = reduce_max(high_lanes), low = reduce_min(low_lanes);
}

// Write the codes of a row, 0 to `top`, the centers of equal parts of its range, and return its zero point.
inline uint16_t quantize_asymmetric(
    const float* x, int64_t head_dim, float low, float scale, float top, uint8_t* codes) {
    const float clip = top / (top + 1), zero_point = std::min(std::max(std::nearbyint(-low * clip / scale), 0.0f), top);
    for_blocks(head_dim, [&](int64_t k, int64_t lanes) SMELT_INLINE {
        const F32x16 steps = round_to_even(load_first(x + k, lanes) / broadcast(scale));
        const F32x16 code = min(max(steps + broadcast(zero_point), zero<float>()), broadcast(top));
        const U32x16 bytes = bit_cast<uint32_t>(to_int(code));
        write_first(codes + k, lanes, [&](uint8_t* y) { store_bytes(bytes, y); });
    });
    return uint16_t(zero_point);
}

inline void quantize_int4(const float* x, const RowShape& s, float high, float low, uint8_t* out) {
    const uint16_t half_scale = float_to_half(std::max((high - low) / 16, 1e-7f));
    alignas(64) uint8_t codes[2 * MAX_HEAD_DIM] = {};
    const uint16_t zero_point = quantize_asymmetric(x, s.head_dim, low, widen_half(half_scale), 15.0f, codes);
    for (int64_t k = 0; k < s.half_dim; ++k) out[k] = codes[k] | codes[k + s.half_dim] << 4;
    const uint16_t word[2] = {half_scale, zero_point};
    std::memcpy(out + s.bytes - 4, word, 4);
}

inline void quantize_int3(const float* x, const RowShape& s, float high, float low, uint8_t* out) {
    const uint16_t half_scale = float_to_half(std::max((high - low) / 8, 1e-7f));
    alignas(64) uint8_t codes[MAX_HEAD_DIM] = {};
    const uint16_t zero_point = quantize_asymmetric(x, s.head_dim, low, widen_half(half_scale), 7.0f, codes);
    for (int64_t group = 0; group < s.head_dim; group += 32, out += 12) {
        uint32_t words[3] = {};
        for (int slot = 0; slot < 16; ++slot) {
            const uint32_t pair = codes[group + 2 * slot] | uint32_t(codes[group + 2 * slot + 1]) << 16;
            if (slot < 15) words[slot / 5] |= pair << slot % 5 * 3;
            for (int word = 0; slot == 15 && word < 3; ++word) words[word] |= (pair >> word & 0x00010001u) << 15;
        }
        std::memcpy(out, words, 12);
    }
    const uint16_t word[2] = {half_scale, zero_point};
    std::memcpy(out, word, 4);
}

// Quantize and store a row of float32.
inline void quantize_row(int32_t page_type, const float* x, const RowShape& s, void* pages, int64_t row) {
    uint8_t* out = static_cast<uint8_t*>(pages) + row * s.bytes;
    float high, low;
    min_max(x, s.head_dim, high, low);
    if (page_type == INT4_ROWS) return quantize_int4(x, s, high, low, out);
    if (page_type == INT3_ROWS) return quantize_int3(x, s, high, low, out);
    const float scale = std::max(std::max(high, -low) / (page_type == INT8_ROWS ? 127.0f : 448.0f), 1e-30f);
    for_blocks(s.head_dim, [&](int64_t k, int64_t lanes) SMELT_INLINE {
        const F32x16 steps = load_first(x + k, lanes) / broadcast(scale);
        const U32x16 bytes = page_type == INT8_ROWS ? bit_cast<uint32_t>(to_int(steps)) : e4m3_codes(steps);
        write_first(out + k, lanes, [&](uint8_t* y) { store_bytes(bytes, y); });
    });
    std::memcpy(out + s.bytes - 4, &scale, 4);
}
