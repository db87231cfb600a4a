// Matrix products with an emulated accumulator: a float with few mantissa bits, rounded after every addition. A separate
// library, as few processes need it. Bit-identical to the reference in emulated_gemm.py.
#include <cstdint>
#include <cstring>
#include <limits>

struct EmulatedGemm {  // same layout as in cpu/emulated_gemm.py; owns nothing
    const float* a;    // [rows, length]
    const float* b;    // [length, columns]
    float* out;        // [rows, columns]
    int64_t rows, columns, length, chunk_size, seed;
    double max_value, min_positive;
    double overflow;  // what a finite sum beyond max_value becomes
    double infinite;  // what an infinite sum becomes
    int32_t mantissa_bits, min_exponent, subnormals, rounding, float32;
};

namespace {

constexpr int NEAREST = 0, STOCHASTIC = 1;  // otherwise truncate
constexpr int64_t TILE = 128;               // columns whose accumulators stay in the L1 cache

template <typename Real>
struct Layout;
template <>
struct Layout<float> {
    using Word = int32_t;
    static constexpr int MANTISSA = 23, BIAS = 127;
};
template <>
struct Layout<double> {
    using Word = int64_t;
    static constexpr int MANTISSA = 52, BIAS = 1023;
};

template <typename To, typename From>
inline To bit_cast(From value) {
    To result;
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

// The first word of Philox-4x32-10 with counter (c0, c1, c2, 0).
inline uint32_t philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2) {
    uint32_t c3 = 0, key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        uint64_t product0 = uint64_t(0xD2511F53u) * c0, product1 = uint64_t(0xCD9E8D57u) * c2;
        c0 = uint32_t(product1 >> 32) ^ c1 ^ key0, c1 = uint32_t(product1);
        c2 = uint32_t(product0 >> 32) ^ c3 ^ key1, c3 = uint32_t(product0);
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    return c0;
}

// x + y, rounded to odd: an inexact sum becomes the neighbor whose last bit is 1, so that rounding again is exact.
inline double sum_to_odd(double x, double y) {
    double sum = x + y, part = sum - x, error = (x - (sum - part)) + (y - part);
    int64_t bits = bit_cast<int64_t>(sum), outward = (error > 0) == (sum > 0) ? 1 : -1;
    bool move = ((error > 0) | (error < 0)) & !(bits & 1);
    return bit_cast<double>(move ? bits + outward : bits);
}

// In float32 mode the sum may be rounded twice, see `float32_is_exact` in accumulation.py.
inline float sum_to_odd(float x, float y) { return x + y; }

template <typename Real>
struct Grid {
    using Word = typename Layout<Real>::Word;
    Real max_value, min_positive, overflow, infinite;
    Word min_code, shift;  // lowest exponent code; exponent codes between a value and 2^MANTISSA steps of its binade

    explicit Grid(const EmulatedGemm& task)
        : max_value(task.max_value), min_positive(task.min_positive), overflow(task.overflow), infinite(task.infinite),
          min_code(task.min_exponent + Layout<Real>::BIAS), shift(Layout<Real>::MANTISSA - task.mantissa_bits) {}

    // Adding 2^MANTISSA steps to a magnitude and subtracting them again rounds it to a multiple of the step.
    template <int ROUNDING, bool SUBNORMALS>
    inline Real round(Real value, uint32_t random) const {
        constexpr int MANTISSA = Layout<Real>::MANTISSA;
        Word bits = bit_cast<Word>(value), sign = bits & std::numeric_limits<Word>::min();
        Real magnitude = bit_cast<Real>(Word(bits ^ sign));
        Word code = (bits ^ sign) >> MANTISSA;
        code = code > min_code ? code : min_code;
        Real steps = bit_cast<Real>(Word((code + shift) << MANTISSA));
        Real result = (magnitude + steps) - steps;
        if (ROUNDING != NEAREST) {
            Real step = bit_cast<Real>(Word((code + shift - MANTISSA) << MANTISSA));
            result = result > magnitude ? result - step : result;
            if (ROUNDING == STOCHASTIC)
                result += Real(random) * Real(0x1p-32) < (magnitude - result) / step ? step : Real(0);
        }
        if (!SUBNORMALS) {
            Real threshold = ROUNDING == STOCHASTIC ? Real(random) * Real(0x1p-32) : Real(0.5);
            bool up = (ROUNDING == NEAREST || ROUNDING == STOCHASTIC) & (magnitude > threshold * min_positive);
            result = magnitude < min_positive ? (up ? min_positive : Real(0)) : result;
        }
        result = result > max_value ? overflow : result;
        result = magnitude > std::numeric_limits<Real>::max() ? infinite : result;
        result = value == value ? result : value;
        return bit_cast<Real>(Word(bit_cast<Word>(result) | sign));
    }
};

template <typename Real, int ROUNDING, bool SUBNORMALS>
void multiply_tile(const EmulatedGemm& task, int64_t row, int64_t first, int64_t count) {
    const Grid<Real> grid(task);
    auto random = [&](int64_t step, int64_t column) {
        return ROUNDING == STOCHASTIC ? philox(task.seed, uint32_t(step), uint32_t(row), uint32_t(column)) : 0;
    };
    Real total[TILE] = {};
    for (int64_t start = 0, chunk = 0; start < task.length; start += task.chunk_size, ++chunk) {
        int64_t stop = start + task.chunk_size < task.length ? start + task.chunk_size : task.length;
        Real partial[TILE] = {};
        for (int64_t step = start; step < stop; ++step) {
            const Real a = task.a[row * task.length + step];
            const float* b = task.b + step * task.columns + first;
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) {
                Real sum = sum_to_odd(partial[i], a * Real(b[i]));
                partial[i] = grid.template round<ROUNDING, SUBNORMALS>(sum, random(step, first + i));
            }
        }
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) {
            Real sum = sum_to_odd(total[i], partial[i]);
            total[i] = grid.template round<ROUNDING, SUBNORMALS>(sum, random(task.length + chunk, first + i));
        }
    }
    for (int64_t i = 0; i < count; ++i) task.out[row * task.columns + first + i] = float(total[i]);
}

template <typename Real, int ROUNDING, bool SUBNORMALS>
void multiply(const EmulatedGemm& task, int threads) {
    const int64_t tiles = (task.columns + TILE - 1) / TILE;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t index = 0; index < task.rows * tiles; ++index) {
        int64_t row = index / tiles, first = index % tiles * TILE, left = task.columns - first;
        if (left >= TILE)
            multiply_tile<Real, ROUNDING, SUBNORMALS>(task, row, first, TILE);  // a constant count is unrolled
        else
            multiply_tile<Real, ROUNDING, SUBNORMALS>(task, row, first, left);
    }
}

template <typename Real, int ROUNDING>
void multiply(const EmulatedGemm& task, int threads) {
    task.subnormals ? multiply<Real, ROUNDING, true>(task, threads) : multiply<Real, ROUNDING, false>(task, threads);
}

}  // namespace

extern "C" void smelt_emulated_gemm(const EmulatedGemm* task, int threads) {
    if (task->float32)
        multiply<float, NEAREST>(*task, threads);
    else if (task->rounding == NEAREST)
        multiply<double, NEAREST>(*task, threads);
    else if (task->rounding == STOCHASTIC)
        multiply<double, STOCHASTIC>(*task, threads);
    else
        multiply<double, 2>(*task, threads);
}
