// Convolutions of integer-only networks, with images in channels-last layout.
//
// Groups of several channels: the inputs of a block of output positions are gathered (im2col) into the tiles of the GEMM.
// One channel per group (depthwise): lanes are channels, and bytes of four neighboring taps are interleaved once, so that
// one instruction multiplies four taps of 16 channels, and all kernel rows and output positions share the result.
#pragma once

#include "integer_gemm.h"
#include "integer_steps.h"

struct IntegerConvolution {  // same layout as in integer_conv.py
    const int8_t* x;         // [batch, height, width, channels], int8 or uint8
    int64_t batch, height, width, channels, out_channels, groups;
    int64_t kernel_height, kernel_width, stride_height, stride_width, top, left;  // zero padding
    int64_t dilation_height, dilation_width, out_height, out_width;
    const int8_t* weight;   // packed
    const int32_t* offset;  // of the sums of each channel, padded in each group
    const int32_t* bias;
    Output out;  // [batch * out_height * out_width, out_channels]
    int32_t is_unsigned;

    int64_t group_channels() const { return channels / groups; }
    int64_t group_outputs() const { return out_channels / groups; }
    int64_t columns() const { return kernel_height * kernel_width * group_channels(); }
    bool is_pointwise() const {
        return kernel_height * kernel_width * stride_height * stride_width == 1 && !top && !left && out_height == height &&
               out_width == width;
    }
};

constexpr int TAPS = 4;                         // of a depthwise kernel row, multiplied by one instruction
constexpr int POSITIONS = PARTS == 1 ? 8 : 4;  // of a depthwise output, multiplied at once
constexpr int64_t DEPTHWISE_BLOCK = 128;        // output positions whose sums stay in the L1 cache

struct OutputPosition {  // counted up, as a division takes longer than the copy of a pixel
    int64_t image, row, column;

    OutputPosition(const IntegerConvolution& conv, int64_t index)
        : image(index / (conv.out_height * conv.out_width)), row(index / conv.out_width % conv.out_height),
          column(index % conv.out_width) {}

    void advance(const IntegerConvolution& conv) {
        if (++column < conv.out_width) return;
        column = 0;
        if (++row < conv.out_height) return;
        row = 0;
        ++image;
    }
};

// Call run(index, pixel, taps) for runs of taps of an output position that are contiguous; the pixel is null in the padding.
template <class Run>
HWY_INLINE void for_taps(const IntegerConvolution& conv, const OutputPosition& position, int64_t channel, Run run) {
    const int64_t taps = conv.kernel_width;
    const int8_t* image = conv.x + position.image * conv.height * conv.width * conv.channels + channel;
    const int64_t y0 = position.row * conv.stride_height - conv.top;
    const int64_t x0 = position.column * conv.stride_width - conv.left;
    const int64_t length = conv.groups == 1 && conv.dilation_width == 1 ? taps : 1;  // of the longest run
    for (int64_t i = 0; i < conv.kernel_height; ++i) {
        const int64_t y = y0 + i * conv.dilation_height, index = i * taps;
        if (y < 0 || y >= conv.height) {
            run(index, nullptr, taps);
            continue;
        }
        const int8_t* line = image + y * conv.width * conv.channels;
        for (int64_t j = 0; j < taps; j += length) {
            const int64_t x = x0 + j * conv.dilation_width, begin = std::min(std::max<int64_t>(-x, 0), length);
            const int64_t end = std::max(std::min(conv.width - x, length), begin);
            if (begin) run(index + j, nullptr, begin);
            if (end > begin) run(index + j + begin, line + (x + begin) * conv.channels, end - begin);
            if (end < length) run(index + j + end, nullptr, length - end);
        }
    }
}

// Copy a multiple of DEPTH bytes to the row of one position in a tile; zeros without a source.
HWY_INLINE void copy_to_tile(const int8_t* source, int64_t count, int8_t flip, int8_t* tile) {
    const hn::Full128<int8_t> tag;
    const auto mask = hn::Set(tag, flip);
    for (int64_t k = 0; k < count; k += DEPTH)
        hn::StoreU(source ? hn::Xor(hn::LoadU(tag, source + k), mask) : mask, tag, tile + k * TILE);
}

