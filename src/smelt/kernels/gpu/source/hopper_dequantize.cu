// Dequantize a packed matrix in tiles to half precision, or to its codes if the operands have 8 bits: [rows, columns].
// A warpgroup takes a tile; its rows leave through shared memory, so that stores are wide.

typedef ELEMENT_TYPE Element;
#if FORMAT == FORMAT_TABLE
__constant__ float FLOAT_VALUES[16] = {TABLE_FLOATS};
#endif
constexpr int STRIDE = TILE_K + 16 / sizeof(Element);

extern "C" __global__ void __launch_bounds__(128) hopper_dequantize(
    const u8* __restrict__ weights, const float* __restrict__ row_scale, Element* __restrict__ out, float factor,
    int rows, int columns, int k_tiles) {
    __shared__ __align__(16) Element results[64 * STRIDE];
    const int thread = threadIdx.x, lane = thread % 32, row = thread / 32 * 16 + lane / 4, quad = lane % 4;
    const u8* const tile = weights + ((u64)blockIdx.y * k_tiles + blockIdx.x) * W_TILE;
    u32 words[WORDS];
    load_words(words, tile, thread);
#if FORMAT == FORMAT_TABLE
    __shared__ float values[16][32];  // a copy for every lane, in its own bank
    for (int i = thread; i < 16 * 32; i += 128) values[i / 32][i % 32] = FLOAT_VALUES[i / 32];
    __syncthreads();
#endif
#pragma unroll
    for (int step = 0; step < K_STEPS; step++) {
        Parameters parameters;
        const int group = step * GROUPS / K_STEPS;
        parameters.load(tile + CODE_BYTES, step * GROUP_LOOPS / K_STEPS, row);
        u32 fragment[4];
        dequantize<WORDS>(fragment, words, step, parameters);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int to = row + (i & 1) * 8;
#if X_BYTES == 1
            *(u32*)&results[to * STRIDE + step * 32 + i / 2 * 16 + 4 * quad] = fragment[i];
#else
            float scale = factor;
            if (row_scale) scale *= row_scale[min((int)blockIdx.y * 64 + to, rows - 1)];
            float low = from_half((u16)fragment[i]), high = from_half((u16)(fragment[i] >> 16));
#if FORMAT == FORMAT_TABLE  // values in half precision would be rounded twice
            low = values[(words[step] >> (8 * i)) & 15][lane];
            high = values[(words[step] >> (8 * i + 4)) & 15][lane];
#endif
#if SHIFTS
            const float by = load_scale(tile + CODE_BYTES, to, group), shift = load_shift(tile + CODE_BYTES, to, group);
            low = low * by + shift;
            high = high * by + shift;
#elif SCALE_BYTES && FORMAT != FORMAT_E2M1
            scale *= load_scale(tile + CODE_BYTES, to, group);
#endif
            *(u32*)&results[to * STRIDE + step * 16 + i / 2 * 8 + 2 * quad] = to_pair(low * scale, high * scale);
#endif
        }
    }
    __syncthreads();
    constexpr int WIDTH = 16 / sizeof(Element), PER_ROW = TILE_K / WIDTH;
    for (int item = thread; item < 64 * PER_ROW; item += 128) {
        const int at = blockIdx.y * 64 + item / PER_ROW, column = blockIdx.x * TILE_K + item % PER_ROW * WIDTH;
        if (at < rows && column < columns)  // columns are a multiple of 128 bytes of operands
            *(uint4*)(out + (u64)at * columns + column) =
                *(const uint4*)&results[item / PER_ROW * STRIDE + item % PER_ROW * WIDTH];
    }
}
