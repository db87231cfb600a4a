// GEMV with a packed matrix on Hopper: y = W x, fused with the operations around it in a decoder layer.
//
// Decoding one token reads every weight once, so instructions per weight decide. Converting 4-bit codes to half
// precision would take more of them than there is time. Here x becomes fixed-point numbers instead, 15 bits with a
// power-of-two scale per 128 columns, split into two bytes; codes are multiplied as bytes by integer mma.sync. Its right
// operand has eight columns: the high and the low bytes of x, for each of four groups of 16 columns and zero elsewhere.
// So the sums of the four groups end up in the four lanes of a quad, each with its own scale. Zero points and shifts
// multiply the sum of x.
//
// Values of a table are float16 numbers, and so is x, with the same scale, whatever its dtype: bfloat16 would be less
// exact. A matrix instruction has 16 columns of W, and those of x in the column of its right operand that has the
// number of the step in the tile.
//
// Operands in 8 bits: x is quantized like rows of a batch (kernels/gpu/activations.py), and multiplied as int8, or E4M3 as
// float16, which has all of its values.
//
// NORM: apply RMSNorm to x first; its weights multiply x, and its divisor the results. GATED: W has `rows` rows of the
// gate projection, then `rows` of the up projection; a block computes 64 of both. RESIDUAL: add the results to y.
//
// hopper_source.py defines these, and K_GROUPS, K_TILES, STAGES and SPLIT_K, as for hopper_gemm.cu.

constexpr int ROW_TILES = GATED ? 2 : 1;
constexpr int CONSUMERS = 128 * K_GROUPS, THREADS = CONSUMERS + 32;
constexpr int STAGE = K_TILES * ROW_TILES * W_TILE;
constexpr int LOADS = 4;                      // of x in flight in a warp
constexpr int X_TILE = FORMAT == FORMAT_TABLE || FORMAT == FORMAT_E4M3 ? 2 * TILE_K : TILE_K;  // bytes of x, or its high ones
constexpr int PAIRS = GROUPS > 1 ? 1 : 2;     // of matrix instructions that share a scale: 64 columns each

// Select bytes of two words by the four low nibbles of a third; a nibble from 8 on repeats the sign of its byte.
__device__ __forceinline__ u32 permute(u32 low, u32 high, u32 selector) {
    u32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
    return result;
}

// Unpack the codes of 16 columns as bytes: those of `row` and of `row + 8`, four in a register.
template <int WORDS>
__device__ __forceinline__ void unpack(u32& first, u32& second, const u32 (&words)[WORDS], int step) {
#if FORMAT == FORMAT_E2M1
    // Twice the value plus 12: 12 minus the magnitude, plus twice the magnitude unless the sign bit is set
    const u32 word = words[step], magnitudes = word & 0x77777777u;
    const u32 low = permute(0x06040200u, 0x18100C08u, word) + permute(0x090A0B0Cu, 0x00040608u, magnitudes);
    const u32 high = permute(0x06040200u, 0x18100C08u, word >> 16) + permute(0x090A0B0Cu, 0x00040608u, magnitudes >> 16);
    first = permute(low, high, 0x6420);
    second = permute(low, high, 0x7531);
#elif BITS == 8
    first = __byte_perm(words[2 * step], words[2 * step + 1], 0x5410);
    second = __byte_perm(words[2 * step], words[2 * step + 1], 0x7632);
#else
#if BITS >= 4
    first = words[step] & 0x0F0F0F0Fu;
    second = (words[step] >> 4) & 0x0F0F0F0Fu;
#else
    const u32 low = words[step / 2] >> (4 * (step & 1));
    first = low & 0x03030303u;
    second = (low >> 2) & 0x03030303u;
#endif
#if BITS == 3 || BITS == 5 || BITS == 6
    constexpr u32 MASK = ((1 << BITS) - (1 << LOW_BITS)) * 0x01010101u;
    const u32 high = high_word(words, step), from = high_from(step);
    first |= move_bits(high, from, LOW_BITS) & MASK;
    second |= move_bits(high, from + HIGH_BITS, LOW_BITS) & MASK;
#endif
#endif
}

// Return the scale of a row for one of the eight groups of 16 columns of a tile.
__device__ __forceinline__ float group_scale(const u8* scales, int row, int sixteen) {
#if FORMAT == FORMAT_E2M1
    const u32 code = scales[row * GROUPS + sixteen * GROUPS / 8];
#if SCALE_E4M3
    return __uint_as_float((code & 0x7F) << 20) * __uint_as_float(0x7B800000u);  // 2^120
#else
    return __uint_as_float(code ? code << 23 : 0x00400000u);  // a power of two; 2^-127 is subnormal
#endif
#elif SCALE_BYTES
    return load_scale(scales, row, sixteen * GROUPS / 8);
#else
    return 1.0f;
#endif
}

