// Run a network as a list of operations over preallocated buffers: one call per step.
//
// The outputs of a token depend only on its own request, not on the rest of the batch.
#include <algorithm>

#include "attention.h"
#include "dense_amx.h"

extern "C" void smelt_linear(
    const LinearPlan* plan, const void* x, void* y, int64_t tokens, int64_t max_gemv_tokens, int threads);

namespace {

enum OpType : int32_t {
    EMBED,
    ADD_RMS_NORM,
    PACKED_LINEAR,
    DENSE_LINEAR,
    RMS_NORM,
    ROPE,
    HADAMARD,
    STORE_KV,
    ATTENTION,
    ACT_AND_MUL,
    GATHER_ROWS,
    EXPERTS,
};

enum Activation : int64_t { SILU, GELU_TANH, SWIGLU_OAI };  // see `smelt.kernels.gated_activation`

// The meaning of fields depends on the op type; same layout as in `program.py`.
struct Operation {
    OpType op_type;
    DType dtype;                     // of inputs or outputs, in 16 or 32 bits
    const void *params, *x, *other;  // plan, matrix, attention, RoPE tables or experts; inputs
    const void* weight;
    void* y;
    int64_t width, x_stride, count;  // values per token; stride between tokens; heads, tokens, an activation
    float epsilon, scale;
    DType weight_type;
};

// cos and sin of all positions, [positions, head_dim] each; pairs are neighbors if `interleaved`, else halves apart.
struct Rotary {
    const float *cosines, *sines;
    int64_t rotary_dim, interleaved;
};

// The operations of expert i, from first_operation[i] to first_operation[i + 1], read `inputs` and end in `outputs`,
// which both have rows for the tokens of one expert.
struct Experts {
    int64_t count, top_k, normalize;  // normalize: the weights of a token add up to 1
    const int64_t* first_operation;
    const Operation* operations;
    const float* router_logits;  // [tokens, count]
    void* inputs;
    const void* outputs;
};

struct Step {
    int64_t tokens, num_logits;
    const int64_t *ids, *positions, *slot_mapping, *rows;  // [tokens] each, rows: [num_logits]
    AttentionMetadata metadata;
    int32_t threads;
};

int threads_for(const Step& step, int64_t work) {
    return work < 1 << 15 ? 1 : step.threads;
}

// y = x / sqrt(mean(x^2) + epsilon) * weight, or x without a weight; `values` loads x.
template <class Load>
void norm_row(const Operation& op, Load values, void* y, int64_t offset) {
    F32x16 inv_rms = broadcast(1.0f);
    if (op.weight) {
        F32x16 squares = zero<float>();
        for_blocks(op.width, [&](int64_t k, int64_t lanes) SMELT_INLINE {
            const F32x16 x = values(k, lanes);
            squares = mul_add(x, x, squares);
        });
        inv_rms = broadcast(1.0f / std::sqrt(reduce_add(squares) / op.width + op.epsilon));
    }
    for_blocks(op.width, [&](int64_t k, int64_t lanes) SMELT_INLINE {
        const F32x16 weight = op.weight ? load_floats(op.weight, op.weight_type, k, lanes) : broadcast(1.0f);
        store_floats(y, op.dtype, offset + k, values(k, lanes) * inv_rms * weight, lanes);
    });
}

void embed(const Operation& op, const Step& step) {
    float* y = static_cast<float*>(op.y);
    const F32x16 scale = broadcast(op.scale);
    for (int64_t token = 0; token < step.tokens; ++token)
        for_blocks(op.width, [&](int64_t k, int64_t lanes) SMELT_INLINE {
            const F32x16 values = load_floats(op.weight, op.weight_type, step.ids[token] * op.width + k, lanes);
            store_first(values * scale, y + token * op.width + k, lanes);
        });
}

// Add the scaled output of a layer to the hidden states, then y = norm(hidden).
void add_rms_norm(const Operation& op, const Step& step, int64_t tokens) {
    float* hidden = const_cast<float*>(static_cast<const float*>(op.x));
    const F32x16 scale = broadcast(op.scale);
#pragma omp parallel for num_threads(threads_for(step, tokens * op.width)) schedule(static)
    for (int64_t token = 0; token < tokens; ++token) {
        float* row = hidden + token * op.width;
        if (op.other)
            for_blocks(op.width, [&](int64_t k, int64_t lanes) SMELT_INLINE {
                const F32x16 residual = load_floats(op.other, op.dtype, token * op.width + k, lanes);
                store_first(mul_add(residual, scale, load_first(row + k, lanes)), row + k, lanes);
            });
        if (op.y)
            norm_row(
                op, [&](int64_t k, int64_t lanes) SMELT_INLINE { return load_first(row + k, lanes); }, op.y,
                token * op.width);
    }
}

// Normalize `count` groups of `width` values of each token in place: heads, or all of its values.
void rms_norm(const Operation& op, const Step& step) {
#pragma omp parallel for num_threads(threads_for(step, step.tokens * op.count * op.width)) schedule(static)
    for (int64_t item = 0; item < step.tokens * op.count; ++item) {
        const int64_t offset = item / op.count * op.x_stride + item % op.count * op.width;
        norm_row(
            op,
            [&](int64_t k, int64_t lanes) SMELT_INLINE { return load_floats(op.x, op.dtype, offset + k, lanes); },
            op.y, offset);
    }
}

void rotate_halves(const Operation& op, int64_t offset, int64_t half, const float* cosine, const float* sine) {
    for_blocks(half, [&](int64_t k, int64_t lanes) SMELT_INLINE {
        const F32x16 low = load_floats(op.x, op.dtype, offset + k, lanes),
                     high = load_floats(op.x, op.dtype, offset + half + k, lanes);
        const F32x16 new_low = low * load_first(cosine + k, lanes) - high * load_first(sine + k, lanes);
        const F32x16 new_high = high * load_first(cosine + half + k, lanes) + low * load_first(sine + half + k, lanes);
        store_floats(op.y, op.dtype, offset + k, new_low, lanes);
        store_floats(op.y, op.dtype, offset + half + k, new_high, lanes);
    });
}

void rotate_neighbors(const Operation& op, int64_t offset, int64_t half, const float* cosine, const float* sine) {
    alignas(64) float x[MAX_HEAD_DIM];
    for_blocks(2 * half, [&](int64_t k, int64_t lanes) SMELT_INLINE {
        store(load_floats(op.x, op.dtype, offset + k, lanes), x + k);
    });
    for (int64_t k = 0; k < 2 * half; k += 2) {
        const float even = x[k], odd = x[k + 1];
        x[k] = even * cosine[k] - odd * sine[k], x[k + 1] = odd * cosine[k + 1] + even * sine[k + 1];
    }
    for_blocks(2 * half, [&](int64_t k, int64_t lanes) SMELT_INLINE {
        store_floats(op.y, op.dtype, offset + k, load(x + k), lanes);
    });
}

// Apply RoPE to the first `rotary_dim` values of each head in place.
void apply_rope(const Operation& op, const Step& step) {
    const Rotary& rotary = *static_cast<const Rotary*>(op.params);
    const auto rotate = rotary.interleaved ? rotate_neighbors : rotate_halves;
#pragma omp parallel for num_threads(threads_for(step, step.tokens * op.count * op.width)) schedule(static)
    for (int64_t item = 0; item < step.tokens * op.count; ++item) {
        const int64_t token = item / op.count, offset = token * op.x_stride + item % op.count * op.width,
                      row = step.positions[token] * op.width;
        rotate(op, offset, rotary.rotary_dim / 2, rotary.cosines + row, rotary.sines + row);
    }
}

// Store one head of a token in its row.
void store_kv_row(const Operation& op, const Attention& a, int64_t token, int64_t head, int64_t row) {
    alignas(64) float values[MAX_HEAD_DIM];
    for_blocks(a.head_dim, [&](int64_t k, int64_t lanes) SMELT_INLINE {
        const F32x16 block = load_floats(op.x, op.dtype, token * op.x_stride + head * a.head_dim + k, lanes);
        if (a.page_type < INT8_ROWS) store_floats(op.y, op.weight_type, row * a.head_dim + k, block, lanes);
        store(block, values + k);
    });
    if (a.page_type >= INT8_ROWS) quantize_row(a.page_type, values, a.rows(), op.y, row);
}

// Append new keys or values to the per-cluster pages of each head.
void store_kv_clustered(const Operation& op, const Attention& a, const Step& step) {
    const AttentionMetadata& p = step.metadata;
    for (int64_t request = 0; request < p.requests; ++request)
        for (int64_t head = 0; head < a.kv_heads; ++head) {
            const HeadPages pages = head_pages(a, p, request, head);
            for (int64_t token = p.cu_seqlens_q[request]; token < p.cu_seqlens_q[request + 1]; ++token) {
                int64_t row;
                const int64_t position = step.positions[token] + pages.seq_len_offset;
                key_row_indices(pages, a.block_size, position, position + 1, &row);
                store_kv_row(op, a, token, head, row);
            }
        }
}

// Store new keys or values in their slots of the pages.
void store_kv(const Operation& op, const Step& step) {
    const Attention& a = *static_cast<const Attention*>(op.params);
    if (a.heads_per_page) return store_kv_clustered(op, a, step);
    for (int64_t token = 0; token < step.tokens; ++token)
        for (int64_t head = 0; step.slot_mapping[token] >= 0 && head < a.kv_heads; ++head)
            store_kv_row(op, a, token, head, step.slot_mapping[token] * a.kv_heads + head);
}

// Rotate heads of queries, keys, values or results by an orthonormal Hadamard matrix in place; `width` is a power of two.
void hadamard(const Operation& op, const Step& step) {
    const float norm = 1.0f / std::sqrt(float(op.width));
#pragma omp parallel for num_threads(threads_for(step, 8 * step.tokens * op.count * op.width)) schedule(static)
    for (int64_t item = 0; item < step.tokens * op.count; ++item) {
        alignas(64) float x[MAX_HEAD_DIM];
        const int64_t offset = item / op.count * op.x_stride + item % op.count * op.width;
        for (int64_t k = 0; k < op.width; k += LANES)
            store(load_floats(op.x, op.dtype, offset + k, op.width - k), x + k);
        for (int64_t distance = 1; distance < op.width; distance *= 2)
            for (int64_t first = 0; first < op.width; first += 2 * distance)
                for (int64_t k = first; k < first + distance; ++k) {
                    const float sum = x[k] + x[k + distance], difference = x[k] - x[k + distance];
                    x[k] = sum, x[k + distance] = difference;
                }
        for (int64_t k = 0; k < op.width; k += LANES)
            store_floats(op.y, op.dtype, offset + k, load(x + k) * broadcast(norm), op.width - k);
    }
}

// x * sigmoid(z) * up, where z depends on the activation.
template <Activation Name>
HWY_INLINE F32x16 activate(const Operation& op, F32x16 x, F32x16 up) {
    F32x16 z = x;
    if constexpr (Name == GELU_TANH) {  // 0.5 * (1 + tanh(u)) is sigmoid(2 * u)
        const float two_sqrt_2_over_pi = 1.5957691216057308f;
        z = mul_add(x * x * x, broadcast(0.044715f), x) * broadcast(two_sqrt_2_over_pi);
    }
    if constexpr (Name == SWIGLU_OAI) {
        const F32x16 limit = broadcast(op.epsilon);
        x = min(x, limit);
        z = x * broadcast(op.scale);
        up = min(max(up, zero<float>() - limit), limit) + broadcast(1.0f);
    }
    return x / (broadcast(1.0f) + exp(zero<float>() - z)) * up;
}

// y = activation(gate) * up, with gate and up concatenated; `epsilon` and `scale` are the limit and alpha of SWIGLU_OAI.
template <Activation Name>
void act_and_mul(const Operation& op, const Step& step) {
#pragma omp parallel for num_threads(threads_for(step, 4 * step.tokens * op.width)) schedule(static)
    for (int64_t token = 0; token < step.tokens; ++token)
        for_blocks(op.width, [&](int64_t k, int64_t lanes) SMELT_INLINE {
            const F32x16 gate = load_floats(op.x, op.dtype, token * op.x_stride + k, lanes),
                         up = load_floats(op.other, op.dtype, token * op.x_stride + k, lanes);
            store_floats(op.y, op.dtype, token * op.width + k, activate<Name>(op, gate, up), lanes);
        });
}

// Gather the hidden states of the tokens that need logits.
void gather_rows(const Operation& op, const Step& step) {
    const float* x = static_cast<const float*>(op.x);
    for (int64_t row = 0; row < step.num_logits; ++row)
        std::memcpy(
            static_cast<float*>(op.y) + row * op.width, x + step.rows[row] * op.width, op.width * sizeof(float));
}

struct Route {
    int64_t token, expert;
    float weight;
};

// Choose the experts of each token: softmax of the router's logits, then the largest.
void route(const Experts& experts, int64_t tokens, std::vector<Route>& routes) {
    std::vector<float> weights(experts.count);
    for (int64_t token = 0; token < tokens; ++token) {
        const float* logits = experts.router_logits + token * experts.count;
        const float max_logit = *std::max_element(logits, logits + experts.count);
        float sum = 0.0f, chosen_sum = 0.0f;
        for (int64_t expert = 0; expert < experts.count; ++expert)
            sum += weights[expert] = std::exp(logits[expert] - max_logit);
        const size_t first = routes.size();
        for (int64_t choice = 0; choice < experts.top_k; ++choice) {
            const auto largest = std::max_element(weights.begin(), weights.end());
            routes.push_back({token, largest - weights.begin(), *largest});
            chosen_sum += *largest;
            *largest = -1.0f;
        }
        for (size_t i = first; i < routes.size(); ++i) routes[i].weight /= experts.normalize ? chosen_sum : sum;
    }
    std::stable_sort(
        routes.begin(), routes.end(), [](const Route& a, const Route& b) { return a.expert < b.expert; });
}

void run(const Operation& op, const Step& step);

// Add the weighted outputs of each token's experts to the hidden states y.
void run_experts(const Operation& op, const Step& step) {
    const Experts& experts = *static_cast<const Experts*>(op.params);
    static thread_local std::vector<Route> routes;
    routes.clear();
    route(experts, step.tokens, routes);
    float* hidden = static_cast<float*>(op.y);
    for (size_t first = 0, last; first < routes.size(); first = last) {
        const int64_t expert = routes[first].expert;
        for (last = first; last < routes.size() && routes[last].expert == expert;) ++last;
        Step part = step;
        part.tokens = last - first;
        const Route* chosen = routes.data() + first;
        for (int64_t row = 0; row < part.tokens; ++row)
            for_blocks(op.width, [&](int64_t k, int64_t lanes) SMELT_INLINE {
                const F32x16 x = load_floats(op.x, op.dtype, chosen[row].token * op.width + k, lanes);
                store_floats(experts.inputs, op.dtype, row * op.width + k, x, lanes);
            });
        for (int64_t i = experts.first_operation[expert]; i < experts.first_operation[expert + 1]; ++i)
            run(experts.operations[i], part);
        for (int64_t row = 0; row < part.tokens; ++row) {
            float* y = hidden + chosen[row].token * op.width;
            for_blocks(op.width, [&](int64_t k, int64_t lanes) SMELT_INLINE {
                const F32x16 output = load_floats(experts.outputs, op.dtype, row * op.width + k, lanes);
                store_first(mul_add(output, broadcast(chosen[row].weight), load_first(y + k, lanes)), y + k, lanes);
            });
        }
    }
}

void run(const Operation& op, const Step& step) {
    // After GATHER_ROWS: only tokens that need logits.
    const int64_t tokens = op.count < 0 ? step.num_logits : step.tokens;
    switch (op.op_type) {
        case EMBED: return embed(op, step);
        case ADD_RMS_NORM: return add_rms_norm(op, step, tokens);
        case PACKED_LINEAR: {
            const LinearPlan* plan = static_cast<const LinearPlan*>(op.params);
            return smelt_linear(
                plan, op.x, op.y, tokens, op.width, threads_for(step, plan->rows * plan->columns * tokens));
        }
        case DENSE_LINEAR: {
            const DenseMatrix* matrix = static_cast<const DenseMatrix*>(op.params);
            const int threads = threads_for(step, matrix->rows * matrix->columns * tokens);
#ifdef SMELT_TILES
            if (has_dense_tiles(*matrix, tokens)) return dense_tiles(*matrix, op.x, tokens, op.y, threads);
#endif
            return dense_product(*matrix, op.x, tokens, op.y, threads);
        }
        case RMS_NORM: return rms_norm(op, step);
        case ROPE: return apply_rope(op, step);
        case HADAMARD: return hadamard(op, step);
        case STORE_KV: return store_kv(op, step);
        case ATTENTION: {
            const Attention* attention = static_cast<const Attention*>(op.params);
            int64_t keys = 0;
            for (int64_t request = 0; request < step.metadata.requests; ++request)
                keys += step.metadata.seq_lens[request];
            return attend(*attention, step.metadata, threads_for(step, keys * attention->heads * attention->head_dim));
        }
        case ACT_AND_MUL:
            if (op.count == GELU_TANH) return act_and_mul<GELU_TANH>(op, step);
            if (op.count == SWIGLU_OAI) return act_and_mul<SWIGLU_OAI>(op, step);
            return act_and_mul<SILU>(op, step);
        case GATHER_ROWS: return gather_rows(op, step);
        case EXPERTS: return run_experts(op, step);
    }
}

}  // namespace

extern "C" {

// Sizes of the structures, so that callers can check their layout.
int64_t smelt_program_sizes(int which) {
    const int64_t sizes[] = {sizeof(Operation), sizeof(Step),   sizeof(DenseMatrix),
                             sizeof(Attention), sizeof(Rotary), sizeof(Experts)};
    return sizes[which];
}

void smelt_run(const void* operations, int64_t count, const void* step) {
    const Operation* list = static_cast<const Operation*>(operations);
    for (int64_t index = 0; index < count; ++index) run(list[index], *static_cast<const Step*>(step));
}

void smelt_attend(const void* attention, const void* pages, int threads) {
    attend(*static_cast<const Attention*>(attention), *static_cast<const AttentionMetadata*>(pages), threads);
}
}