// Copy bytes in steps of 16 where no byte from `end` on is read: the next run, or a weight of zero, covers what is too much.
HWY_INLINE void copy_to_row(const int8_t* source, int64_t count, const int8_t* end, int8_t* row) {
    const hn::Full128<int8_t> tag;
    if (source && source + round_up(count, 16) > end) {
        std::memcpy(row, source, count);
        return;
    }
    for (int64_t k = 0; k < count; k += 16) hn::StoreU(source ? hn::LoadU(tag, source + k) : hn::Zero(tag), tag, row + k);
}

// Gather the inputs of output positions into tiles, in the order [kernel row, kernel column, channel].
inline void gather_tiles(
    const IntegerConvolution& conv, int64_t first, int64_t positions, int64_t group, int8_t* row, int8_t* tiles) {
    const int64_t channels = conv.group_channels(), columns = conv.columns(), padded = round_up(columns, DEPTH);
    const int8_t flip = int8_t(activation_flip(conv.is_unsigned));
    if (conv.is_pointwise()) {
        const int8_t* x = conv.x + first * conv.channels + group * channels;
        return pack_tokens(x, conv.channels, positions, columns, tiles, flip);
    }
    const int8_t* end = conv.x + conv.batch * conv.height * conv.width * conv.channels;
    OutputPosition position(conv, first);
    for (int64_t t = 0; t < positions; ++t, position.advance(conv)) {
        int8_t* tile = tiles + t / TILE * TILE * padded + t % TILE * DEPTH;
        if (channels % DEPTH == 0) {
            for_taps(conv, position, group * channels, [&](int64_t index, const int8_t* pixel, int64_t taps) SMELT_INLINE {
                copy_to_tile(pixel, taps * channels, flip, tile + index * channels * TILE);
            });
            continue;
        }
        for_taps(conv, position, group * channels, [&](int64_t index, const int8_t* pixel, int64_t taps) SMELT_INLINE {
            copy_to_row(pixel, taps * channels, end, row + index * channels);
        });
        copy_to_tile(row, padded, flip, tile);  // weights beyond the last column are zero
    }
}

inline void convolve_by_gemm(const IntegerConvolution& conv, int threads) {
    const int64_t positions = conv.batch * conv.out_height * conv.out_width, outputs = conv.group_outputs();
    const int64_t padded = round_up(conv.columns(), DEPTH), padded_outputs = round_up(outputs, PANEL);
    const int64_t fair = round_up((positions + 2 * threads - 1) / (2 * threads), TILE);
    const int64_t rows = threads == 1 ? ROW_BLOCK : std::min(ROW_BLOCK, fair), blocks = (positions + rows - 1) / rows;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
    for (int64_t index = 0; index < blocks * conv.groups; ++index) {
        static thread_local Scratch tile_bytes, row_bytes;
        const int64_t group = index % conv.groups, first = index / conv.groups * rows;
        const int64_t count = std::min(positions - first, rows);
        int8_t* tiles = tile_bytes.get<int8_t>(round_up(count, TILE) * padded);
        gather_tiles(conv, first, count, group, row_bytes.get<int8_t>(padded + DEPTH), tiles);
        const PackedPanels weight{
            conv.weight + group * padded_outputs * padded, conv.offset + group * padded_outputs, outputs, conv.columns()};
        const int32_t* bias = conv.bias ? conv.bias + group * outputs : nullptr;
        multiply_panels(weight, tiles, count, bias, 0, outputs, [&](int32_t* sums, int64_t channel, int64_t channels) {
            store_tile(conv.out, {sums, STRIP, first, count, group * outputs + channel, channels});
        });
    }
}

// Bytes of the packed weight of 16 channels of a depthwise convolution: [kernel height, kernel width / TAPS, 16, TAPS].
inline int64_t depthwise_panel_size(int64_t kernel_height, int64_t kernel_width) {
    return kernel_height * round_up(kernel_width, TAPS) * PANEL;
}

