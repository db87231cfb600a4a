// Attention of one new token per request over an unquantized, paged KV cache on Hopper, for few requests: latency decides.
//
// A block attends with HEADS query heads of one KV head to a part of the keys; the SPLITS parts of a request form a
// cluster, whose blocks read each other's sums from shared memory. RoPE, the norms of queries and keys, and storing the
// new token are part of it. K and V of earlier tokens are loaded before the kernel that computes the queries has
// ended.
//
// hopper_attention.py defines HEAD_DIM, HEADS, GROUP (query heads per KV head), SPLITS, BLOCK_SIZE (tokens of a page),
// NORM, PAIR and HALF_IS_BF16.

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int LANES = HEAD_DIM / 8, KEYS = 32 / LANES;  // lanes of a key, keys of a warp
constexpr int UNROLL = HEADS > 2 ? 2 : 4;               // keys of a lane in flight
constexpr int PASS = WARPS * KEYS * UNROLL;             // keys that are loaded at a time
constexpr int STEPS = HEAD_DIM / 32;                    // values of a head in a lane, for RoPE
constexpr float LOWEST_FINITE = -3.0e38f;               // below all scores, and differences are not NaN

struct Softmax {
    float top = LOWEST_FINITE, total = 0.0f;

    // Return what sums so far are multiplied with if `score` becomes the largest.
    __device__ __forceinline__ float raise(float score) {
        const float raised = fmaxf(top, score), shrink = exp2_fast(top - raised);
        top = raised;
        total *= shrink;
        return shrink;
    }
};

__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Load from the shared memory of another block of the cluster.
__device__ __forceinline__ float load_remote(const float* local, int rank) {
    u32 address;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(local)), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

// Apply the norm of a head and RoPE to the values lane, lane + 32, ... of a head, and round them.
__device__ __forceinline__ void rotate(float (&head)[STEPS], const float (&cosines)[STEPS], const float (&sines)[STEPS], const u16* norm,
                                       float epsilon) {
    const int lane = threadIdx.x % 32;
#if NORM
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < STEPS; i++) square += head[i] * head[i];
#pragma unroll
    for (int i = 16; i; i /= 2) square += __shfl_xor_sync(~0u, square, i);
    const float inverse = rsqrtf(square / HEAD_DIM + epsilon);
#pragma unroll
    for (int i = 0; i < STEPS; i++) head[i] *= inverse * from_half(norm[lane + 32 * i]);
#endif
    float partner[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++) partner[i] = i < STEPS / 2 ? -head[i + STEPS / 2] : head[i - STEPS / 2];
#pragma unroll
    for (int i = 0; i < STEPS; i++) head[i] = head[i] * cosines[i] + partner[i] * sines[i];
}

