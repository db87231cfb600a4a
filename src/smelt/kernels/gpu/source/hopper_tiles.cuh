// Tiles of packed weights, 64 rows x 128 columns, as `shuffle` of hopper_layout.py arranges them: how a thread loads and
// dequantizes its part.
//
// hopper_source.py defines FORMAT, BITS, GROUPS (scales or zero points of a row in a tile), GROUP_LOOPS, SCALE_BYTES,
// SHIFTS (each scale is followed by a shift), ZERO_BYTES, ZERO_OFFSET, X_BYTES and HALF_IS_BF16 (the operands), FOLD.

constexpr int TILE_K = 128;                        // columns of a weight tile
constexpr int CODE_BYTES = 64 * TILE_K * BITS / 8; // of a weight tile
constexpr int SCALES_BYTES = 64 * GROUPS * SCALE_BYTES * (1 + SHIFTS);
constexpr int W_TILE = (CODE_BYTES + SCALES_BYTES + 64 * GROUPS * ZERO_BYTES + 127) / 128 * 128;
constexpr int K_STEPS = TILE_K * X_BYTES / 32;     // wgmma instructions per weight tile: 32 bytes of columns each
constexpr int SETS = FORMAT == FORMAT_E2M1 || GROUPS <= GROUP_LOOPS ? 1 : GROUPS / GROUP_LOOPS;  // groups of a loop

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

// Return (a & mask) | b in one instruction: with two constants, the compiler would take two.
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 b) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(a), "r"(mask), "r"(b));
    return result;
}

__device__ __forceinline__ u32 twice(u32 half) { return half * 0x10001u; }

// The number 2^m + c for a code c < 2^(bits of the mantissa) is an OR: its exponent with c as the mantissa.
#if HALF_IS_BF16
constexpr u32 LIFT = 0x43004300u;  // 128
#else
constexpr u32 LIFT = 0x64006400u;  // 1024
#endif
constexpr bool EXACT_SCALES = SCALE_BYTES == 2 && SCALE_IS_BF16 == HALF_IS_BF16;  // they are numbers of the operands' type

__device__ __forceinline__ float from_float16(u16 half) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(half));
    return result;
}

// Scales and zero points are [64, GROUPS].
__device__ __forceinline__ float load_scale(const u8* scales, int row, int group) {
    const int index = (row * GROUPS + group) * (1 + SHIFTS);
#if SCALE_BYTES == 4
    return ((const float*)scales)[index];
#elif SCALE_IS_BF16
    return __uint_as_float((u32)((const u16*)scales)[index] << 16);
#else
    return from_float16(((const u16*)scales)[index]);
#endif
}

__device__ __forceinline__ float load_shift(const u8* scales, int row, int group) {
    return from_float16(((const u16*)scales)[2 * (row * GROUPS + group) + 1]);
}

__device__ __forceinline__ u32 load_zero(const u8* scales, int row, int group) {
    return (scales + SCALES_BYTES)[row * GROUPS + group];
}

// Move the bits of a word up or down, from one position to another.
__device__ __forceinline__ u32 move_bits(u32 word, int from, int to) { return to >= from ? word << (to - from) : word >> (from - to); }

#if BITS == 3 || BITS == 5 || BITS == 6
// Return the bits of the high plane of one or two bits at a step: those of the first row are `high_from` bits up in each
// byte, those of the second as many bits further up as the plane has.
constexpr int LOW_BITS = BITS == 3 ? 2 : 4, HIGH_BITS = BITS - LOW_BITS, HIGH_STEPS = 4 / HIGH_BITS;
template <int WORDS>
__device__ __forceinline__ u32 high_word(const u32 (&words)[WORDS], int step) { return words[2 * LOW_BITS + step / HIGH_STEPS]; }
__device__ __forceinline__ int high_from(int step) { return 2 * HIGH_BITS * (step % HIGH_STEPS); }
#endif

#if FORMAT == FORMAT_TABLE
// The values of two codes as half-precision numbers, [256, 32]: every lane has a copy in its own bank.
__constant__ u16 VALUES[16] = {TABLE_VALUES};
__shared__ __align__(1024) u32 lookup[256 * 32];

__device__ __forceinline__ void fill_lookup(int threads) {
    for (int i = threadIdx.x; i < 256 * 8; i += threads) {
        const u32 pair = VALUES[i / 8 % 16] | (u32)VALUES[i / 128] << 16;
        ((uint4*)lookup)[i] = make_uint4(pair, pair, pair, pair);
    }
}

