// GEMM with a packed weight matrix on Hopper: y = x W^T, with W dequantized in registers.
//
// The weights are the left operand of wgmma, which takes it from registers, so dequantized values never touch memory.
// They are shuffled once at load (hopper_layout.py) into tiles of 64 rows x 128 columns: the codes in the order of the wgmma
// fragments, then the scales and zero points of the tile. A tile is contiguous and travels by one bulk copy. x tiles
// come through a tensor map, which swizzles them for wgmma and fills rows and columns outside of x with zeros.
//
// One thread issues all copies, STAGES deep. Warpgroups compute: a team of them takes a step of ROW_TILES weight tiles,
// M_TILES per warpgroup, and one x tile; K_GROUPS teams take turns, so that one dequantizes while another waits. With
// SPLIT_K > 1, the blocks of a cluster take parts of the columns. All sums meet in (distributed) shared memory: no second
// kernel, and always the same order of additions.
//
// Integer groups have their scale applied in one of two ways. FLUSH: to the sums of a group, in float32; exact, and
// cheap if x has few rows. Otherwise to the weights, rounded to half precision as a dequantized matrix would be; then
// sums stay in the tensor cores. Shifts are added to the weights as well.
//
// With few rows of x (MMA), the products are those of single warps, mma.sync: its fragments have the same layout, and it
// has no fences to wait for. There, time is latency and instructions, not multiplications.
//
// Rows of y are `stride` numbers apart: y may be columns of a larger matrix.
//
// GROUPED: the weights are those of many experts, stacked, and a list on the device (experts.py) has, for each block,
// the expert, its first row of x and of y, and their number. A block beyond the end of the list reads no weights. The list
// is written by an earlier kernel than the one before (EARLY), or by that one: then weights are not copied ahead of it.
//
// hopper_source.py defines: TILE_N (rows of x per block), ROW_TILES, M_TILES, K_GROUPS, STAGES, SPLIT_K, GROUPED, EARLY,
// FORMAT and its parameters, and the functions `wgmma` and `mma` for the operand type.

constexpr int ROWS = 64 * ROW_TILES;               // weight rows per block
constexpr int TEAM = ROW_TILES / M_TILES;           // warpgroups
constexpr int WARPGROUPS = TEAM * K_GROUPS;
constexpr int CONSUMERS = 128 * WARPGROUPS;   // threads that compute
constexpr bool WIDE = TILE_N > 64 && WARPGROUPS == 2;  // registers move from the copying warps to the others
constexpr int THREADS = CONSUMERS + (WIDE ? 128 : 32);
constexpr int SWIZZLE = 128;                       // bytes of a row of x in a swizzled tile
constexpr int X_PANEL = TILE_N * SWIZZLE;          // bytes
constexpr int X_PANELS = TILE_K * X_BYTES / SWIZZLE;
constexpr int X_TILE = X_PANEL * X_PANELS;
constexpr int STAGE = K_TILES * (X_TILE + ROW_TILES * W_TILE);
constexpr int OUT_STRIDE = ROWS + 4;               // floats
constexpr int ACC = TILE_N / 2;                    // accumulators of a thread
constexpr u64 WEIGHT_POLICY = GROUPED && TILE_N > 32 ? EVICT_NORMAL : EVICT_FIRST;  // an expert may have several tiles
constexpr int CHAINS = TILE_N <= 16 && K_STEPS > GROUP_LOOPS ? 2 : 1;
constexpr int CHUNK = K_STEPS / GROUP_LOOPS < 4 ? K_STEPS / GROUP_LOOPS : X_BYTES == 1 || TILE_N > 64 ? 2 : 4;  // instructions issued at a time

// ------------------------------------------------------------------------------------------------- matrix products

@PRODUCTS@

// Load the right operands of two products from a swizzled panel: matrices of 8 rows x 16 bytes, of which lanes 8 j to
// 8 j + 7 address matrix j.
__device__ __forceinline__ void load_matrices(u32 (&out)[4], u32 panel, int row, int chunk) {
    const u32 address = panel + row * SWIZZLE + ((chunk ^ (row & 7)) << 4);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address) : "memory");
}

