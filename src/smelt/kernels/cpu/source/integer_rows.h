// Integer softmax and LayerNorm of one row (I-BERT), with the bits of the reference in runtime/integer/ops.py.
//
// Both compute in 32 bits, with 64-bit products, if the constants permit, otherwise in 64 bits.
#pragma once

#include "integer_steps.h"

struct Softmax {  // same layout as in integer.py
    int64_t levels, q_ln2, q_b, q_c;
    int32_t reciprocal_bits, max_halvings, lift, drop;
};

inline int bit_length(int64_t value) {
    return value > 0 ? 64 - __builtin_clzll(uint64_t(value)) : 0;
}

// i-exp of -distance: one right shift per multiple of ln 2, a polynomial of the rest.
inline int64_t exp_of_distance(const Softmax& s, int64_t distance) {
    distance = std::min(distance, s.max_halvings * s.q_ln2);
    const int64_t halvings = distance / s.q_ln2, rest = distance - halvings * s.q_ln2;
    return ((rest * (rest - s.q_b) + s.q_c) << s.lift) >> std::min<int64_t>(s.drop + halvings, 63);
}

// The same in 32 bits, for q_c << lift below 2^31.
struct NarrowExp {
    const Softmax& s;
    uint32_t limit, reciprocal;

    explicit NarrowExp(const Softmax& softmax)
        : s(softmax), limit(uint32_t(s.max_halvings * s.q_ln2)), reciprocal(uint32_t(0xffffffffu / s.q_ln2)) {}

    template <class V>
    HWY_INLINE hn::Vec<Tag<int32_t>> operator()(V distance) const {
        const Tag<uint32_t> tag;
        const Tag<int32_t> ints;
        const auto x = hn::Min(distance, hn::Set(tag, limit)), q_ln2 = hn::Set(tag, uint32_t(s.q_ln2));
        auto halvings = hn::MulHigh(x, hn::Set(tag, reciprocal));  // the quotient or one less, as x < 2^31
        auto rest = hn::Sub(x, hn::Mul(halvings, q_ln2));
        const auto more = hn::Ge(rest, q_ln2);
        rest = hn::Sub(rest, hn::IfThenElseZero(more, q_ln2));
        halvings = hn::Add(halvings, hn::IfThenElseZero(more, hn::Set(tag, 1)));
        const auto r = hn::BitCast(ints, rest);
        const auto polynomial =
            hn::MulAdd(r, hn::Sub(r, hn::Set(ints, int32_t(s.q_b))), hn::Set(ints, int32_t(s.q_c)));
        const auto right = hn::Min(hn::Add(halvings, hn::Set(tag, uint32_t(s.drop))), hn::Set(tag, 31));
        return hn::BitCast(ints, hn::Shr(hn::ShiftLeftSame(hn::BitCast(tag, polynomial), s.lift), right));
    }
};

// Softmax of a row x [padded to 16], which is overwritten; mask [padded] is zero where a position is masked and beyond the
// last. `write(rescale)` takes the result: rescale(x) of every value.
template <class Write>
inline void softmax_row(const Softmax& s, int32_t* x, const uint8_t* mask, int64_t length, Write write) {
    const Tag<int32_t> tag;
    const int64_t largest = s.drop < 63 ? (s.q_c << s.lift) >> s.drop : 0;
    const bool narrow = bit_length(s.q_c) + s.lift <= 31 && s.max_halvings * s.q_ln2 < int64_t(1) << 31 &&
                        s.q_b < int64_t(1) << 31 && bit_length(largest) + bit_length(length) <= 31;
    auto visible = [&](int64_t k, auto p) SMELT_INLINE {
        const auto bytes = hn::LoadU(hn::Rebind<uint8_t, Tag<int32_t>>(), mask + k + p * PART_LANES);
        return hn::Gt(hn::PromoteTo(tag, bytes), hn::Zero(tag));
    };
    I32x16 peaks = broadcast(INT32_MIN);
    for (int64_t k = 0; k < length; k += LANES) {
        const I32x16 values = load(x + k);
        peaks = max(peaks, for_parts<int32_t>([&](auto p) SMELT_INLINE {
                        return hn::IfThenElse(visible(k, p), values.part[p], hn::Set(tag, INT32_MIN));
                    }));
    }
    int32_t lanes[LANES];
    store(peaks, lanes);
    const int32_t peak = *std::max_element(lanes, lanes + LANES);
    int64_t sum = 0;
    if (narrow) {
        const NarrowExp exp(s);
        I32x16 sums = zero<int32_t>();
        for (int64_t k = 0; k < length; k += LANES) {
            const I32x16 values = load(x + k);
            const I32x16 exp_values = for_parts<int32_t>([&](auto p) SMELT_INLINE {
                const auto distance = hn::Sub(hn::Set(tag, peak), values.part[p]);
                return hn::IfThenElseZero(visible(k, p), exp(hn::BitCast(Tag<uint32_t>(), distance)));
            });
            sums = sums + exp_values;
            store(exp_values, x + k);
        }
        store(sums, lanes);
        for (const int32_t lane : lanes) sum += lane;
    } else {
        for (int64_t k = 0; k < length; ++k) {
            const int64_t value = mask[k] ? exp_of_distance(s, int64_t(peak) - x[k]) : 0;
            x[k] = int32_t(value);
            sum += value;
        }
    }
    const int64_t factor = (s.levels << s.reciprocal_bits) / std::max<int64_t>(sum, 1);
    if (factor <= INT32_MAX) {
        return with_rescale(int32_t(factor), s.reciprocal_bits, write);
    }
    for (int64_t k = 0; k < length; ++k)
        x[k] = int32_t((x[k] * factor + (int64_t(1) << (s.reciprocal_bits - 1))) >> s.reciprocal_bits);
    write([](I32x16 x) { return x; });
}