extern "C" __global__ void __launch_bounds__(THREADS) hopper_decode_few(
    const u16* __restrict__ qkv, const float* __restrict__ cosines, const float* __restrict__ sines,
    const u16* __restrict__ query_norm, const u16* __restrict__ key_norm, u16* keys, u16* values,
    const int* __restrict__ block_tables, const long long* __restrict__ slots, const long long* __restrict__ seq_lens,
    u16* __restrict__ output, float scale, float epsilon, int window, int stride, int table_stride, int kv_heads) {
    __shared__ float query[HEADS][HEAD_DIM];
    __shared__ __align__(16) u16 fresh[2][HEAD_DIM];  // key and value of the new token
    __shared__ __align__(16) float warp_sums[WARPS][HEADS][HEAD_DIM];
    __shared__ float2 warp_stats[WARPS][HEADS];
    __shared__ float block_sums[HEADS][HEAD_DIM];
    __shared__ float block_tops[HEADS], block_totals[HEADS];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, sub = lane % LANES;
    const int split = blockIdx.x, unit = blockIdx.y, request = blockIdx.z, kv_head = unit * HEADS / GROUP;

    asm volatile("griddepcontrol.launch_dependents;");
    const int length = (int)seq_lens[request], low = max(length - window, 0);
    const int part = (length - low + SPLITS - 1) / SPLITS, begin = low + split * part, end = min(begin + part, length);
    const int* const table = block_tables + slots[request] * table_stride;
    const bool has_new = begin < end && end == length;
    auto row = [&](int position) {
        return ((u64)table[position / BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE) * kv_heads + kv_head;
    };
    uint4 key_words[UNROLL], value_words[UNROLL];
    auto load = [&](int start) {  // those of earlier tokens
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int position = start + (u * WARPS + warp) * KEYS + lane / LANES;
            key_words[u] = value_words[u] = make_uint4(0, 0, 0, 0);
            if (position >= min(end, length - 1)) continue;
            const u64 offset = row(position) * HEAD_DIM + 8 * sub;
            key_words[u] = *(const uint4*)(keys + offset);
            value_words[u] = *(const uint4*)(values + offset);
        }
    };
    load(begin);
    float cosine[STEPS], sine[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        cosine[i] = cosines[max(length - 1, 0) * HEAD_DIM + lane + 32 * i];
        sine[i] = sines[max(length - 1, 0) * HEAD_DIM + lane + 32 * i];
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");  // Q, K and V come from the kernel before
    if (warp < HEADS || (warp < HEADS + 2 && has_new)) {
        const bool is_query = warp < HEADS, is_key = warp == HEADS;
        const int heads = kv_heads * GROUP;
        const int index = is_query ? unit * HEADS + warp : heads + (is_key ? 0 : kv_heads) + kv_head;
        const u16* const from = qkv + (u64)request * stride + index * HEAD_DIM + lane;
        float head[STEPS];
#pragma unroll
        for (int i = 0; i < STEPS; i++) head[i] = from_half(from[32 * i]);
        if (is_query || is_key) rotate(head, cosine, sine, is_query ? query_norm : key_norm, epsilon);
        if (is_query) {
#pragma unroll
            for (int i = 0; i < STEPS; i++) query[warp][lane + 32 * i] = from_half((u16)to_pair(head[i], 0.0f)) * scale;
        } else {
            u16* const to = (is_key ? keys : values) + row(length - 1) * HEAD_DIM;
#pragma unroll
            for (int i = 0; i < STEPS; i++) to[lane + 32 * i] = fresh[is_key ? 0 : 1][lane + 32 * i] = (u16)to_pair(head[i], 0.0f);
        }
    }
    __syncthreads();

    float q[HEADS][8], sums[HEADS][8];
    Softmax softmax[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            q[h][i] = query[h][8 * sub + i];
            sums[h][i] = 0.0f;
        }
    for (int start = begin; start < end; start += PASS) {
        if (start != begin) load(start);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int first = start + (u * WARPS + warp) * KEYS, position = first + lane / LANES;
            if (first >= end) break;
            if (has_new && position == length - 1) {  // other blocks have no new token: what is in `fresh` may be NaN
                key_words[u] = ((const uint4*)fresh[0])[sub];
                value_words[u] = ((const uint4*)fresh[1])[sub];
            }
            const u32 key[4] = {key_words[u].x, key_words[u].y, key_words[u].z, key_words[u].w};
            const u32 value[4] = {value_words[u].x, value_words[u].y, value_words[u].z, value_words[u].w};
            float scores[HEADS];
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                scores[h] = 0.0f;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    scores[h] += q[h][2 * i] * from_half((u16)key[i]) + q[h][2 * i + 1] * from_half((u16)(key[i] >> 16));
            }
#pragma unroll
            for (int i = LANES / 2; i; i /= 2)
#pragma unroll
                for (int h = 0; h < HEADS; h++) scores[h] += __shfl_xor_sync(~0u, scores[h], i);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                const bool inside = position < end;
                const float shrink = softmax[h].raise(inside ? scores[h] : LOWEST_FINITE);
                const float weight = inside ? exp2_fast(scores[h] - softmax[h].top) : 0.0f;
                softmax[h].total += weight;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sums[h][2 * i] = sums[h][2 * i] * shrink + weight * from_half((u16)value[i]);
                    sums[h][2 * i + 1] = sums[h][2 * i + 1] * shrink + weight * from_half((u16)(value[i] >> 16));
                }
            }
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) {
            const float shrink = softmax[h].raise(__shfl_xor_sync(~0u, softmax[h].top, step));
            softmax[h].total += __shfl_xor_sync(~0u, softmax[h].total, step);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                sums[h][i] *= shrink;
                sums[h][i] += __shfl_xor_sync(~0u, sums[h][i], step);
            }
        }
        if (lane >= LANES) continue;
#pragma unroll
        for (int i = 0; i < 2; i++)
            *(float4*)&warp_sums[warp][h][8 * sub + 4 * i] = make_float4(sums[h][4 * i], sums[h][4 * i + 1], sums[h][4 * i + 2], sums[h][4 * i + 3]);
        if (lane == 0) warp_stats[warp][h] = make_float2(softmax[h].top, softmax[h].total);
    }
    __syncthreads();
    for (int at = thread; at < HEADS * HEAD_DIM; at += THREADS) {
        const int h = at / HEAD_DIM, i = at % HEAD_DIM;
        float top = LOWEST_FINITE, total = 0.0f, sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, warp_stats[w][h].x);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float factor = exp2_fast(warp_stats[w][h].x - top);
            total += factor * warp_stats[w][h].y;
            sum += factor * warp_sums[w][h][i];
        }
        block_sums[h][i] = sum;
        if (i == 0) {
            block_tops[h] = top;
            block_totals[h] = total;
        }
    }
#if SPLITS > 1
    sync_cluster();
#else
    __syncthreads();
#endif
    constexpr int SHARE = HEADS * HEAD_DIM / SPLITS;  // results of a block
    for (int at = split * SHARE + thread; at < (split + 1) * SHARE; at += THREADS) {
        const int h = at / HEAD_DIM, i = at % HEAD_DIM;
        float tops[SPLITS], totals[SPLITS], parts[SPLITS], top = LOWEST_FINITE, total = 0.0f, sum = 0.0f;
#pragma unroll
        for (int s = 0; s < SPLITS; s++) {
            tops[s] = load_remote(&block_tops[h], s);
            totals[s] = load_remote(&block_totals[h], s);
            parts[s] = load_remote(&block_sums[h][i], s);
        }
#pragma unroll
        for (int s = 0; s < SPLITS; s++) top = fmaxf(top, tops[s]);
#pragma unroll
        for (int s = 0; s < SPLITS; s++) {
            const float factor = exp2_fast(tops[s] - top);
            total += factor * totals[s];
            sum += factor * parts[s];
        }
        output[(u64)request * kv_heads * GROUP * HEAD_DIM + unit * HEADS * HEAD_DIM + at] =
            (u16)to_pair(sum / (total == 0.0f ? 1.0f : total), 0.0f);
    }
#if SPLITS > 1
    sync_cluster();  // others may still read this block's sums
#endif
}
