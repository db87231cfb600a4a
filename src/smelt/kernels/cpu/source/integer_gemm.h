// GEMM of int8 activations and int8 weights with int32 sums, for integer-only networks.
//
// Lanes are output channels: weights are packed once to panels of 16 channels, [panels, columns / GROUP, 16, GROUP], and
// GROUP columns of a token are broadcast, so that nothing is summed across lanes. x86 multiplies unsigned by signed bytes,
// ARM signed ones: activations of the other kind are moved by 128 while they are copied into tiles, and the packed weights
// carry what that adds to a sum.
#pragma once

#include "int8_gemv.h"

constexpr int PANEL = LANES;             // output channels of a panel
constexpr int DEPTH = 16;                // columns are padded to a multiple of it
#if defined(__AVX512VNNI__)
constexpr int TILE = 12, TILE_PANELS = 2;  // tokens and panels multiplied at once: 24 registers of sums
constexpr int64_t ROW_BLOCK = 96;          // tokens whose activations stay in cache
#else
constexpr int TILE = PARTS == 1 ? 8 : 4, TILE_PANELS = 1;
constexpr int64_t ROW_BLOCK = 64;
#endif
constexpr int64_t CACHE_LINE = 64;
constexpr int64_t STRIP = 64;            // channels finished at once: a cache line of int8 results
#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr int GROUP = 8;  // SMMLA: two tokens by two channels, eight columns each
#else
constexpr int GROUP = 4;  // four products to a lane
#endif

// The number to add to the sum of the weights' products for activations that are moved by 128; 0 if they are not.
constexpr int activation_offset(bool is_unsigned) {
    return is_unsigned == !SIGNED_WEIGHTS ? 0 : is_unsigned ? 128 : -128;
}
// The bit of a byte that moves activations to the other range.
constexpr int activation_flip(bool is_unsigned) {
    return activation_offset(is_unsigned) ? 0x80 : 0;
}
constexpr int ACTIVATION_OFFSET = activation_offset(false), ACTIVATION_FLIP = activation_flip(false);

// A matrix [channels, columns] in panels; `offset` [padded channels] is added to the sums of each channel.
struct PackedPanels {
    const int8_t* bytes;
    const int32_t* offset;
    int64_t channels, columns;

    int64_t padded() const { return round_up(columns, DEPTH); }
    const int8_t* panel(int64_t channel) const { return bytes + channel * padded(); }
};

// Pack a panel from rows of contiguous columns; `factor` times the sum of a row is its offset.
inline void pack_panel(
    const int8_t* rows, int64_t stride, int64_t count, int64_t columns, int8_t* out, int32_t* offset,
    int factor = ACTIVATION_OFFSET) {
    const int64_t padded = round_up(columns, DEPTH);
    if (count < PANEL || padded != columns) std::memset(out, 0, PANEL * padded);
    for (int64_t c = 0; c < PANEL; ++c) {
        const int8_t* row = rows + c * stride;
        int32_t sum = 0;
        if (c < count) {
            int64_t k = 0;
            for (; k + GROUP <= columns; k += GROUP) std::memcpy(out + k * PANEL + c * GROUP, row + k, GROUP);
            for (; k < columns; ++k) out[k / GROUP * GROUP * PANEL + c * GROUP + k % GROUP] = row[k];
            if (factor)
                for (k = 0; k < columns; ++k) sum += row[k];
        }
        offset[c] = factor * sum;
    }
}

// Pack a panel of the transposed matrix: rows are columns of the product, `count` contiguous values each.
inline void pack_panel_transposed(
    const int8_t* rows, int64_t stride, int64_t count, int64_t columns, int8_t* out, int32_t* offset) {
    const int64_t padded = round_up(columns, DEPTH);
    int32_t sums[PANEL] = {};
    std::memset(out, 0, PANEL * padded);
    int64_t k = 0;
    if (GROUP == 4 && count == PANEL) {
        const hn::Full128<int8_t> tag;
        for (; k + 4 <= columns; k += 4) {
            const int8_t* row = rows + k * stride;
            hn::StoreInterleaved4(
                hn::LoadU(tag, row), hn::LoadU(tag, row + stride), hn::LoadU(tag, row + 2 * stride),
                hn::LoadU(tag, row + 3 * stride), tag, out + k * PANEL);
        }
    }
    for (; k < columns; ++k)
        for (int64_t c = 0; c < count; ++c)
            out[k / GROUP * GROUP * PANEL + c * GROUP + k % GROUP] = rows[k * stride + c];
    if (ACTIVATION_OFFSET)
        for (k = 0; k < columns; ++k)
            for (int64_t c = 0; c < count; ++c) sums[c] += rows[k * stride + c];
    for (int c = 0; c < PANEL; ++c) offset[c] = ACTIVATION_OFFSET * sums[c];
}

