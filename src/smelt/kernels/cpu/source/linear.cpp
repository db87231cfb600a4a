// Products with packed matrices on x86: x [tokens, columns] -> y [tokens, rows], both in the dtype of the plan.
// Compiled for the machine it runs on; paths that the CPU does not support fall back to the reference.
#include "amx_tiles.h"

namespace {

#ifdef SMELT_LANES
void gemv_tokens(const LinearPlan& plan, const void* x, int64_t tokens, void* y, int threads) {
    switch (plan.bits) {
        case 2: return row_product<2>(plan, x, tokens, y, threads);
        case 3: return row_product<3>(plan, x, tokens, y, threads);
        case 4: return row_product<4>(plan, x, tokens, y, threads);
        default: return row_product<8>(plan, x, tokens, y, threads);
    }
}
#endif

#ifdef SMELT_INT8
void int8_gemv_tokens(const LinearPlan& plan, const void* x, int64_t tokens, void* y, int threads) {
    switch (code_layout_of(plan)) {
        case BYTES: return int8_product<BYTES>(plan, x, tokens, y, threads);
        case NIBBLES: return int8_product<NIBBLES>(plan, x, tokens, y, threads);
        case DOUBLED: return int8_product<DOUBLED>(plan, x, tokens, y, threads);
    }
}
#endif

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
#ifdef SMELT_INT8
    return has_int8(*plan);
#else
    return (void)plan, 0;
#endif
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
#ifdef SMELT_INT8
    if (quantized_inputs) return int8_gemv_tokens(*plan, x, tokens, y, threads);
#endif
#ifdef SMELT_LANES
    if (has_lanes(*plan)) return gemv_tokens(*plan, x, tokens, y, threads);
#endif
    reference_tokens(*plan, x, tokens, y, threads);
}

void smelt_dequantize(const LinearPlan* plan, int64_t first, int64_t last, void* out, int threads) {
#ifdef SMELT_LANES
    if (has_lanes(*plan)) switch (plan->bits) {
            case 2: return dequantize_lanes<2>(*plan, first, last, out, threads);
            case 3: return dequantize_lanes<3>(*plan, first, last, out, threads);
            case 4: return dequantize_lanes<4>(*plan, first, last, out, threads);
            default: return dequantize_lanes<8>(*plan, first, last, out, threads);
        }
#endif
    dequantize_rows(*plan, first, last, out, threads);
}
}
