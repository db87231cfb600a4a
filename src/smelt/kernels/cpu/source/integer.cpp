// Kernels of integer-only networks: GEMM, convolution, batched matmul, attention, softmax, norms and elementwise steps on integers.
// Bit-identical to the reference in runtime/integer/ops.py. Structures own nothing; same layout as in cpu/integer.py.
#include "integer_conv.h"
#include "integer_gemm.h"
#include "integer_rows.h"

namespace {

constexpr int64_t NORM_ROWS = 4, MAP_CHANNELS = 1024;  // rows and channels whose values stay in the L1 cache

int64_t size_of(IntType type) {
    return type == INT32 ? 4 : type == INT16 ? 2 : 1;
}

void load_tile(const void* x, IntType type, int64_t stride, const Tile& tile) {
    for (int64_t t = 0; t < tile.rows; ++t)
        for_blocks(tile.channels, [&](int64_t c, int64_t lanes) {
            const int64_t index = (tile.row + t) * stride + tile.channel + c;
            store(load_ints(x, type, index, lanes), tile.values + t * tile.stride + c);
        });
}

Output at_row(Output out, int64_t element) {
    out.data = static_cast<char*>(out.data) + element * size_of(out.type);
    return out;
}

struct Matrices {  // [outer, inner, rows, columns]; columns are contiguous
    const int8_t* data;
    int64_t outer, inner, row;  // strides

    const int8_t* at(int64_t index, int64_t inner_count) const {
        return data + index / inner_count * outer + index % inner_count * inner;
    }
};

// Pack a matrix [columns, channels], or [channels, columns] if it is transposed, in this thread's memory.
PackedPanels pack_matrix(
    const int8_t* b, int64_t row_stride, bool transposed, int64_t channels, int64_t columns, Scratch& bytes,
    Scratch& offsets) {
    const int64_t padded = round_up(columns, DEPTH), panels = round_up(channels, PANEL);
    int8_t* packed = bytes.get<int8_t>(panels * padded);
    int32_t* offset = offsets.get<int32_t>(panels);
    for (int64_t c = 0; c < channels; c += PANEL) {
        const int64_t count = std::min<int64_t>(channels - c, PANEL);
        if (transposed) pack_panel(b + c * row_stride, row_stride, count, columns, packed + c * padded, offset + c);
        else pack_panel_transposed(b + c, row_stride, count, columns, packed + c * padded, offset + c);
    }
    return {packed, offset, channels, columns};
}

}  // namespace

struct IntegerLinear {
    const int8_t* x;  // [rows, x_stride], int8 or uint8
    int64_t x_stride, rows;
    PackedPanels weight;
    const int32_t* bias;
    Output out;
    int32_t is_unsigned;
};

struct IntegerMatmul {
    Matrices a, b;
    int64_t batch, inner, rows, channels, columns;
    int64_t out_outer, out_inner;  // strides; that of rows is in `out`
    Output out;
    int32_t transposed;  // b is [channels, columns]
};

struct IntegerAttention {
    Matrices query, key, value;
    int64_t batch, inner, queries, keys, head_dim;
    int64_t out_outer, out_inner;
    Steps score_steps;
    Softmax softmax;
    const uint8_t* mask;  // [mask_rows, keys padded to 16]
    int64_t rows_per_mask;  // rows of scores in order of [outer, inner, queries]
    Output out;
};

struct IntegerSoftmax {
    const void* x;  // [rows, length]
    IntType type;
    int64_t rows, length;
    Steps steps;  // before
    Softmax softmax;
    const uint8_t* mask;
    int64_t rows_per_mask;
    Output out;
};

struct IntegerNorm {
    const void* x;  // [rows, length]
    IntType type;
    int64_t rows;
    Steps steps;  // before
    Norm norm;
    int64_t outputs;  // 1 or 2
    Output out[2];
};

struct IntegerMap {
    const void* x;  // [rows, channels]
    IntType type;
    int64_t rows, channels;
    Output out;
};

// Bytes of a packed matrix [channels, columns]; its offsets take 4 bytes per padded channel.
extern "C" int64_t smelt_integer_packed_size(int64_t channels, int64_t columns) {
    return round_up(channels, PANEL) * round_up(columns, DEPTH);
}

extern "C" void smelt_integer_pack(
    const int8_t* weight, int64_t channels, int64_t columns, int is_unsigned, int8_t* bytes, int32_t* offset) {
    const int64_t padded = round_up(columns, DEPTH);
    const int factor = activation_offset(is_unsigned);
    for (int64_t c = 0; c < channels; c += PANEL) {
        const int64_t count = std::min<int64_t>(channels - c, PANEL);
        pack_panel(weight + c * columns, columns, count, columns, bytes + c * padded, offset + c, factor);
    }
}

