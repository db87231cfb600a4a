// Dyadic requantization of 16 values: clamp((x * multiplier + 2^(shift - 1)) >> shift), exact in 64 bits.
#pragma once

#include "simd.h"

enum IntType : int32_t { INT8, UINT8, INT16, INT32 };  // same order as in integer.py

struct Requantize {                     // same layout as in integer.py
    const int32_t *multiplier, *shift;  // [1 or channels], and 16 more that can be read
    int64_t channels;                   // 1 if all share a multiplier
    int32_t minimum, maximum;
    int32_t is_high;  // all shifts are at least 32, so that the low half of a product only rounds down
};

// (x * multiplier + 2^(shift - 1)) >> shift in 64 bits, saturated.
HWY_INLINE hn::Vec<Tag<int32_t>> rescale_wide(
    hn::Vec<Tag<int32_t>> x, hn::Vec<Tag<int32_t>> multiplier, hn::Vec<Tag<int32_t>> shift) {
#if HWY_ARCH_ARM_A64  // rounding shifts and saturating conversions are instructions
    const int32x4_t left = vnegq_s32(shift.raw);
    const int64x2_t low = vmull_s32(vget_low_s32(x.raw), vget_low_s32(multiplier.raw)),
                    high = vmull_high_s32(x.raw, multiplier.raw);
    const int32x2_t narrow = vqmovn_s64(vrshlq_s64(low, vmovl_s32(vget_low_s32(left))));
    return hn::Vec<Tag<int32_t>>(vqmovn_high_s64(narrow, vrshlq_s64(high, vmovl_high_s32(left))));
#else
    const Tag<int32_t> tag;
    const Tag<int64_t> wide;
    const Tag<uint64_t> bits;
    auto round = [=](auto product, auto right) SMELT_INLINE {
        const auto half = hn::ShiftRight<1>(hn::Shl(hn::Set(wide, 1), right));
        const auto result = hn::Shr(hn::Add(product, half), right);
        return hn::Min(hn::Max(result, hn::Set(wide, INT32_MIN)), hn::Set(wide, INT32_MAX));
    };
    const auto shifts = hn::BitCast(bits, shift);
    const auto even_shift = hn::BitCast(wide, hn::And(shifts, hn::Set(bits, 63))),
               odd_shift = hn::BitCast(wide, hn::ShiftRight<32>(shifts));
    const auto even = round(hn::MulEven(x, multiplier), even_shift), odd = round(hn::MulOdd(x, multiplier), odd_shift);
    return hn::OddEven(hn::BitCast(tag, hn::ShiftLeft<32>(odd)), hn::BitCast(tag, even));
#endif
}

// The same for shifts of at least 32: floor(x * multiplier / 2^31) fits int32, and its lower bits alone round.
HWY_INLINE hn::Vec<Tag<int32_t>> rescale_high(
    hn::Vec<Tag<int32_t>> x, hn::Vec<Tag<int32_t>> multiplier, hn::Vec<Tag<int32_t>> shift) {
    const Tag<int32_t> tag;
    const auto right = hn::Sub(shift, hn::Set(tag, 31));
#if HWY_ARCH_ARM_A64
    return hn::Vec<Tag<int32_t>>(vrshlq_s32(vqdmulhq_s32(x.raw, multiplier.raw), vnegq_s32(right.raw)));
#else
    const auto even = hn::MulEven(x, multiplier), odd = hn::MulOdd(x, multiplier);
    const auto high = hn::OddEven(
        hn::BitCast(tag, hn::Add(odd, odd)), hn::BitCast(tag, hn::ShiftRight<31>(even)));
    const auto last = hn::And(hn::Shr(high, hn::Sub(right, hn::Set(tag, 1))), hn::Set(tag, 1));
    return hn::Add(hn::Shr(high, right), last);
#endif
}

// The multipliers of 16 channels, in registers.
template <bool High>
struct Rescale {
    I32x16 multiplier, shift, minimum, maximum;

    HWY_INLINE Rescale(int32_t multiplier, int32_t shift, int32_t minimum = INT32_MIN, int32_t maximum = INT32_MAX)
        : multiplier(broadcast(multiplier)), shift(broadcast(shift)), minimum(broadcast(minimum)),
          maximum(broadcast(maximum)) {}

    explicit Rescale(const Requantize& q) : Rescale(*q.multiplier, *q.shift, q.minimum, q.maximum) {}

    HWY_INLINE void load_channels(const Requantize& q, int64_t channel) {
        multiplier = load(q.multiplier + channel);
        shift = load(q.shift + channel);
    }

    HWY_INLINE I32x16 operator()(I32x16 x) const {
        return for_parts<int32_t>([&](auto p) SMELT_INLINE {
            const auto rounded = High ? rescale_high(x.part[p], multiplier.part[p], shift.part[p])
                                      : rescale_wide(x.part[p], multiplier.part[p], shift.part[p]);
            return hn::Min(hn::Max(rounded, minimum.part[p]), maximum.part[p]);
        });
    }
};

// Call `run` with the function that rescales 16 values from `channel` on: rescale(x, channel, lanes).
template <class Run>
HWY_INLINE void with_rescale(const Requantize& q, Run run) {
    auto start = [&](auto rescale) SMELT_INLINE {
        if (q.channels == 1) return run([=](I32x16 x, int64_t, int64_t) SMELT_INLINE { return rescale(x); });
        const Requantize by_channel = q;
        run([=](I32x16 x, int64_t channel, int64_t) mutable SMELT_INLINE {
            rescale.load_channels(by_channel, channel);
            return rescale(x);
        });
    };
    q.is_high ? start(Rescale<true>(q)) : start(Rescale<false>(q));
}

// Call `run` with the function that rescales by multiplier / 2^shift, moved to a shift of 32 if that is exact.
template <class Run>
HWY_INLINE void with_rescale(int32_t multiplier, int32_t shift, Run run) {
    const int more = std::max(32 - shift, 0);
    if (more < 32 && int64_t(multiplier) << more <= INT32_MAX) run(Rescale<true>(multiplier << more, shift + more));
    else run(Rescale<false>(multiplier, shift));
}

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