// Load an entry of the list of tiles: expert, first row, number of rows (0 beyond the end). Not through the first-level
// cache, which other multiprocessors do not update.
__device__ __forceinline__ int4 load_expert_tile(const int4* tiles, const int* num_tiles, int index) {
    int4 tile;
    int count;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(count) : "l"(num_tiles) : "memory");
    asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tile.x), "=r"(tile.y), "=r"(tile.z), "=r"(tile.w) : "l"(tiles + index) : "memory");
    if (index >= count) tile.z = 0;
    return tile;
}

// ---------------------------------------------------------------------------------------------------------- the kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_gemm(
    const __grid_constant__ TensorMap x_map, const u8* __restrict__ weights, const float* __restrict__ row_scale,
    const float* __restrict__ x_scale, const u16* __restrict__ bias, u16* __restrict__ y, float factor, int batch,
    int rows, int stride, int k_tiles
#if GROUPED
    , const int4* expert_tiles, const int* num_tiles, int shared_x  // all experts have the first row of x
#endif
) {
    extern __shared__ __align__(1024) u8 memory[];
    const int thread = threadIdx.x, group = thread / 128;
    const int row_tile = blockIdx.x * ROW_TILES, rank = blockIdx.z;
#if GROUPED
    asm volatile("griddepcontrol.launch_dependents;");
    if constexpr (!EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");
    const int4 listed = load_expert_tile(expert_tiles, num_tiles, blockIdx.y);
    if (listed.z == 0) {
        if constexpr (EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");  // later kernels rely on it
        return;
    }
    const int first_n = listed.y, first_x = shared_x ? 0 : first_n, valid_n = listed.z;
    weights += (u64)listed.x * ((rows + 63) / 64) * k_tiles * W_TILE;
    if (row_scale) row_scale += (u64)listed.x * rows;
#else
    const int first_n = blockIdx.y * TILE_N, first_x = first_n, valid_n = min(TILE_N, batch - first_n);
#endif
    const int steps = (k_tiles + K_TILES - 1) / K_TILES;
    const int first = steps * rank / SPLIT_K, count = steps * (rank + 1) / SPLIT_K - first;
    const u32 full = shared_address(memory + STAGES * STAGE), empty = full + 8 * STAGES;
    u8* const w_memory = memory + STAGES * K_TILES * X_TILE;

    if constexpr (!GROUPED) asm volatile("griddepcontrol.launch_dependents;");
#if FORMAT == FORMAT_TABLE
    fill_lookup(THREADS);
#endif
    if (thread == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 4 * TEAM);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    float* const out = (float*)memory;  // [K_GROUPS, TILE_N, ROWS], after all copies have been used
    if (group == WARPGROUPS) {
        if constexpr (WIDE) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (thread == CONSUMERS) {
            const int row_tiles = (rows + 63) / 64;
            auto copy_weights = [&](int step, int stage) {
                const int k = (first + step) * K_TILES, bytes = min(K_TILES, k_tiles - k) * W_TILE;
                barrier_expect(full + 8 * stage, K_TILES * X_TILE + ROW_TILES * bytes);
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    const int tile = min(row_tile + r, row_tiles - 1);  // a tile behind the last row is not stored
                    copy_tile(shared_address(w_memory + (stage * ROW_TILES + r) * K_TILES * W_TILE),
                              weights + ((u64)tile * k_tiles + k) * W_TILE, bytes, full + 8 * stage, WEIGHT_POLICY);
                }
            };
            auto copy_inputs = [&](int step, int stage) {
                copy_x(shared_address(memory + stage * K_TILES * X_TILE), &x_map, first_x,
                       (first + step) * K_TILES * X_PANELS, full + 8 * stage);
            };
            const int ahead = min(STAGES, count);
            for (int step = 0; step < ahead; step++) copy_weights(step, step);
            asm volatile("griddepcontrol.wait;" ::: "memory");  // x comes from the kernel before
            for (int step = 0; step < ahead; step++) copy_inputs(step, step);
            for (int step = ahead; step < count; step++) {
                const int stage = step % STAGES;
                barrier_wait(empty + 8 * stage, (step / STAGES - 1) & 1);
                copy_weights(step, stage);
                copy_inputs(step, stage);
            }
        }
    } else {
        if constexpr (WIDE) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int lane = thread % 32, row = (thread % 128) / 32 * 16 + lane / 4;
        SUM acc[M_TILES][ACC];
#pragma unroll
        for (int i = 0; i < M_TILES * ACC; i++) acc[i / ACC][i % ACC] = 0;
#if MMA && !FLUSH
        SUM second[ACC];  // a product takes long to add to the last one, so every other one has its own sums
#pragma unroll
        for (int i = 0; i < ACC; i++) second[i] = 0;
#endif
        const int team = group / TEAM, first_tile = group % TEAM * M_TILES;
        for (int step = team; step < count; step += K_GROUPS) {
            const int stage = step % STAGES;
            barrier_wait(full + 8 * stage, (step / STAGES) & 1);
            const int valid = min(K_TILES, k_tiles - (first + step) * K_TILES);
#pragma unroll
            for (int tile = 0; tile < K_TILES; tile++) {
            if (K_TILES > 1 && tile >= valid) break;
            auto weight_tile = [&](int m) {
                return w_memory + ((stage * ROW_TILES + first_tile + m) * K_TILES + tile) * W_TILE;
            };
            const u32 x_tile = shared_address(memory + (stage * K_TILES + tile) * X_TILE);
            const u64 descriptor = panel_descriptor(x_tile);
            u32 words[M_TILES][WORDS];
#pragma unroll
            for (int m = 0; m < M_TILES; m++) load_words(words[m], weight_tile(m), thread % 128);
#if MMA
            u32 x_pairs[TILE_N == 8 ? 1 : TILE_N / 16][4];  // right operands: of two steps if there are 8 rows
#endif
#pragma unroll
            for (int g = 0; g < GROUP_LOOPS; g++) {
                constexpr int STEPS = K_STEPS / GROUP_LOOPS;
#if FLUSH
                PART part[M_TILES][ACC];
#endif
                Parameters parameters[M_TILES];
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
                    parameters[m].load(weight_tile(m) + CODE_BYTES, g, row);
#if MMA
#if FLUSH
                PART chains[CHAINS][ACC];  // independent sums, as above
#pragma unroll
                for (int i = 0; i < CHAINS * ACC; i++) chains[i / ACC][i % ACC] = 0;
#endif
#pragma unroll
                for (int k = 0; k < STEPS; k++) {
                    const int at = g * STEPS + k, matrix = lane / 8;
                    const u32 panel = x_tile + at / 4 * X_PANEL;
                    if (TILE_N > 8) {
#pragma unroll
                        for (int n = 0; n < TILE_N / 16; n++)
                            load_matrices(x_pairs[n], panel, n * 16 + matrix / 2 * 8 + lane % 8, at % 4 * 2 + matrix % 2);
                    } else if (at % 2 == 0) {
                        load_matrices(x_pairs[0], panel, lane % 8, at % 4 * 2 + matrix);
                    }
                    u32 fragment[4];
                    dequantize<WORDS>(fragment, words[0], at, parameters[0]);
#pragma unroll
                    for (int n = 0; n < TILE_N / 8; n++) {
                        const int from = TILE_N > 8 ? n % 2 * 2 : at % 2 * 2;
#if FLUSH
                        mma(&chains[k % CHAINS][4 * n], fragment, &x_pairs[n / 2][from]);
#else
                        mma(at % CHAINS ? &second[4 * n] : &acc[0][4 * n], fragment, &x_pairs[n / 2][from]);
#endif
                    }
                }
#if FLUSH
#pragma unroll
                for (int i = 0; i < ACC; i++) part[0][i] = CHAINS == 2 ? chains[0][i] + chains[CHAINS - 1][i] : chains[0][i];
#endif
#else
                // A few instructions at a time: dequantize while the tensor cores work on those before.
#pragma unroll
                for (int chunk = 0; chunk < STEPS / CHUNK; chunk++) {
                    u32 fragment[M_TILES][CHUNK][4];
#pragma unroll
                    for (int i = 0; i < M_TILES * CHUNK; i++)
                        dequantize<WORDS>(fragment[i / CHUNK][i % CHUNK], words[i / CHUNK],
                                          g * STEPS + chunk * CHUNK + i % CHUNK, parameters[i / CHUNK]);
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < M_TILES * CHUNK; i++) {
                        const int m = i % M_TILES, k = i / M_TILES, at = g * STEPS + chunk * CHUNK + k;
                        const u64 panel = descriptor + (at / 4 * X_PANEL + at % 4 * 32) / 16;
#if FLUSH
                        wgmma(part[m], fragment[m][k], panel, chunk + k > 0);
#else
                        wgmma(acc[m], fragment[m][k], panel, 1);
#endif
                    }
                    wgmma_commit();
                }
#endif
#if FLUSH
                if constexpr (!MMA) wgmma_wait();
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    const u8* const scales = weight_tile(m) + CODE_BYTES;
                    const float s0 = load_scale(scales, row, g), s1 = load_scale(scales, row + 8, g);
#pragma unroll
                    for (int i = 0; i < ACC; i++) acc[m][i] += (i & 2 ? s1 : s0) * (float)part[m][i];
                }
#endif
            }
            }
#if !FLUSH && !MMA
            wgmma_wait();
#endif
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * stage);
        }
