// Attention of many requests over a paged KV cache, as defined by `smelt.kernels.paged`.
//
// Queries that share keys (some tokens of a request, all query heads of a KV head) are computed together. Keys are
// processed in spans of fixed size and merged in order, so that results do not depend on the rest of the batch.
#pragma once

#include <vector>

#include "kv_rows.h"

#ifdef SMELT_LANES
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

struct Partial {  // of one query: max score, sum of softmax weights, weighted values
    float max_score, sum;
    float values[MAX_HEAD_DIM];
};

struct Job {  // some tokens of a request, one KV head
    int64_t request, head, first, count;
};

// Sum the lanes of each of 16 registers, in order.
inline __m512 sum_sixteen(const __m512* r) {
    __m512 pairs[8], fours[4];
    for (int i = 0; i < 8; ++i)
        pairs[i] =
            _mm512_add_ps(_mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]), _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]));
    for (int i = 0; i < 4; ++i)
        fours[i] = _mm512_add_ps(
            _mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0x44),
            _mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0xee));
    const __m512 low =
        _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x88), _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
    const __m512 high =
        _mm512_add_ps(_mm512_shuffle_f32x4(fours[2], fours[3], 0x88), _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

// Compute the row indices of the keys of a span.
inline void key_row_indices(const HeadPages& h, int64_t block_size, int64_t begin, int64_t end, int64_t* rows) {
    int64_t page = begin / block_size, offset = begin % block_size;
    for (int64_t key = begin; key < end; ++key) {
        rows[key - begin] = int64_t(h.table[page]) * h.block_rows + offset * h.token_rows + h.first_row;
        if (++offset == block_size) offset = 0, ++page;
    }
}

// Dot products of a query with 16 keys, or with the first `num_keys` of them.
template <int32_t PageType, bool All>
inline __m512 score_sixteen(const Attention& a, const int64_t* key_rows, int64_t num_keys, const float* query) {
    const RowShape shape = a.rows();
    __m512 dots[16];
    float zeros[16] = {}, scales[16] = {};
    for (auto& acc : dots) acc = _mm512_setzero_ps();
    if (is_packed<PageType>())
        for (int key = 0; key < 16; ++key)
            if (All || key < num_keys) {
                zeros[key] = row_zero<PageType>(a.key_pages, shape, key_rows[key]);
                scales[key] = row_scale<PageType>(a.key_pages, shape, key_rows[key]);
            }
    for (int64_t k = 0; k < a.head_dim; k += 16) {
        const __mmask16 valid = first_lanes(a.head_dim - k);
        const __m512 q = _mm512_load_ps(query + k);
        for (int key = 0; key < 16; ++key)
            if (All || key < num_keys)
                dots[key] = _mm512_fmadd_ps(
                    q, load_row<PageType>(a.key_pages, shape, key_rows[key], k, valid, zeros[key]), dots[key]);
    }
    const __m512 dots_sum = sum_sixteen(dots);
    return is_packed<PageType>() ? _mm512_mul_ps(dots_sum, _mm512_loadu_ps(scales)) : dots_sum;
}

// Compute scores [rows, SPAN] of each query with the keys of a span.
template <int32_t PageType>
inline void score_keys(
    const Attention& a, const int64_t* key_rows, int64_t keys, const float* queries, int64_t rows, float* scores) {
    const int64_t padded = round_up(a.head_dim, 16);
    for (int64_t key = 0; key < keys; key += 16)
        for (int64_t row = 0; row < rows; ++row) {
            const float* query = queries + row * padded;
            const __m512 dots_sum = keys - key >= 16
                                        ? score_sixteen<PageType, true>(a, key_rows + key, 16, query)
                                        : score_sixteen<PageType, false>(a, key_rows + key, keys - key, query);
            _mm512_storeu_ps(scores + row * SPAN + key, dots_sum);
        }
}

// Convert the scores of one query to softmax weights; keys low..high of the span are visible, others get 0.
inline void softmax_weights(float* scores, int64_t keys, int64_t low, int64_t high, Partial& out) {
    const __m512 minus_infinity = _mm512_set1_ps(-INFINITY);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 max_scores = minus_infinity, sum = _mm512_setzero_ps();
    for (int64_t key = 0; key < keys; key += 16) {
        const __m512i key_index = _mm512_add_epi32(lanes, _mm512_set1_epi32(int(key)));
        const __mmask16 visible = _mm512_cmpge_epi32_mask(key_index, _mm512_set1_epi32(int(low))) &
                                  _mm512_cmplt_epi32_mask(key_index, _mm512_set1_epi32(int(high)));
        const __m512 score = _mm512_mask_loadu_ps(minus_infinity, visible, scores + key);
        _mm512_storeu_ps(scores + key, score);
        max_scores = _mm512_max_ps(max_scores, score);
    }
    out.max_score = _mm512_reduce_max_ps(max_scores);
    const __m512 max_score = _mm512_set1_ps(out.max_score == -INFINITY ? 0.0f : out.max_score);
    for (int64_t key = 0; key < keys; key += 16) {
        const __m512 weight = exp_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + key), max_score));
        _mm512_storeu_ps(scores + key, weight);
        sum = _mm512_add_ps(sum, weight);
    }
    out.sum = _mm512_reduce_add_ps(sum);
}