__device__ __forceinline__ int group_zero(const u8* scales, int row, int sixteen) {
#if FORMAT == FORMAT_E2M1
    return 12;
#elif ZERO_BYTES
    return load_zero(scales, row, sixteen * GROUPS / 8);
#else
    return DEFAULT_ZERO;
#endif
}

__device__ __forceinline__ void mma(int (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 to_float16_pair(float low, float high) {
    u32 result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

__device__ __forceinline__ void load_two(float* values, const u16* from) {
    const u32 loaded = *(const u32*)from;
    values[0] = from_half((u16)loaded);
    values[1] = from_half((u16)(loaded >> 16));
}

// Return byte `k` of four words.
__device__ __forceinline__ u32 gather_bytes(u32 a, u32 b, u32 c, u32 d, int k) {
    const u32 selector = k | (k + 4) << 4;
    return __byte_perm(__byte_perm(a, b, selector), __byte_perm(c, d, selector), 0x5410);
}

// Convert 128 columns of x to fixed point. A lane has columns 2 * (lane % 4) + {0, 1, 8, 9} of 16, as the fragments of
// weights have them: one word of `bytes` [2, stride] each for the high and the low bytes. For a table: to float16, with
// the right operand of a lane in each row of `bytes` [tiles, 32, 8].
__device__ __forceinline__ void store_fixed_point(const float (&values)[4], u8* bytes, int stride, float* x_scale, int* x_sum, int lane) {
    u32 magnitude = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) magnitude = max(magnitude, __float_as_uint(values[i]) & 0x7FFFFFFFu);
    const u32 amax = __reduce_max_sync(~0u, magnitude);
    // The power of two that brings all magnitudes below 2^14
    const int exponent = min(max((int)(amax >> 23), 14), 254);
    const float unit = __uint_as_float((u32)(exponent - 13) << 23), inverse = __uint_as_float((u32)(267 - exponent) << 23);
    if (lane == 0) *x_scale = amax < 0x7F800000u ? unit : __uint_as_float(0x7FC00000u);  // infinite or not a number
#if FORMAT == FORMAT_TABLE
    ((uint2*)bytes)[lane] = make_uint2(to_float16_pair(values[0] * inverse, values[1] * inverse),
                                       to_float16_pair(values[2] * inverse, values[3] * inverse));
#else
    int fixed[4], rounded[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        fixed[i] = __float2int_rn(values[i] * inverse);
        rounded[i] = fixed[i] + 128;  // the low byte is signed
    }
    constexpr int SECOND = BITS == 8 ? 1 : 2, THIRD = 3 - SECOND;  // as `unpack` orders codes
    *(u32*)(bytes + 4 * lane) = gather_bytes(rounded[0], rounded[SECOND], rounded[THIRD], rounded[3], 1);
    *(u32*)(bytes + stride + 4 * lane) = gather_bytes(fixed[0], fixed[SECOND], fixed[THIRD], fixed[3], 0);
    int total = fixed[0] + fixed[1] + fixed[2] + fixed[3];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (lane % 4 == 0) x_sum[lane / 4] = total;
#endif
}

#if X_BYTES == 1
__device__ __forceinline__ u32 from_e4m3(u32 word, int half) {  // two codes to float16
    u32 result;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(result) : "r"(word >> (16 * half)));
    return result;
}

__device__ __forceinline__ void signed_mma(int (&sums)[4], const u32* a, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Return the largest of all threads of the block.
__device__ __forceinline__ u32 block_max(u32 value, u32* memory) {
    value = __reduce_max_sync(~0u, value);
    if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = value;
    __syncthreads();
    for (int warp = 0; warp < THREADS / 32; warp++) value = max(value, memory[warp]);
    return value;
}

__device__ __forceinline__ float block_sum(float value, float* memory) {
#pragma unroll
    for (int i = 16; i; i /= 2) value += __shfl_xor_sync(~0u, value, i);
    if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0.0f;
    for (int warp = 0; warp < THREADS / 32; warp++) value += memory[warp];
    return value;
}

// Return the scale of x: the largest finite magnitude maps to `amax_code`.
__device__ __forceinline__ float scale_of(float amax, float clip_ratio, float amax_code) {
    const float scale = __fdiv_rn(amax * clip_ratio, amax_code);
    if (amax == 0.0f) return 1.0f;
#if X_SCALE_DTYPE == 1  // float16
    float rounded;
    asm("{\n.reg .b16 half;\ncvt.rn.f16.f32 half, %1;\ncvt.f32.f16 %0, half;\n}" : "=f"(rounded) : "f"(fminf(scale, 65504.0f)));
    return fmaxf(rounded, 5.9604644775390625e-08f);
#elif X_SCALE_DTYPE == 2  // bfloat16
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(pair) : "f"(fminf(scale, 3.38e38f)));
    return fmaxf(__uint_as_float(pair << 16), 1.1754943508222875e-38f);
#else
    return fmaxf(fminf(scale, 3.4e38f), 1.1754943508222875e-38f);
#endif
}

// Quantize four values and store them as the right operand.
__device__ __forceinline__ void store_codes(const float (&values)[4], float scale, u8* bytes, int column) {
    float steps[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float quotient = __fdiv_rn(values[i], scale);
        steps[i] = quotient == quotient ? quotient : 0.0f;
    }
#if FORMAT == FORMAT_E4M3
    u32 words[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        asm("{\n.reg .b16 codes;\ncvt.rn.satfinite.e4m3x2.f32 codes, %2, %1;\ncvt.rn.f16x2.e4m3x2 %0, codes;\n}"
            : "=r"(words[i]) : "f"(steps[2 * i]), "f"(steps[2 * i + 1]));
    *(uint2*)(bytes + 2 * column) = make_uint2(words[0], words[1]);
#else
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) word |= (u32)(u8)__float2int_rn(fminf(fmaxf(steps[i], -128.0f), 127.0f)) << (8 * i);
    *(u32*)(bytes + column) = word;
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) hopper_gemv(
    const u16* __restrict__ x, const u8* __restrict__ weights, const float* __restrict__ row_scale,
    const u16* __restrict__ bias, u16* __restrict__ y, const u16* __restrict__ norm, float factor, float epsilon, int rows,
    int columns, int k_tiles, const float* __restrict__ static_scale, float clip_ratio, float amax_code) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ float squares[THREADS / 32];
    const int thread = threadIdx.x, group = thread / 128, lane = thread % 32, rank = blockIdx.y;
    const int steps = (k_tiles + K_TILES - 1) / K_TILES;
    const int first = steps * rank / SPLIT_K, count = steps * (rank + 1) / SPLIT_K - first;
    const int first_tile = first * K_TILES, tiles = min(count * K_TILES, k_tiles - first_tile);
    const u32 full = shared_address(memory + STAGES * STAGE), empty = full + 8 * STAGES;
    const int stride = tiles * TILE_K + 16;  // of a row of bytes, which shifts rows by four banks
    u8* const bytes = memory + STAGES * STAGE + 16 * STAGES;  // [2, stride]
    float* const x_scale = (float*)(bytes + 2 * stride);      // [tiles]
    int* const x_sum = (int*)(x_scale + tiles);               // [tiles, 8], of 16 columns each
    float* const out = (float*)memory;                        // [K_GROUPS, ROW_TILES, 64], at the end

    asm volatile("griddepcontrol.launch_dependents;");
#if FORMAT == FORMAT_TABLE
    fill_lookup(THREADS);
#endif
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
        barrier_expect(full + 8 * stage, ROW_TILES * size);
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
            copy_tile(shared_address(memory + stage * STAGE + r * K_TILES * W_TILE),
                      weights + ((u64)(blockIdx.x + r * (rows / 64)) * k_tiles + k) * W_TILE, size, full + 8 * stage);
    };
    if (thread == CONSUMERS)
        for (int step = 0; step < min(PREFETCH, count); step++) copy_weights(step, step);
    asm volatile("griddepcontrol.wait;" ::: "memory");  // x comes from the kernel before
