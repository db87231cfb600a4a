// GEMV with int8 inputs and per-token scales: integer products and sums are exact, then scaled.
//
// A chunk is 64 codes. 8-bit codes are multiplied in memory order; 4-bit codes are unpacked to bytes, the first 32
// columns in the lower half. `offset` makes all bytes unsigned, as x86 requires for weights; its contribution, a
// multiple of the sum of the inputs, is subtracted beforehand, in integers. ARM requires signed weights: 8-bit codes
// have no offset there, and the others are below 128.
#pragma once

#include <algorithm>

#include "gemv.h"

constexpr int CHUNK = 64;

// Whether the product can be computed in integers.
inline bool has_int8(const LinearPlan& plan) {
    const bool uniform = plan.dequant_mode == UNIFORM && (plan.bits == 4 || plan.bits == 8);
    const bool denormal = plan.dequant_mode == DENORMAL && plan.bits == 4 && (!plan.zero || plan.zero_type == BYTE);
    return plan.inputs != FLOAT_INPUTS && (uniform || denormal) && plan.groups_align(32);
}

inline int column_in_chunk(int bits, int position) {
    if (bits == 8) return position;
    return position / 32 * 32 + 2 * (position % 16) + position % 32 / 16;
}

constexpr bool SIGNED_WEIGHTS = HWY_ARCH_ARM;

inline int code_offset(const LinearPlan& plan) {
    if (plan.bits == 8) return SIGNED_WEIGHTS ? 0 : 128;
    return plan.dequant_mode == DENORMAL ? 32 : 8;
}

// dINT: twice the value plus the offset, one table per zero point. [16 zero points][16 codes]
struct DoubledTables {
    alignas(64) uint8_t bytes[16][16];
    DoubledTables() {
        for (int zero = 0; zero < 16; ++zero)
            for (int code = 0; code < 16; ++code)
                bytes[zero][code] = uint8_t(32 + (code == 14 ? 1 : code == 15 ? -1 : 2 * (code - zero)));
    }
};
inline const DoubledTables& doubled_tables() {
    static const DoubledTables tables;
    return tables;
}

HWY_INLINE U8x64 nibbles(const uint8_t* codes) {  // 32 bytes -> 64 codes in the order of `column_in_chunk`
    const Tag<uint8_t> tag;
    if constexpr (PARTS == 1) {
        const Tag<uint64_t> pairs;
        const Tag<uint16_t> words;
        const hn::Half<Tag<uint8_t>> half;
        alignas(64) static constexpr uint64_t order[8] = {0, 1, 0, 1, 2, 3, 2, 3};
        alignas(64) static constexpr uint16_t shifts[32] = {0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4,
                                                            0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4};
        const auto bytes = hn::BitCast(pairs, hn::ZeroExtendVector(tag, hn::LoadU(half, codes)));
        const auto spread = hn::BitCast(words, hn::TableLookupLanes(bytes, hn::SetTableIndices(pairs, order)));
        const auto shifted = hn::BitCast(tag, hn::Shr(spread, hn::Load(words, shifts)));
        return {{hn::And(shifted, hn::Set(tag, 15))}};
    } else {
        return for_parts<uint8_t>([=](auto p) {
            const hn::Full128<uint8_t> block;
            const auto bytes = hn::LoadU(block, codes + (p >= PARTS / 2 ? 16 : 0));
            const auto low = hn::And(bytes, hn::Set(block, 15)), high = hn::ShiftRight<4>(bytes);
            if constexpr (PARTS == 2) return hn::Combine(tag, high, low);
            else return p % 2 ? high : low;
        });
    }
}

enum CodeLayout { BYTES, NIBBLES, DOUBLED };  // 8-bit codes, 4-bit codes, 4-bit dINT

inline CodeLayout code_layout_of(const LinearPlan& plan) {
    return plan.dequant_mode == DENORMAL ? DOUBLED : plan.bits == 4 ? NIBBLES : BYTES;
}

// Groups of the two halves of a chunk.
struct ChunkGroups {
    int64_t low, high;
};

// Load a chunk of a row as bytes; `zero`: the zero points of the row (dINT).
template <CodeLayout Layout>
HWY_INLINE U8x64 chunk_bytes(
    const LinearPlan& plan, const uint8_t* codes, int64_t k, const uint8_t* zero, const ChunkGroups& groups) {
    if constexpr (Layout == BYTES) {
        const U8x64 bytes = load(codes + k);
        if (!SIGNED_WEIGHTS) return bytes;
        return bytes - broadcast<uint8_t>(128);
    }
    const U8x64 codes_64 = nibbles(codes + k / 2);
    if constexpr (Layout == NIBBLES) return codes_64;
    const auto& tables = doubled_tables().bytes;
    const uint8_t *low = tables[zero ? zero[groups.low] & 15 : int(plan.center)],
                  *high = tables[zero ? zero[groups.high] & 15 : int(plan.center)];
    return for_parts<uint8_t>([&](auto p) {
        const Tag<uint8_t> tag;
        auto table = hn::LoadDup128(tag, p < (PARTS + 1) / 2 ? low : high);
        if constexpr (PARTS == 1) table = hn::ConcatUpperLower(tag, hn::LoadDup128(tag, high), table);
        return hn::TableLookupBytes(table, codes_64.part[p]);
    });
}

