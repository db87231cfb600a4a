// Tiles of packed weights, 64 rows x 128 columns, as `shuffle` of hopper_layout.py arranges them: how a thread loads and
// dequantizes its part.
//
// hopper.py defines FORMAT, BITS, GROUPS (scales or zero points of a row in a tile), SCALE_BYTES, ZERO_BYTES,
// ZERO_OFFSET, X_BYTES and HALF_IS_BF16 (the operands), FOLD.

constexpr int TILE_K = 128;                        // columns of a weight tile
constexpr int CODE_BYTES = 64 * TILE_K * BITS / 8; // of a weight tile
constexpr int W_TILE = (CODE_BYTES + 64 * GROUPS * (SCALE_BYTES + ZERO_BYTES) + 127) / 128 * 128;
constexpr int K_STEPS = TILE_K * X_BYTES / 32;     // wgmma instructions per weight tile: 32 bytes of columns each

// ---------------------------------------------------------------------------------------------------- dequantization

__device__ __forceinline__ u32 subtract(u32 a, u32 b) {
    u32 result;
    asm("sub.rn." PAIR " %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 result;
    asm("mul.rn." PAIR " %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
    u32 result;
    asm("fma.rn." PAIR " %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

__device__ __forceinline__ u32 twice(u32 half) { return half * 0x10001u; }

// The number 2^m + c for a code c < 2^(bits of the mantissa) is an OR: its exponent with c as the mantissa.
#if HALF_IS_BF16
constexpr u32 LIFT = 0x43004300u;  // 128
#else
constexpr u32 LIFT = 0x64006400u;  // 1024
#endif

__device__ __forceinline__ float load_scale(const u8* scales, int index) {
#if SCALE_BYTES == 4
    return ((const float*)scales)[index];
#elif SCALE_IS_BF16
    return __uint_as_float((u32)((const u16*)scales)[index] << 16);
#else
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(((const u16*)scales)[index]));
    return result;
#endif
}

// What a thread needs to dequantize a group of its two rows, `row` and `row + 8`, of a tile.
struct Parameters {
    u32 offset[2] = {ZERO_OFFSET, ZERO_OFFSET};  // zero points, as the lifted codes have them
    u32 scale[2], rest[2];                       // a scale as the sum of two half-precision numbers
#if FORMAT == FORMAT_E2M1
    SCALES codes[2];  // of the scales of all groups of the tile, [64, GROUPS] bytes
#endif

    __device__ __forceinline__ void load(const u8* scales, int group, int row) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
#if ZERO_BYTES
            const u32 zero = (scales + 64 * GROUPS * SCALE_BYTES)[64 * group + row + 8 * i];
            offset[i] = BITS == 8 && HALF_IS_BF16 ? __float_as_uint(8388608.0f + zero) : LIFT | twice(zero);
#endif
#if FOLD
            const float value = load_scale(scales, 64 * group + row + 8 * i);
            scale[i] = to_pair(value, value);
            const float error = value - from_half((u16)scale[i]);
            rest[i] = to_pair(error, error);
#endif
#if FORMAT == FORMAT_E2M1
            codes[i] = ((const SCALES*)scales)[row + 8 * i];
#endif
        }
    }

    // Return the scale of an E2M1 group for the wgmma step of a tile.
    __device__ __forceinline__ u32 scale_at(int step, int i) const {
#if FORMAT == FORMAT_E2M1
        const u32 code = ((const u8*)&codes[i])[step * GROUPS / K_STEPS];
#if SCALE_E4M3 && HALF_IS_BF16
        return multiply(twice((code & 0x7F) << 4), 0x7B807B80u);  // 2^120
#elif SCALE_E4M3
        return multiply(twice((code & 0x7F) << 7), 0x5C005C00u);  // 2^8
#else
        return twice(code ? code << 7 : 0x0040);  // a power of two; 2^-127 is subnormal
#endif
#else
        return scale[i];
#endif
    }
};

// Dequantize the fragment of wgmma step `step` of a tile: four registers; 0 and 2 belong to row `row`, 1 and 3 to
// `row + 8`.
template <int WORDS>
__device__ __forceinline__ void dequantize(u32 (&out)[4], const u32 (&words)[WORDS], int step, const Parameters& p) {
    const u32 (&offset)[2] = p.offset;
#if X_BYTES == 2 && FORMAT == FORMAT_INT
#if BITS == 4
    const u32 word = words[step];
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = subtract(((word >> (4 * i)) & 0x000F000Fu) | LIFT, offset[i & 1]);
#elif BITS == 2
    const u32 word = words[step / 2] >> (8 * (step & 1));
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = subtract(((word >> (2 * i)) & 0x00030003u) | LIFT, offset[i & 1]);
#elif BITS == 3
    const u32 low = words[step / 2] >> (8 * (step & 1)), high = words[4 + step / 4] >> (4 * (step & 3));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 code = ((low >> (2 * i)) & 0x00030003u) | (((high >> i) & 0x00010001u) << 2);
        out[i] = subtract(code | LIFT, offset[i & 1]);
    }
#else  // 8 bits: bytes of a word belong to registers 0, 0, 1, 1 or 2, 2, 3, 3
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 word = words[2 * step + i / 2];
#if HALF_IS_BF16
        const float zero = __uint_as_float(offset[i & 1]);
        const float low = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440 + 2 * (i & 1)));
        const float high = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7441 + 2 * (i & 1)));
        out[i] = to_pair(low - zero, high - zero);
