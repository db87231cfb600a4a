// Attention of the tokens of many requests over pages of keys and values, as `smelt.kernels.paged` defines it.
//
// The queries that share keys (some tokens of a request, all heads of a group) are computed together. Keys are taken in
// spans of a fixed number, whose results are merged in order: what a query gets depends on nothing beside it.
#pragma once

#include <vector>

#include "page_rows.h"

#ifdef SMELT_LANES
struct Pages {
    int64_t requests;
    const int32_t *starts, *lengths, *tables;  // [requests + 1], [requests], [requests, table_stride]
    int64_t table_stride;
    // Where clusters of heads have pages of their own (otherwise null): a request's row of the tables, which are [rows,
    // clusters, most pages] then; and how many tokens each cluster holds less than the text has, [rows, clusters].
    const int64_t* slots;
    const int32_t* shifts;
    int64_t cluster_stride, shift_stride;
};

struct Attention {
    int64_t heads, kv_heads, width, size;  // of queries, of keys; of a head; tokens a page
    int64_t query_stride, window;          // numbers between the queries of two tokens; positions seen, 0 for all
    float scale;
    Number type;             // of queries and results
    int32_t page_type;       // a number, or a kind of rows
    const void *queries, *key_pages, *value_pages;
    void* results;  // [tokens, heads, width]
    const int64_t *cluster, *column;  // of each head of keys, where pages belong to clusters
    int64_t columns;                  // heads of such a page
    int64_t half, row_bytes;          // where rows are packed

    RowShape rows() const { return {width, half, row_bytes}; }
};

// Of one head of a request: its table, how many tokens it holds less than the text has, and where its keys lie in the
// pages seen as rows of `width`.
struct HeadPages {
    const int32_t* table;
    int64_t shift, block_rows, token_rows, first_row;
};

inline HeadPages head_pages(const Attention& a, const Pages& p, int64_t request, int64_t head) {
    if (!a.columns) return {p.tables + request * p.table_stride, 0, a.size * a.kv_heads, a.kv_heads, head};
    const int64_t slot = p.slots[request], cluster = a.cluster[head];
    return {p.tables + slot * p.table_stride + cluster * p.cluster_stride, p.shifts[slot * p.shift_stride + cluster],
            a.columns * a.size, 1, a.column[head] * a.size};
}

constexpr int64_t SPAN = 256, MOST_QUERIES = 16;  // keys a span; queries together

struct Partial {  // of one query: the largest score, the sum of the weights, the weighted values
    float largest, sum;
    float values[MOST_WIDTH];
};

struct Job {  // some tokens of a request, one head of keys
    int64_t request, head, first, count;
};

// The sums of the lanes of sixteen registers, in their order.
inline __m512 sum_sixteen(const __m512* r) {
    __m512 pairs[8], fours[4];
    for (int i = 0; i < 8; ++i)
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]), _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]));
    for (int i = 0; i < 4; ++i)
        fours[i] = _mm512_add_ps(
            _mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0x44), _mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0xee));
    const __m512 low = _mm512_add_ps(
        _mm512_shuffle_f32x4(fours[0], fours[1], 0x88), _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
    const __m512 high = _mm512_add_ps(
        _mm512_shuffle_f32x4(fours[2], fours[3], 0x88), _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

// Where the keys of a span lie: rows of pages seen as [keys and heads, width].
inline void rows_of_keys(const HeadPages& h, int64_t size, int64_t begin, int64_t end, int64_t* rows) {
    int64_t page = begin / size, offset = begin % size;
    for (int64_t key = begin; key < end; ++key) {
        rows[key - begin] = int64_t(h.table[page]) * h.block_rows + offset * h.token_rows + h.first_row;
        if (++offset == size) offset = 0, ++page;
    }
}

// The products of a query with sixteen keys, or with the first `here` of them.
template <int32_t Pages, bool All>
inline __m512 score_sixteen(const Attention& a, const int64_t* key_rows, int64_t here, const float* query) {
    const RowShape shape = a.rows();
    __m512 dots[16];
    float zeros[16] = {}, scales[16] = {};
    for (auto& one : dots) one = _mm512_setzero_ps();
    if (is_packed<Pages>())
        for (int one = 0; one < 16; ++one)
            if (All || one < here) {
                zeros[one] = row_zero<Pages>(a.key_pages, shape, key_rows[one]);
                scales[one] = row_scale<Pages>(a.key_pages, shape, key_rows[one]);
            }
    for (int64_t k = 0; k < a.width; k += 16) {
        const __mmask16 there = first_lanes(a.width - k);
        const __m512 part = _mm512_load_ps(query + k);
        for (int one = 0; one < 16; ++one)
            if (All || one < here)
                dots[one] = _mm512_fmadd_ps(
                    part, load_row<Pages>(a.key_pages, shape, key_rows[one], k, there, zeros[one]), dots[one]);
    }
    const __m512 found = sum_sixteen(dots);
    return is_packed<Pages>() ? _mm512_mul_ps(found, _mm512_loadu_ps(scales)) : found;
}

// Of each query with the keys of a span: scores [rows, SPAN].
template <int32_t Pages>
inline void score_keys(
    const Attention& a, const int64_t* key_rows, int64_t keys, const float* queries, int64_t rows, float* scores) {
    const int64_t padded = round_up(a.width, 16);
    for (int64_t key = 0; key < keys; key += 16)
        for (int64_t row = 0; row < rows; ++row) {
            const float* query = queries + row * padded;
            const __m512 found = keys - key >= 16
                                     ? score_sixteen<Pages, true>(a, key_rows + key, 16, query)
                                     : score_sixteen<Pages, false>(a, key_rows + key, keys - key, query);
            _mm512_storeu_ps(scores + row * SPAN + key, found);
        }
}

// Scores of one query become weights; those of keys low..high of the span are seen, the others weigh nothing.
inline void weigh(float* scores, int64_t keys, int64_t low, int64_t high, Partial& out) {
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 most = nothing, sum = _mm512_setzero_ps();
    for (int64_t key = 0; key < keys; key += 16) {
        const __m512i place = _mm512_add_epi32(lanes, _mm512_set1_epi32(int(key)));
        const __mmask16 seen = _mm512_cmpge_epi32_mask(place, _mm512_set1_epi32(int(low))) &
                               _mm512_cmplt_epi32_mask(place, _mm512_set1_epi32(int(high)));
        const __m512 score = _mm512_mask_loadu_ps(nothing, seen, scores + key);
        _mm512_storeu_ps(scores + key, score);
        most = _mm512_max_ps(most, score);
    }
    out.largest = _mm512_reduce_max_ps(most);
    const __m512 largest = _mm512_set1_ps(out.largest == -INFINITY ? 0.0f : out.largest);
    for (int64_t key = 0; key < keys; key += 16) {
        const __m512 weight = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + key), largest));
        _mm512_storeu_ps(scores + key, weight);
        sum = _mm512_add_ps(sum, weight);
    }
    out.sum = _mm512_reduce_add_ps(sum);
}

