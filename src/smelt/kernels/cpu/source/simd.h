// Load and store 16 values of any dtype as float32; the exponential function.
#pragma once

#include <initializer_list>

#include "plan.h"
#include "vectors.h"

// Call step(k, lanes) for blocks of 16 of `count` values; `lanes` is less than 16 for the last.
template <class Step>
HWY_INLINE void for_blocks(int64_t count, Step step) {
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) step(k, int64_t(LANES));
    if (k < count) step(k, count - k);
}

// Pass `read` 16 values of which `lanes` are in memory, the others 0.
template <class T, class Read>
HWY_INLINE auto read_padded(const T* values, int64_t lanes, Read read) {
    if (HWY_LIKELY(lanes >= LANES)) return read(values);
    T padded[LANES] = {};
    for (int64_t lane = 0; lane < lanes; ++lane) padded[lane] = values[lane];
    return read(padded);
}

// Have `write` write 16 values and keep the first `lanes`.
template <class T, class Write>
HWY_INLINE void write_first(T* values, int64_t lanes, Write write) {
    if (HWY_LIKELY(lanes >= LANES)) return write(values);
    T all[LANES];
    write(all);
    for (int64_t lane = 0; lane < lanes; ++lane) values[lane] = all[lane];
}

HWY_INLINE F32x16 load_halves(const uint16_t* values) {
    const hn::Rebind<hwy::float16_t, Tag<float>> narrow;
    return for_parts<float>([=](auto p) {
        const auto* halves = reinterpret_cast<const hwy::float16_t*>(values + p * PART_LANES);
        return hn::PromoteTo(Tag<float>(), hn::LoadU(narrow, halves));
    });
}
HWY_INLINE void store_halves(F32x16 v, uint16_t* values) {
    const hn::Rebind<hwy::float16_t, Tag<float>> narrow;
    for (int p = 0; p < PARTS; ++p)
        hn::StoreU(
            hn::DemoteTo(narrow, v.part[p]), narrow, reinterpret_cast<hwy::float16_t*>(values + p * PART_LANES));
}

HWY_INLINE F32x16 load_bfloats(const uint16_t* values) {
    return for_parts<float>([=](auto p) {
        const auto wide =
            hn::PromoteTo(Tag<uint32_t>(), hn::LoadU(hn::Rebind<uint16_t, Tag<uint32_t>>(), values + p * PART_LANES));
        return hn::BitCast(Tag<float>(), hn::ShiftLeft<16>(wide));
    });
}
HWY_INLINE void store_bfloats(F32x16 v, uint16_t* values) {
    const U32x16 bits = bit_cast<uint32_t>(v), odd = shift_right<16>(bits) & broadcast<uint32_t>(1),
                 nearest = bits + odd + broadcast<uint32_t>(0x7fff),  // ties to even
        quiet = bits | broadcast<uint32_t>(0x400000);
    const hn::Rebind<uint16_t, Tag<uint32_t>> narrow;
    for (int p = 0; p < PARTS; ++p) {
        const auto is_nan = hn::RebindMask(Tag<uint32_t>(), hn::IsNaN(v.part[p]));
        const auto rounded = hn::IfThenElse(is_nan, quiet.part[p], nearest.part[p]);
        hn::StoreU(hn::TruncateTo(narrow, hn::ShiftRight<16>(rounded)), narrow, values + p * PART_LANES);
    }
}

HWY_INLINE F32x16 load_first(const float* values, int64_t lanes) {
    if (HWY_LIKELY(lanes >= LANES)) return load(values);
    return for_parts<float>([=](auto p) {
        const int64_t rest = lanes - p * PART_LANES;
        return hn::LoadN(Tag<float>(), values + p * PART_LANES, rest > 0 ? size_t(rest) : 0);
    });
}
HWY_INLINE void store_first(F32x16 v, float* values, int64_t lanes) {
    write_first(values, lanes, [&](float* x) { store(v, x); });
}

HWY_INLINE F32x16 load_floats(const void* data, DType type, int64_t index, int64_t lanes = LANES) {
    if (type == FLOAT32) return load_first(static_cast<const float*>(data) + index, lanes);
    const uint16_t* values = static_cast<const uint16_t*>(data) + index;
    if (type == FLOAT16) return read_padded(values, lanes, [](const uint16_t* x) { return load_halves(x); });
    return read_padded(values, lanes, [](const uint16_t* x) { return load_bfloats(x); });
}

HWY_INLINE void store_floats(void* data, DType type, int64_t index, F32x16 v, int64_t lanes = LANES) {
    if (type == FLOAT32) return store_first(v, static_cast<float*>(data) + index, lanes);
    uint16_t* values = static_cast<uint16_t*>(data) + index;
    if (type == FLOAT16) return write_first(values, lanes, [&](uint16_t* x) { store_halves(v, x); });
    write_first(values, lanes, [&](uint16_t* x) { store_bfloats(v, x); });
}

// e^x to about one ulp; 0 below -87, infinity above 88.
HWY_INLINE F32x16 exp(F32x16 x) {
    return for_parts<float>([&](auto p) {
        const Tag<float> tag;
        const auto v = hn::Min(x.part[p], hn::Set(tag, 88.0f));
        const auto exponent = hn::Round(hn::Mul(v, hn::Set(tag, 1.44269504f)));
        auto r = hn::NegMulAdd(exponent, hn::Set(tag, 0.693359375f), v);  // ln 2 in two parts
        r = hn::NegMulAdd(exponent, hn::Set(tag, -2.12194440e-4f), r);
        auto sum = hn::Set(tag, 1.0f / 5040);  // Taylor series, for |r| <= 0.35
        for (const float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
            sum = hn::MulAdd(sum, r, hn::Set(tag, coefficient));
        if constexpr (SMELT_AVX512) {
            sum = hn::MulByFloorPow2(sum, exponent);  // one instruction
        } else {
            const auto biased = hn::Add(hn::NearestInt(exponent), hn::Set(Tag<int32_t>(), 127));
            sum = hn::Mul(sum, hn::BitCast(tag, hn::ShiftLeft<23>(biased)));
        }
        const auto result = hn::IfThenZeroElse(hn::Lt(x.part[p], hn::Set(tag, -87.0f)), sum);
        return hn::IfThenElse(hn::Gt(x.part[p], hn::Set(tag, 88.0f)), hn::Inf(tag), result);
    });
}

// `half_to_float` with the instruction of the CPU.
inline float widen_half(uint16_t value) {
    const hn::CappedTag<float, 1> tag;
    const hn::Rebind<uint16_t, decltype(tag)> bits;
    const hn::Rebind<hwy::float16_t, decltype(tag)> narrow;
    return hn::GetLane(hn::PromoteTo(tag, hn::BitCast(narrow, hn::Set(bits, value))));
}
inline uint16_t float_to_half(float value) {
    const hn::CappedTag<float, 1> tag;
    const hn::Rebind<hwy::float16_t, decltype(tag)> narrow;
    const hn::Rebind<uint16_t, decltype(tag)> bits;
    return hn::GetLane(hn::BitCast(bits, hn::DemoteTo(narrow, hn::Set(tag, value))));
}
