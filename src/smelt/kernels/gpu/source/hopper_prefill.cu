// Attention of prompts over a paged KV cache on Hopper, after FlashAttention-3 (Shah et al., 2024).
//
// A block computes 64 query rows per warpgroup against tiles of KEYS keys, from the last visible tile to the first. The
// rows are PACK query heads of one KV head for each of TOKENS tokens, so that keys are read once for all of them. One
// warp copies: every page of a tile by its own tensor copies, which swizzle for wgmma. A warpgroup issues the scores of
// a tile before the weighted values of the one before, so that the tensor cores work during its softmax.
//
// hopper_attention.py defines WARPGROUPS, KEYS (of a tile), HEAD_DIM, PACK, BLOCK_SIZE, STAGES, HALF_IS_BF16, PAIR, and the functions
// `wgmma_scores` and `wgmma_values`.

constexpr int ROWS = 64 * WARPGROUPS, TOKENS = ROWS / PACK;   // of a block
constexpr int CONSUMERS = 128 * WARPGROUPS, WARPS = CONSUMERS / 32;
constexpr int PANELS = HEAD_DIM / 64;                         // of 128 bytes of a row
constexpr int Q_PANEL = ROWS * 128, KV_PANEL = KEYS * 128;    // bytes
constexpr int Q_BYTES = PANELS * Q_PANEL, KV_BYTES = PANELS * KV_PANEL;
constexpr int COPY_KEYS = BLOCK_SIZE < KEYS ? BLOCK_SIZE : KEYS;  // keys of a copy: at most a page
constexpr int COPIES = KEYS / COPY_KEYS;

@PRODUCTS@

// Copy a box of five dimensions: 64 columns, then rows, then the three given indices.
__device__ __forceinline__ void copy_box(u32 target, const TensorMap* map, int c1, int c2, int c3, int c4, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
        "[%7];" ::"r"(target), "l"(map), "r"(0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier) : "memory");
}

// Describe values [keys, HEAD_DIM] as the right operand: its rows are the dimension that is summed over.
__device__ __forceinline__ u64 value_descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | ((u64)(KV_PANEL >> 4) << 16) | (64ULL << 32) | (1ULL << 62);
}

