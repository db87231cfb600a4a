// Attention of one new token per request over a quantized, paged KV cache on Hopper.
//
// A block computes a split of the keys of one request for HEADS KV heads, one warp per head. Rows of a head, codes and
// then their parameters, start at any multiple of four bytes, but those of all heads and of 16 tokens are contiguous:
// one bulk copy each for K and V, STAGES in flight. Codes are converted to half precision in registers, exactly,
// and multiplied by mma with the queries of the KV head on the right: scores [16 tokens, 8 queries], and sums
// [HEAD_DIM, 8 queries]. Scales are applied outside of the products: those of keys to scores, those of values to weights.
// If values are rotated by a Hadamard matrix, every split rotates its sums back. The split that finishes last merges all
// of them.
//
// hopper_attention.py defines FORMAT and its ROW_BYTES, ROTATED, HEAD_DIM, HEADS, GROUP (query heads per KV head), BLOCK_SIZE,
// STAGES, MIN_TILES (of a split), WHOLE (the block has all heads of a page), PAIR and HALF_IS_BF16 of queries and results.

constexpr int TOKENS = 16;                               // of a tile
constexpr int TILE = TOKENS * HEADS * ROW_BYTES;         // bytes
constexpr int WORDS = HEAD_DIM / (FORMAT == INT4 ? 8 : 4);  // of the codes of a row
constexpr int THREADS = 32 * (HEADS + 1);
// Keeps weights times scales normal; int3 has codes of eighths, and scales times eight
constexpr float LIFT = FORMAT == FP8 ? 512.0f : FORMAT == INT8 ? 128.0f : FORMAT == INT4 ? 16.0f : 1.0f;

__device__ __forceinline__ void mma(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 transpose(u32 x) {  // an 8 x 8 matrix of halves, two of a row per lane
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(x));
    return result;
}

