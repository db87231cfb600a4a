// Load and dequantize 16 codes of a row at once.
//
// Any order works as long as inputs are laid out the same way. 4-bit codes come in the order 0 8 1 9 ..., which takes
// one shift; all others in column order.
#pragma once

#include "dequantize.h"

// How codes become values. A table lookup takes one instruction with AVX-512 and several on other CPUs, where
// conversion is faster, for codes that are integers.
enum Decoding { CONVERT, LOOKUP };

template <int Bits, Decoding How>
struct Decoder {
    F32x16 table;   // LOOKUP: values of codes of up to 4 bits, repeated to 16, since the bits above belong to neighbors
    U32x16 shifts;  // that move each code to the lowest bits (LOOKUP) or to the highest (CONVERT)

    explicit Decoder(const LinearPlan& plan) {
        alignas(64) float values[LANES] = {};
        alignas(64) uint32_t right[LANES], left[LANES];
        for (int index = 0; index < LANES; ++index) {
            const int code = index & ((1 << Bits) - 1);
            if (How == LOOKUP) values[index] = plan.dequant_mode == TABLE ? plan.table[code] : code - plan.center;
            if (plan.dequant_mode == DENORMAL && code >= (1 << Bits) - 2) values[index] = code % 2 ? -0.5f : 0.5f;
            right[index] = Bits == 4 ? 4 * (index / 2) : Bits * (Bits == 3 ? index % 8 : index);
            left[index] = 32 - Bits - right[index];
        }
        table = load(values);
        shifts = load(How == LOOKUP ? right : left);
    }
};

template <Decoding How, class Run>
inline void with_narrow_decoder(const LinearPlan& plan, Run run) {
    switch (plan.bits) {
        case 2: return run(Decoder<2, How>(plan));
        case 3: return run(Decoder<3, How>(plan));
        default: return run(Decoder<4, How>(plan));
    }
}

// Call `run` with the decoder for the codes of a matrix.
template <class Run>
inline void with_decoder(const LinearPlan& plan, Run run) {
    if (plan.bits == 8) return run(Decoder<8, CONVERT>(plan));
    if constexpr (!SMELT_AVX512)
        if (plan.dequant_mode == UNIFORM) return with_narrow_decoder<CONVERT>(plan, run);
    with_narrow_decoder<LOOKUP>(plan, run);
}

template <class T>
inline T unaligned(const uint8_t* bytes) {
    T value;
    std::memcpy(&value, bytes, sizeof(T));
    return value;
}

// Look up values by the lowest four bits of each index.
HWY_INLINE F32x16 lookup(F32x16 table, U32x16 indices) {
    return for_parts<float>([&](auto p) {
        const Tag<float> tag;
        const auto index = indices.part[p];
        if constexpr (PARTS == 1) {
            return hn::TableLookupLanes(table.part[0], hn::IndicesFromVec(tag, index));
        } else if constexpr (PARTS == 2) {
            return hn::TwoTablesLookupLanes(tag, table.part[0], table.part[1], hn::IndicesFromVec(tag, index));
        } else {
            const auto within = hn::IndicesFromVec(tag, hn::And(index, hn::Set(Tag<uint32_t>(), 7)));
            const auto low = hn::TwoTablesLookupLanes(tag, table.part[0], table.part[1], within),
                       high = hn::TwoTablesLookupLanes(tag, table.part[2], table.part[3], within);
            const auto is_high = hn::TestBit(index, hn::Set(Tag<uint32_t>(), 8));
            return hn::IfThenElse(hn::RebindMask(tag, is_high), high, low);
        }
    });
}

// The bits of 16 codes in every lane; lane i needs those of code i. `flip` is applied to each.
template <int Bits>
HWY_INLINE U32x16 code_words(const uint8_t* codes, uint64_t flip) {
    return for_parts<uint32_t>([=](auto p) {
        const Tag<uint32_t> tag;
        if constexpr (Bits == 4) {
            return hn::BitCast(tag, hn::Set(Tag<uint64_t>(), unaligned<uint64_t>(codes) ^ flip));
        } else if constexpr (Bits == 2) {
            return hn::Set(tag, unaligned<uint32_t>(codes) ^ uint32_t(flip));
        } else {
            const auto low = hn::Set(tag, unaligned<uint32_t>(codes) ^ uint32_t(flip)),
                       high = hn::Set(tag, unaligned<uint32_t>(codes + 3) ^ uint32_t(flip));
            if constexpr (PARTS == 1) return hn::IfThenElse(hn::FirstN(tag, 8), low, high);
            else return p < PARTS / 2 ? low : high;
        }
    });
}

