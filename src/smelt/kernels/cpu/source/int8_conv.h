// Convolution with int8 inputs: images in channels-last layout are quantized once, then the inputs of a block of output
// positions are gathered (im2col) into cache and multiplied with all output channels.
//
// Rows have few columns here, so that lanes are output channels and nothing has to be summed across lanes: the bytes of
// the weights are rearranged to [rows / 16, columns / 4, 16, 4], and four inputs of a position are broadcast.
#pragma once

#include "int8_gemv.h"

struct ConvPlan {  // same layout as in conv.py
    int64_t batch, height, width, channels;
    int64_t kernel_height, kernel_width, stride_height, stride_width;
    int64_t top, left;  // zero padding
    int64_t dilation_height, dilation_width, out_height, out_width;
};

constexpr int64_t POSITION_BLOCK = 64;              // output positions gathered at once
constexpr int TILE_POSITIONS = PARTS == 1 ? 8 : 4;  // multiplied at once, limited by the number of registers

inline bool has_int8_conv(const LinearPlan& plan) {
    return has_int8(plan) && plan.dequant_mode == UNIFORM;
}

// Weights of all rows, rearranged, and their scales by group: [groups, padded rows].
struct ConvWeights {
    const uint8_t* bytes;
    const float *scale, *shift;
    int64_t quads, rows;  // columns / 4 and rows, rounded up
};

inline uint32_t four_codes(const LinearPlan& plan, const uint8_t* codes, int64_t k) {
    const int64_t left = plan.row_bytes();
    uint32_t bytes = 0;
    for (int i = 0; i < 4 && k + i < plan.columns; ++i) {
        const int64_t index = plan.bits == 8 ? k + i : (k + i) / 2;
        uint8_t code = index < left ? codes[index] : 0;
        if (plan.bits == 4) code = (k + i) % 2 ? code >> 4 : code & 15;
        if (SIGNED_WEIGHTS) code -= plan.bits == 8 ? 128 : 8;
        bytes |= uint32_t(code) << (8 * i);
    }
    return bytes;
}

inline uint32_t four_codes_inside(const LinearPlan& plan, const uint8_t* codes, int64_t k) {
    uint32_t bytes;
    if (plan.bits == 8) {
        std::memcpy(&bytes, codes + k, 4);
        return SIGNED_WEIGHTS ? bytes ^ 0x80808080u : bytes;
    }
    const uint32_t pairs = codes[k / 2] | uint32_t(codes[k / 2 + 1]) << 16;
    bytes = (pairs & 0x000f000fu) | (pairs & 0x00f000f0u) << 4;
    if (!SIGNED_WEIGHTS) return bytes;
    return ((bytes | 0x80808080u) - 0x08080808u) ^ 0x80808080u;  // minus 8 in each byte
}

inline ConvWeights conv_weights(const LinearPlan& plan, int threads) {
    static thread_local Scratch bytes, scale, shift, row_scale, row_shift;
    const int64_t quads = (plan.columns + 3) / 4, rows = round_up(plan.rows, LANES);
    uint32_t* out = bytes.get<uint32_t>(rows * quads);
    float *scales = scale.get<float>(plan.groups * rows), *shifts = shift.get<float>(plan.groups * rows);
    float* by_row = row_scale.get<float>(rows * plan.groups + LANES);
    float* shift_by_row = row_shift.get<float>(rows * plan.groups + LANES);
    row_scales(plan, 0, plan.rows, by_row, shift_by_row);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t source = std::min(row, plan.rows - 1);
        const uint8_t* codes = plan.row_codes(source);
        uint32_t* tile = out + row / LANES * quads * LANES + row % LANES;
        const int64_t whole = plan.columns / 4;
        for (int64_t q = 0; q < whole; ++q) tile[q * LANES] = four_codes_inside(plan, codes, 4 * q);
        for (int64_t q = whole; q < quads; ++q) tile[q * LANES] = four_codes(plan, codes, 4 * q);
        for (int64_t g = 0; g < plan.groups; ++g) {
            scales[g * rows + row] = by_row[source * plan.groups + g];
            shifts[g * rows + row] = plan.zero ? shift_by_row[source * plan.groups + g] : 0.0f;
        }
    }
    return {reinterpret_cast<const uint8_t*>(out), scales, shifts, quads, rows};
}