// Copy tokens into tiles [tokens / TILE, padded / DEPTH, TILE, DEPTH]; what is beyond the last token does not matter.
inline void pack_tokens(
    const int8_t* x, int64_t stride, int64_t tokens, int64_t columns, int8_t* tiles, int8_t flip_bit = int8_t(ACTIVATION_FLIP)) {
    const hn::Full128<int8_t> tag;
    const auto flip = hn::Set(tag, flip_bit);
    const int64_t padded = round_up(columns, DEPTH);
    for (int64_t t = 0; t < tokens; ++t) {
        const int8_t* row = x + t * stride;
        int8_t* tile = tiles + t / TILE * TILE * padded + t % TILE * DEPTH;
        int64_t k = 0;
        for (; k + DEPTH <= columns; k += DEPTH) hn::StoreU(hn::Xor(hn::LoadU(tag, row + k), flip), tag, tile + k * TILE);
        if (k < columns) hn::StoreU(hn::Xor(hn::LoadN(tag, row + k, columns - k), flip), tag, tile + k * TILE);
    }
}

// Multiply the first tokens of a tile with adjacent panels: sums [Tokens, stride], beginning at start [Panels * PANEL].
// `ahead` is prefetched to the L2 cache.
template <int Tokens, int Panels>
inline void multiply_tile(
    const int8_t* x, const int8_t* w, const int8_t* ahead, int64_t padded, const int32_t* start, int32_t* sums,
    int64_t stride) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    static_assert(Tokens == 4 && Panels == 1, "two pairs of tokens");
    int32x4_t sum[2][8];
    unroll<8>([&](auto c) SMELT_INLINE {
        const int32x2_t first = vld1_s32(start + 2 * c);
        unroll<2>([&](auto t) SMELT_INLINE { sum[t][c] = vcombine_s32(first, first); });
    });
    for (int64_t k = 0; k < padded; k += DEPTH, x += TILE * DEPTH) {
        int64x2_t token[4];
        unroll<4>([&](auto t) SMELT_INLINE { token[t] = vreinterpretq_s64_s8(vld1q_s8(x + t * DEPTH)); });
        unroll<2>([&](auto half) SMELT_INLINE {
            int8x16_t pair[2];
            unroll<2>([&](auto t) SMELT_INLINE {
                pair[t] = vreinterpretq_s8_s64(
                    half ? vzip2q_s64(token[2 * t], token[2 * t + 1]) : vzip1q_s64(token[2 * t], token[2 * t + 1]));
            });
            unroll<8>([&](auto c) SMELT_INLINE {
                const int8x16_t weights = vld1q_s8(w + c * 16);
                unroll<2>([&](auto t) SMELT_INLINE { sum[t][c] = vmmlaq_s32(sum[t][c], pair[t], weights); });
            });
            w += PANEL * GROUP;
        });
    }
    unroll<2>([&](auto t) SMELT_INLINE {
        unroll<4>([&](auto c) SMELT_INLINE {
            const int64x2_t low = vreinterpretq_s64_s32(sum[t][2 * c]), high = vreinterpretq_s64_s32(sum[t][2 * c + 1]);
            vst1q_s32(sums + 2 * t * stride + 4 * c, vreinterpretq_s32_s64(vzip1q_s64(low, high)));
            vst1q_s32(sums + (2 * t + 1) * stride + 4 * c, vreinterpretq_s32_s64(vzip2q_s64(low, high)));
        });
    });
#elif defined(__ARM_FEATURE_DOTPROD)
    int32x4_t sum[TILE][PARTS];
    unroll<PARTS>([&](auto p) SMELT_INLINE {
        unroll<TILE>([&](auto t) SMELT_INLINE { sum[t][p] = vld1q_s32(start + p * PART_LANES); });
    });
    for (int64_t k = 0; k < padded; k += DEPTH, x += TILE * DEPTH) {
        int8x16_t token[TILE];
        unroll<TILE>([&](auto t) SMELT_INLINE { token[t] = vld1q_s8(x + t * DEPTH); });
        unroll<DEPTH / GROUP>([&](auto lane) SMELT_INLINE {
            unroll<PARTS>([&](auto p) SMELT_INLINE {
                const int8x16_t weights = vld1q_s8(w + p * 16);
                unroll<TILE>([&](auto t) SMELT_INLINE {
                    sum[t][p] = vdotq_laneq_s32(sum[t][p], weights, token[t], lane);
                });
            });
            w += PANEL * GROUP;
        });
    }
    unroll<TILE * PARTS>([&](auto i) SMELT_INLINE {
        vst1q_s32(sums + i / PARTS * stride + i % PARTS * PART_LANES, sum[i / PARTS][i % PARTS]);
    });
