// Elementwise steps that follow a sum in an integer-only network: requantization, i-GELU, tables, residual sums.
//
// Values are int32 between two steps, as conversion has proved. A strip is 16 channels of some rows.
#pragma once

#include "requantize.h"

enum StepKind : int32_t { REQUANTIZE, GELU, PIECEWISE_LINEAR, ADD };  // same order as in integer.py

struct Step {  // same layout as in integer.py
    StepKind kind;
    int32_t shift;                                     // GELU
    Requantize requantize;                             // REQUANTIZE; ADD: of `other`, if it has a multiplier
    int64_t q_b, q_c, q_one;                           // GELU
    const int32_t *breakpoints, *slopes, *intercepts;  // PIECEWISE_LINEAR; intercepts modulo 2^32
    int64_t entries;                                   // number of breakpoints
    const void* other;                                 // ADD: [other_rows, channels]; rows repeat
    int64_t other_rows, other_stride;
    IntType other_type;
};

struct Steps {
    const Step* first;
    int64_t count;
};

// x * ((erf >> shift) + q_one), erf = sign(x) * (q_c - (q_b - min(|x|, q_b))^2).
struct Gelu {
    const Step& step;
    bool narrow;  // erf fits int32

    explicit Gelu(const Step& s) : step(s) {
        const int64_t limit = int64_t(1) << 31;
        narrow = s.q_b <= 46340 && s.q_c < limit && s.q_c - s.q_b * s.q_b > -limit && s.shift < 32;
    }

    HWY_INLINE I32x16 operator()(I32x16 x, int64_t) const {
        if (HWY_LIKELY(narrow)) {
            return for_parts<int32_t>([&](auto p) SMELT_INLINE {
                const Tag<int32_t> tag;
                const Tag<uint32_t> bits;
                const auto v = x.part[p];
                const auto q_b = hn::Set(bits, uint32_t(step.q_b)), size = hn::BitCast(bits, hn::Abs(v));  // 2^31 too
                const auto distance = hn::BitCast(tag, hn::Sub(q_b, hn::Min(size, q_b)));
                auto erf = hn::Sub(hn::Set(tag, int32_t(step.q_c)), hn::Mul(distance, distance));
                const auto sign = hn::BroadcastSignBit(v);
                erf = hn::IfThenZeroElse(hn::Eq(v, hn::Zero(tag)), hn::Sub(hn::Xor(erf, sign), sign));
                return hn::Mul(v, hn::Add(hn::ShiftRightSame(erf, step.shift), hn::Set(tag, int32_t(step.q_one))));
            });
        }
        int32_t values[LANES];
        store(x, values);
        for (int i = 0; i < LANES; ++i) {
            const int64_t v = values[i], size = std::min(v < 0 ? -v : v, step.q_b), distance = step.q_b - size;
            const int64_t erf = ((v > 0) - (v < 0)) * (step.q_c - distance * distance);
            values[i] = int32_t(uint64_t(v) * uint64_t((erf >> step.shift) + step.q_one));
        }
        return load(values);
    }
};

// slopes[k] * x + intercepts[k], k the number of breakpoints <= x; modulo 2^32, as the result fits.
struct PiecewiseLinear {
    const Step& step;

    HWY_INLINE I32x16 operator()(I32x16 x, int64_t) const {
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
};

// Call `run` with the function of a step: op(values, row) of 16 channels.
template <class Run>
HWY_INLINE void with_step(const Step& step, int64_t channel, int64_t lanes, Run run) {
    switch (step.kind) {
        case REQUANTIZE: {
            const Rescale rescale(step.requantize, channel, lanes);
            return run([&](I32x16 x, int64_t) SMELT_INLINE { return rescale(x); });
        }
        case GELU: return run(Gelu(step));
        case PIECEWISE_LINEAR: return run(PiecewiseLinear{step});
        case ADD: {
            auto other = [&](int64_t row) SMELT_INLINE {
                const int64_t index = row % step.other_rows * step.other_stride + channel;
                return load_ints(step.other, step.other_type, index, lanes);
            };
            if (!step.requantize.multiplier)
                return run([&](I32x16 x, int64_t row) SMELT_INLINE { return x + other(row); });
            const Rescale rescale(step.requantize, channel, lanes);
            return run([&](I32x16 x, int64_t row) SMELT_INLINE { return x + rescale(other(row)); });
        }
    }
}

// Apply steps to a strip of `rows` rows from `row` on: values [rows, stride], in place.
inline void apply_steps(
    Steps steps, int32_t* values, int64_t stride, int64_t row, int64_t rows, int64_t channel, int64_t lanes) {
    for (int64_t i = 0; i < steps.count; ++i)
        with_step(steps.first[i], channel, lanes, [&](auto op) SMELT_INLINE {
            for (int64_t t = 0; t < rows; ++t) store(op(load(values + t * stride), row + t), values + t * stride);
        });
}

struct Output {  // same layout as in integer.py
    Steps steps;
    void* data;  // [rows, stride]
    int64_t stride;
    IntType type;
};

// Apply steps to a strip and store it; the last one on the way out.
inline void store_strip(
    const Output& out, int32_t* values, int64_t stride, int64_t row, int64_t rows, int64_t channel, int64_t lanes) {
    auto write = [&](auto op) SMELT_INLINE {
        for (int64_t t = 0; t < rows; ++t)
            store_ints(op(load(values + t * stride), row + t), out.data, out.type, (row + t) * out.stride + channel, lanes);
    };
    if (!out.steps.count) return write([](I32x16 x, int64_t) SMELT_INLINE { return x; });
    const Steps before{out.steps.first, out.steps.count - 1};
    apply_steps(before, values, stride, row, rows, channel, lanes);
    with_step(out.steps.first[before.count], channel, lanes, write);
}