__device__ __forceinline__ u32 half_pair(float low, float high) {
    u32 result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

__device__ __forceinline__ u32 subtract(u32 a, u32 b) {
    u32 result;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

__device__ __forceinline__ u32 from_e4m3(u32 two) {  // the low 16 bits
    u32 result;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(result) : "r"(two));
    return result;
}

// The kernel before computes the queries and stores the new token; all other tokens may be read earlier.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

struct Scale {
    float scale;
    u32 zero;  // a half: 1024 plus the zero point of int4, or one plus an eighth of that of int3, as codes are lifted
};

__device__ __forceinline__ Scale load_scale(const u8* row) {
    const u32 word = *(const u32*)(row + ROW_BYTES - 4);
#if FORMAT == INT4
    float scale;
    asm("cvt.f32.f16 %0, %1;" : "=f"(scale) : "h"((u16)word));
    return {scale, 0x6400u + (word >> 16)};
#elif FORMAT == INT3
    float scale;
    asm("cvt.f32.f16 %0, %1;" : "=f"(scale) : "h"((u16)word));
    return {8.0f * scale, 0x3C00u | ((word >> 9) & 0x0380u)};
#else
    return {__uint_as_float(word), 0};
#endif
}

#if FORMAT == INT3
// Convert the two codes of a slot of three words to halves, one from each half of the words: eighths of codes minus zero
// points. In the top bits of the mantissa of one, codes are eighths.
__device__ __forceinline__ u32 convert_slot(const u32 (&words)[3], int slot, u32 zeros) {
    u32 codes;
    if (slot == 15)
        codes = ((words[0] >> 8) & 0x00800080u) | ((words[1] >> 7) & 0x01000100u) | ((words[2] >> 6) & 0x02000200u);
    else {
        const u32 word = words[slot / 5];
        const int shift = slot % 5 * 3 - 7;
        codes = (shift < 0 ? word << -shift : word >> shift) & 0x03800380u;
    }
    return subtract(codes | 0x3C003C00u, zeros);
}
#endif

// Convert four codes of one row to halves: two each, in the order of `order_in_word`.
__device__ __forceinline__ void convert(u32& first, u32& second, u32 word, int part, u32 zero) {
#if FORMAT == FP8
    first = from_e4m3(word);
    second = from_e4m3(word >> 16);
#elif FORMAT == INT8
    const u32 lifted = word ^ 0x80808080u;
    first = subtract(__byte_perm(lifted, 0x64646464u, 0x4140), 0x64806480u);
    second = subtract(__byte_perm(lifted, 0x64646464u, 0x4342), 0x64806480u);
#else
    const u32 nibbles = word >> (4 * part);
    first = subtract((nibbles & 0x000F000Fu) | 0x64006400u, zero * 0x10001u);
    second = subtract(((nibbles >> 8) & 0x000F000Fu) | 0x64006400u, zero * 0x10001u);
#endif
}

// Convert codes of one column and two rows at a time: out[0] of the first, out[1] of the second of two columns.
__device__ __forceinline__ void convert_rows(u32& first, u32& second, u32 word, u32 next, int part, u32 zeros) {
#if FORMAT == INT4
    const u32 low = ((word >> (4 * part)) & 0x000F000Fu) | 0x64006400u, high = ((next >> (4 * part)) & 0x000F000Fu) | 0x64006400u;
    first = subtract(__byte_perm(low, high, 0x5410), zeros);
    second = subtract(__byte_perm(low, high, 0x7632), zeros);
#else
    const u32 both = __byte_perm(word, next, part ? 0x7362 : 0x5140);
#if FORMAT == FP8
    first = from_e4m3(both);
    second = from_e4m3(both >> 16);
#else
    const u32 lifted = both ^ 0x80808080u;
    first = subtract(__byte_perm(lifted, 0x64646464u, 0x4140), 0x64806480u);
    second = subtract(__byte_perm(lifted, 0x64646464u, 0x4342), 0x64806480u);
#endif
#endif
}

// Which of four columns `convert` returns at `index`, and the column of a row that `convert_rows` does.
__device__ __forceinline__ constexpr int order_in_word(int index) {
    return FORMAT == INT4 ? (index & 1) * 2 + index / 2 : index;
}

__device__ __forceinline__ int value_column(int word, int part, int index) {
    if (FORMAT == INT3) return word / 2 * 32 + 4 * part + 2 * index + (word & 1);
    return FORMAT == INT4 ? (part & 1) * (HEAD_DIM / 2) + 4 * word + part / 2 + 2 * index : 4 * word + 2 * part + index;
}

constexpr int K_PARTS = FORMAT == INT4 ? 2 : 1;  // of a word: fragments of keys
constexpr int V_PARTS = FORMAT == INT3 ? HEAD_DIM / 16 : FORMAT == INT4 ? 4 : 2;  // and of values

// Multiply sums [HEAD_DIM, 8 queries] by the orthonormal Hadamard matrix. Every bit of a column is one of a lane, of a
// tile or of a half of it; in which order does not matter to the matrix.
__device__ __forceinline__ void rotate_back(float (&sums)[HEAD_DIM / 16][4], int lane) {
#pragma unroll
    for (int distance = 1; distance < HEAD_DIM / 16; distance *= 2)
#pragma unroll
        for (int t = 0; t < HEAD_DIM / 16; t++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (!(t & distance)) {
                    const float a = sums[t][i], b = sums[t + distance][i];
                    sums[t][i] = a + b;
                    sums[t + distance][i] = a - b;
                }
    const float norm = HEAD_DIM == 128 ? 0.08838834764831845f : 0.125f;
#pragma unroll
    for (int t = 0; t < HEAD_DIM / 16; t++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float a = sums[t][i] * norm, b = sums[t][i + 2] * norm;
            sums[t][i] = a + b;
            sums[t][i + 2] = a - b;
        }
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 4; i++) {
            const float mine = sums[i / 4][i % 4], other = __shfl_xor_sync(~0u, mine, distance);
            sums[i / 4][i % 4] = lane & distance ? other - mine : other + mine;
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) hopper_decode(
    const u16* __restrict__ queries, const u8* __restrict__ key_pages, const u8* __restrict__ value_pages,
    const int* __restrict__ block_tables, const long long* __restrict__ slots, const long long* __restrict__ seq_lens,
    u16* __restrict__ output, float* __restrict__ partial, float* __restrict__ stats, int* __restrict__ counters,
    float scale, int window, int table_stride, int kv_heads) {
    extern __shared__ __align__(128) u8 memory[];  // [STAGES, K and V, TILE]
    __shared__ int finished;
    asm volatile("griddepcontrol.launch_dependents;");
    const int split = blockIdx.x, request = blockIdx.y, first_head = blockIdx.z * HEADS;
    const int kv_len = (int)seq_lens[request];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    if (kv_len <= 0) {  // padding of the batch
        wait_for_previous();
        u16* const rows = output + ((u64)request * kv_heads + first_head) * GROUP * HEAD_DIM;
        for (int item = thread; split == 0 && item < HEADS * GROUP * HEAD_DIM; item += THREADS) rows[item] = 0;
        return;
    }
    const int low = max(kv_len - window, 0), first_tile = low / TOKENS, tiles = (kv_len + TOKENS - 1) / TOKENS - first_tile;
    const int splits = max(1, min((int)gridDim.x, tiles / MIN_TILES));  // a short request has fewer
    if (split >= splits) return;
    const int begin = first_tile + (int)((long long)tiles * split / splits);
    const int count = first_tile + (int)((long long)tiles * (split + 1) / splits) - begin;
    const u32 full = shared_address(memory + STAGES * 2 * TILE), empty = full + 8 * STAGES;
    if (thread == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, HEADS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (warp == HEADS) {
        const int* const table = block_tables + slots[request] * table_stride;
        int blocks = 0;
        for (int step = 0; step < count; step++) {
            if (step % 32 == 0) blocks = step + lane < count ? table[(begin + step + lane) * TOKENS / BLOCK_SIZE] : 0;
            const int block = __shfl_sync(~0u, blocks, step % 32), stage = step % STAGES;
            if (step >= STAGES) barrier_wait(empty + 8 * stage, (step / STAGES - 1) & 1);
            if (begin + step == first_tile + tiles - 1) wait_for_previous();
            const u64 token = (u64)block * BLOCK_SIZE + (begin + step) * TOKENS % BLOCK_SIZE;
            const u64 offset = (token * kv_heads + first_head) * ROW_BYTES;
            const u32 target = shared_address(memory + stage * 2 * TILE);
            if (lane == 0) barrier_expect(full + 8 * stage, 2 * TILE);
            __syncwarp();
            if (WHOLE) {
                if (lane < 2) copy_tile(target + lane * TILE, (lane ? value_pages : key_pages) + offset, TILE, full + 8 * stage);
            } else {  // the rows of every token apart
                const u32 size = HEADS * ROW_BYTES;
                copy_tile(target + lane * size, (lane < TOKENS ? key_pages : value_pages) + offset +
                          (u64)(lane % TOKENS) * kv_heads * ROW_BYTES, size, full + 8 * stage);
            }
        }
    } else {
        wait_for_previous();
        const int g = lane / 4, q = lane % 4, kv_head = first_head + warp;
        // Queries of the KV head as the right operand, divided by their largest magnitude, so that halves hold them.
        const u16* const query = queries + ((u64)request * kv_heads + kv_head) * GROUP * HEAD_DIM + g * HEAD_DIM;
        float values[HEAD_DIM / 16][4], amax = 0.0f;
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++) {
            const int column = FORMAT == INT3 ? 32 * q + 4 * k : k % K_PARTS * (HEAD_DIM / 2) + 4 * (4 * (k / K_PARTS) + q);
            const uint2 four = g < GROUP ? *(const uint2*)(query + column) : make_uint2(0, 0);
            const u16 halves[4] = {(u16)four.x, (u16)(four.x >> 16), (u16)four.y, (u16)(four.y >> 16)};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                values[k][i] = from_half(halves[order_in_word(i)]);
                amax = fmaxf(amax, fabsf(values[k][i]));
            }
        }
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
        const float inverse = amax > 0.0f ? 1.0f / amax : 0.0f;
        u32 right[HEAD_DIM / 16][2];
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
#pragma unroll
            for (int i = 0; i < 2; i++) right[k][i] = half_pair(values[k][2 * i] * inverse, values[k][2 * i + 1] * inverse);
        // Lanes have scores of queries 2 q and 2 q + 1.
        const float factor[2] = {scale * __shfl_sync(~0u, amax, 8 * q), scale * __shfl_sync(~0u, amax, 8 * q + 4)};
        float sums[HEAD_DIM / 16][4], largest[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 4; i++) sums[i / 4][i % 4] = 0.0f;

        for (int step = 0; step < count; step++) {
            const int stage = step % STAGES, position = (begin + step) * TOKENS;
            barrier_wait(full + 8 * stage, (step / STAGES) & 1);
            const u8* const keys = memory + stage * 2 * TILE + warp * ROW_BYTES;
            auto row = [&](int token) { return keys + token * HEADS * ROW_BYTES; };
            const Scale key_scales[2] = {load_scale(row(g)), load_scale(row(g + 8))};
            float scores[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#if FORMAT == INT3
            u32 key_words[2][3];
#pragma unroll
            for (int i = 0; i < 6; i++) key_words[i / 3][i % 3] = ((const u32*)row(g + i / 3 * 8))[3 * q + i % 3];
#pragma unroll
            for (int k = 0; k < HEAD_DIM / 16; k++) {
                u32 left[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    left[i] = convert_slot(key_words[i & 1], 2 * k + i / 2, key_scales[i & 1].zero * 0x10001u);
                mma(scores, left, right[k][0], right[k][1]);
            }
#else
#pragma unroll
            for (int w = 0; w < WORDS / 4; w++) {
                const u32 words[2] = {((const u32*)row(g))[4 * w + q], ((const u32*)row(g + 8))[4 * w + q]};
#pragma unroll
                for (int part = 0; part < K_PARTS; part++) {
                    u32 left[4];
                    convert(left[0], left[2], words[0], part, key_scales[0].zero);
                    convert(left[1], left[3], words[1], part, key_scales[1].zero);
                    mma(scores, left, right[w * K_PARTS + part][0], right[w * K_PARTS + part][1]);
                }
            }
#endif
            const bool masked = position < low || position + TOKENS > kv_len;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int token = position + g + i / 2 * 8;
                scores[i] *= factor[i & 1] * key_scales[i / 2].scale;
                if (masked && (token < low || token >= kv_len)) scores[i] = -INFINITY;
            }
            const u8* const value_rows = row(0) + TILE;
            const Scale value_scales[2] = {load_scale(row(g) + TILE), load_scale(row(g + 8) + TILE)};
            float weights[4], change[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float score = fmaxf(scores[i], scores[i + 2]);
#pragma unroll
                for (int distance = 4; distance < 32; distance *= 2)
                    score = fmaxf(score, __shfl_xor_sync(~0u, score, distance));
                const float next = fmaxf(largest[i], score), base = next == -INFINITY ? 0.0f : next;
                change[i] = exp2_fast(largest[i] - base);
                largest[i] = next;
                weights[i] = exp2_fast(scores[i] - base);
                weights[i + 2] = exp2_fast(scores[i + 2] - base);
                total[i] = total[i] * change[i] + weights[i] + weights[i + 2];
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int token = position + g + i / 2 * 8;
                weights[i] *= value_scales[i / 2].scale * LIFT;
                if (masked && (token < low || token >= kv_len)) weights[i] = 0.0f;
            }
            const u32 b0 = transpose(half_pair(weights[0], weights[1])), b1 = transpose(half_pair(weights[2], weights[3]));
#if FORMAT == INT4 || FORMAT == INT3
            // Zero points of tokens 2 q, 2 q + 1 and of those 8 behind
            const u32 zeros[2] = {
                __shfl_sync(~0u, value_scales[0].zero, 8 * q) | __shfl_sync(~0u, value_scales[0].zero, 8 * q + 4) << 16,
                __shfl_sync(~0u, value_scales[1].zero, 8 * q) | __shfl_sync(~0u, value_scales[1].zero, 8 * q + 4) << 16};
#else
            const u32 zeros[2] = {0, 0};
#endif
#if FORMAT == INT3
            u32 value_words[2][3];  // of tokens 2 q and 2 q + 1, and of those 8 behind: the half of words with the codes of g
#pragma unroll
            for (int i = 0; i < 6; i++) {
                const u8* const first = value_rows + (2 * q + i / 3 * 8) * HEADS * ROW_BYTES;
                const int word = 3 * (g / 2) + i % 3;
                value_words[i / 3][i % 3] = __byte_perm(
                    ((const u32*)first)[word], ((const u32*)(first + HEADS * ROW_BYTES))[word], g & 1 ? 0x7632 : 0x5410);
            }
#pragma unroll
            for (int t = 0; t < HEAD_DIM / 16; t++) {
                u32 left[4];
#pragma unroll
                for (int i = 0; i < 4; i++) left[i] = convert_slot(value_words[i / 2], 2 * t + (i & 1), zeros[i / 2]);
#pragma unroll
                for (int i = 0; i < 4; i++) sums[t][i] *= change[i & 1];
                mma(sums[t], left, b0, b1);
            }
#else
#pragma unroll
            for (int w = 0; w < WORDS / 8; w++) {
                u32 words[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int token = 2 * q + (i & 1) + i / 2 * 8;
                    words[i] = ((const u32*)(value_rows + token * HEADS * ROW_BYTES))[8 * w + g];
                    if (FORMAT == FP8 && masked && (position + token < low || position + token >= kv_len)) words[i] = 0;
                }
#pragma unroll
                for (int part = 0; part < V_PARTS; part++) {
                    u32 left[4];
                    convert_rows(left[0], left[1], words[0], words[1], part, zeros[0]);
                    convert_rows(left[2], left[3], words[2], words[3], part, zeros[1]);
                    float (&tile)[4] = sums[w * V_PARTS + part];
#pragma unroll
                    for (int i = 0; i < 4; i++) tile[i] *= change[i & 1];
                    mma(tile, left, b0, b1);
                }
            }
#endif
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * stage);
        }

        if (ROTATED) rotate_back(sums, lane);
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2) total[i] += __shfl_xor_sync(~0u, total[i], distance);
            const int member = 2 * q + i;
            if (member >= GROUP) continue;
            const u64 at = ((u64)request * kv_heads + kv_head) * GROUP + member;
            const float divisor = LIFT * (splits > 1 ? 1.0f : total[i]);
            if (splits > 1 && g == 0) {
                stats[(at * gridDim.x + split) * 2] = largest[i];
                stats[(at * gridDim.x + split) * 2 + 1] = total[i];
            }
#pragma unroll
            for (int t = 0; t < HEAD_DIM / 16; t++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int column = value_column(8 * (t / V_PARTS) + g, t % V_PARTS, half);
                    const float sum = sums[t][2 * half + i] / divisor;
                    if (splits > 1) partial[(at * gridDim.x + split) * HEAD_DIM + column] = sum;
                    else output[at * HEAD_DIM + column] = (u16)to_pair(sum, 0.0f);
                }
        }
    }
    if (splits == 1) return;
    __threadfence();
    __syncthreads();
    int* const counter = counters + request * gridDim.z + blockIdx.z;
    if (thread == 0) finished = atomicAdd(counter, 1);
    __syncthreads();
    if (finished != splits - 1) return;
    __threadfence();
    // Weights of the splits of every query, then sums of four columns per thread
    float* const ratios = (float*)memory;  // [HEADS * GROUP, splits]
    const u64 first_row = ((u64)request * kv_heads + first_head) * GROUP;
    for (int row = warp; row < HEADS * GROUP; row += THREADS / 32) {
        const float* const from = stats + (first_row + row) * gridDim.x * 2;
        float highest = -INFINITY, weight = 0.0f;
        for (int s = lane; s < splits; s += 32) highest = fmaxf(highest, __ldcg(from + 2 * s));
        for (int distance = 16; distance; distance /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, distance));
        for (int s = lane; s < splits; s += 32) {
            const float ratio = exp2_fast(__ldcg(from + 2 * s) - highest);
            ratios[row * splits + s] = ratio;
            weight += ratio * __ldcg(from + 2 * s + 1);
        }
        for (int distance = 16; distance; distance /= 2) weight += __shfl_xor_sync(~0u, weight, distance);
        for (int s = lane; s < splits; s += 32) ratios[row * splits + s] /= weight;
    }
    __syncthreads();
    for (int item = thread; item < HEADS * GROUP * HEAD_DIM / 4; item += THREADS) {
        const int row = item / (HEAD_DIM / 4), column = item % (HEAD_DIM / 4) * 4;
        const float* const from = partial + (first_row + row) * gridDim.x * HEAD_DIM + column;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
        for (int s = 0; s < splits; s++) {
            const float4 part = __ldcg((const float4*)(from + (u64)s * HEAD_DIM));
            const float ratio = ratios[row * splits + s];
            sum[0] += ratio * part.x;
            sum[1] += ratio * part.y;
            sum[2] += ratio * part.z;
            sum[3] += ratio * part.w;
        }
        u16* const target = output + (first_row + row) * HEAD_DIM + column;
#pragma unroll
        for (int i = 0; i < 4; i++) target[i] = (u16)to_pair(sum[i], 0.0f);
    }
    if (thread == 0) *counter = 0;  // as the next call needs it
}
