// GEMV with a packed integer matrix on Hopper: y = W x.
//
// Decoding one token reads every weight once, so instructions per weight decide. Converting 4-bit codes to half
// precision would take more of them than there is time. Here x becomes fixed-point numbers instead, 15 bits with a
// power-of-two scale per 128 columns, split into two bytes; codes are multiplied as the bytes they are, by integer
// mma.sync. Columns 0 and 1 of its right operand are the high and the low bytes of x, so that both sums of a row end up
// in one thread. Zero points multiply the sum of x.
//
// hopper.py defines K_GROUPS, K_TILES, STAGES and SPLIT_K, as for hopper_gemm.cu.

constexpr int CONSUMERS = 128 * K_GROUPS, THREADS = CONSUMERS + 32;
constexpr int STAGE = K_TILES * W_TILE;
constexpr int LOADS = 4;  // of x in flight in a warp

// Return the place of a column among the 16 of a step: four columns of a thread's fragment are neighbors.
__device__ __forceinline__ int byte_of_column(int column) {
    const int thread = column % 8 / 2, low = column % 2, high = column / 8;
    return 4 * thread + (BITS == 8 ? low + 2 * high : 2 * low + high);
}

// Unpack the codes of 16 columns: those of `row` and of `row + 8`, four in a register.
template <int WORDS>
__device__ __forceinline__ void unpack(u32& first, u32& second, const u32 (&words)[WORDS], int step) {
#if BITS == 4
    first = words[step] & 0x0F0F0F0Fu;
    second = (words[step] >> 4) & 0x0F0F0F0Fu;
#elif BITS == 8
    first = __byte_perm(words[2 * step], words[2 * step + 1], 0x5410);
    second = __byte_perm(words[2 * step], words[2 * step + 1], 0x7632);
#else  // 2 bits, or 3 with the high bits in words 4 and 5
    const u32 low = words[step / 2] >> (8 * (step & 1));
    first = (low & 0x00030003u) | ((low << 4) & 0x03000300u);
    second = ((low >> 2) & 0x00030003u) | ((low << 2) & 0x03000300u);
#if BITS == 3
    const u32 high = words[4 + step / 4] >> (4 * (step & 3));
    first |= ((high << 2) & 0x00040004u) | ((high << 8) & 0x04000400u);
    second |= ((high << 1) & 0x00040004u) | ((high << 7) & 0x04000400u);
#endif
#endif
}