using ByteRegister = hn::Vec<Tag<uint8_t>>;
using IntRegister = hn::Vec<Tag<int32_t>>;

// Sums of a chunk, in integers or floats: one register with AVX-512, otherwise one for each half, since more would not
// fit beside those of other rows.
constexpr int SUMS = PARTS > 1 ? 2 : 1, SUM_LANES = SUMS * PART_LANES, PARTS_PER_SUM = PARTS / SUMS;
struct IntSums {
    IntRegister half[SUMS];
};
struct FloatSums {
    FloatRegister half[SUMS];
};

HWY_INLINE IntSums load_sums(const int32_t* values) {
    IntSums sums;
    unroll<SUMS>([&](auto h) SMELT_INLINE { sums.half[h] = hn::Load(Tag<int32_t>(), values + h * PART_LANES); });
    return sums;
}
HWY_INLINE FloatRegister add_halves(FloatSums sums) {
    return SUMS == 1 ? sums.half[0] : hn::Add(sums.half[0], sums.half[SUMS - 1]);
}

// Add the products of weights and inputs to `sum`, four to a lane.
template <CodeLayout Layout>
HWY_INLINE IntRegister dot_bytes(ByteRegister weights, hn::Vec<Tag<int8_t>> x, IntRegister sum) {
    const Tag<int32_t> tag;
    const Tag<int16_t> words;
#ifdef __AVX512VNNI__  // Highway requires other extensions for it, which Cascade Lake does not have
    return IntRegister{_mm512_dpbusd_epi32(sum.raw, weights.raw, x.raw)};
#endif
#ifdef __ARM_FEATURE_DOTPROD  // Highway requires bf16 for it, which Neoverse N1 and Apple M1 do not have
    return IntRegister(vdotq_s32(sum.raw, vreinterpretq_s8_u8(weights.raw), x.raw));
#endif
    if constexpr (SIGNED_WEIGHTS) {
        return hn::SumOfMulQuadAccumulate(tag, hn::BitCast(Tag<int8_t>(), weights), x, sum);
    } else if constexpr (Layout == BYTES) {
        return hn::SumOfMulQuadAccumulate(tag, weights, x, sum);
    } else {  // weights below 64: products do not saturate in 16 bits
        const auto pairs = hn::SatWidenMulPairwiseAdd(words, weights, x);
        return hn::Add(sum, hn::WidenMulPairwiseAdd(tag, pairs, hn::Set(words, 1)));
    }
}

inline const uint8_t* row_zero_points(const LinearPlan& plan, int64_t row) {
    return plan.zero ? static_cast<const uint8_t*>(plan.zero) + (plan.scale_stride ? row * plan.scale_stride : 0)
                     : nullptr;
}

// Scales and shifts as in `row_scales`; for dINT, bytes include zero points and are doubled.
inline void int8_scales(const LinearPlan& plan, int64_t row, int64_t count, float* scale, float* shift) {
    row_scales(plan, row, count, scale, shift);
    if (plan.dequant_mode != DENORMAL) return;
    for (int64_t i = 0; i < count * plan.groups; ++i) scale[i] *= 0.5f, shift[i] = 0.0f;
}

// Quantize the inputs of a token as `numerics.integer` does: codes [padded], 0 beyond the last column.
inline float quantize_inputs(const LinearPlan& plan, const void* x, int64_t token, int8_t* codes, int64_t padded) {
    float scale = plan.inputs == FIXED_SCALE ? *plan.x_scale : 0.0f;
    if (plan.inputs == PER_TOKEN_SCALE) {
        F32x16 amax = zero<float>(), nans = zero<float>();
        for (int64_t k = 0; k < plan.columns; k += LANES) {
            const F32x16 x_size = magnitude(load_input_columns(plan, x, token, k));
            for (int p = 0; p < PARTS; ++p) {
                const auto part = x_size.part[p];
                nans.part[p] = hn::Add(nans.part[p], hn::IfThenElseZero(hn::IsNaN(part), part));
                const auto finite = hn::Lt(part, hn::Inf(Tag<float>()));
                amax.part[p] = hn::Max(amax.part[p], hn::IfThenElseZero(finite, part));
            }
        }
        scale = reduce_max(amax);
        scale = scale == 0 ? 1.0f : std::fmin(std::fmax(scale * plan.clip_ratio / plan.amax_code, 0x1p-126f), 3.4e38f);
        if (std::isnan(reduce_add(nans))) scale = NAN;
    }
    const F32x16 step = broadcast(scale), low = broadcast(plan.qmin), high = broadcast(plan.qmax);
    for (int64_t k = 0; k < padded; k += LANES) {
        F32x16 steps = round_to_even(load_input_columns(plan, x, token, k) / step);
        steps = max(min(steps, high), low);  // the code of NaN does not matter: it is carried by the scale
        store_bytes(bit_cast<uint32_t>(to_int(steps)), reinterpret_cast<uint8_t*>(codes + k));
    }
    return scale;
}