#else
    I32x16 sum[Tokens][Panels];
    unroll<Tokens * Panels>([&](auto i) SMELT_INLINE { sum[i / Panels][i % Panels] = load(start + i % Panels * PANEL); });
    for (int64_t k = 0; k < padded; k += DEPTH, x += TILE * DEPTH, ahead += CACHE_LINE) {
        if (Panels > 1) __builtin_prefetch(ahead, 0, 2);
        for (int g = 0; g < DEPTH; g += GROUP, w += PANEL * GROUP) {
            I8x64 weights[Panels];
            unroll<Panels>([&](auto p) SMELT_INLINE { weights[p] = load(w + p * PANEL * padded); });
            unroll<Tokens>([&](auto t) SMELT_INLINE {
                int32_t four;
                std::memcpy(&four, x + t * DEPTH + g, 4);
                const auto token = hn::BitCast(Tag<uint8_t>(), hn::Set(Tag<int32_t>(), four));
                unroll<Panels * PARTS>([&](auto i) SMELT_INLINE {
                    auto& part = sum[t][i / PARTS].part[i % PARTS];
                    part = dot_bytes<BYTES>(token, weights[i / PARTS].part[i % PARTS], part);
                });
            });
        }
    }
    unroll<Tokens * Panels>([&](auto i) SMELT_INLINE {
        store(sum[i / Panels][i % Panels], sums + i / Panels * stride + i % Panels * PANEL);
    });
#endif
}

// Multiply tokens, in tiles, with adjacent panels, and prefetch the next ones: one cache line per step of each tile.
template <int Panels>
inline void multiply_tiles(
    const int8_t* tiles, const int8_t* w, int64_t tokens, int64_t padded, const int32_t* start, int32_t* sums) {
    const int8_t* ahead = w + Panels * PANEL * padded;
    for (int64_t t = 0; t < tokens; t += TILE) {
        auto multiply = [&](auto rows) {
            multiply_tile<rows, Panels>(tiles + t * padded, w, ahead, padded, start, sums + t * STRIP, STRIP);
        };
        if (TILE_PANELS == 1 || tokens - t > 8) multiply(std::integral_constant<int, TILE>());
        else if constexpr (TILE_PANELS > 1) {  // short tiles are compiled for this case alone
            if (tokens - t > 4) multiply(std::integral_constant<int, 8>());
            else multiply(std::integral_constant<int, 4>());
        }
        ahead += padded / DEPTH * CACHE_LINE;
    }
}

// Multiply `tokens` tokens, in tiles, with the channels from `first` up to `last`, a multiple of PANEL unless it is the
// last. `finish(sums, channel, count)` takes the sums [tokens, STRIP] of `count` channels; bias [channels] may be null.
template <class Finish>
inline void multiply_panels(
    const PackedPanels& weights, const int8_t* tiles, int64_t tokens, const int32_t* bias, int64_t first, int64_t last,
    Finish finish) {
    static thread_local Scratch buffer;
    const int64_t padded = weights.padded();
    int32_t* sums = buffer.get<int32_t>(round_up(tokens, TILE) * STRIP);
    for (int64_t strip = first; strip < last; strip += STRIP) {
        const int64_t count = std::min(last - strip, STRIP), panels = (count + PANEL - 1) / PANEL;
        alignas(64) int32_t start[STRIP];
        std::memcpy(start, weights.offset + strip, panels * PANEL * sizeof(*start));
        for (int64_t c = 0; bias && c < count; ++c)
            start[c] = int32_t(uint32_t(start[c]) + uint32_t(bias[strip + c]));  // sums are modulo 2^32
        for (int64_t p = 0; p < panels; p += TILE_PANELS) {
            const int64_t c = p * PANEL;
            const int8_t* w = weights.panel(strip + c);
            if (panels - p >= TILE_PANELS) multiply_tiles<TILE_PANELS>(tiles, w, tokens, padded, start + c, sums + c);
            else multiply_tiles<1>(tiles, w, tokens, padded, start + c, sums + c);
        }
        finish(sums, strip, count);
    }
}
