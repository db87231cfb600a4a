// Elementwise steps that follow a sum in an integer-only network: requantization, i-GELU, tables, residual sums.
//
// Values are int32 between two steps, as conversion has proved. A tile is some channels of some rows; its rows are padded
// to 16 channels.
#pragma once

#include "requantize.h"

enum StepKind : int32_t { REQUANTIZE, GELU, TABLE_LOOKUP, ADD };  // same order as in integer.py

struct Step {  // same layout as in integer.py
    StepKind kind;
    int32_t shift;                                     // GELU
    Requantize requantize;                             // REQUANTIZE; ADD: of `other`, if it has a multiplier
    int64_t q_b, q_c, q_one;                           // GELU
    const int32_t *breakpoints, *slopes, *intercepts;  // TABLE_LOOKUP; intercepts modulo 2^32
    int64_t entries;                                   // number of breakpoints
    const void* other;                                 // ADD: [other_rows, channels]; rows repeat
    int64_t other_rows, other_stride;
    IntType other_type;
};

struct Steps {
    const Step* first;
    int64_t count;
};

// x * ((erf >> shift) + q_one), erf = sign(x) * (q_c - (q_b - min(|x|, q_b))^2), where erf fits int32.
struct NarrowGelu {
    int32_t q_b, q_c, q_one, shift;

    static bool fits(const Step& s) {
        const int64_t limit = int64_t(1) << 31;
        return s.q_b <= 46340 && s.q_c < limit && s.q_c - s.q_b * s.q_b > -limit && s.shift < 32;
    }

    HWY_INLINE I32x16 operator()(I32x16 x) const {
        return for_parts<int32_t>([&](auto p) SMELT_INLINE {
            const Tag<int32_t> tag;
            const Tag<uint32_t> bits;
            const auto v = x.part[p];
            const auto limit = hn::Set(bits, uint32_t(q_b)), size = hn::BitCast(bits, hn::Abs(v));  // 2^31 included
            const auto distance = hn::BitCast(tag, hn::Sub(limit, hn::Min(size, limit)));
            auto erf = hn::Sub(hn::Set(tag, q_c), hn::Mul(distance, distance));
            const auto sign = hn::BroadcastSignBit(v);
            // The sign of zero does not matter: the result is a multiple of x.
            erf = hn::ShiftRightSame(hn::Sub(hn::Xor(erf, sign), sign), shift);
            return hn::Mul(v, hn::Add(erf, hn::Set(tag, q_one)));
        });
    }
};

// The same in 64 bits.
inline I32x16 wide_gelu(const Step& step, I32x16 x) {
    int32_t values[LANES];
    store(x, values);
    for (int i = 0; i < LANES; ++i) {
        const int64_t v = values[i], size = std::min(v < 0 ? -v : v, step.q_b), distance = step.q_b - size;
        const int64_t erf = (v < 0 ? -1 : 1) * (step.q_c - distance * distance);
        values[i] = int32_t(uint64_t(v) * uint64_t((erf >> step.shift) + step.q_one));
    }
    return load(values);
}

// slopes[k] * x + intercepts[k], k the number of breakpoints <= x; modulo 2^32, as the result fits.
inline I32x16 table_lookup(const Step& step, I32x16 x) {
    return for_parts<int32_t>([&](auto p) SMELT_INLINE {
        const Tag<int32_t> tag;
        auto slope = hn::Set(tag, step.slopes[0]), intercept = hn::Set(tag, step.intercepts[0]);
        for (int64_t k = 0; k < step.entries; ++k) {
            const auto reached = hn::Ge(x.part[p], hn::Set(tag, step.breakpoints[k]));
            slope = hn::IfThenElse(reached, hn::Set(tag, step.slopes[k + 1]), slope);
            intercept = hn::IfThenElse(reached, hn::Set(tag, step.intercepts[k + 1]), intercept);
        }
        return hn::Add(hn::Mul(slope, x.part[p]), intercept);
    });
}

// Call `run` with the function of a step: op(values, row, channel, lanes) of 16 channels.
template <class Run>
HWY_INLINE void with_step(const Step& step, Run run) {
    switch (step.kind) {
        case REQUANTIZE:
            return with_rescale(step.requantize, [&](auto rescale) SMELT_INLINE {
                run([=](I32x16 x, int64_t, int64_t channel, int64_t lanes) mutable SMELT_INLINE {
                    return rescale(x, channel, lanes);
                });
            });
        case GELU: {
            if (!NarrowGelu::fits(step))
                return run([&](I32x16 x, int64_t, int64_t, int64_t) { return wide_gelu(step, x); });
            const NarrowGelu gelu{int32_t(step.q_b), int32_t(step.q_c), int32_t(step.q_one), step.shift};
            return run([=](I32x16 x, int64_t, int64_t, int64_t) SMELT_INLINE { return gelu(x); });
        }
        case TABLE_LOOKUP:
            return run([&](I32x16 x, int64_t, int64_t, int64_t) { return table_lookup(step, x); });
        case ADD: {
            auto other = [&](int64_t row, int64_t channel, int64_t lanes) SMELT_INLINE {
                const int64_t index = (row < step.other_rows ? row : row % step.other_rows) * step.other_stride + channel;
                return load_ints(step.other, step.other_type, index, lanes);
            };
            if (!step.requantize.multiplier)
                return run([&](I32x16 x, int64_t row, int64_t channel, int64_t lanes) SMELT_INLINE {
                    return x + other(row, channel, lanes);
                });
            return with_rescale(step.requantize, [&](auto rescale) SMELT_INLINE {
                run([=](I32x16 x, int64_t row, int64_t channel, int64_t lanes) mutable SMELT_INLINE {
                    return x + rescale(other(row, channel, lanes), channel, lanes);
                });
            });
        }
    }
}

struct Tile {
    int32_t* values;  // [rows, stride]
    int64_t stride;
    int64_t row, rows;          // first row, number of rows
    int64_t channel, channels;  // first channel, number of channels
};

// Apply steps to a tile, in place.
inline void apply_steps(Steps steps, const Tile& tile) {
    for (int64_t i = 0; i < steps.count; ++i)
        with_step(steps.first[i], [&](auto op) SMELT_INLINE {
            for (int64_t t = 0; t < tile.rows; ++t) {
                int32_t* values = tile.values + t * tile.stride;
                for_blocks(tile.channels, [&](int64_t c, int64_t lanes) SMELT_INLINE {
                    store(op(load(values + c), tile.row + t, tile.channel + c, lanes), values + c);
                });
            }
        });
}

struct Output {  // same layout as in integer.py
    Steps steps;
    void* data;  // [rows, stride]
    int64_t stride;
    IntType type;
};

// Apply steps to a tile and store it; the last one on the way out.
inline void store_tile(const Output& out, const Tile& tile) {
    auto write = [&](auto op) SMELT_INLINE {
        for (int64_t t = 0; t < tile.rows; ++t) {
            const int32_t* values = tile.values + t * tile.stride;
            const int64_t first = (tile.row + t) * out.stride + tile.channel;
            for_blocks(tile.channels, [&](int64_t c, int64_t lanes) SMELT_INLINE {
                const I32x16 result = op(load(values + c), tile.row + t, tile.channel + c, lanes);
                store_ints(result, out.data, out.type, first + c, lanes);
            });
        }
    };
    if (!out.steps.count) return write([](I32x16 x, int64_t, int64_t, int64_t) SMELT_INLINE { return x; });
    const Steps before{out.steps.first, out.steps.count - 1};
    apply_steps(before, tile);
    with_step(out.steps.first[before.count], write);
}