// Values of 16 codes that start at a byte boundary. Reads at most 16 bytes, possibly beyond the codes.
template <int Bits, Decoding How>
HWY_INLINE F32x16 lane_values(const uint8_t* codes, const Decoder<Bits, How>& decoder) {
    if constexpr (Bits == 8) {
        return to_float(bit_cast<int32_t>(widen(codes)) - broadcast<int32_t>(128));
    } else if constexpr (How == LOOKUP) {
        const U32x16 words = code_words<Bits>(codes, 0);
        return lookup(decoder.table, for_parts<uint32_t>([&](auto p) {
                          return hn::Shr(words.part[p], decoder.shifts.part[p]);
                      }));
    } else {  // subtract the center by flipping the sign bit of each code, then extend the sign
        constexpr uint64_t SIGNS = Bits == 4 ? 0x8888888888888888 : Bits == 3 ? 044444444 : 0xaaaaaaaa;
        const U32x16 words = code_words<Bits>(codes, SIGNS);
        return to_float(shift_right<32 - Bits>(bit_cast<int32_t>(for_parts<uint32_t>([&](auto p) {
            return hn::Shl(words.part[p], decoder.shifts.part[p]);
        }))));
    }
}

// Whether columns can be padded to a multiple of `step`: inputs there are zero, so that no code may be NaN.
inline bool can_pad(const LinearPlan& plan, int64_t step) {
    if (plan.columns % step == 0 || plan.dequant_mode != TABLE) return true;
    for (int code = 0; code < 1 << plan.bits; ++code)
        if (std::isnan(plan.table[code])) return false;
    return true;
}

// Supported formats: up to 4 bits by a table, 8 bits as integers minus 128.
inline bool has_lanes(const LinearPlan& plan) {
    const bool tabled =
        plan.dequant_mode == UNIFORM || plan.dequant_mode == TABLE || (plan.dequant_mode == DENORMAL && !plan.zero);
    const bool narrow = plan.bits >= 2 && plan.bits <= 4 && tabled;
    const bool wide = plan.bits == 8 && plan.dequant_mode == UNIFORM;
    return (narrow || wide) && plan.groups_align(16) && can_pad(plan, 16);
}

// Codes of a row, readable 64 bytes beyond the end: the last rows of a matrix are copied to a padded buffer.
inline const uint8_t* padded_row_codes(const LinearPlan& plan, int64_t row, uint8_t* padded_row) {
    const int64_t bytes = plan.row_bytes();
    if ((plan.rows - row - 1) * bytes >= 64) return plan.row_codes(row);
    std::memcpy(padded_row, plan.row_codes(row), bytes);
    std::memset(padded_row + bytes, 0, 64);
    return padded_row;
}

// Prefetch codes of later rows, which are contiguous, to overlap loads with computation. Measured: shorter distances
// are too late.
constexpr int64_t PREFETCH_BYTES = 8192;

HWY_INLINE void prefetch_codes(const uint8_t* codes, int64_t begin, int64_t end) {
    for (int64_t offset = begin; offset < end; offset += 64) __builtin_prefetch(codes + offset + PREFETCH_BYTES, 0, 3);
}

// Load columns k to k + 16 of a token in float32, 0 beyond the last.
inline F32x16 load_input_columns(const LinearPlan& plan, const void* x, int64_t token, int64_t k) {
    return load_floats(x, plan.x_type, token * plan.columns + k, plan.columns - k);
}

// Move inputs from column order to the order of the lanes.
template <int Bits>
HWY_INLINE F32x16 to_lane_order(F32x16 v) {
    const Tag<float> tag;
    if constexpr (Bits != 4) {
        return v;
    } else if constexpr (PARTS == 1) {
        alignas(64) static constexpr int32_t order[LANES] = {0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15};
        return {{hn::TableLookupLanes(v.part[0], hn::SetTableIndices(tag, order))}};
    } else {
        return for_parts<float>([&](auto p) {
            const auto low = v.part[p / 2], high = v.part[p / 2 + PARTS / 2];
            return p % 2 ? hn::InterleaveWholeUpper(tag, low, high) : hn::InterleaveWholeLower(tag, low, high);
        });
    }
}

template <int Bits>
HWY_INLINE F32x16 to_column_order(F32x16 v) {  // the inverse
    const Tag<float> tag;
    if constexpr (Bits != 4) {
        return v;
    } else if constexpr (PARTS == 1) {
        alignas(64) static constexpr int32_t order[LANES] = {0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15};
        return {{hn::TableLookupLanes(v.part[0], hn::SetTableIndices(tag, order))}};
    } else {
        return for_parts<float>([&](auto p) {
            constexpr int half = PARTS / 2, pair = 2 * (p % half);
            const auto low = v.part[pair], high = v.part[pair + 1];
            return p < half ? hn::ConcatEven(tag, high, low) : hn::ConcatOdd(tag, high, low);
        });
    }
}