// Bytes of the packed weight of a depthwise convolution.
extern "C" int64_t smelt_integer_depthwise_size(int64_t channels, int64_t kernel_height, int64_t kernel_width) {
    return round_up(channels, PANEL) / PANEL * depthwise_panel_size(kernel_height, kernel_width);
}

extern "C" void smelt_integer_pack_depthwise(
    const int8_t* weight, int64_t channels, int64_t kernel_height, int64_t kernel_width, int is_unsigned, int8_t* bytes,
    int32_t* offset) {
    pack_depthwise(weight, channels, kernel_height, kernel_width, is_unsigned, bytes, offset);
}

extern "C" int64_t smelt_integer_sizes(int index) {
    const int64_t sizes[] = {sizeof(Step), sizeof(IntegerLinear), sizeof(IntegerMatmul), sizeof(IntegerAttention),
                             sizeof(IntegerSoftmax), sizeof(IntegerNorm), sizeof(IntegerMap), sizeof(IntegerConvolution)};
    return index < int(sizeof(sizes) / sizeof(*sizes)) ? sizes[index] : 0;
}

extern "C" void smelt_integer_linear(const IntegerLinear* task, int threads) {
    const PackedPanels& weight = task->weight;
    const int64_t blocks = (task->rows + ROW_BLOCK - 1) / ROW_BLOCK, panels = (weight.channels + PANEL - 1) / PANEL;
    // A block of tokens is split by channels where there are too few blocks for the threads.
    const int64_t wanted = (4 * threads + blocks - 1) / std::max<int64_t>(blocks, 1);
    const int64_t splits = std::max<int64_t>(std::min(wanted, panels / 4), 1);
    const int8_t flip = int8_t(activation_flip(task->is_unsigned));
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t index = 0; index < blocks * splits; ++index) {
        static thread_local Scratch scratch;
        const int64_t row = index / splits * ROW_BLOCK, rows = std::min(task->rows - row, ROW_BLOCK), split = index % splits;
        int8_t* tiles = scratch.get<int8_t>(round_up(rows, TILE) * weight.padded());
        pack_tokens(task->x + row * task->x_stride, task->x_stride, rows, weight.columns, tiles, flip);
        const int64_t first = panels * split / splits * PANEL;
        const int64_t last = std::min(panels * (split + 1) / splits * PANEL, weight.channels);
        multiply_panels(weight, tiles, rows, task->bias, first, last, [&](int32_t* sums, int64_t channel, int64_t count) {
            store_tile(task->out, {sums, STRIP, row, rows, channel, count});
        });
    }
}

extern "C" void smelt_integer_convolution(const IntegerConvolution* task, int threads) {
    if (task->groups > 1 && task->groups == task->channels && task->channels == task->out_channels)
        return convolve_depthwise(*task, threads);
    convolve_by_gemm(*task, threads);
}

extern "C" void smelt_integer_matmul(const IntegerMatmul* task, int threads) {
    const int64_t blocks = task->batch < threads ? (task->rows + ROW_BLOCK - 1) / ROW_BLOCK : 1;
    const int64_t block_rows = blocks == 1 ? task->rows : ROW_BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t index = 0; index < task->batch * blocks; ++index) {
        static thread_local Scratch bytes, offsets, scratch;
        const int64_t matrix = index / blocks, first = index % blocks * block_rows;
        const int8_t* a = task->a.at(matrix, task->inner);
        const PackedPanels b = pack_matrix(
            task->b.at(matrix, task->inner), task->b.row, task->transposed, task->channels, task->columns, bytes, offsets);
        const Output out = at_row(
            task->out, matrix / task->inner * task->out_outer + matrix % task->inner * task->out_inner);
        int8_t* tiles = scratch.get<int8_t>(ROW_BLOCK * b.padded());
        for (int64_t row = first; row < std::min(first + block_rows, task->rows); row += ROW_BLOCK) {
            const int64_t rows = std::min(task->rows - row, ROW_BLOCK);
            pack_tokens(a + row * task->a.row, task->a.row, rows, task->columns, tiles);
            multiply_panels(b, tiles, rows, nullptr, 0, task->channels, [&](int32_t* sums, int64_t channel, int64_t count) {
                store_tile(out, {sums, STRIP, row, rows, channel, count});
            });
        }
    }
}