inline void pack_depthwise(
    const int8_t* weight, int64_t channels, int64_t kernel_height, int64_t kernel_width, bool is_unsigned, int8_t* out,
    int32_t* offset) {
    const int64_t taps = kernel_height * kernel_width, quads = (kernel_width + TAPS - 1) / TAPS;
    const int64_t size = depthwise_panel_size(kernel_height, kernel_width);
    std::memset(out, 0, round_up(channels, PANEL) / PANEL * size);
    for (int64_t c = 0; c < round_up(channels, PANEL); ++c) {
        int32_t sum = 0;
        for (int64_t k = 0; c < channels && k < taps; ++k) {
            const int64_t i = k / kernel_width, j = k % kernel_width;
            const int64_t quad = (i * quads + j / TAPS) * PANEL + c % PANEL;
            out[c / PANEL * size + quad * TAPS + j % TAPS] = weight[c * taps + k];
            sum += weight[c * taps + k];
        }
        offset[c] = activation_offset(is_unsigned) * sum;
    }
}

struct DepthwiseBlock {  // output positions of an image, and the inputs that they read
    int64_t row, rows, column, columns;
    int64_t in_rows, in_columns;  // with padding; in_columns count the positions of the first tap of four

    DepthwiseBlock(const IntegerConvolution& conv, int64_t first_row, int64_t first_column, int64_t height, int64_t width)
        : row(first_row), rows(std::min(conv.out_height - first_row, height)), column(first_column),
          columns(std::min(conv.out_width - first_column, width)) {
        in_rows = (rows - 1) * conv.stride_height + (conv.kernel_height - 1) * conv.dilation_height + 1;
        const int64_t last_quad = (conv.kernel_width - 1) / TAPS * TAPS;
        in_columns = (columns - 1) * conv.stride_width + last_quad * conv.dilation_width + 1;
    }
};

// Interleave the bytes of four taps of up to 16 channels: quads [in_rows, in_columns, 16, TAPS].
inline void interleave_taps(
    const IntegerConvolution& conv, const DepthwiseBlock& block, const int8_t* image, int64_t channel, int8_t* line,
    int8_t* quads) {
    const hn::Full128<int8_t> tag;
    const auto flip = hn::Set(tag, int8_t(activation_flip(conv.is_unsigned)));
    const int64_t lanes = std::min<int64_t>(conv.channels - channel, PANEL), step = conv.dilation_width;
    const int64_t length = block.in_columns + (TAPS - 1) * step, x0 = block.column * conv.stride_width - conv.left;
    const int64_t inside = std::min(std::max<int64_t>(-x0, 0), length), end = std::max(std::min(conv.width - x0, length), inside);
    const int64_t every = TAPS * step % conv.stride_width ? 1 : conv.stride_width;  // the others are not read
    for (int64_t i = 0; i < block.in_rows; ++i) {
        const int64_t y = block.row * conv.stride_height - conv.top + i;
        const bool is_padding = y < 0 || y >= conv.height;
        const int8_t* pixels = image + y * conv.width * conv.channels + channel;
        for (int64_t s = 0; s < length; ++s) {
            const int8_t* pixel = pixels + (x0 + s) * conv.channels;
            auto bytes = hn::Zero(tag);
            if (!is_padding && s >= inside && s < end)
                bytes = lanes == PANEL ? hn::LoadU(tag, pixel) : hn::LoadN(tag, pixel, size_t(lanes));
            hn::StoreU(hn::Xor(bytes, flip), tag, line + s * PANEL);
        }
        int8_t* out = quads + i * block.in_columns * PANEL * TAPS;
        for (int64_t s = 0; s < block.in_columns; s += every) {
            const int8_t* tap = line + s * PANEL;
            hn::StoreInterleaved4(
                hn::LoadU(tag, tap), hn::LoadU(tag, tap + step * PANEL), hn::LoadU(tag, tap + 2 * step * PANEL),
                hn::LoadU(tag, tap + 3 * step * PANEL), tag, out + s * PANEL * TAPS);
        }
    }
}