// Copy bytes in steps of 16: reads and writes up to 15 bytes more, for which both buffers have room.
HWY_INLINE void copy_bytes(int8_t* target, const int8_t* source, int64_t count) {
    const hn::Full128<int8_t> tag;
    for (int64_t k = 0; k < count; k += 16) hn::StoreU(hn::LoadU(tag, source + k), tag, target + k);
}

// Gather the inputs of one output position from the codes of its image, in the order of the columns.
inline void gather(const ConvPlan& conv, const int8_t* image, int64_t position, int8_t* row) {
    const int64_t y0 = position / conv.out_width * conv.stride_height - conv.top;
    const int64_t x0 = position % conv.out_width * conv.stride_width - conv.left;
    const int64_t channels = conv.channels, taps = conv.kernel_width;
    for (int64_t i = 0; i < conv.kernel_height; ++i, row += taps * channels) {
        const int64_t y = y0 + i * conv.dilation_height;
        if (y < 0 || y >= conv.height) {
            std::memset(row, 0, taps * channels);
            continue;
        }
        const int8_t* line = image + y * conv.width * channels;
        if (conv.dilation_width == 1) {
            const int64_t first = std::min(std::max<int64_t>(-x0, 0), taps);
            const int64_t last = std::max(std::min(conv.width - x0, taps), first);
            copy_bytes(row + first * channels, line + (x0 + first) * channels, (last - first) * channels);
            if (first) std::memset(row, 0, first * channels);
            if (last < taps) std::memset(row + last * channels, 0, (taps - last) * channels);
            continue;
        }
        for (int64_t j = 0; j < taps; ++j) {
            const int64_t x = x0 + j * conv.dilation_width;
            if (x < 0 || x >= conv.width) std::memset(row + j * channels, 0, channels);
            else std::memcpy(row + j * channels, line + x * channels, channels);
        }
    }
}

struct Positions {   // a block of output positions
    int8_t* codes;   // [positions, padded columns]
    int32_t* sums;   // [positions, groups]
    int64_t padded;  // columns, rounded up to 4
};

// Multiply 16 rows with a few positions, and store the results.
template <CodeLayout Layout, int Count>
inline void multiply_positions(
    const LinearPlan& plan, const ConvWeights& weights, const Positions& in, int64_t row, int64_t position,
    const float* input_scale, int64_t token, void* y) {
    const Tag<int32_t> ints;
    const int offset = SIGNED_WEIGHTS ? 0 : code_offset(plan);
    const uint8_t* w = weights.bytes + row * weights.quads * 4;
    const int8_t* x = in.codes + position * in.padded;
    const int32_t* sums = in.sums + position * plan.groups;
    F32x16 total[Count];
    unroll<Count>([&](auto t) SMELT_INLINE { total[t] = zero<float>(); });
    for (int64_t g = 0; g < plan.groups; ++g) {
        I32x16 part[Count];
        unroll<Count>([&](auto t) SMELT_INLINE {
            part[t] = broadcast<int32_t>(offset ? -offset * sums[t * plan.groups + g] : 0);
        });
        const int64_t end = (plan.group_end(g) + 3) / 4;
        for (int64_t q = g * plan.group / 4; q < end; ++q) {
            ByteRegister bytes[PARTS];
            unroll<PARTS>([&](auto p) SMELT_INLINE {
                bytes[p] = hn::Load(Tag<uint8_t>(), w + (q * LANES + p * PART_LANES) * 4);
            });
            unroll<Count>([&](auto t) SMELT_INLINE {
                int32_t four;
                std::memcpy(&four, x + t * in.padded + 4 * q, 4);
                const auto inputs = hn::BitCast(Tag<int8_t>(), hn::Set(ints, four));
                unroll<PARTS>([&](auto p) SMELT_INLINE {
                    part[t].part[p] = dot_bytes<Layout>(bytes[p], inputs, part[t].part[p]);
                });
            });
        }
        const F32x16 scale = load(weights.scale + g * weights.rows + row);
        unroll<Count>([&](auto t) SMELT_INLINE { total[t] = mul_add(to_float(part[t]), scale, total[t]); });
        if (!plan.zero) continue;
        const F32x16 shift = load(weights.shift + g * weights.rows + row);
        unroll<Count>([&](auto t) SMELT_INLINE {
            total[t] = total[t] - shift * broadcast(float(sums[t * plan.groups + g]));
        });
    }
    unroll<Count>([&](auto t) SMELT_INLINE {
        store_block(plan, y, token + t, row, total[t] * broadcast(input_scale[t]));
    });
}

