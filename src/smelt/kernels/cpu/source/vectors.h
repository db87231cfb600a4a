// Vectors of 512 bits on any CPU, with Google Highway: one register with AVX-512, two with AVX2, four with NEON or SSE.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// Not used here, and hidden by some virtual machines: AVX2 must not depend on them.
#define HWY_DISABLE_PCLMUL_AES
// Registers of unknown length cannot be members of structures: CPUs with SVE use NEON.
#define HWY_DISABLED_TARGETS HWY_ALL_SVE
#include "hwy/highway.h"

namespace hn = hwy::HWY_NAMESPACE;

template <class T>
using Tag = hn::CappedTag<T, 64 / sizeof(T)>;  // of one register

constexpr int LANES = 16;  // of 32 bits
constexpr int PARTS = LANES / int(hn::MaxLanes(Tag<float>()));
constexpr int PART_LANES = LANES / PARTS;
#define SMELT_AVX512 (HWY_TARGET <= HWY_AVX3)

// For lambdas: vectors that they refer to stay in registers.
#define SMELT_INLINE __attribute__((always_inline))

template <class T>
struct Vector {
    hn::Vec<Tag<T>> part[PARTS];
};
using F32x16 = Vector<float>;
using I32x16 = Vector<int32_t>;
using U32x16 = Vector<uint32_t>;
using U8x64 = Vector<uint8_t>;
using I8x64 = Vector<int8_t>;
using FloatRegister = hn::Vec<Tag<float>>;

template <class Body, size_t... Index>
HWY_INLINE void unroll(Body body, std::index_sequence<Index...>) {
    (body(std::integral_constant<int, int(Index)>()), ...);
}

// Call body(0), body(1), ... with compile-time constants: arrays of vectors with such indices stay in registers.
template <int Count, class Body>
HWY_INLINE void unroll(Body body) {
    unroll(body, std::make_index_sequence<Count>());
}

template <class T, class Op, size_t... Index>
HWY_INLINE Vector<T> for_parts(Op op, std::index_sequence<Index...>) {
    return {{op(std::integral_constant<int, int(Index)>())...}};
}

// Build a vector from op(part) for each register; `part` is a compile-time constant.
template <class T, class Op>
HWY_INLINE Vector<T> for_parts(Op op) {
    return for_parts<T>(op, std::make_index_sequence<PARTS>());
}

template <class T>
HWY_INLINE Vector<T> zero() {
    return for_parts<T>([](auto) { return hn::Zero(Tag<T>()); });
}
template <class T>
HWY_INLINE Vector<T> broadcast(T value) {
    return for_parts<T>([=](auto) { return hn::Set(Tag<T>(), value); });
}
HWY_INLINE F32x16 broadcast_halves(float low, float high) {  // `low` in the first 8 lanes
    const Tag<float> tag;
    if constexpr (PARTS == 1) return {{hn::ConcatUpperLower(tag, hn::Set(tag, high), hn::Set(tag, low))}};
    else return for_parts<float>([=](auto p) { return hn::Set(Tag<float>(), p < PARTS / 2 ? low : high); });
}
template <class T>
HWY_INLINE Vector<T> load(const T* values) {
    return for_parts<T>([=](auto p) { return hn::LoadU(Tag<T>(), values + p * hn::MaxLanes(Tag<T>())); });
}
template <class T>
HWY_INLINE void store(Vector<T> v, T* values) {
    for (int p = 0; p < PARTS; ++p) hn::StoreU(v.part[p], Tag<T>(), values + p * hn::MaxLanes(Tag<T>()));
}
template <class To, class From>
HWY_INLINE Vector<To> bit_cast(Vector<From> v) {
    return for_parts<To>([&](auto p) { return hn::BitCast(Tag<To>(), v.part[p]); });
}

template <class T>
HWY_INLINE Vector<T> operator+(Vector<T> a, Vector<T> b) {
    return for_parts<T>([&](auto p) { return hn::Add(a.part[p], b.part[p]); });
}
template <class T>
HWY_INLINE Vector<T> operator-(Vector<T> a, Vector<T> b) {
    return for_parts<T>([&](auto p) { return hn::Sub(a.part[p], b.part[p]); });
}
template <class T>
HWY_INLINE Vector<T> operator*(Vector<T> a, Vector<T> b) {
    return for_parts<T>([&](auto p) { return hn::Mul(a.part[p], b.part[p]); });
}
template <class T>
HWY_INLINE Vector<T> operator/(Vector<T> a, Vector<T> b) {
    return for_parts<T>([&](auto p) { return hn::Div(a.part[p], b.part[p]); });
}
template <class T>
HWY_INLINE Vector<T> operator&(Vector<T> a, Vector<T> b) {
    return for_parts<T>([&](auto p) { return hn::And(a.part[p], b.part[p]); });
}
template <class T>
HWY_INLINE Vector<T> operator|(Vector<T> a, Vector<T> b) {
    return for_parts<T>([&](auto p) { return hn::Or(a.part[p], b.part[p]); });
}
template <int Bits, class T>
HWY_INLINE Vector<T> shift_left(Vector<T> v) {
    return for_parts<T>([&](auto p) { return hn::ShiftLeft<Bits>(v.part[p]); });
}
template <int Bits, class T>
HWY_INLINE Vector<T> shift_right(Vector<T> v) {
    return for_parts<T>([&](auto p) { return hn::ShiftRight<Bits>(v.part[p]); });
}
template <class T>
HWY_INLINE Vector<T> min(Vector<T> a, Vector<T> b) {
    return for_parts<T>([&](auto p) { return hn::Min(a.part[p], b.part[p]); });
}
template <class T>
HWY_INLINE Vector<T> max(Vector<T> a, Vector<T> b) {
    return for_parts<T>([&](auto p) { return hn::Max(a.part[p], b.part[p]); });
}

