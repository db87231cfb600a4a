// Attention of many requests over a paged KV cache, as defined by `smelt.kernels.paged`.
//
// Queries that share keys (some tokens of a request, all query heads of a KV head) are computed together. Keys are
// processed in spans of fixed size and merged in order, so that results do not depend on the rest of the batch.
#pragma once

#include <vector>

#include "kv_rows.h"

struct AttentionMetadata {
    int64_t requests;
    const int32_t *cu_seqlens_q, *seq_lens, *block_tables;  // [requests + 1], [requests], [requests, table_stride]
    int64_t table_stride;
    // With per-cluster pages (otherwise null): the row of each request in block_tables, which is [slots, clusters, max
    // blocks] then; and tokens each cluster keeps minus tokens of the sequence, [slots, clusters].
    const int64_t* request_slots;
    const int32_t* seq_len_offsets;
    int64_t cluster_stride, offset_stride;
};

struct Attention {
    int64_t heads, kv_heads, head_dim, block_size;  // block_size: tokens per page
    int64_t query_stride, window;  // values between the queries of two tokens; sliding window, 0 for none
    float scale;
    DType dtype;        // of queries and results
    int32_t page_type;  // DType, or a quantized row type
    const void *queries, *key_pages, *value_pages;
    void* results;                              // [tokens, heads, head_dim]
    const int64_t *head_cluster, *head_column;  // of each KV head, with per-cluster pages
    int64_t heads_per_page;                     // heads of a cluster; 0: pages of a layer
    int64_t half_dim, row_bytes;                // of quantized rows
    const float* sinks;  // a score of each head without a value, or null

    RowShape rows() const { return {head_dim, half_dim, row_bytes}; }
};

// For one head of a request: its row of block_tables, its seq_len offset, and where its keys are in pages viewed as
// rows of `head_dim`.
struct HeadPages {
    const int32_t* table;
    int64_t seq_len_offset, block_rows, token_rows, first_row;
};

inline HeadPages head_pages(const Attention& a, const AttentionMetadata& p, int64_t request, int64_t head) {
    if (!a.heads_per_page)
        return {p.block_tables + request * p.table_stride, 0, a.block_size * a.kv_heads, a.kv_heads, head};
    const int64_t slot = p.request_slots[request], cluster = a.head_cluster[head];
    const int32_t* table = p.block_tables + slot * p.table_stride + cluster * p.cluster_stride;
    const int64_t offset = p.seq_len_offsets[slot * p.offset_stride + cluster];
    return {table, offset, a.heads_per_page * a.block_size, 1, a.head_column[head] * a.block_size};
}

constexpr int64_t SPAN = 256, MAX_QUERIES = 16;  // keys per span; queries computed together
constexpr int KEYS = SMELT_AVX512 ? 16 : 4;      // keys scored at once, limited by the number of registers

struct Partial {  // of one query: max score, sum of softmax weights, weighted values
    float max_score, sum;
    float values[MAX_HEAD_DIM];
};

struct Job {  // some tokens of a request, one KV head
    int64_t request, head, first, count;
};

// Compute the row indices of the keys of a span.
inline void key_row_indices(const HeadPages& h, int64_t block_size, int64_t begin, int64_t end, int64_t* rows) {
    int64_t page = begin / block_size, offset = begin % block_size;
    for (int64_t key = begin; key < end; ++key) {
        rows[key - begin] = int64_t(h.table[page]) * h.block_rows + offset * h.token_rows + h.first_row;
        if (++offset == block_size) offset = 0, ++page;
    }
}

// Dot products of a query with 16 keys, or with the first `num_keys` of them: scores [16].
template <int32_t PageType, bool All>
inline void score_sixteen(
    const Attention& a, const int64_t* key_rows, int64_t num_keys, const float* query, float* scores) {
    const RowShape shape = a.rows();
    for (int first = 0; first < LANES; first += KEYS) {
        F32x16 dots[KEYS];
        float zeros[KEYS] = {};
        unroll<KEYS>([&](auto key) SMELT_INLINE {
            dots[key] = zero<float>();
            if (is_packed<PageType>() && (All || first + key < num_keys))
                zeros[key] = row_zero<PageType>(a.key_pages, shape, key_rows[first + key]);
        });
        for_blocks(a.head_dim, [&](int64_t k, int64_t lanes) SMELT_INLINE {
            const F32x16 q = load(query + k);
            unroll<KEYS>([&](auto key) SMELT_INLINE {
                if (!All && first + key >= num_keys) return;
                const F32x16 keys = load_row<PageType>(a.key_pages, shape, key_rows[first + key], k, lanes, zeros[key]);
                dots[key] = mul_add(q, keys, dots[key]);
            });
        });
        unroll<KEYS / 4>([&](auto i) SMELT_INLINE {
            sum_lanes(dots[4 * i], dots[4 * i + 1], dots[4 * i + 2], dots[4 * i + 3], scores + first + 4 * i);
        });
    }
    for (int key = 0; is_packed<PageType>() && key < LANES && (All || key < num_keys); ++key)
        scores[key] *= row_scale<PageType>(a.key_pages, shape, key_rows[key]);
}

