// Scales of rows, and the reference dequantization of rows in any format.
#pragma once

#include "simd.h"

// Compute the zero point term scale * (zero - center) of `size` groups from `first` on.
inline void row_shifts(const LinearPlan& plan, int64_t first, int64_t size, const float* scale, float* shift) {
    const F32x16 center = broadcast(plan.center);
    const auto store_shifts = [&](const auto* zeros, auto read) SMELT_INLINE {
        for_blocks(size, [&](int64_t i, int64_t lanes) SMELT_INLINE {
            store(load(scale + i) * (read_padded(zeros + first + i, lanes, read) - center), shift + i);
        });
    };
    const auto read_bytes = [](const uint8_t* zeros) SMELT_INLINE { return to_float(bit_cast<int32_t>(widen(zeros))); };
    if (plan.zero_type == BYTE) store_shifts(static_cast<const uint8_t*>(plan.zero), read_bytes);
    else if (plan.zero_type == FLOAT16) store_shifts(static_cast<const uint16_t*>(plan.zero), load_halves);
    else if (plan.zero_type == BFLOAT16) store_shifts(static_cast<const uint16_t*>(plan.zero), load_bfloats);
    else store_shifts(static_cast<const float*>(plan.zero), [](const float* zeros) SMELT_INLINE { return load(zeros); });
}

// Load the scales of `count` rows in float32. With zero points, `shift` = scale * (zero - center) times the sum of the
// inputs of a group is to be subtracted from its product. Both buffers have 16 extra elements.
inline void row_scales(const LinearPlan& plan, int64_t row, int64_t count, float* scale, float* shift) {
    const int64_t first = row * plan.scale_stride, size = plan.scale_stride ? count * plan.groups : 1;
    int64_t i = 0;
    if (plan.scale_type == FLOAT16) {
        const uint16_t* halves = static_cast<const uint16_t*>(plan.scale) + first;
        for_blocks(size, [&](int64_t k, int64_t lanes) SMELT_INLINE {
            store(read_padded(halves + k, lanes, load_halves), scale + k);
        });
        i = size;
    }
    for (; i < size; ++i) scale[i] = load_float(plan.scale, plan.scale_type, first + i, plan.scale_table);
    if (plan.divisor)
        for (i = 0; i < size; ++i) scale[i] /= *plan.divisor;
    if (plan.zero) row_shifts(plan, first, size, scale, shift);
    for (i = size; i < count * plan.groups; ++i) scale[i] = scale[0], shift[i] = shift[0];  // one for all rows
}

inline void unpack_codes(const uint8_t* packed, int bits, int64_t columns, uint8_t* codes) {
    if (bits == 4) {
        for (int64_t k = 0; k + 1 < columns; k += 2) {
            codes[k] = packed[k / 2] & 15;
            codes[k + 1] = packed[k / 2] >> 4;
        }
        if (columns % 2) codes[columns - 1] = packed[columns / 2] & 15;
        return;
    }
    const int64_t bytes = (columns * bits + 7) / 8;
    const unsigned mask = (1u << bits) - 1;
    for (int64_t k = 0; k < columns; ++k) {
        const int64_t bit = k * bits, byte = bit / 8;
        const unsigned word = packed[byte] | (byte + 1 < bytes ? unsigned(packed[byte + 1]) << 8 : 0u);
        codes[k] = uint8_t((word >> (bit % 8)) & mask);
    }
}

// Dequantize a row of any format to out [columns]. `codes` is a buffer for unpacked codes.
inline void dequantize_row(const LinearPlan& plan, int64_t row, uint8_t* codes, float* out) {
    const uint8_t* packed = plan.row_codes(row);
    if (plan.bits == 8) codes = const_cast<uint8_t*>(packed);
    else unpack_codes(packed, plan.bits, plan.columns, codes);
    const int64_t first = plan.scale_stride ? row * plan.scale_stride : 0;
    const uint8_t max_code = uint8_t((1 << plan.bits) - 1);
    for (int64_t g = 0; g < plan.groups; ++g) {
        const int64_t begin = g * plan.group, end = plan.group_end(g);
        float scale = load_float(plan.scale, plan.scale_type, first + g, plan.scale_table);
        if (plan.divisor) scale /= *plan.divisor;
        const float zero = plan.zero ? load_float(plan.zero, plan.zero_type, first + g) : plan.center;
        const float negative_scale =
            plan.negative ? load_float(plan.negative, plan.scale_type, first + g, plan.scale_table) : 0;
        switch (plan.dequant_mode) {
            case UNIFORM:
                for (int64_t k = begin; k < end; ++k) out[k] = (float(codes[k]) - zero) * scale;
                break;
            case TABLE:
                for (int64_t k = begin; k < end; ++k) out[k] = plan.table[codes[k]] * scale;
                break;
            case TWO_SCALES:
                for (int64_t k = begin; k < end; ++k) {
                    const float value = plan.table[codes[k]];
                    out[k] = value * (value > 0 ? scale : negative_scale);
                }
                break;
            case DENORMAL:  // the last two codes are plus and minus half a step
                for (int64_t k = begin; k < end; ++k) {
                    const float steps = float(codes[k]) - zero;
                    out[k] = (codes[k] == max_code ? -0.5f : codes[k] == max_code - 1 ? 0.5f : steps) * scale;
                }
                break;
        }
    }
}

struct ThreadRowBuffers {  // per thread
    Scratch codes, values;
};

inline ThreadRowBuffers& thread_row_buffers() {
    static thread_local ThreadRowBuffers buffers;
    return buffers;
}

// Dequantize rows `first` to `last` to out [last - first, columns] in the dtype of x.
inline void dequantize_rows(const LinearPlan& plan, int64_t first, int64_t last, void* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = first; row < last; ++row) {
        uint8_t* codes = thread_row_buffers().codes.get<uint8_t>(plan.columns);
        float* values = thread_row_buffers().values.get<float>(plan.columns);
        const int64_t offset = (row - first) * plan.columns;
        if (plan.x_type == FLOAT32) {
            dequantize_row(plan, row, codes, static_cast<float*>(out) + offset);
            continue;
        }
        dequantize_row(plan, row, codes, values);
        uint16_t* target = static_cast<uint16_t*>(out) + offset;
        for (int64_t k = 0; k < plan.columns; ++k) target[k] = float_to_bfloat(values[k]);
    }
}

// Reference product, one dequantized row at a time: x [tokens, columns] in float32.
inline void reference_product(const LinearPlan& plan, const float* x, int64_t tokens, void* y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < plan.rows; ++row) {
        uint8_t* codes = thread_row_buffers().codes.get<uint8_t>(plan.columns);
        float* values = thread_row_buffers().values.get<float>(plan.columns);
        dequantize_row(plan, row, codes, values);
        for (int64_t token = 0; token < tokens; ++token) {
            const float* input = x + token * plan.columns;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t k = 0; k < plan.columns; ++k) sum += values[k] * input[k];
            store_result(plan, y, token, row, sum);
        }
    }
}