#if MMA && !FLUSH
        if (CHAINS == 2)
#pragma unroll
            for (int i = 0; i < ACC; i++) acc[0][i] += second[i];
#endif
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int i = 0; i < ACC; i++)
                out[(team * TILE_N + i / 4 * 8 + lane % 4 * 2 + (i & 1)) * OUT_STRIDE + (first_tile + m) * 64 + row +
                    (i & 2 ? 8 : 0)] = (float)acc[m][i];
    }
    __syncwarp();
#if SPLIT_K > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
    const bool aligned = (rows | stride) % 4 == 0 && (u64)y % 8 == 0;
    for (int item = thread; item < valid_n * (ROWS / 4); item += THREADS) {
        const int n = item / (ROWS / 4), column = item % (ROWS / 4) * 4, row = row_tile * 64 + column;
        if (n % SPLIT_K != rank || row >= rows) continue;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int peer = 0; peer < SPLIT_K; peer++) {
#pragma unroll
            for (int team = 0; team < K_GROUPS; team++) {
                float part[4];
                const float* const local = out + (team * TILE_N + n) * OUT_STRIDE + column;
#if SPLIT_K > 1
                u32 remote;
                asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(local)), "r"(peer));
                asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(part[0]), "=f"(part[1]), "=f"(part[2]), "=f"(part[3]) : "r"(remote) : "memory");
#else
                *(float4*)part = *(const float4*)local;
#endif
#pragma unroll
                for (int i = 0; i < 4; i++) sum[i] += part[i];
            }
        }
        const float by_token = factor * (x_scale ? x_scale[first_x + n] : 1.0f);
        u16 result[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = min(row + i, rows - 1);
            float value = sum[i] * by_token * (row_scale ? row_scale[at] : 1.0f);
            if (bias) value += from_half(bias[at]);
            result[i] = (u16)to_pair(value, 0.0f);
        }
        u16* const target = y + (u64)(first_n + n) * stride + row;
        if (aligned) {
            *(uint2*)target = *(const uint2*)result;
        } else {
            for (int i = 0; i < 4; i++)
                if (row + i < rows) target[i] = result[i];
        }
    }
#if SPLIT_K > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