// Compute scores [rows, SPAN] of each query with the keys of a span.
template <int32_t PageType>
inline void score_keys(
    const Attention& a, const int64_t* key_rows, int64_t keys, const float* queries, int64_t rows, float* scores) {
    const int64_t padded = round_up(a.head_dim, LANES);
    for (int64_t key = 0; key < keys; key += LANES)
        for (int64_t row = 0; row < rows; ++row) {
            const float* query = queries + row * padded;
            float* sixteen = scores + row * SPAN + key;
            if (keys - key >= LANES) score_sixteen<PageType, true>(a, key_rows + key, LANES, query, sixteen);
            else score_sixteen<PageType, false>(a, key_rows + key, keys - key, query, sixteen);
        }
}

// Convert the scores of one query to softmax weights; keys low..high of the span are visible, others get 0. The visible
// ones of a query may all be before the span, or behind it.
inline void softmax_weights(float* scores, int64_t keys, int64_t low, int64_t high, Partial& out) {
    const int64_t padded = round_up(keys, LANES);
    for (int64_t key = 0; key < std::min(low, padded); ++key) scores[key] = -INFINITY;
    for (int64_t key = std::max(high, int64_t(0)); key < padded; ++key) scores[key] = -INFINITY;
    F32x16 max_scores = broadcast(-INFINITY), sum = zero<float>();
    for (int64_t key = 0; key < padded; key += LANES) max_scores = max(max_scores, load(scores + key));
    out.max_score = reduce_max(max_scores);
    const F32x16 max_score = broadcast(out.max_score == -INFINITY ? 0.0f : out.max_score);
    for (int64_t key = 0; key < padded; key += LANES) {
        const F32x16 weight = exp(load(scores + key) - max_score);
        store(weight, scores + key);
        sum = sum + weight;
    }
    out.sum = reduce_add(sum);
}

// Accumulate the weighted values of a span for `Rows` queries from `first` on.
template <int32_t PageType, int Rows>
inline void accumulate_rows(
    const Attention& a, const int64_t* key_rows, const float* zeros, int64_t keys, const float* weights, int64_t first,
    Partial* partial) {
    const RowShape shape = a.rows();
    for_blocks(a.head_dim, [&](int64_t k, int64_t lanes) SMELT_INLINE {
        F32x16 total[Rows];
        unroll<Rows>([&](auto row) SMELT_INLINE { total[row] = zero<float>(); });
        for (int64_t key = 0; key < keys; ++key) {
            const F32x16 values = load_row<PageType>(a.value_pages, shape, key_rows[key], k, lanes, zeros[key]);
            unroll<Rows>([&](auto row) SMELT_INLINE {
                total[row] = mul_add(broadcast(weights[(first + row) * SPAN + key]), values, total[row]);
            });
        }
        unroll<Rows>([&](auto row) SMELT_INLINE { store(total[row], partial[first + row].values + k); });
    });
}

// Scales of quantized values are folded into the weights, which are not used afterward.
template <int32_t PageType>
inline void accumulate_values(
    const Attention& a, const int64_t* key_rows, int64_t keys, float* weights, int64_t rows, Partial* partial) {
    float zeros[SPAN] = {};
    if (is_packed<PageType>())
        for (int64_t key = 0; key < keys; ++key) {
            const float scale = row_scale<PageType>(a.value_pages, a.rows(), key_rows[key]);
            zeros[key] = row_zero<PageType>(a.value_pages, a.rows(), key_rows[key]);
            for (int64_t row = 0; row < rows; ++row) weights[row * SPAN + key] *= scale;
        }
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) accumulate_rows<PageType, 4>(a, key_rows, zeros, keys, weights, row, partial);
    for (; row + 3 <= rows; row += 3) accumulate_rows<PageType, 3>(a, key_rows, zeros, keys, weights, row, partial);
    for (; row < rows; ++row) accumulate_rows<PageType, 1>(a, key_rows, zeros, keys, weights, row, partial);
}

// Merge one span into the running result.
inline void merge_partial(Partial& running, const Partial& next, int64_t head_dim) {
    if (next.max_score == -INFINITY) return;
    const float max_score = running.max_score > next.max_score ? running.max_score : next.max_score;
    const float alpha = running.max_score == -INFINITY ? 0.0f : std::exp(running.max_score - max_score),
                beta = std::exp(next.max_score - max_score);
    running.max_score = max_score;
    running.sum = running.sum * alpha + next.sum * beta;
    for (int64_t k = 0; k < head_dim; ++k) running.values[k] = running.values[k] * alpha + next.values[k] * beta;
}

struct JobBuffers {           // per thread
    float *queries, *scores;  // [MAX_QUERIES, padded], [MAX_QUERIES, SPAN]
    Partial *running, *next;  // [MAX_QUERIES] each
};

inline JobBuffers job_buffers(int64_t padded) {
    static thread_local Scratch queries, scores, partial;
    Partial* both = partial.get<Partial>(2 * MAX_QUERIES);
    return {queries.get<float>(MAX_QUERIES * padded), scores.get<float>(MAX_QUERIES * SPAN), both, both + MAX_QUERIES};
}