struct Norm {                      // same layout as in integer.py
    const int32_t *weight, *bias;  // [length]; bias may be null
    int64_t length, epsilon;
    int32_t shift, reciprocal_bits, output_bits, centered;  // centered: LayerNorm, otherwise RMSNorm
};

// Newton's iteration from a tangent of the root: at most 9 % above it, so that few divisions are necessary.
inline int64_t floor_sqrt(int64_t value) {
    if (value <= 0) return 0;
    const int half = (bit_length(value) - 1) / 2;  // value = m * 4^half, 1 <= m < 4: sqrt(m) <= (m + 9 / 4) / 3
    int64_t root = ((value >> half) + ((int64_t(9) << half) >> 2)) / 3 + 2;
    while (true) {
        const int64_t smaller = (root + value / root) >> 1;
        if (smaller >= root) return root;
        root = smaller;
    }
}

// Normalize a row in place: values [padded to 16].
inline void normalize_row(const Norm& norm, int32_t* values) {
    const int64_t length = norm.length, half_excess = norm.reciprocal_bits - norm.output_bits - 1;
    int64_t mean = 0;
    int32_t lowest = INT32_MAX, highest = INT32_MIN;
#pragma omp simd reduction(+ : mean) reduction(min : lowest) reduction(max : highest)
    for (int64_t k = 0; k < length; ++k) {
        mean += values[k];
        lowest = std::min(lowest, values[k]), highest = std::max(highest, values[k]);
    }
    if (norm.centered) {
        const int64_t twice = 2 * mean + length, divisor = 2 * length;
        mean = twice / divisor - (twice % divisor < 0);  // floor
    } else {
        mean = 0;
    }
    int64_t squares = 0;
    const bool narrow = lowest - mean >= INT32_MIN && highest - mean <= INT32_MAX && norm.shift < 32;
    if (narrow) {
        const int32_t center = int32_t(mean);
#pragma omp simd reduction(+ : squares)
        for (int64_t k = 0; k < length; ++k) {
            const int32_t value = (values[k] - center) >> norm.shift;
            squares += int64_t(value) * value;
        }
    } else {
        for (int64_t k = 0; k < length; ++k) {
            const int64_t value = (values[k] - mean) >> std::min(norm.shift, 63);
            squares += value * value;
        }
    }
    const int64_t root = floor_sqrt(squares + norm.epsilon) << norm.shift;
    const int64_t factor = (int64_t(1) << norm.reciprocal_bits) / std::max<int64_t>(root, 1);
    if (narrow && factor <= INT32_MAX) {
        const I32x16 center = broadcast(int32_t(mean));
        return with_rescale(int32_t(factor), int32_t(half_excess + 1), [&](auto rescale) SMELT_INLINE {
            for_blocks(length, [&](int64_t k, int64_t lanes) SMELT_INLINE {
                I32x16 result = rescale(load(values + k) - center) * load_ints(norm.weight, INT32, k, lanes);
                if (norm.bias) result = result + load_ints(norm.bias, INT32, k, lanes);
                store(result, values + k);
            });
        });
    }
    for (int64_t k = 0; k < length; ++k) {
        const int64_t product = (values[k] - mean) * factor + (int64_t(1) << half_excess);
        const uint64_t normalized = uint64_t(product >> (half_excess + 1));
        values[k] = int32_t(normalized * uint64_t(int64_t(norm.weight[k])) + uint64_t(norm.bias ? norm.bias[k] : 0));
    }
}