__device__ __forceinline__ void mma(int (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(THREADS) hopper_gemv(
    const u16* __restrict__ x, const u8* __restrict__ weights, const float* __restrict__ row_scale,
    const u16* __restrict__ bias, u16* __restrict__ y, float factor, int rows, int columns, int k_tiles) {
    extern __shared__ __align__(1024) u8 memory[];
    const int thread = threadIdx.x, group = thread / 128, lane = thread % 32, rank = blockIdx.y;
    const int steps = (k_tiles + K_TILES - 1) / K_TILES;
    const int first = steps * rank / SPLIT_K, count = steps * (rank + 1) / SPLIT_K - first;
    const int first_tile = first * K_TILES, tiles = min(count * K_TILES, k_tiles - first_tile);
    const u32 full = shared_address(memory + STAGES * STAGE), empty = full + 8 * STAGES;
    const int stride = tiles * TILE_K + 16;  // of a row of bytes, which shifts rows by four banks
    u8* const bytes = memory + STAGES * STAGE + 16 * STAGES;  // [2, stride]
    float* const x_scale = (float*)(bytes + 2 * stride);      // [tiles]
    int* const x_sum = (int*)(x_scale + tiles);               // [tiles, 4], of 32 columns each
    float* const out = (float*)memory;                        // [K_GROUPS, 64], at the end

    asm volatile("griddepcontrol.launch_dependents;");
    if (thread == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    auto copy_weights = [&](int step, int stage) {
        const int k = (first + step) * K_TILES, size = min(K_TILES, k_tiles - k) * W_TILE;
        barrier_expect(full + 8 * stage, size);
        copy_tile(shared_address(memory + stage * STAGE), weights + ((u64)blockIdx.x * k_tiles + k) * W_TILE, size,
                  full + 8 * stage);
    };
    if (thread == CONSUMERS)
        for (int step = 0; step < min(STAGES, count); step++) copy_weights(step, step);
    asm volatile("griddepcontrol.wait;" ::: "memory");  // x comes from the kernel before
    for (int start = thread / 32; start < tiles; start += LOADS * (THREADS / 32)) {  // one warp for 128 columns
        uint2 loaded[LOADS];
#pragma unroll
        for (int load = 0; load < LOADS; load++) {
            const int tile = start + load * (THREADS / 32), column = (first_tile + tile) * TILE_K + 4 * lane;
            loaded[load] = tile < tiles && column < columns ? *(const uint2*)(x + column) : make_uint2(0, 0);
        }
#pragma unroll
        for (int load = 0; load < LOADS; load++) {
            const int tile = start + load * (THREADS / 32);
            if (tile >= tiles) break;
            const float values[4] = {from_half((u16)loaded[load].x), from_half((u16)(loaded[load].x >> 16)),
                                     from_half((u16)loaded[load].y), from_half((u16)(loaded[load].y >> 16))};
            float amax = 0.0f, sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                amax = fmaxf(amax, fabsf(values[i]));
                sum += values[i] - values[i];  // not a number if one of them is infinite or not a number
            }
#pragma unroll
            for (int i = 16; i; i /= 2) {
                amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, i));
                sum += __shfl_xor_sync(~0u, sum, i);
            }
            // The power of two that brings all magnitudes below 2^14
            const int exponent = min(max((int)(__float_as_uint(amax) >> 23), 14), 254);
            const float unit = __uint_as_float((u32)(exponent - 13) << 23);
            const float inverse = __uint_as_float((u32)(267 - exponent) << 23);
            int total = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int value = __float2int_rn(values[i] * inverse), high = (value + 128) >> 8;
                const int at = tile * TILE_K + 4 * lane / 16 * 16 + byte_of_column((4 * lane + i) % 16);
                bytes[at] = (u8)high;
                bytes[stride + at] = (u8)(value - 256 * high);
                total += value;
            }
#pragma unroll
            for (int i = 4; i; i /= 2) total += __shfl_xor_sync(~0u, total, i);
            if (lane == 0) x_scale[tile] = unit + sum;
            if (lane % 8 == 0) x_sum[tile * 4 + lane / 8] = total;
        }
    }
    __syncthreads();

    if (group == K_GROUPS) {
        if (thread == CONSUMERS) {
            for (int step = STAGES; step < count; step++) {
                barrier_wait(empty + 8 * (step % STAGES), (step / STAGES - 1) & 1);
                copy_weights(step, step % STAGES);
            }
        }
    } else {
        const int row = thread % 128 / 32 * 16 + lane / 4;
        const bool present = lane / 4 < 2;  // the other columns are zero
        const u8* const my_bytes = bytes + (present ? lane / 4 : 0) * stride + 4 * (lane % 4);
        float acc[2] = {0.0f, 0.0f};
        for (int step = group; step < count; step += K_GROUPS) {
            const int stage = step % STAGES;
            barrier_wait(full + 8 * stage, (step / STAGES) & 1);
#pragma unroll
            for (int t = 0; t < K_TILES; t++) {
                const int tile = step * K_TILES + t;
                if (K_TILES > 1 && tile >= tiles) break;
                const u8* const codes = memory + stage * STAGE + t * W_TILE;
                const u8* const scales = codes + CODE_BYTES;
                u32 words[WORDS];
                load_words(words, codes, thread % 128);
#pragma unroll
                for (int g = 0; g < GROUP_LOOPS; g++) {
                    int sums[4] = {0, 0, 0, 0}, total = 0;
#pragma unroll
                    for (int k = g * 8 / GROUP_LOOPS; k < (g + 1) * 8 / GROUP_LOOPS; k += 2) {
                        u32 a[4];
                        unpack<WORDS>(a[0], a[1], words, k);
                        unpack<WORDS>(a[2], a[3], words, k + 1);
                        u32 b0 = *(const u32*)(my_bytes + tile * TILE_K + 16 * k);
                        u32 b1 = *(const u32*)(my_bytes + tile * TILE_K + 16 * k + 16);
                        mma(sums, a[0], a[1], a[2], a[3], present ? b0 : 0, present ? b1 : 0);
                        total += x_sum[tile * 4 + k / 2];
                    }
                    const float unit = x_scale[tile];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
#if ZERO_BYTES
                        const int zero = (scales + 64 * GROUPS * SCALE_BYTES)[64 * g + row + 8 * i];
#else
                        const int zero = DEFAULT_ZERO;
#endif
#if SCALE_BYTES
                        const float scale = unit * load_scale(scales, 64 * g + row + 8 * i);
#else
                        const float scale = unit;
#endif
                        acc[i] += scale * (float)(256 * sums[2 * i] + sums[2 * i + 1] - zero * total);
                    }
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * stage);
        }
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
        if (lane % 4 == 0)
#pragma unroll
            for (int i = 0; i < 2; i++) out[group * 64 + row + 8 * i] = acc[i];
    }
    __syncwarp();
#if SPLIT_K > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
    const int at = blockIdx.x * 64 + thread;
    if (thread < 64 && thread / 32 % SPLIT_K == rank && at < rows) {
        float sum = 0.0f;
#pragma unroll
        for (int peer = 0; peer < SPLIT_K; peer++)
#pragma unroll
            for (int team = 0; team < K_GROUPS; team++) {
                const float* const local = out + team * 64 + thread;
#if SPLIT_K > 1
                u32 remote;
                float part;
                asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(local)), "r"(peer));
                asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(part) : "r"(remote) : "memory");
                sum += part;
#else
                sum += *local;
#endif
            }
        sum *= factor * (row_scale ? row_scale[at] : 1.0f);
        if (bias) sum += from_half(bias[at]);
        y[at] = (u16)to_pair(sum, 0.0f);
    }
#if SPLIT_K > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