inline void load_queries(const Attention& a, const Job& job, int64_t token, float* queries) {
    const int64_t group = a.heads / a.kv_heads, padded = round_up(a.head_dim, LANES);
    for (int64_t row = 0; row < job.count * group; ++row)
        for (int64_t k = 0; k < a.head_dim; k += LANES) {
            const int64_t head = job.head * group + row % group,
                          offset = (token + row / group) * a.query_stride + head * a.head_dim + k;
            const F32x16 values = load_floats(a.queries, a.dtype, offset, a.head_dim - k);
            store(values * broadcast(a.scale), queries + row * padded + k);
        }
}

// The sum of softmax weights relative to the max score, with that of the sink.
inline float softmax_sum(const Partial& partial, float sink) {
    return partial.sum + std::exp(sink - partial.max_score);
}

inline void store_results(const Attention& a, const Job& job, int64_t token, const Partial* partial) {
    const int64_t group = a.heads / a.kv_heads;
    for (int64_t row = 0; row < job.count * group; ++row) {
        const int64_t head = job.head * group + row % group,
                      offset = ((token + row / group) * a.heads + head) * a.head_dim;
        const F32x16 inv_sum = broadcast(1.0f / softmax_sum(partial[row], a.sinks ? a.sinks[head] : -INFINITY));
        for (int64_t k = 0; k < a.head_dim; k += LANES)
            store_floats(
                a.results, a.dtype, offset + k, load(partial[row].values + k) * inv_sum, a.head_dim - k);
    }
}

template <int32_t PageType>
inline void attend_tile(const Attention& a, const AttentionMetadata& p, const Job& job) {
    const int64_t group = a.heads / a.kv_heads, rows = job.count * group,
                  token = p.cu_seqlens_q[job.request] + job.first;
    const JobBuffers buffers = job_buffers(round_up(a.head_dim, LANES));
    load_queries(a, job, token, buffers.queries);
    for (int64_t row = 0; row < rows; ++row) buffers.running[row] = Partial{-INFINITY, 0.0f, {}};
    const int64_t query_len = p.cu_seqlens_q[job.request + 1] - p.cu_seqlens_q[job.request];
    const HeadPages pages = head_pages(a, p, job.request, job.head);
    const int64_t seq_len = p.seq_lens[job.request] + pages.seq_len_offset;
    const int64_t first = seq_len - query_len + job.first, last = first + job.count;  // positions of the queries
    const int64_t first_visible = a.window && first >= a.window ? first - a.window + 1 : 0;
    for (int64_t begin = first_visible / SPAN * SPAN; begin < last; begin += SPAN) {
        const int64_t keys = (begin + SPAN < last ? begin + SPAN : last) - begin;
        int64_t key_rows[SPAN];
        key_row_indices(pages, a.block_size, begin, begin + keys, key_rows);
        score_keys<PageType>(a, key_rows, keys, buffers.queries, rows, buffers.scores);
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t position = first + row / group - begin;  // of the query, relative to the span
            const int64_t low = a.window ? position - a.window + 1 : 0;
            softmax_weights(buffers.scores + row * SPAN, keys, low, position + 1, buffers.next[row]);
        }
        accumulate_values<PageType>(a, key_rows, keys, buffers.scores, rows, buffers.next);
        for (int64_t row = 0; row < rows; ++row) merge_partial(buffers.running[row], buffers.next[row], a.head_dim);
    }
    store_results(a, job, token, buffers.running);
}

inline void attend(const Attention& a, const AttentionMetadata& p, int threads) {
    const int64_t group = a.heads / a.kv_heads, tokens_per_job = MAX_QUERIES / group;
    static thread_local std::vector<Job> jobs;
    jobs.clear();
    for (int64_t request = 0; request < p.requests; ++request) {
        const int64_t count = p.cu_seqlens_q[request + 1] - p.cu_seqlens_q[request];
        for (int64_t first = 0; first < count; first += tokens_per_job)
            for (int64_t head = 0; head < a.kv_heads; ++head)
                jobs.push_back({request, head, first, first + tokens_per_job < count ? tokens_per_job : count - first});
    }
    const Job* list = jobs.data();
    const int64_t num_jobs = jobs.size();
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t job = 0; job < num_jobs; ++job) switch (a.page_type) {
            case FLOAT16: attend_tile<FLOAT16>(a, p, list[job]); break;
            case BFLOAT16: attend_tile<BFLOAT16>(a, p, list[job]); break;
            case INT8_ROWS: attend_tile<INT8_ROWS>(a, p, list[job]); break;
            case FP8_ROWS: attend_tile<FP8_ROWS>(a, p, list[job]); break;
            case INT4_ROWS: attend_tile<INT4_ROWS>(a, p, list[job]); break;
            case INT3_ROWS: attend_tile<INT3_ROWS>(a, p, list[job]); break;
            default: attend_tile<FLOAT32>(a, p, list[job]);
        }
}
