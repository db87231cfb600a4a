// Products with packed matrices: x [tokens, columns] -> y [tokens, rows], both in the dtype of the plan. Compiled for
// the machine it runs on; formats without vectorized code fall back to the reference.
#include "amx_tiles.h"
#include "int8_conv.h"
#include "int8_gemm.h"

namespace {

template <CodeLayout Layout>
void int8_tokens(const LinearPlan& plan, const void* x, int64_t tokens, void* y, int threads) {
    if (tokens == 1) int8_product<Layout>(plan, x, y, threads);
    else int8_gemm<Layout>(plan, x, tokens, y, threads);
}

void int8_tokens(const LinearPlan& plan, const void* x, int64_t tokens, void* y, int threads) {
    switch (code_layout_of(plan)) {
        case BYTES: return int8_tokens<BYTES>(plan, x, tokens, y, threads);
        case NIBBLES: return int8_tokens<NIBBLES>(plan, x, tokens, y, threads);
        case DOUBLED: return int8_tokens<DOUBLED>(plan, x, tokens, y, threads);
    }
}

#ifdef SMELT_TILES
constexpr int64_t MIN_SCALED_TOKENS = 24;  // from here on, scaling weights is cheaper than scaling products

template <bool Scaled>
void amx_tokens(const LinearPlan& plan, const void* x, int64_t tokens, void* y, int threads) {
    switch (plan.bits) {
        case 2: return float_tiles<2, Scaled>(plan, x, tokens, y, threads);
        case 3: return float_tiles<3, Scaled>(plan, x, tokens, y, threads);
        case 4: return float_tiles<4, Scaled>(plan, x, tokens, y, threads);
        default: return float_tiles<8, Scaled>(plan, x, tokens, y, threads);
    }
}

template <bool Half>
void int8_amx_tokens(const LinearPlan& plan, const void* x, int64_t tokens, void* y, int threads) {
    switch (code_layout_of(plan)) {
        case BYTES: return int8_tiles<BYTES, Half>(plan, x, tokens, y, threads);
        case NIBBLES: return int8_tiles<NIBBLES, Half>(plan, x, tokens, y, threads);
        case DOUBLED: return int8_tiles<DOUBLED, Half>(plan, x, tokens, y, threads);
    }
}
#endif

void reference_tokens(const LinearPlan& plan, const void* x, int64_t tokens, void* y, int threads) {
    static thread_local Scratch buffer;
    const float* inputs = static_cast<const float*>(x);
    if (plan.x_type != FLOAT32) {
        float* values = buffer.get<float>(tokens * plan.columns);
        for (int64_t k = 0; k < tokens * plan.columns; ++k) values[k] = load_float(x, plan.x_type, k);
        inputs = values;
    }
    reference_product(plan, inputs, tokens, y, threads);
}

}  // namespace

extern "C" {

// Size of a plan, so that callers can check its layout.
int64_t smelt_plan_size() {
    return sizeof(LinearPlan);
}

// Whether inputs can be quantized and multiplied in integers.
int smelt_has_int8(const LinearPlan* plan) {
    return has_int8(*plan);
}

// Whether there is vectorized code for the format; otherwise rows are dequantized one at a time.
int smelt_is_vectorized(const LinearPlan* plan) {
    return plan->inputs != FLOAT_INPUTS ? has_int8(*plan) : has_lanes(*plan);
}

// Whether there is a fast GEMM; otherwise dequantize the matrix for a dense product.
int smelt_has_gemm(const LinearPlan* plan) {
#ifdef SMELT_TILES
    if (plan->inputs != FLOAT_INPUTS) return has_int8_tiles(*plan);
    return has_float_tiles(*plan) || has_scaled_tiles(*plan);
#else
    return (void)plan, 0;
#endif
}

// `max_gemv_tokens`: largest number of tokens for GEMV.
void smelt_linear(
    const LinearPlan* plan, const void* x, void* y, int64_t tokens, int64_t max_gemv_tokens, int threads) {
    const bool quantized_inputs = plan->inputs != FLOAT_INPUTS;
#ifdef SMELT_TILES
    if (tokens > max_gemv_tokens && smelt_has_gemm(plan)) {
        const bool scaled =
            !quantized_inputs && has_scaled_tiles(*plan) && (tokens >= MIN_SCALED_TOKENS || !has_float_tiles(*plan));
        if (scaled) return amx_tokens<true>(*plan, x, tokens, y, threads);
        if (!quantized_inputs) return amx_tokens<false>(*plan, x, tokens, y, threads);
        if (plan->groups > 1 && plan->group % CHUNK) return int8_amx_tokens<true>(*plan, x, tokens, y, threads);
        return int8_amx_tokens<false>(*plan, x, tokens, y, threads);
    }
#endif
    if (quantized_inputs) return int8_tokens(*plan, x, tokens, y, threads);
    if (!has_lanes(*plan)) return reference_tokens(*plan, x, tokens, y, threads);
    with_decoder(*plan, [&](const auto& decoder) { row_product(*plan, decoder, x, tokens, y, threads); });
}

int64_t smelt_conv_plan_size() {
    return sizeof(ConvPlan);
}

// Whether there is an integer convolution with a matrix of this format.
int smelt_has_conv(const LinearPlan* plan) {
    return has_int8_conv(*plan);
}

// Convolve images in channels-last layout.
void smelt_conv(const LinearPlan* plan, const ConvPlan* conv, const void* x, void* y, int threads) {
    if (plan->bits == 4) int8_conv<NIBBLES>(*plan, *conv, x, y, threads);
    else int8_conv<BYTES>(*plan, *conv, x, y, threads);
}

void smelt_dequantize(const LinearPlan* plan, int64_t first, int64_t last, void* out, int threads) {
    if (!has_lanes(*plan)) return dequantize_rows(*plan, first, last, out, threads);
    with_decoder(*plan, [&](const auto& decoder) { dequantize_lanes(*plan, decoder, first, last, out, threads); });
}

// The instruction set that the library was compiled for, as Highway names it, such as AVX2 or NEON.
const char* smelt_simd_target() {
    return hwy::TargetName(HWY_TARGET);
}
}
