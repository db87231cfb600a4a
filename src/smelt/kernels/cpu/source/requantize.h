// Dyadic requantization of 16 values: clamp((x * multiplier + 2^(shift - 1)) >> shift), exact in 64 bits.
#pragma once

#include "simd.h"

enum IntType : int32_t { INT8, UINT8, INT16, INT32 };  // same order as in integer.py

struct Requantize {                     // same layout as in integer.py
    const int32_t *multiplier, *shift;  // [1 or channels]
    int64_t channels;                   // 1 if all share a multiplier
    int32_t minimum, maximum;
};

// The multipliers of 16 channels, in registers.
struct Rescale {
    I32x16 multiplier, shift, minimum, maximum;

    Rescale(int32_t multiplier, int32_t shift, int32_t minimum = INT32_MIN, int32_t maximum = INT32_MAX)
        : multiplier(broadcast(multiplier)), shift(broadcast(shift)), minimum(broadcast(minimum)),
          maximum(broadcast(maximum)) {}

    Rescale(const Requantize& q, int64_t channel, int64_t lanes)
        : Rescale(*q.multiplier, *q.shift, q.minimum, q.maximum) {
        if (q.channels == 1) return;
        auto read = [](const int32_t* values) { return load(values); };
        multiplier = read_padded(q.multiplier + channel, lanes, read);
        shift = read_padded(q.shift + channel, lanes, read);
    }

    HWY_INLINE I32x16 operator()(I32x16 x) const {
        return for_parts<int32_t>([&](auto p) SMELT_INLINE {
#if HWY_ARCH_ARM_A64  // rounding shifts and saturating conversions are instructions
            const int32x4_t v = x.part[p].raw, m = multiplier.part[p].raw, left = vnegq_s32(shift.part[p].raw);
            const int64x2_t low = vmull_s32(vget_low_s32(v), vget_low_s32(m)), high = vmull_high_s32(v, m);
            const int32x2_t narrow = vqmovn_s64(vrshlq_s64(low, vmovl_s32(vget_low_s32(left))));
            const hn::Vec<Tag<int32_t>> rounded(vqmovn_high_s64(narrow, vrshlq_s64(high, vmovl_high_s32(left))));
#else
            const Tag<int32_t> tag;
            const Tag<int64_t> wide;
            const Tag<uint64_t> bits;
            auto round = [=](auto product, auto right) SMELT_INLINE {
                const auto half = hn::ShiftRight<1>(hn::Shl(hn::Set(wide, 1), right));
                const auto result = hn::Shr(hn::Add(product, half), right);
                return hn::Min(hn::Max(result, hn::Set(wide, INT32_MIN)), hn::Set(wide, INT32_MAX));
            };
            const auto shifts = hn::BitCast(bits, shift.part[p]);
            const auto even_shift = hn::BitCast(wide, hn::And(shifts, hn::Set(bits, 63))),
                       odd_shift = hn::BitCast(wide, hn::ShiftRight<32>(shifts));
            const auto even = round(hn::MulEven(x.part[p], multiplier.part[p]), even_shift),
                       odd = round(hn::MulOdd(x.part[p], multiplier.part[p]), odd_shift);
            const auto rounded = hn::OddEven(hn::BitCast(tag, hn::ShiftLeft<32>(odd)), hn::BitCast(tag, even));
#endif
            return hn::Min(hn::Max(rounded, minimum.part[p]), maximum.part[p]);
        });
    }
};

// Load 16 integers of a type from `index` on, of which `lanes` are in memory.
HWY_INLINE I32x16 load_ints(const void* data, IntType type, int64_t index, int64_t lanes) {
    switch (type) {
        case INT8:
            return read_padded(static_cast<const int8_t*>(data) + index, lanes, [](const int8_t* x) { return widen(x); });
        case UINT8:
            return read_padded(static_cast<const uint8_t*>(data) + index, lanes, [](const uint8_t* x) {
                return bit_cast<int32_t>(widen(x));
            });
        case INT16:
            return read_padded(static_cast<const int16_t*>(data) + index, lanes, [](const int16_t* x) {
                return for_parts<int32_t>([=](auto p) {
                    const hn::Rebind<int16_t, Tag<int32_t>> narrow;
                    return hn::PromoteTo(Tag<int32_t>(), hn::LoadU(narrow, x + p * PART_LANES));
                });
            });
        default:
            return read_padded(static_cast<const int32_t*>(data) + index, lanes, [](const int32_t* x) { return load(x); });
    }
}

// Store the lowest byte of each lane; one store of 128 bits where registers have as many.
HWY_INLINE void store_low_bytes(I32x16 v, uint8_t* bytes) {
    if constexpr (PARTS == 4) {
        const U32x16 u = bit_cast<uint32_t>(v);
        const Tag<uint16_t> words;
        const auto low = hn::OrderedTruncate2To(words, u.part[0], u.part[1]),
                   high = hn::OrderedTruncate2To(words, u.part[2], u.part[3]);
        hn::StoreU(hn::OrderedTruncate2To(Tag<uint8_t>(), low, high), Tag<uint8_t>(), bytes);
    } else {
        store_bytes(bit_cast<uint32_t>(v), bytes);
    }
}

// Store the first `lanes` of 16 values, which fit the type, from `index` on.
HWY_INLINE void store_ints(I32x16 v, void* data, IntType type, int64_t index, int64_t lanes) {
    if (type == INT8 || type == UINT8) {
        write_first(static_cast<uint8_t*>(data) + index, lanes, [&](uint8_t* x) { store_low_bytes(v, x); });
    } else if (type == INT16) {
        write_first(static_cast<int16_t*>(data) + index, lanes, [&](int16_t* x) {
            const hn::Rebind<int16_t, Tag<int32_t>> narrow;
            for (int p = 0; p < PARTS; ++p) hn::StoreU(hn::DemoteTo(narrow, v.part[p]), narrow, x + p * PART_LANES);
        });
    } else {
        write_first(static_cast<int32_t*>(data) + index, lanes, [&](int32_t* x) { store(v, x); });
    }
}