// The values of a span, weighted, for `Rows` queries from `first` on.
template <int32_t Pages, int Rows>
inline void mix_rows(
    const Attention& a, const int64_t* key_rows, const float* zeros, int64_t keys, const float* weights, int64_t first,
    Partial* partial) {
    const RowShape shape = a.rows();
    for (int64_t k = 0; k < a.width; k += 16) {
        const __mmask16 there = first_lanes(a.width - k);
        __m512 total[Rows];
        for (auto& one : total) one = _mm512_setzero_ps();
        for (int64_t key = 0; key < keys; ++key) {
            const __m512 values = load_row<Pages>(a.value_pages, shape, key_rows[key], k, there, zeros[key]);
            for (int row = 0; row < Rows; ++row)
                total[row] = _mm512_fmadd_ps(_mm512_set1_ps(weights[(first + row) * SPAN + key]), values, total[row]);
        }
        for (int row = 0; row < Rows; ++row) _mm512_storeu_ps(partial[first + row].values + k, total[row]);
    }
}

// Of packed values the scales go into the weights, which nobody needs after this.
template <int32_t Pages>
inline void mix_values(
    const Attention& a, const int64_t* key_rows, int64_t keys, float* weights, int64_t rows, Partial* partial) {
    float zeros[SPAN] = {};
    if (is_packed<Pages>())
        for (int64_t key = 0; key < keys; ++key) {
            const float scale = row_scale<Pages>(a.value_pages, a.rows(), key_rows[key]);
            zeros[key] = row_zero<Pages>(a.value_pages, a.rows(), key_rows[key]);
            for (int64_t row = 0; row < rows; ++row) weights[row * SPAN + key] *= scale;
        }
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) mix_rows<Pages, 4>(a, key_rows, zeros, keys, weights, row, partial);
    for (; row + 3 <= rows; row += 3) mix_rows<Pages, 3>(a, key_rows, zeros, keys, weights, row, partial);
    for (; row < rows; ++row) mix_rows<Pages, 1>(a, key_rows, zeros, keys, weights, row, partial);
}

// One more span into the result so far.
inline void merge_span(Partial& so_far, const Partial& next, int64_t width) {
    if (next.largest == -INFINITY) return;
    const float largest = so_far.largest > next.largest ? so_far.largest : next.largest;
    const float mine = so_far.largest == -INFINITY ? 0.0f : std::exp(so_far.largest - largest),
                theirs = std::exp(next.largest - largest);
    so_far.largest = largest;
    so_far.sum = so_far.sum * mine + next.sum * theirs;
    for (int64_t k = 0; k < width; ++k) so_far.values[k] = so_far.values[k] * mine + next.values[k] * theirs;
}