// Keep the compiler from moving uses of accumulators across a wait.
template <int COUNT>
__device__ __forceinline__ void pin(float (&values)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(values[i])::"memory");
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, WARPGROUPS == 1 ? 2 : 1) hopper_prefill(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const int* __restrict__ block_tables, const int* __restrict__ seq_lens,
    const int* __restrict__ cu_seqlens_q, const int* __restrict__ tile_requests, const int* __restrict__ tile_first,
    u16* __restrict__ output, float scale, int window, int table_stride, int num_blocks, int groups_per_kv_head) {
    extern __shared__ __align__(1024) u8 memory[];
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    const int tile = gridDim.x - 1 - blockIdx.x, group = blockIdx.y;  // long tiles first
    const int request = tile_requests[tile], first = tile_first[tile];
    const int start = cu_seqlens_q[request], count = cu_seqlens_q[request + 1] - start;
    if (first >= count) return;
    const int kv_len = seq_lens[request], lowest = kv_len - count + first;  // position of the first query
    const int last_key = min(lowest + TOKENS, kv_len) - 1;
    const int last_tile = last_key / KEYS, first_tile = max(lowest - window + 1, 0) / KEYS;
    const int thread = threadIdx.x, lane = thread % 32, steps = last_tile - first_tile + 1;

    u8* const k_memory = memory + Q_BYTES;
    u8* const v_memory = k_memory + STAGES * KV_BYTES;
    const u32 q_full = shared_address(v_memory + STAGES * KV_BYTES), k_full = q_full + 8, v_full = k_full + 8 * STAGES;
    const u32 k_empty = v_full + 8 * STAGES, v_empty = k_empty + 8 * STAGES;
    if (thread == 0) {
        barrier_init(q_full, 1);
        for (int s = 0; s < STAGES; s++) {
            barrier_init(k_full + 8 * s, 1);
            barrier_init(v_full + 8 * s, 1);
            barrier_init(k_empty + 8 * s, WARPS);
            barrier_init(v_empty + 8 * s, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (thread >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (thread >= CONSUMERS + 32) return;
        const int kv_head = group / groups_per_kv_head;
        if (lane == 0) {
            barrier_expect(q_full, Q_BYTES);
            for (int panel = 0; panel < PANELS; panel++)
                for (int w = 0; w < WARPGROUPS; w++)
                    copy_box(shared_address(memory + panel * Q_PANEL + w * 64 * 128), &q_map, 0,
                             start + first + w * 64 / PACK, panel, group, q_full);
        }
        auto copy = [&](u8* target, const TensorMap* map, int token, int block, u32 full, u32 empty, int step) {
            if (step >= STAGES) barrier_wait(empty, (step / STAGES - 1) & 1);
            if (lane == 0) barrier_expect(full, KV_BYTES);
            __syncwarp();
            if (lane < COPIES)
                for (int panel = 0; panel < PANELS; panel++)
                    copy_box(shared_address(target + panel * KV_PANEL + lane * COPY_KEYS * 128), map, token, panel,
                             kv_head, block, full);
        };
        for (int step = 0; step < steps; step++) {
            const int stage = step % STAGES, key = (last_tile - step) * KEYS + lane * COPY_KEYS;
            int block = num_blocks;  // pages behind the last key read as zero
            if (lane < COPIES && key < kv_len) block = block_tables[(u64)request * table_stride + key / BLOCK_SIZE];
            copy(k_memory + stage * KV_BYTES, &k_map, key % BLOCK_SIZE, block, k_full + 8 * stage, k_empty + 8 * stage, step);
            copy(v_memory + stage * KV_BYTES, &v_map, key % BLOCK_SIZE, block, v_full + 8 * stage, v_empty + 8 * stage, step);
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WARPGROUPS == 1 ? 232 : 240));
    const int warpgroup = thread / 128, row = thread / 32 * 16 + lane / 4;  // and row + 8
    const int positions[2] = {lowest + row / PACK, lowest + (row + 8) / PACK};
    const u64 queries = panel_descriptor(shared_address(memory + warpgroup * 64 * 128));
    float scores[KEYS / 2], sums[HEAD_DIM / 2], max_score[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
    u32 weights[KEYS / 4];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) sums[i] = 0.0f;

    auto issue_scores = [&](int step) {
        const int stage = step % STAGES;
        barrier_wait(k_full + 8 * stage, (step / STAGES) & 1);
        const u64 keys = panel_descriptor(shared_address(k_memory + stage * KV_BYTES));
        pin(scores);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
            wgmma_scores(scores, queries + (k / 4 * Q_PANEL + k % 4 * 32) / 16, keys + (k / 4 * KV_PANEL + k % 4 * 32) / 16, k > 0);
        wgmma_commit();
    };
    auto issue_values = [&](int step) {
        const int stage = step % STAGES;
        barrier_wait(v_full + 8 * stage, (step / STAGES) & 1);
        const u64 values = value_descriptor(shared_address(v_memory + stage * KV_BYTES));
        pin(sums);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) wgmma_values(sums, weights + 4 * k, values + k * 16 * 128 / 16);
        wgmma_commit();
    };
    // Let the warpgroups issue their products in turns: while one computes its softmax, the tensor cores have the other's.
    auto wait_turn = [&]() {
        if (WARPGROUPS == 2) asm volatile("bar.sync %0, 256;" ::"r"(3 + warpgroup) : "memory");
    };
    auto pass_turn = [&]() {
        if (WARPGROUPS == 2) asm volatile("bar.arrive %0, 256;" ::"r"(4 - warpgroup) : "memory");
    };
    auto release = [&](u32 empty) {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty);
    };
    // Turn scores into weights (of the largest score so far) and return what earlier sums have to be multiplied with.
    auto softmax = [&](int step, float (&factor)[2]) {
        const int first_key = (last_tile - step) * KEYS;
        const bool masked = first_key + KEYS - 1 > lowest || first_key <= lowest + TOKENS - 1 - window;
        if (masked) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) {
                const int key = first_key + i / 4 * 8 + lane % 4 * 2 + (i & 1), position = positions[(i >> 1) & 1];
                if (key > position || key <= position - window) scores[i] = -INFINITY;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float largest = scores[2 * r];
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++)
                if (((i >> 1) & 1) == r) largest = fmaxf(largest, scores[i]);
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            const float before = max_score[r];
            max_score[r] = fmaxf(before, largest * scale);
            const float base = max_score[r] == -INFINITY ? 0.0f : max_score[r];
            factor[r] = exp2_fast(before - base);
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++)
                if (((i >> 1) & 1) == r) {
                    scores[i] = exp2_fast(fmaf(scores[i], scale, -base));
                    sum += scores[i];
                }
            total[r] = total[r] * factor[r] + sum;
        }
    };
    auto pack_weights = [&]() {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) weights[i] = to_pair(scores[2 * i], scores[2 * i + 1]);
    };

    float factor[2];
    barrier_wait(q_full, 0);
    issue_scores(0);
    wgmma_wait();
    pin(scores);
    release(k_empty);
    softmax(0, factor);
    pack_weights();
    if (kv_len % COPY_KEYS && last_tile == (kv_len - 1) / KEYS) {  // values behind the last key may be anything
        barrier_wait(v_full, 0);
        const int from = kv_len - last_tile * KEYS, to = (from + COPY_KEYS - 1) / COPY_KEYS * COPY_KEYS;
        for (int i = thread % 128; i < (to - from) * 32; i += 128)
            for (int panel = 0; panel < PANELS; panel++)
                *(u32*)(v_memory + panel * KV_PANEL + from * 128 + 4 * i) = 0;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
    }
    if (warpgroup == 1) pass_turn();
    for (int step = 1; step < steps; step++) {
        wait_turn();
        issue_scores(step);
        if (step > 1)
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 2; i++) sums[i] *= factor[(i >> 1) & 1];
        issue_values(step - 1);
        pass_turn();
        wgmma_wait<1>();
        pin(scores);
        release(k_empty + 8 * (step % STAGES));
        softmax(step, factor);
        wgmma_wait();
        pin(sums);
        release(v_empty + 8 * ((step - 1) % STAGES));
        pack_weights();
    }
    if (steps > 1)
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) sums[i] *= factor[(i >> 1) & 1];
    issue_values(steps - 1);
    wgmma_wait();
    pin(sums);

    const int heads = gridDim.y * PACK;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        total[r] += __shfl_xor_sync(~0u, total[r], 1);
        total[r] += __shfl_xor_sync(~0u, total[r], 2);
        const float inverse = total[r] == 0.0f ? 0.0f : 1.0f / total[r];
        const int at = row + 8 * r, token = first + at / PACK;
        if (token >= count) continue;
        u16* const target = output + ((u64)(start + token) * heads + group * PACK + at % PACK) * HEAD_DIM + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; i++)
            *(u32*)(target + 8 * i) = to_pair(sums[4 * i + 2 * r] * inverse, sums[4 * i + 2 * r + 1] * inverse);
    }
}