// Sums of products are exact in a segment of a row: a group, or a chunk of two groups.
struct Segments {
    const LinearPlan& plan;
    bool halves;  // each half of a chunk has its own scale
    int64_t padded, columns, count;

    explicit Segments(const LinearPlan& p) : plan(p), halves(p.groups > 1 && p.group % CHUNK) {
        padded = round_up(p.columns, CHUNK);
        columns = halves ? CHUNK : p.groups > 1 ? p.group : padded;
        count = (padded + columns - 1) / columns;
    }
    int64_t end(int64_t segment) const { return std::min((segment + 1) * columns, padded); }

    // Groups of a segment, given those of the segment before.
    ChunkGroups next_groups(int64_t segment, ChunkGroups groups) const {
        if (!halves) return {segment, segment};
        if (plan.group == 32) return {2 * segment, std::min(2 * segment + 1, plan.groups - 1)};  // without branches
        const int64_t k = segment * CHUNK;
        while ((groups.low + 1) * plan.group <= k) ++groups.low;
        const bool splits = groups.low + 1 < plan.groups && (groups.low + 1) * plan.group <= k + 32;
        return {groups.low, groups.low + splits};
    }

    // Scales of the lanes of one register of sums in a segment of a row.
    HWY_INLINE FloatRegister steps(const float* scale, ChunkGroups groups, int half) const {
        if constexpr (SUMS == 2) return hn::Set(Tag<float>(), scale[half ? groups.high : groups.low]);
        return (halves ? broadcast_halves(scale[groups.low], scale[groups.high]) : broadcast(scale[groups.low])).part[0];
    }
};

struct Int8Inputs {
    int8_t* codes;         // [tokens / tile, padded / 64, tile, 64] in chunk order
    int32_t* offset_sums;  // [tokens, segments, SUM_LANES]: -offset * sum of codes in each lane, where sums start
    float* sums;           // [tokens, groups]
    float* scale;          // [tokens]
    int64_t padded, padded_groups;
    int tile;  // tokens whose columns alternate

    int8_t* at(int64_t token, int64_t k) const {
        return codes + (token / tile * padded + k) * tile + token % tile * CHUNK;
    }
};

inline Int8Inputs int8_inputs(const LinearPlan& plan, const void* x, int64_t tokens, int tile = 1, int threads = 1) {
    static thread_local Scratch column_codes, codes, offset_sums, sums, scale;
    const Segments segments(plan);
    const int64_t padded = segments.padded, groups = round_up(plan.groups, LANES);
    Int8Inputs in{
        codes.get<int8_t>(round_up(tokens, tile) * padded),
        offset_sums.get<int32_t>((tokens * segments.count + 1) * SUM_LANES),
        sums.get<float>(tokens * groups),
        scale.get<float>(tokens),
        padded,
        groups,
        tile};
    int8_t* all_codes = column_codes.get<int8_t>(tokens * padded);
    alignas(64) uint8_t order[CHUNK];
    for (int p = 0; p < CHUNK; ++p) order[p] = uint8_t(column_in_chunk(plan.bits, p));
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t token = 0; token < tokens; ++token) {
        int8_t* in_order = all_codes + token * padded;
        in.scale[token] = quantize_inputs(plan, x, token, in_order, padded);
        for (int64_t segment = 0; segment < segments.count; ++segment) {
            IntSums sums_of_four;
            unroll<SUMS>([&](auto h) SMELT_INLINE { sums_of_four.half[h] = hn::Zero(Tag<int32_t>()); });
            for (int64_t k = segment * segments.columns; k < segments.end(segment); k += CHUNK) {
                alignas(64) int8_t chunk[CHUNK];
                for (int p = 0; p < CHUNK; ++p) chunk[p] = in_order[k + order[p]];
                const I8x64 ordered = load(chunk);
                store(ordered, in.at(token, k));
                unroll<PARTS>([&](auto p) SMELT_INLINE {
                    auto& sum = sums_of_four.half[p / PARTS_PER_SUM];
                    sum = dot_bytes<NIBBLES>(hn::Set(Tag<uint8_t>(), 1), ordered.part[p], sum);
                });
            }
            const auto offset = hn::Set(Tag<int32_t>(), -code_offset(plan));
            int32_t* starts = in.offset_sums + (token * segments.count + segment) * SUM_LANES;
            unroll<SUMS>([&](auto h) SMELT_INLINE {
                hn::Store(hn::Mul(sums_of_four.half[h], offset), Tag<int32_t>(), starts + h * PART_LANES);
            });
        }
        for (int64_t g = 0; g < groups; ++g) {
            int32_t sum = 0;
            for (int64_t k = g * plan.group; g < plan.groups && k < plan.group_end(g); ++k) sum += in_order[k];
            in.sums[token * groups + g] = float(sum);
        }
    }
    return in;
}