struct JobRoom {  // of a thread
    float *queries, *scores;  // [MOST_QUERIES, padded], [MOST_QUERIES, SPAN]
    Partial *so_far, *next;   // [MOST_QUERIES] each
};

inline JobRoom job_room(int64_t padded) {
    static thread_local Scratch queries, scores, partial;
    Partial* both = partial.take<Partial>(2 * MOST_QUERIES);
    return {queries.take<float>(MOST_QUERIES * padded), scores.take<float>(MOST_QUERIES * SPAN), both, both + MOST_QUERIES};
}

inline void load_queries(const Attention& a, const Job& job, int64_t token, float* queries) {
    const int64_t group = a.heads / a.kv_heads, padded = round_up(a.width, 16);
    for (int64_t row = 0; row < job.count * group; ++row)
        for (int64_t k = 0; k < a.width; k += 16) {
            const int64_t head = job.head * group + row % group,
                          place = (token + row / group) * a.query_stride + head * a.width + k;
            const __m512 values = load_numbers(a.queries, a.type, place, first_lanes(a.width - k));
            _mm512_store_ps(queries + row * padded + k, _mm512_mul_ps(values, _mm512_set1_ps(a.scale)));
        }
}

inline void store_results(const Attention& a, const Job& job, int64_t token, const Partial* partial) {
    const int64_t group = a.heads / a.kv_heads;
    for (int64_t row = 0; row < job.count * group; ++row) {
        const int64_t place = ((token + row / group) * a.heads + job.head * group + row % group) * a.width;
        const __m512 over = _mm512_set1_ps(1.0f / partial[row].sum);
        for (int64_t k = 0; k < a.width; k += 16)
            store_numbers(
                a.results, a.type, place + k, _mm512_mul_ps(_mm512_loadu_ps(partial[row].values + k), over),
                first_lanes(a.width - k));
    }
}

template <int32_t Pages>
inline void attend_job(const Attention& a, const ::Pages& p, const Job& job) {
    const int64_t group = a.heads / a.kv_heads, rows = job.count * group, token = p.starts[job.request] + job.first;
    const JobRoom room = job_room(round_up(a.width, 16));
    load_queries(a, job, token, room.queries);
    for (int64_t row = 0; row < rows; ++row) room.so_far[row] = Partial{-INFINITY, 0.0f, {}};
    const int64_t fresh = p.starts[job.request + 1] - p.starts[job.request];
    const HeadPages own = head_pages(a, p, job.request, job.head);
    const int64_t length = p.lengths[job.request] + own.shift;
    const int64_t first = length - fresh + job.first, last = first + job.count;  // of the queries
    const int64_t seen = a.window && first >= a.window ? first - a.window + 1 : 0;
    for (int64_t begin = seen / SPAN * SPAN; begin < last; begin += SPAN) {
        const int64_t keys = (begin + SPAN < last ? begin + SPAN : last) - begin;
        int64_t key_rows[SPAN];
        rows_of_keys(own, a.size, begin, begin + keys, key_rows);
        score_keys<Pages>(a, key_rows, keys, room.queries, rows, room.scores);
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t position = first + row / group - begin;  // of the query, from the span's beginning
            weigh(room.scores + row * SPAN, keys, a.window ? position - a.window + 1 : 0, position + 1, room.next[row]);
        }
        mix_values<Pages>(a, key_rows, keys, room.scores, rows, room.next);
        for (int64_t row = 0; row < rows; ++row) merge_span(room.so_far[row], room.next[row], a.width);
    }
    store_results(a, job, token, room.so_far);
}

inline void attend(const Attention& a, const Pages& p, int threads) {
    const int64_t group = a.heads / a.kv_heads, together = MOST_QUERIES / group;
    static thread_local std::vector<Job> jobs;
    jobs.clear();
    for (int64_t request = 0; request < p.requests; ++request) {
        const int64_t count = p.starts[request + 1] - p.starts[request];
        for (int64_t first = 0; first < count; first += together)
            for (int64_t head = 0; head < a.kv_heads; ++head)
                jobs.push_back({request, head, first, first + together < count ? together : count - first});
    }
    const Job* list = jobs.data();
    const int64_t many = jobs.size();
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t job = 0; job < many; ++job) switch (a.page_type) {
            case FLOAT16: attend_job<FLOAT16>(a, p, list[job]); break;
            case BFLOAT16: attend_job<BFLOAT16>(a, p, list[job]); break;
            case INT8_ROWS: attend_job<INT8_ROWS>(a, p, list[job]); break;
            case FP8_ROWS: attend_job<FP8_ROWS>(a, p, list[job]); break;
            case INT4_ROWS: attend_job<INT4_ROWS>(a, p, list[job]); break;
            default: attend_job<FLOAT32>(a, p, list[job]);
        }
}
#endif
