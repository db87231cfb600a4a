// GEMM with a packed weight matrix on Hopper for many rows of x: y = x W^T; see hopper_gemm.cu for operands and tiles.
//
// Stream-K: the work is the list of all steps (128 columns) of all output tiles, and every block takes an equal part of
// it, so that no SM waits for a last, partial wave. A block adds the steps of a tile in registers. If it did not begin
// the tile, it leaves its sums in `parts`; the block that began the tile adds them, in order, and writes the results.
// Blocks wait for each other, so all of them must fit on the GPU at once.
//
// ROW_TILES warpgroups compute, each with 64 weight rows and all TILE_N rows of x. The products of a step run while the
// next step is dequantized, and copies never stop between tiles: results leave through the memory of the last tile of x.
//
// hopper_source.py defines TILE_N, ROW_TILES, STAGES, FORMAT and its parameters, and the functions `wgmma` and `mma`.

constexpr int ROWS = 64 * ROW_TILES;           // weight rows per block
constexpr int CONSUMERS = 128 * ROW_TILES;     // threads that compute
constexpr int THREADS = CONSUMERS + 128;
constexpr int REGISTERS = 232;                 // of a thread that computes: those of two warpgroups and 24 are all
static_assert(ROW_TILES == 2);
constexpr int X_PANEL = TILE_N * 128;          // bytes: rows of 128 bytes
constexpr int X_PANELS = TILE_K * X_BYTES / 128;
constexpr int X_TILE = X_PANEL * X_PANELS;
constexpr int ACC = TILE_N / 2;                // sums of a thread
constexpr int STEPS = K_STEPS / GROUP_LOOPS;   // instructions of a group of columns
constexpr int CHUNK = STEPS < 2 ? STEPS : 2;   // of them, issued at a time
constexpr int OUT_ROW = 2 * ROWS;              // bytes of results of a row of x
constexpr int OUT_N = X_TILE / OUT_ROW / 16 * 16 < TILE_N ? X_TILE / OUT_ROW / 16 * 16 : TILE_N;  // rows of x that a stage holds

#define OPERANDS_STORED (X_BYTES == 1 && BITS == 8)  // fragments are loaded when needed, not all words at once