#if X_BYTES == 1
    __shared__ u32 magnitudes[THREADS / 32], flags[THREADS / 32];
    float held[X_LOADS][4];  // the whole row, since its scale depends on all of it
#pragma unroll
    for (int i = 0; i < X_LOADS; i++) {
        const int column = 4 * (thread + i * THREADS);
#pragma unroll
        for (int k = 0; k < 4; k++) held[i][k] = 0.0f;
        if (column >= columns) continue;
        load_two(held[i], x + column);
        load_two(held[i] + 2, x + column + 2);
    }
#if NORM
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < X_LOADS; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) square += held[i][k] * held[i][k];
    const float inverse = rsqrtf(block_sum(square, squares) / columns + epsilon);
#pragma unroll
    for (int i = 0; i < X_LOADS; i++) {
        const int column = 4 * (thread + i * THREADS);
        if (column >= columns) continue;
        float by[4];
        load_two(by, norm + column);
        load_two(by + 2, norm + column + 2);
#pragma unroll
        for (int k = 0; k < 4; k++) held[i][k] = from_half((u16)to_pair(held[i][k] * inverse * by[k], 0.0f));
    }
#endif
    u32 magnitude = 0, has_nan = 0;
#pragma unroll
    for (int i = 0; i < X_LOADS; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u32 bits = __float_as_uint(held[i][k]) & 0x7FFFFFFFu;
            magnitude = max(magnitude, bits < 0x7F800000u ? bits : 0);  // infinities do not count
            has_nan |= bits > 0x7F800000u;
        }
    magnitude = block_max(magnitude, magnitudes);
    has_nan = block_max(has_nan, flags);
    const float step = static_scale ? *static_scale : scale_of(__uint_as_float(magnitude), clip_ratio, amax_code);
    factor *= has_nan ? __uint_as_float(0x7FC00000u) : step;