HWY_INLINE F32x16 mul_add(F32x16 a, F32x16 b, F32x16 c) {  // a * b + c
    return for_parts<float>([&](auto p) { return hn::MulAdd(a.part[p], b.part[p], c.part[p]); });
}
HWY_INLINE F32x16 mul_sub(F32x16 a, F32x16 b, F32x16 c) {  // a * b - c
    return for_parts<float>([&](auto p) { return hn::MulSub(a.part[p], b.part[p], c.part[p]); });
}
HWY_INLINE F32x16 round_to_even(F32x16 v) {
    return for_parts<float>([&](auto p) { return hn::Round(v.part[p]); });
}
HWY_INLINE F32x16 magnitude(F32x16 v) {
    return for_parts<float>([&](auto p) { return hn::Abs(v.part[p]); });
}
HWY_INLINE I32x16 to_int(F32x16 v) {  // of integers
    return for_parts<int32_t>([&](auto p) { return hn::NearestInt(v.part[p]); });
}
HWY_INLINE F32x16 to_float(I32x16 v) {
    return for_parts<float>([&](auto p) { return hn::ConvertTo(Tag<float>(), v.part[p]); });
}

// Widen 16 bytes.
HWY_INLINE U32x16 widen(const uint8_t* bytes) {
    return for_parts<uint32_t>([=](auto p) {
        return hn::PromoteTo(Tag<uint32_t>(), hn::LoadU(hn::Rebind<uint8_t, Tag<uint32_t>>(), bytes + p * PART_LANES));
    });
}
HWY_INLINE I32x16 widen(const int8_t* bytes) {
    return for_parts<int32_t>([=](auto p) {
        return hn::PromoteTo(Tag<int32_t>(), hn::LoadU(hn::Rebind<int8_t, Tag<int32_t>>(), bytes + p * PART_LANES));
    });
}
// Store the lowest byte of each lane.
HWY_INLINE void store_bytes(U32x16 v, uint8_t* bytes) {
    const hn::Rebind<uint8_t, Tag<uint32_t>> narrow;
    for (int p = 0; p < PARTS; ++p) hn::StoreU(hn::TruncateTo(narrow, v.part[p]), narrow, bytes + p * PART_LANES);
}

// Add all registers lane by lane.
HWY_INLINE FloatRegister add_parts(F32x16 v) {
    if constexpr (PARTS == 1) return v.part[0];
    else if constexpr (PARTS == 2) return hn::Add(v.part[0], v.part[1]);
    else return hn::Add(hn::Add(v.part[0], v.part[1]), hn::Add(v.part[2], v.part[3]));
}
HWY_INLINE float reduce_add(F32x16 v) {
    return hn::ReduceSum(Tag<float>(), add_parts(v));
}
HWY_INLINE float reduce_max(F32x16 v) {
    auto all = v.part[0];
    for (int p = 1; p < PARTS; ++p) all = hn::Max(all, v.part[p]);
    return hn::ReduceMax(Tag<float>(), all);
}
HWY_INLINE float reduce_min(F32x16 v) {
    auto all = v.part[0];
    for (int p = 1; p < PARTS; ++p) all = hn::Min(all, v.part[p]);
    return hn::ReduceMin(Tag<float>(), all);
}

// Add the 128-bit blocks of a register.
template <class D>
HWY_INLINE hn::Vec<hn::Full128<float>> add_blocks(D d, hn::Vec<D> v) {
    if constexpr (hn::MaxLanes(D()) == 4) {
        return v;
    } else {
        const hn::Half<D> half;
        return add_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
    }
}

// Sum the lanes of each of four registers: sums [4].
HWY_INLINE void sum_lanes(FloatRegister a, FloatRegister b, FloatRegister c, FloatRegister d, float* sums) {
    const Tag<float> tag;
    const Tag<double> pairs;
    const auto ab = hn::BitCast(pairs, hn::Add(hn::InterleaveLower(tag, a, b), hn::InterleaveUpper(tag, a, b)));
    const auto cd = hn::BitCast(pairs, hn::Add(hn::InterleaveLower(tag, c, d), hn::InterleaveUpper(tag, c, d)));
    const auto low = hn::BitCast(tag, hn::InterleaveLower(pairs, ab, cd)),
               high = hn::BitCast(tag, hn::InterleaveUpper(pairs, ab, cd));
    hn::StoreU(add_blocks(tag, hn::Add(low, high)), hn::Full128<float>(), sums);
}
HWY_INLINE void sum_lanes(F32x16 a, F32x16 b, F32x16 c, F32x16 d, float* sums) {
    sum_lanes(add_parts(a), add_parts(b), add_parts(c), add_parts(d), sums);
}