// Accumulate the weighted values of a span for `Rows` queries from `first` on.
template <int32_t PageType, int Rows>
inline void accumulate_rows(
    const Attention& a, const int64_t* key_rows, const float* zeros, int64_t keys, const float* weights, int64_t first,
    Partial* partial) {
    const RowShape shape = a.rows();
    for (int64_t k = 0; k < a.head_dim; k += 16) {
        const __mmask16 valid = first_lanes(a.head_dim - k);
        __m512 total[Rows];
        for (auto& acc : total) acc = _mm512_setzero_ps();
        for (int64_t key = 0; key < keys; ++key) {
            const __m512 values = load_row<PageType>(a.value_pages, shape, key_rows[key], k, valid, zeros[key]);
            for (int row = 0; row < Rows; ++row)
                total[row] = _mm512_fmadd_ps(_mm512_set1_ps(weights[(first + row) * SPAN + key]), values, total[row]);
        }
        for (int row = 0; row < Rows; ++row) _mm512_storeu_ps(partial[first + row].values + k, total[row]);
    }
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
    const int64_t group = a.heads / a.kv_heads, padded = round_up(a.head_dim, 16);
    for (int64_t row = 0; row < job.count * group; ++row)
        for (int64_t k = 0; k < a.head_dim; k += 16) {
            const int64_t head = job.head * group + row % group,
                          offset = (token + row / group) * a.query_stride + head * a.head_dim + k;
            const __m512 values = load_floats(a.queries, a.dtype, offset, first_lanes(a.head_dim - k));
            _mm512_store_ps(queries + row * padded + k, _mm512_mul_ps(values, _mm512_set1_ps(a.scale)));
        }
}

inline void store_results(const Attention& a, const Job& job, int64_t token, const Partial* partial) {
    const int64_t group = a.heads / a.kv_heads;
    for (int64_t row = 0; row < job.count * group; ++row) {
        const int64_t offset = ((token + row / group) * a.heads + job.head * group + row % group) * a.head_dim;
        const __m512 inv_sum = _mm512_set1_ps(1.0f / partial[row].sum);
        for (int64_t k = 0; k < a.head_dim; k += 16)
            store_floats(
                a.results, a.dtype, offset + k, _mm512_mul_ps(_mm512_loadu_ps(partial[row].values + k), inv_sum),
                first_lanes(a.head_dim - k));
    }
}

template <int32_t PageType>
inline void attend_tile(const Attention& a, const AttentionMetadata& p, const Job& job) {
    const int64_t group = a.heads / a.kv_heads, rows = job.count * group,
                  token = p.cu_seqlens_q[job.request] + job.first;
    const JobBuffers buffers = job_buffers(round_up(a.head_dim, 16));
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
            default: attend_tile<FLOAT32>(a, p, list[job]);
        }
}
#endif