// Return the values of the codes in a byte of a word.
__device__ __forceinline__ u32 look_up(u32 word, int byte) {
    const u32 address = __byte_perm(word, 0, 0x4440 + byte) * 128 + (shared_address(lookup) + threadIdx.x % 32 * 4);
    u32 values;
    asm("ld.shared.u32 %0, [%1];" : "=r"(values) : "r"(address));
    return values;
}
#endif

// What a thread needs to dequantize the groups of a loop, in its two rows, `row` and `row + 8`, of a tile.
struct Parameters {
    u32 offset[SETS][2];                // zero points, as the lifted codes have them
    u32 scale[SETS][2], rest[SETS][2];  // a scale as the sum of two half-precision numbers
    u32 shift[SETS][2];
#if FORMAT == FORMAT_E2M1
    SCALES codes[2];  // of the scales of all groups of the tile, [64, GROUPS] bytes
#endif

    __device__ __forceinline__ void load(const u8* scales, int loop, int row) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                const int group = loop * SETS + set;
#if ZERO_BYTES
                const u32 zero = load_zero(scales, row + 8 * i, group);
                offset[set][i] = BITS == 8 && HALF_IS_BF16 ? __float_as_uint(8388608.0f + zero) : LIFT | twice(zero);
#else
                offset[set][i] = ZERO_OFFSET;
#endif
#if FOLD
                const float value = load_scale(scales, row + 8 * i, group);
                scale[set][i] = to_pair(value, value);
                const float error = value - from_half((u16)scale[set][i]);
                rest[set][i] = to_pair(error, error);
#if SHIFTS
                const float by = load_shift(scales, row + 8 * i, group);
                shift[set][i] = to_pair(by, by);
#endif
#endif
            }
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
        return scale[0][i];
#endif
    }
};

// Dequantize the fragment of wgmma step `step` of a tile: four registers; 0 and 2 belong to row `row`, 1 and 3 to
// `row + 8`.
template <int WORDS>
__device__ __forceinline__ void dequantize(u32 (&out)[4], const u32 (&words)[WORDS], int step, const Parameters& p) {
    const int set = SETS == 1 ? 0 : step * GROUPS / K_STEPS % SETS;
    const u32 (&offset)[2] = p.offset[set];
#if X_BYTES == 2 && FORMAT == FORMAT_INT
#if BITS == 4
    const u32 word = words[step];
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = subtract(and_or(word >> (4 * i), 0x000F000Fu, LIFT), offset[i & 1]);
#elif BITS == 2
    const u32 word = words[step / 2] >> (4 * (step & 1));
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = subtract(and_or(word >> (8 * (i / 2) + 2 * (i & 1)), 0x00030003u, LIFT), offset[i & 1]);
#elif BITS < 8
    const u32 low = BITS == 3 ? words[step / 2] >> (4 * (step & 1)) : words[step], high = high_word(words, step);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 from = 8 * (i / 2) + high_from(step) + HIGH_BITS * (i & 1);
        const u32 code = and_or(low >> (8 * (i / 2) + LOW_BITS * (i & 1)), twice((1 << LOW_BITS) - 1), LIFT);
        out[i] = subtract(and_or(move_bits(high, from, LOW_BITS), twice((1 << BITS) - (1 << LOW_BITS)), code), offset[i & 1]);
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
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = look_up(words[step], i);
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
    for (int i = 0; i < 4; i++) {
        const u32 scale = p.scale[set][i & 1], rest = p.rest[set][i & 1];
#if SHIFTS
        out[i] = multiply_add(out[i], scale, EXACT_SCALES ? p.shift[set][i & 1] : multiply_add(out[i], rest, p.shift[set][i & 1]));
#else
        out[i] = EXACT_SCALES ? multiply(out[i], scale) : multiply_add(out[i], scale, multiply(out[i], rest));
#endif
    }
#endif
}

constexpr int WORDS = CODE_BYTES / 128 / 4;  // of codes that a thread has in a tile

// Load the codes of a thread of a warpgroup, 16 bytes at a time, plane by plane.
__device__ __forceinline__ void load_words(u32 (&words)[WORDS], const u8* tile, int thread) {
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) *(uint4*)&words[4 * i] = ((const uint4*)tile)[128 * i + thread];
#if BITS == 3 || BITS == 5  // a plane of one bit
    *(uint2*)&words[2 * LOW_BITS] = ((const uint2*)(tile + 1024 * LOW_BITS))[thread];
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