#else
        out[i] = subtract(__byte_perm(word, 0x64006400u, (i & 1) ? 0x7372 : 0x7170), offset[i & 1]);
#endif
    }
#endif
#elif FORMAT == FORMAT_E2M1
    const u32 word = words[step];
    const u32 factor[2] = {p.scale_at(step, 0), p.scale_at(step, 1)};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // The three bits of exponent and mantissa as those of a half-precision number 2^EXPONENT_LIFT times too small
        const u32 code = word >> (4 * i);
#if HALF_IS_BF16
        const u32 bits = ((code << 12) & 0x80008000u) | ((code << 6) & 0x01C001C0u);
        out[i] = multiply(multiply(bits, 0x7E807E80u), factor[i & 1]);  // 2^126
#else
        const u32 bits = ((code << 12) & 0x80008000u) | ((code << 9) & 0x0E000E00u);
        out[i] = multiply(multiply(bits, 0x74007400u), factor[i & 1]);  // 2^14
#endif
    }
#elif FORMAT == FORMAT_TABLE
    // Bytes of the values of four codes: a permutation looks up eight entries, another one selects between two halves
    const u32 word = words[step];
    u32 first[2], last[2];  // values of codes 0, 1 and of 2, 3, for both halves of the word
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 codes = word >> (16 * half), entry = codes & 0x7777u, upper = ((codes >> 1) & 0x4444u) | 0x3210u;
        const u32 low = __byte_perm(__byte_perm(TABLE_LOW_0, TABLE_LOW_1, entry), __byte_perm(TABLE_LOW_2, TABLE_LOW_3, entry), upper);
        const u32 high = __byte_perm(__byte_perm(TABLE_HIGH_0, TABLE_HIGH_1, entry), __byte_perm(TABLE_HIGH_2, TABLE_HIGH_3, entry), upper);
        first[half] = __byte_perm(low, high, 0x5140);
        last[half] = __byte_perm(low, high, 0x7362);
    }
    out[0] = __byte_perm(first[0], first[1], 0x5410);
    out[1] = __byte_perm(first[0], first[1], 0x7632);
    out[2] = __byte_perm(last[0], last[1], 0x5410);
    out[3] = __byte_perm(last[0], last[1], 0x7632);
#elif BITS == 4  // to int8, 16 times as large; codes are in two's complement
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 word = words[2 * step + i / 2];
        out[i] = ((i & 1) ? word : word << 4) & 0xF0F0F0F0u;
    }
#else  // 8-bit operands as they are
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = words[4 * step + i];
#endif
#if FOLD
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = multiply_add(out[i], p.scale[i & 1], multiply(out[i], p.rest[i & 1]));
#endif
}

constexpr int WORDS = CODE_BYTES / 128 / 4;  // of codes that a thread has in a tile

// Load the codes of a thread of a warpgroup, 16 bytes at a time.
__device__ __forceinline__ void load_words(u32 (&words)[WORDS], const u8* tile, int thread) {
#if BITS == 3  // planes of two bits and of one
    *(uint4*)&words[0] = ((const uint4*)tile)[thread];
    *(uint2*)&words[4] = ((const uint2*)(tile + 2048))[thread];
#else
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) *(uint4*)&words[4 * i] = ((const uint4*)tile)[128 * i + thread];
#endif
}

// Keep the compiler from dequantizing words earlier than here: it does not know that matrix instructions still read
// registers that it would write.
__device__ __forceinline__ void pin(u32 (&words)[WORDS]) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) asm volatile("" : "+r"(words[i]));
}

// Copy panels of x; the map has the dimensions column in a panel, row, panel.
__device__ __forceinline__ void copy_x(u32 target, const TensorMap* map, int row, int panel, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(target),
        "l"(map), "r"(0), "r"(row), "r"(panel), "r"(barrier) : "memory");
}