// x [batch, height, width, channels] -> y [batch, out_height, out_width, rows].
template <CodeLayout Layout>
inline void int8_conv(const LinearPlan& plan, const ConvPlan& conv, const void* x, void* y, int threads) {
    static thread_local Scratch image_codes, image_scales;
    const int64_t pixels = conv.height * conv.width * conv.channels, padded = round_up(pixels, LANES);
    const int64_t positions = conv.out_height * conv.out_width, tokens = conv.batch * positions;
    int8_t* images = image_codes.get<int8_t>(conv.batch * padded);
    float* scales = image_scales.get<float>(conv.batch);
    LinearPlan whole = plan;  // an image as one row of inputs
    whole.columns = pixels;
#pragma omp parallel for num_threads(threads) if (conv.batch > 1) schedule(static)
    for (int64_t n = 0; n < conv.batch; ++n) scales[n] = quantize_inputs(whole, x, n, images + n * padded, padded);
    const ConvWeights weights = conv_weights(plan, threads);
    const bool needs_sums = plan.zero || !SIGNED_WEIGHTS;
#pragma omp parallel num_threads(threads)
    {
        static thread_local Scratch rows, totals;
        const int64_t columns = weights.quads * 4;
        const Positions in{
            rows.get<int8_t>(POSITION_BLOCK * columns), totals.get<int32_t>(POSITION_BLOCK * plan.groups), columns};
#pragma omp for schedule(static)
        for (int64_t first = 0; first < tokens; first += POSITION_BLOCK) {
            const int64_t count = std::min(tokens - first, POSITION_BLOCK);
            float input_scale[POSITION_BLOCK];
            for (int64_t t = 0; t < count; ++t) {
                const int64_t image = (first + t) / positions;
                int8_t* row = in.codes + t * columns;
                input_scale[t] = scales[image];
                gather(conv, images + image * padded, (first + t) % positions, row);
                for (int64_t k = plan.columns; k < columns; ++k) row[k] = 0;
                for (int64_t g = 0; needs_sums && g < plan.groups; ++g) {
                    int32_t sum = 0;
                    for (int64_t k = g * plan.group; k < plan.group_end(g); ++k) sum += row[k];
                    in.sums[t * plan.groups + g] = sum;
                }
            }
            for (int64_t row = 0; row < plan.rows; row += LANES) {
                int64_t t = 0;
                for (; t + TILE_POSITIONS <= count; t += TILE_POSITIONS)
                    multiply_positions<Layout, TILE_POSITIONS>(
                        plan, weights, in, row, t, input_scale + t, first + t, y);
                for (; t < count; ++t)
                    multiply_positions<Layout, 1>(plan, weights, in, row, t, input_scale + t, first + t, y);
            }
        }
    }
}