// Multiply `Count` output positions of a row: sums [Count, 16].
template <int Count>
HWY_INLINE void multiply_taps(
    const IntegerConvolution& conv, const DepthwiseBlock& block, const int8_t* quads, const int8_t* weight,
    const int32_t* start, int32_t* sums) {
    I32x16 sum[Count];
    unroll<Count>([&](auto t) SMELT_INLINE { sum[t] = load(start); });
    const int64_t row = block.in_columns * conv.dilation_height * PANEL * TAPS;
    const int64_t next = conv.stride_width * PANEL * TAPS, step = TAPS * conv.dilation_width * PANEL * TAPS;
    for (int64_t i = 0; i < conv.kernel_height; ++i) {
        const int8_t* x = quads + i * row;
        for (int64_t j = 0; j < conv.kernel_width; j += TAPS, x += step, weight += PANEL * TAPS) {
            const I8x64 taps = load(weight);
            unroll<Count>([&](auto t) SMELT_INLINE {
                const I8x64 bytes = load(x + t * next);
                unroll<PARTS>([&](auto p) SMELT_INLINE {
                    const auto inputs = hn::BitCast(Tag<uint8_t>(), bytes.part[p]);
                    sum[t].part[p] = dot_bytes<BYTES>(inputs, taps.part[p], sum[t].part[p]);
                });
            });
        }
    }
    unroll<Count>([&](auto t) SMELT_INLINE { store(sum[t], sums + t * PANEL); });
}

inline void convolve_depthwise(const IntegerConvolution& conv, int threads) {
    const int64_t width = std::min(conv.out_width, DEPTHWISE_BLOCK);
    const int64_t height = width < conv.out_width ? 1 : std::max<int64_t>(DEPTHWISE_BLOCK / std::max<int64_t>(width, 1), 1);
    const int64_t across = (conv.out_width + width - 1) / width, down = (conv.out_height + height - 1) / height;
    const int64_t panels = round_up(conv.channels, PANEL) / PANEL;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
    for (int64_t index = 0; index < conv.batch * down * across * panels; ++index) {
        static thread_local Scratch line_bytes, quad_bytes, sum_values;
        const int64_t channel = index % panels * PANEL, tile = index / panels, image = tile / across / down;
        const DepthwiseBlock block(conv, tile / across % down * height, tile % across * width, height, width);
        const int64_t lanes = std::min<int64_t>(conv.channels - channel, PANEL);
        int8_t* quads = quad_bytes.get<int8_t>(block.in_rows * block.in_columns * PANEL * TAPS);
        int32_t* sums = sum_values.get<int32_t>(block.rows * block.columns * PANEL);
        interleave_taps(
            conv, block, conv.x + image * conv.height * conv.width * conv.channels, channel,
            line_bytes.get<int8_t>((block.in_columns + (TAPS - 1) * conv.dilation_width) * PANEL), quads);
        alignas(64) int32_t start[PANEL];
        std::memcpy(start, conv.offset + channel, sizeof(start));
        for (int64_t c = 0; conv.bias && c < lanes; ++c)
            start[c] = int32_t(uint32_t(start[c]) + uint32_t(conv.bias[channel + c]));  // sums are modulo 2^32
        const int8_t* weight = conv.weight + channel / PANEL * depthwise_panel_size(conv.kernel_height, conv.kernel_width);
        for (int64_t r = 0; r < block.rows; ++r) {
            const int8_t* x = quads + r * conv.stride_height * block.in_columns * PANEL * TAPS;
            int32_t* row_sums = sums + r * block.columns * PANEL;
            auto multiply = [&](auto count, int64_t t) SMELT_INLINE {
                multiply_taps<count>(
                    conv, block, x + t * conv.stride_width * PANEL * TAPS, weight, start, row_sums + t * PANEL);
            };
            int64_t t = 0;
            for (; t + POSITIONS <= block.columns; t += POSITIONS) multiply(std::integral_constant<int, POSITIONS>(), t);
            for (; t + 2 <= block.columns; t += 2) multiply(std::integral_constant<int, 2>(), t);
            if (t < block.columns) multiply(std::integral_constant<int, 1>(), t);
        }
        // The rows of a block are whole, or there is only one: its positions are contiguous.
        const int64_t position = (image * conv.out_height + block.row) * conv.out_width + block.column;
        store_tile(conv.out, {sums, PANEL, position, block.rows * block.columns, channel, lanes});
    }
}
