// Description of a product: the packed matrix in memory, and how its codes and scales are read. Same layout as in
// plan.py; owns nothing.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <omp.h>

enum DequantMode : int32_t { UNIFORM, TABLE, TWO_SCALES, DENORMAL };  // how codes are dequantized
enum DType : int32_t { NONE, FLOAT32, FLOAT16, BFLOAT16, BYTE };
enum Inputs : int32_t { FLOAT_INPUTS, PER_TOKEN_SCALE, FIXED_SCALE };

struct LinearPlan {
    int64_t rows, columns;
    int64_t group, groups;  // values per group; groups per row
    int64_t scale_stride;   // scales per row; 0 if all rows share one
    int32_t bits;
    DequantMode dequant_mode;
    DType scale_type, zero_type, bias_type, x_type;
    Inputs inputs;
    float center;                 // zero point if none is stored; otherwise subtracted from codes first
    float amax_code, qmin, qmax;  // of input codes: scale = amax / amax_code
    float clip_ratio;
    const uint8_t* codes;                 // [rows, row_bytes]
    const void *scale, *zero, *negative;  // [rows, groups]
    const float* divisor;                 // scalar that divides all scales
    const float* scale_table;             // values of one-byte scales, 256
    const float* table;                   // values of codes, 256
    const void* bias;                     // [rows]
    const float* x_scale;                 // static scale of the inputs

    int64_t row_bytes() const { return (columns * bits + 7) / 8; }
    const uint8_t* row_codes(int64_t row) const { return codes + row * row_bytes(); }
    int64_t group_end(int64_t g) const { return (g + 1) * group < columns ? (g + 1) * group : columns; }
    bool groups_align(int64_t step) const { return groups == 1 || group % step == 0; }
};

inline int64_t round_up(int64_t value, int64_t step) {
    return (value + step - 1) / step * step;
}

// Thread-local buffer that is kept between calls, so that calls do not allocate.
class Scratch {
  public:
    ~Scratch() { std::free(data_); }
    template <class T>
    T* get(int64_t count) {
        const size_t bytes = round_up(count * int64_t(sizeof(T)) + 64, 64);
        if (bytes > size_) {
            std::free(data_);
            data_ = std::aligned_alloc(64, bytes);
            if (!data_) throw std::bad_alloc();
            size_ = bytes;
        }
        return static_cast<T*>(data_);
    }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

// Rows that this thread computes, in whole blocks, inside a parallel region.
struct RowRange {
    int64_t first, last;
};

inline RowRange static_row_range(int64_t rows, int64_t block) {
    const int64_t blocks = (rows + block - 1) / block, thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t last = blocks * (thread + 1) / threads * block;
    return {blocks * thread / threads * block, last < rows ? last : rows};
}

// Chunk size of dynamic scheduling, in blocks of rows, inside a parallel region: about an eighth of a thread's share,
// so that a delayed thread gets fewer.
inline int dynamic_chunk(int64_t rows, int64_t block) {
    const int64_t blocks = (rows + block - 1) / block, chunk = blocks / (8 * omp_get_num_threads());
    return int(chunk < 1 ? 1 : chunk);
}

inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
    uint32_t bits;
    if (magnitude >= 0x7c00) bits = sign | 0x7f800000 | ((magnitude & 0x3ff) << 13);
    else if (magnitude >= 0x400) bits = sign | ((magnitude + 0x1c000) << 13);
    else {
        const float small = float(magnitude) * 0x1p-24f;
        return sign ? -small : small;
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float bfloat_to_float(uint16_t b) {
    const uint32_t bits = uint32_t(b) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint16_t float_to_bfloat(float value) {  // round to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value)) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float load_float(const void* data, DType type, int64_t index, const float* table = nullptr) {
    switch (type) {
        case FLOAT32: return static_cast<const float*>(data)[index];
        case FLOAT16: return half_to_float(static_cast<const uint16_t*>(data)[index]);
        case BFLOAT16: return bfloat_to_float(static_cast<const uint16_t*>(data)[index]);
        case BYTE: {
            const uint8_t byte = static_cast<const uint8_t*>(data)[index];
            return table ? table[byte] : float(byte);
        }
        default: return 0.0f;
    }
}

inline void store_result(const LinearPlan& plan, void* y, int64_t token, int64_t row, float value) {
    if (plan.bias) value += load_float(plan.bias, plan.bias_type, row);
    const int64_t index = token * plan.rows + row;
    if (plan.x_type == FLOAT32) static_cast<float*>(y)[index] = value;
    else static_cast<uint16_t*>(y)[index] = float_to_bfloat(value);
}