#pragma unroll
    for (int i = 0; i < X_LOADS; i++) {
        const int column = 4 * (thread + i * THREADS) - first_tile * TILE_K;
        if (column >= 0 && column < tiles * TILE_K) store_codes(held[i], step, bytes, column);
    }
#else
#if NORM
    float square = 0.0f;
    for (int column = 4 * thread; column < columns; column += 4 * THREADS) {
        float values[4];
        load_two(values, x + column);
        load_two(values + 2, x + column + 2);
#pragma unroll
        for (int i = 0; i < 4; i++) square += values[i] * values[i];
    }
#pragma unroll
    for (int i = 16; i; i /= 2) square += __shfl_xor_sync(~0u, square, i);
    if (lane == 0) squares[thread / 32] = square;
#endif
    for (int start = thread / 32; start < tiles; start += LOADS * (THREADS / 32)) {  // one warp for 128 columns
        float loaded[LOADS][4];
#pragma unroll
        for (int load = 0; load < LOADS; load++) {
            const int tile = start + load * (THREADS / 32), column = (first_tile + tile) * TILE_K + lane / 4 * 16 + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 4; i++) loaded[load][i] = 0.0f;
            if (tile >= tiles || column >= columns) continue;
            load_two(loaded[load], x + column);
            load_two(loaded[load] + 2, x + column + 8);
#if NORM
            float by[4];
            load_two(by, norm + column);
            load_two(by + 2, norm + column + 8);
#pragma unroll
            for (int i = 0; i < 4; i++) loaded[load][i] *= by[i];
#endif
        }
#pragma unroll
        for (int load = 0; load < LOADS; load++) {
            const int tile = start + load * (THREADS / 32);
            if (tile >= tiles) break;
            store_fixed_point(loaded[load], bytes + tile * X_TILE, stride, x_scale + tile, x_sum + tile * 8, lane);
        }
    }