// Attention of one head at a time: scores and probabilities of a block of queries stay in cache.
extern "C" void smelt_integer_attention(const IntegerAttention* task, int threads) {
    const int64_t blocks = task->batch < threads ? (task->queries + ROW_BLOCK - 1) / ROW_BLOCK : 1;
    const int64_t block_rows = blocks == 1 ? task->queries : ROW_BLOCK, stride = round_up(task->keys, PANEL);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t index = 0; index < task->batch * blocks; ++index) {
        static thread_local Scratch key_bytes, key_offsets, value_bytes, value_offsets, tiles_buffer, scores_buffer, probs;
        const int64_t head = index / blocks, first = index % blocks * block_rows, inner = task->inner;
        const PackedPanels keys = pack_matrix(
            task->key.at(head, inner), task->key.row, true, task->keys, task->head_dim, key_bytes, key_offsets);
        const PackedPanels values = pack_matrix(
            task->value.at(head, inner), task->value.row, false, task->head_dim, task->keys, value_bytes, value_offsets);
        const Output out = at_row(task->out, head / inner * task->out_outer + head % inner * task->out_inner);
        int8_t* tiles = tiles_buffer.get<int8_t>(ROW_BLOCK * std::max(keys.padded(), values.padded()));
        int32_t* scores = scores_buffer.get<int32_t>(ROW_BLOCK * stride);
        int8_t* probabilities = probs.get<int8_t>(ROW_BLOCK * stride);
        for (int64_t row = first; row < std::min(first + block_rows, task->queries); row += ROW_BLOCK) {
            const int64_t rows = std::min(task->queries - row, ROW_BLOCK);
            const int8_t* queries = task->query.at(head, inner) + row * task->query.row;
            pack_tokens(queries, task->query.row, rows, task->head_dim, tiles);
            multiply_panels(keys, tiles, rows, nullptr, 0, task->keys, [&](int32_t* sums, int64_t key, int64_t count) {
                store_tile({task->score_steps, scores, stride, INT32}, {sums, STRIP, 0, rows, key, count});
            });
            for (int64_t t = 0; t < rows; ++t) {
                const int64_t mask_row = (head * task->queries + row + t) / task->rows_per_mask;
                int32_t* row_scores = scores + t * stride;
                softmax_row(task->softmax, row_scores, task->mask + mask_row * stride, task->keys, [&](auto rescale) {
                    for (int64_t k = 0; k < task->keys; k += LANES)
                        store_ints(rescale(load(row_scores + k)), probabilities + t * stride, INT8, k, LANES);
                });
            }
            pack_tokens(probabilities, stride, rows, task->keys, tiles);
            multiply_panels(values, tiles, rows, nullptr, 0, task->head_dim, [&](int32_t* sums, int64_t channel, int64_t count) {
                store_tile(out, {sums, STRIP, row, rows, channel, count});
            });
        }
    }
}

extern "C" void smelt_integer_softmax(const IntegerSoftmax* task, int threads) {
    const int64_t padded = round_up(task->length, LANES);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < task->rows; ++row) {
        static thread_local Scratch scratch;
        int32_t* values = scratch.get<int32_t>(padded);
        for_blocks(task->length, [&](int64_t k, int64_t lanes) {
            store(load_ints(task->x, task->type, row * task->length + k, lanes), values + k);
        });
        apply_steps(task->steps, {values, padded, row, 1, 0, task->length});
        const uint8_t* mask = task->mask + row / task->rows_per_mask * padded;
        softmax_row(task->softmax, values, mask, task->length, [&](auto rescale) {
            for_blocks(task->length, [&](int64_t k, int64_t lanes) {
                store_ints(rescale(load(values + k)), task->out.data, task->out.type, row * task->out.stride + k, lanes);
            });
        });
    }
}

extern "C" void smelt_integer_norm(const IntegerNorm* task, int threads) {
    const int64_t length = task->norm.length, padded = round_up(length, LANES);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < task->rows; row += NORM_ROWS) {
        static thread_local Scratch scratch, copy;
        const int64_t rows = std::min(task->rows - row, NORM_ROWS);
        int32_t* values = scratch.get<int32_t>(NORM_ROWS * padded);
        load_tile(task->x, task->type, length, {values, padded, row, rows, 0, length});
        apply_steps(task->steps, {values, padded, row, rows, 0, length});
        for (int64_t t = 0; t < rows; ++t) normalize_row(task->norm, values + t * padded);
        for (int64_t i = 0; i < task->outputs; ++i) {
            int32_t* tile = values;
            if (i + 1 < task->outputs && task->out[i].steps.count > 1) {  // steps before the last are in place
                tile = copy.get<int32_t>(NORM_ROWS * padded);
                std::memcpy(tile, values, rows * padded * sizeof(int32_t));
            }
            store_tile(task->out[i], {tile, padded, row, rows, 0, length});
        }
    }
}

extern "C" void smelt_integer_map(const IntegerMap* task, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < task->rows; row += ROW_BLOCK) {
        alignas(64) int32_t values[MAP_CHANNELS];
        for (int64_t t = row; t < std::min(row + ROW_BLOCK, task->rows); ++t)
            for (int64_t channel = 0; channel < task->channels; channel += MAP_CHANNELS) {
                const Tile tile{values, MAP_CHANNELS, t, 1, channel, std::min(task->channels - channel, MAP_CHANNELS)};
                load_tile(task->x, task->type, task->channels, tile);
                store_tile(task->out, tile);
            }
    }
}