// Multiply four rows with the only token: sums [4].
template <CodeLayout Layout>
inline void int8_dot(
    const LinearPlan& plan, const Segments& segments, int64_t row, const uint8_t* const* codes, const float* scale, const float* shift,
    const Int8Inputs& in, float* sums) {
    const Tag<float> floats;
    const uint8_t* zeros[4];
    FloatSums total[4];
    unroll<4>([&](auto r) SMELT_INLINE {
        zeros[r] = row_zero_points(plan, std::min(row + r, plan.rows - 1));
        unroll<SUMS>([&](auto h) SMELT_INLINE { total[r].half[h] = hn::Zero(floats); });
    });
    constexpr int BITS = Layout == BYTES ? 8 : 4;
    ChunkGroups groups = segments.next_groups(0, {});
    IntSums part[4];
    unroll<4>([&](auto r) SMELT_INLINE { part[r] = load_sums(in.offset_sums); });
    for (int64_t k = 0, segment = 0, end = segments.end(0); k < segments.padded; k += CHUNK) {
        const I8x64 x = load(in.codes + k);
        unroll<4>([&](auto r) SMELT_INLINE {
            __builtin_prefetch(codes[r] + k * BITS / 8 + PREFETCH_BYTES, 0, 3);
            const U8x64 weights = chunk_bytes<Layout>(plan, codes[r], k, zeros[r], groups);
            unroll<PARTS>([&](auto p) SMELT_INLINE {
                auto& sum = part[r].half[p / PARTS_PER_SUM];
                sum = dot_bytes<Layout>(weights.part[p], x.part[p], sum);
            });
        });
        if (k + CHUNK < end) continue;
        const IntSums start = load_sums(in.offset_sums + (segment + 1) * SUM_LANES);  // room beyond the last segment
        unroll<4>([&](auto r) SMELT_INLINE {
            unroll<SUMS>([&](auto h) SMELT_INLINE {
                const auto steps = segments.steps(scale + r * plan.groups, groups, h);
                total[r].half[h] = hn::MulAdd(hn::ConvertTo(floats, part[r].half[h]), steps, total[r].half[h]);
            });
            part[r] = start;
        });
        end = segments.end(++segment), groups = segments.next_groups(segment, groups);
    }
    FloatRegister lanes[4];
    unroll<4>([&](auto r) SMELT_INLINE {
        lanes[r] = without_zero_points(plan, add_halves(total[r]), shift + r * plan.groups, in.sums);
    });
    sum_lanes(lanes[0], lanes[1], lanes[2], lanes[3], sums);
}

// Multiply with one token.
template <CodeLayout Layout>
inline void int8_product(const LinearPlan& plan, const void* x, void* y, int threads) {
    const Int8Inputs in = int8_inputs(plan, x, 1);
    const Segments segments(plan);
#pragma omp parallel num_threads(threads)
    {
        const RowBuffers buffers = row_buffers(plan);
#pragma omp for schedule(dynamic, dynamic_chunk(plan.rows, BLOCK))
        for (int64_t row = 0; row < plan.rows; row += BLOCK) {
            const uint8_t* codes[BLOCK];
            row_pointers(plan, row, buffers, codes);
            int8_scales(plan, row, std::min<int64_t>(plan.rows - row, BLOCK), buffers.scale, buffers.shift);
            alignas(64) float sums[BLOCK];
            for (int r = 0; r < BLOCK; r += 4)
                int8_dot<Layout>(
                    plan, segments, row + r, codes + r, buffers.scale + r * plan.groups, buffers.shift + r * plan.groups, in,
                    sums + r);
            store_block(plan, y, 0, row, load(sums) * broadcast(in.scale[0]));
        }
    }
}