@PRODUCTS@

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// Transpose four 8 x 8 matrices of results into shared memory.
__device__ __forceinline__ void store_matrices(u32 address, const u32 (&values)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(values[0]),
                 "r"(values[1]), "r"(values[2]), "r"(values[3]) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_stream_k(
    const __grid_constant__ TensorMap x_map, const u8* __restrict__ weights, const float* __restrict__ row_scale,
    const float* __restrict__ x_scale, const u16* __restrict__ bias, u16* __restrict__ y, SUM* __restrict__ parts,
    u32* __restrict__ flags, float factor, int batch, int rows, int stride, int k_tiles) {
    extern __shared__ __align__(1024) u8 memory[];
    const int thread = threadIdx.x, group = thread / 128, block = blockIdx.x, blocks = gridDim.x;
    const int n_tiles = (batch + TILE_N - 1) / TILE_N, row_tiles = (rows + 63) / 64;
    const u64 units = (u64)((row_tiles + ROW_TILES - 1) / ROW_TILES) * n_tiles * k_tiles;
    const int begin = (int)(units * block / blocks), end = (int)(units * (block + 1) / blocks);
    u8* const w_memory = memory + STAGES * X_TILE;
    const u32 full = shared_address(w_memory + STAGES * ROW_TILES * W_TILE), empty = full + 8 * STAGES;

    asm volatile("griddepcontrol.launch_dependents;");
#if FORMAT == FORMAT_TABLE
    fill_lookup(THREADS);
#endif
    if (thread == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, CONSUMERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (group == ROW_TILES) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (thread != CONSUMERS) return;
        const u64 policy = n_tiles > 1 ? EVICT_NORMAL : EVICT_FIRST;  // weights are read once per tile of x
        auto copy_weights = [&](int unit, int stage) {
            const int first = unit / k_tiles / n_tiles * ROW_TILES;
            barrier_expect(full + 8 * stage, X_TILE + ROW_TILES * W_TILE);
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                const int tile = min(first + r, row_tiles - 1);  // a tile behind the last row is not stored
                copy_tile(shared_address(w_memory + (stage * ROW_TILES + r) * W_TILE),
                          weights + ((u64)tile * k_tiles + unit % k_tiles) * W_TILE, W_TILE, full + 8 * stage, policy);
            }
        };
        auto copy_inputs = [&](int unit, int stage) {
            copy_x(shared_address(memory + stage * X_TILE), &x_map, unit / k_tiles % n_tiles * TILE_N,
                   unit % k_tiles * X_PANELS, full + 8 * stage);
        };
        const int ahead = min(STAGES, end - begin);
        for (int step = 0; step < ahead; step++) copy_weights(begin + step, step);
        asm volatile("griddepcontrol.wait;" ::: "memory");  // x comes from the kernel before
        for (int step = 0; step < ahead; step++) copy_inputs(begin + step, step);
        for (int step = ahead; step < end - begin; step++) {
            const int stage = step % STAGES;
            barrier_wait(empty + 8 * stage, (step / STAGES - 1) & 1);
            copy_weights(begin + step, stage);
            copy_inputs(begin + step, stage);
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    const int lane = thread % 32, row = thread % 128 / 32 * 16 + lane / 4;
    auto release = [&](int stage, bool condition = true) {
        __syncwarp();
        barrier_arrive_if(lane == 0 && condition, empty + 8 * stage);
    };
    int step = 0;
    for (int unit = begin; unit < end;) {
        const int tile = unit / k_tiles, first_k = unit % k_tiles, count = min(k_tiles - first_k, end - unit);
        SUM acc[ACC];
#pragma unroll
        for (int i = 0; i < ACC; i++) acc[i] = 0;
        for (int k = 0; k < count; k++, step++) {
            const int stage = step % STAGES;
            barrier_wait(full + 8 * stage, (step / STAGES) & 1);
            const u8* const w_tile = w_memory + (stage * ROW_TILES + group) * W_TILE;
            const u64 descriptor = panel_descriptor(shared_address(memory + stage * X_TILE));
#if !OPERANDS_STORED
            u32 words[WORDS];
            load_words(words, w_tile, thread % 128);
#endif
#pragma unroll
            for (int g = 0; g < GROUP_LOOPS; g++) {
                Parameters parameters;
                parameters.load(w_tile + CODE_BYTES, g, row);
#pragma unroll
                for (int chunk = 0; chunk < STEPS / CHUNK; chunk++) {
                    u32 fragment[CHUNK][4];
#pragma unroll
                    for (int i = 0; i < CHUNK; i++) {
                        const int at = g * STEPS + chunk * CHUNK + i;
#if OPERANDS_STORED
                        *(uint4*)fragment[i] = ((const uint4*)w_tile)[128 * at + thread % 128];
#else
                        dequantize<WORDS>(fragment[i], words, at, parameters);
#endif
                    }
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < CHUNK; i++) {
                        const int at = g * STEPS + chunk * CHUNK + i;
                        wgmma(acc, fragment[i], descriptor + (at / 4 * X_PANEL + at % 4 * 32) / 16, 1);
                    }
                    wgmma_commit();
                    wgmma_wait<1>();  // the products before these are complete
                    if (g == 0 && chunk == 0) {
                        release((step + STAGES - 1) % STAGES, k > 0);
#if !OPERANDS_STORED
                        pin(words);
#endif
                    }
                }
            }
        }
        wgmma_wait();
        const int last = (step - 1) % STAGES;
        SUM* const mine = parts + ((u64)block * CONSUMERS + thread) * 4;
        const u64 next = (u64)blocks * CONSUMERS * 4;  // the distance of four sums of a thread
        unit += count;
        if (first_k > 0) {
#pragma unroll
            for (int i = 0; i < ACC; i += 4) *(uint4*)(mine + i / 4 * next) = *(const uint4*)&acc[i];
            consumers_sync();
            if (thread == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flags + block) : "memory");
            release(last);
            continue;
        }
        const int tile_end = (tile + 1) * k_tiles;
        for (int peer = block + 1; peer < blocks && (int)(units * peer / blocks) < tile_end; peer++) {
            if (thread == 0) {
                u32 ready = 0;
                while (!ready) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(ready) : "l"(flags + peer) : "memory");
                flags[peer] = 0;  // for the next launch
            }
            consumers_sync();
            const SUM* const theirs = parts + ((u64)peer * CONSUMERS + thread) * 4;
#pragma unroll
            for (int i = 0; i < ACC; i += 4) {
                SUM part[4];
                *(uint4*)part = __ldcg((const uint4*)(theirs + i / 4 * next));
#pragma unroll
                for (int j = 0; j < 4; j++) acc[i + j] += part[j];
            }
        }

        const int first_row = tile / n_tiles * ROWS, first_n = tile % n_tiles * TILE_N, valid = min(TILE_N, batch - first_n);
        float scale[2], offset[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = min(first_row + group * 64 + row + 8 * i, rows - 1);
            scale[i] = factor * (row_scale ? row_scale[at] : 1.0f);
            offset[i] = bias ? from_half(bias[at]) : 0.0f;
        }
        const bool aligned = (rows | stride) % 8 == 0 && (u64)y % 16 == 0;
        u8* const out = memory + last * X_TILE;  // [OUT_N, ROWS] half-precision results, 16 bytes at a time, swizzled
#pragma unroll
        for (int start = 0; start < TILE_N; start += OUT_N) {
            consumers_sync();  // nobody reads the stage any more
#pragma unroll
            for (int n = start; n < min(start + OUT_N, TILE_N); n += 16) {
                u32 pairs[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {  // rows, rows + 8; then the same for the next eight rows of x
                    const int at = 4 * (n / 8 + i / 2) + 2 * (i % 2), column = n + i / 2 * 8 + lane % 4 * 2;
                    const float s0 = x_scale ? x_scale[min(first_n + column, batch - 1)] : 1.0f;
                    const float s1 = x_scale ? x_scale[min(first_n + column + 1, batch - 1)] : 1.0f;
                    pairs[i] = to_pair((float)acc[at] * scale[i % 2] * s0 + offset[i % 2],
                                       (float)acc[at + 1] * scale[i % 2] * s1 + offset[i % 2]);
                }
                const int to = n - start + lane / 16 * 8 + lane % 8, chunk = group * 8 + thread % 128 / 32 * 2 + lane / 8 % 2;
                store_matrices(shared_address(out + to * OUT_ROW + ((chunk ^ (to & 7)) << 4)), pairs);
            }
            consumers_sync();
            constexpr int CHUNKS = ROWS / 8;
            for (int item = thread; item < min(OUT_N, valid - start) * CHUNKS; item += CONSUMERS) {
                const int n = item / CHUNKS, chunk = item % CHUNKS, at = first_row + chunk * 8;
                const uint4 values = *(const uint4*)(out + n * OUT_ROW + ((chunk ^ (n & 7)) << 4));
                u16* const target = y + (u64)(first_n + start + n) * stride + at;
                if (aligned) {
                    if (at < rows) *(uint4*)target = values;
                } else {
                    for (int i = 0; i < 8; i++)
                        if (at + i < rows) target[i] = ((const u16*)&values)[i];
                }
            }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the next copy comes after these accesses
        release(last);
    }
}