#endif
    __syncthreads();

    if (group == K_GROUPS) {
        if (thread == CONSUMERS) {
            for (int step = PREFETCH; step < count; step++) {
                if (step >= STAGES) barrier_wait(empty + 8 * (step % STAGES), (step / STAGES - 1) & 1);
                copy_weights(step, step % STAGES);
            }
        }
    } else {
        const int row = thread % 128 / 32 * 16 + lane / 4, quad = lane % 4, column = lane / 4;
        const int sixteen = column / 2 % 2;  // of the 32 columns of an instruction, those that this lane has
        const u8* const my_bytes = bytes + column % 2 * stride + 16 * sixteen + 4 * quad;
        float acc[ROW_TILES][2];
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; i++) acc[i / 2][i % 2] = 0.0f;
        for (int step = group; step < count; step += K_GROUPS) {
            const int stage = step % STAGES;
            barrier_wait(full + 8 * stage, (step / STAGES) & 1);
#pragma unroll
            for (int t = 0; t < K_TILES; t++) {
                const int tile = step * K_TILES + t;
                if (K_TILES > 1 && tile >= tiles) break;
#if FORMAT == FORMAT_TABLE || FORMAT == FORMAT_E4M3
                const uint2 right = ((const uint2*)(bytes + tile * X_TILE))[lane];  // of step `column`
#elif X_BYTES == 1
                const u32* const right = (const u32*)(bytes + tile * X_TILE) + 8 * column + quad;  // of step `column` < 4
#else
                u32 right[4];
#pragma unroll
                for (int k = 0; k < 4; k++)  // an instruction has data of this lane if its two columns are for these 32
                    right[k] = column / 4 == k % 2 ? *(const u32*)(my_bytes + tile * TILE_K + 32 * k) : 0;
#endif
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    const u8* const codes = memory + stage * STAGE + (r * K_TILES + t) * W_TILE;
                    const u8* const scales = codes + CODE_BYTES;
                    u32 words[WORDS];
                    load_words(words, codes, thread % 128);
#if FORMAT == FORMAT_E4M3
                    float sums[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};  // of even and odd steps
#pragma unroll
                    for (int k = 0; k < 8; k++) {
                        const u32* const two = words + 2 * k;  // rows `row` and `row + 8`
                        const u32 left[4] = {from_e4m3(two[0], 0), from_e4m3(two[1], 0), from_e4m3(two[0], 1), from_e4m3(two[1], 1)};
                        mma(sums[k % 2], left, column == k ? right.x : 0, column == k ? right.y : 0);
                    }
#pragma unroll
                    for (int i = 0; i < 2; i++) acc[r][i] += sums[0][2 * i] + sums[1][2 * i + 1];
#elif X_BYTES == 1
                    const Parameters none = {};
                    int sums[4] = {0, 0, 0, 0};
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        u32 left[4];
                        dequantize(left, words, k, none);
                        signed_mma(sums, left, column == k ? right[0] : 0, column == k ? right[4] : 0);
                    }
#pragma unroll
                    for (int i = 0; i < 2; i++) acc[r][i] += (float)(sums[2 * i] + sums[2 * i + 1]);
#elif FORMAT == FORMAT_TABLE
                    float sums[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};  // of even and odd steps
#pragma unroll
                    for (int k = 0; k < K_STEPS; k++) {
                        u32 left[4];
#pragma unroll
                        for (int i = 0; i < 4; i++) left[i] = look_up(words[k], i);
                        mma(sums[k % 2], left, column == k ? right.x : 0, column == k ? right.y : 0);
                    }
#pragma unroll
                    for (int i = 0; i < 2; i++) {  // this lane has the sums of steps 2 * quad and 2 * quad + 1
                        const float scale = x_scale[tile] * group_scale(scales, row + 8 * i, 2 * quad);
                        acc[r][i] += scale * (sums[0][2 * i] + sums[1][2 * i + 1]);
                    }
#else
#pragma unroll
                    for (int pair = 0; pair < 2; pair += PAIRS) {
                        int sums[4] = {0, 0, 0, 0}, total = 0;
#pragma unroll
                        for (int k = 2 * pair; k < 2 * (pair + PAIRS); k++) {
                            u32 left[4];
                            unpack<WORDS>(left[0], left[1], words, 2 * k);
                            unpack<WORDS>(left[2], left[3], words, 2 * k + 1);
                            mma(sums, left, sixteen ? 0 : right[k], sixteen ? right[k] : 0);
                            if (k % 2 == 0) total += x_sum[tile * 8 + 2 * k + quad];
                        }
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            const int sum = 256 * sums[2 * i] + sums[2 * i + 1];
                            const int zero = group_zero(scales, row + 8 * i, 4 * pair + quad);
                            const float scale = x_scale[tile] * group_scale(scales, row + 8 * i, 4 * pair + quad);
                            acc[r][i] += scale * (float)(sum - zero * total);
#if SHIFTS
                            const float shift = load_shift(scales, row + 8 * i, (4 * pair + quad) * GROUPS / 8);
                            acc[r][i] += x_scale[tile] * shift * (float)total;
#endif
                        }
                    }
#endif
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * stage);
        }
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; i++) {
            float sum = acc[i / 2][i % 2];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (quad == 0) out[(group * ROW_TILES + i / 2) * 64 + row + i % 2 * 8] = sum;
        }
    }
    __syncwarp();
#if SPLIT_K > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
    const int at = blockIdx.x * 64 + thread;
    if (thread < 64 && thread / 32 % SPLIT_K == rank && at < rows) {
#if NORM && X_BYTES == 2
        float square = 0.0f;
        for (int warp = 0; warp < THREADS / 32; warp++) square += squares[warp];
        factor *= rsqrtf(square / columns + epsilon);
#endif
        float results[ROW_TILES];
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            float sum = 0.0f;
#pragma unroll
            for (int peer = 0; peer < SPLIT_K; peer++)
#pragma unroll
                for (int team = 0; team < K_GROUPS; team++) {
                    const float* const local = out + (team * ROW_TILES + r) * 64 + thread;
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
            results[r] = sum * factor * (row_scale ? row_scale[at + r * rows] : 1.0f);
        }
        float result = results[0];
        if (bias) result += from_half(bias[at]);
#if GATED
        result = result / (1.0f + __expf(-result)) * results[1];
#endif
#if RESIDUAL
        result += from_half(y[at]);
#endif
        y[at] = (u16)to_pair(result, 0.0f);
    }
#if SPLIT_K > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
