// The inner loop of GPTQ: quantize columns in order and propagate each error to the columns that follow.
//
// Rows are independent, so that 16 of them form a column-major tile that stays in the L1 cache. Products and sums are
// rounded separately, as in the plain loop; this file must be compiled with -ffp-contract=off, or fused multiply-adds
// would change the last bits.
#include "plan.h"

struct Matrix {  // any float32 view; strides in values
    const float* data;
    int64_t row_stride, column_stride;
};

struct GptqBlock {               // same layout as in gptq_rounding.py; owns nothing
    Matrix weight, scale, zero;  // [rows, columns]; zero.data null: `default_zero` everywhere
    const float* hinv;           // [columns, columns], upper
    int64_t hinv_stride;         // between rows
    uint8_t* codes;              // [rows, columns]
    float* errors;               // [rows, columns], divided by the diagonal
    int64_t rows, columns;
    float qmax, default_zero;
    int32_t fractional_zero;  // zero points are fractional, and added before rounding
};

namespace {

constexpr int LANES = 16;

struct TileBuffers {  // per thread: [columns, LANES] each
    Scratch values, scale, zero, codes;
};

TileBuffers& tile_buffers() {
    static thread_local TileBuffers buffers;
    return buffers;
}

// Load the columns of up to 16 rows; lanes beyond the last row repeat it.
void read_tile(const Matrix& matrix, int64_t row, int64_t rows, int64_t columns, float* tile) {
    if (rows == LANES && matrix.row_stride == 1) {
        for (int64_t k = 0; k < columns; ++k)
            std::memcpy(tile + k * LANES, matrix.data + row + k * matrix.column_stride, LANES * sizeof(float));
        return;
    }
    for (int lane = 0; lane < LANES; ++lane) {
        const float* hinv_row = matrix.data + (row + (lane < rows ? lane : rows - 1)) * matrix.row_stride;
        for (int64_t k = 0; k < columns; ++k) tile[k * LANES + lane] = hinv_row[k * matrix.column_stride];
    }
}

template <class T>
void write_tile(const float* tile, int64_t row, int64_t rows, int64_t columns, T* out) {
    for (int64_t lane = 0; lane < rows; ++lane)
        for (int64_t k = 0; k < columns; ++k) out[(row + lane) * columns + k] = T(tile[k * LANES + lane]);
}

// Quantize one column and replace its values by errors divided by the diagonal. NaN gets code 0.
template <bool FractionalZero>
void round_column(float* values, const float* scale, const float* zero, float qmax, float diagonal, float* codes) {
#pragma omp simd
    for (int lane = 0; lane < LANES; ++lane) {
        float code = values[lane] / scale[lane];
        code = FractionalZero ? std::rint(code + zero[lane]) : std::rint(code) + zero[lane];
        code = code > 0.0f ? code : 0.0f;
        codes[lane] = code = code < qmax ? code : qmax;
        values[lane] = (values[lane] - (code - zero[lane]) * scale[lane]) / diagonal;
    }
}

// Subtract the error times the factor from the columns that follow.
void propagate_error(
    const float* __restrict error, const float* __restrict hinv_row, int64_t columns, float* __restrict values) {
    for (int64_t k = 0; k < columns; ++k) {
#pragma omp simd
        for (int lane = 0; lane < LANES; ++lane) values[k * LANES + lane] -= error[lane] * hinv_row[k];
    }
}

template <bool FractionalZero>
void round_tile(const GptqBlock& task, float* values, const float* scale, const float* zero, float* codes) {
    for (int64_t column = 0; column < task.columns; ++column) {
        const float* hinv_row = task.hinv + column * task.hinv_stride + column;  // from the diagonal on
        const int64_t offset = column * LANES;
        round_column<FractionalZero>(
            values + offset, scale + offset, zero + offset, task.qmax, *hinv_row, codes + offset);
        propagate_error(values + offset, hinv_row + 1, task.columns - column - 1, values + offset + LANES);
    }
}

void round_rows(const GptqBlock& task, int64_t first, int64_t last) {
    const int64_t size = task.columns * LANES;
    float *values = tile_buffers().values.get<float>(size), *scale = tile_buffers().scale.get<float>(size),
          *zero = tile_buffers().zero.get<float>(size), *codes = tile_buffers().codes.get<float>(size);
    if (!task.zero.data)
        for (int64_t i = 0; i < size; ++i) zero[i] = task.default_zero;
    for (int64_t row = first; row < last; row += LANES) {
        const int64_t rows = last - row < LANES ? last - row : LANES;
        read_tile(task.weight, row, rows, task.columns, values);
        read_tile(task.scale, row, rows, task.columns, scale);
        if (task.zero.data) read_tile(task.zero, row, rows, task.columns, zero);
        if (task.fractional_zero) round_tile<true>(task, values, scale, zero, codes);
        else round_tile<false>(task, values, scale, zero, codes);
        write_tile(codes, row, rows, task.columns, task.codes);
        write_tile(values, row, rows, task.columns, task.errors);
    }
}

}  // namespace

extern "C" void smelt_gptq_block(const GptqBlock* task, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const RowRange range = static_row_range(task->rows, LANES);
        round_rows(*task, range.first, range.last);
    }
}
