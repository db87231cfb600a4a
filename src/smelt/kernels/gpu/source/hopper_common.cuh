// What all Hopper kernels share: types, barriers in shared memory, copies that arrive at them, wgmma's operands, and conversions.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap { u64 words[16]; };

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive without a branch: control flow between matrix instructions makes the compiler run them one after the other.
__device__ __forceinline__ void barrier_arrive_if(bool condition, u32 barrier) {
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %1, 0;\n @p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier),
                 "r"((int)condition) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        " @!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

constexpr u64 EVICT_FIRST = 0x12F0000000000000ULL, EVICT_NORMAL = 0x1000000000000000ULL;  // of the cache

__device__ __forceinline__ void copy_tile(u32 target, const u8* source, u32 bytes, u32 barrier, u64 policy = EVICT_FIRST) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

// Describe rows of 128 bytes in shared memory, swizzled, groups of 8 rows 1024 bytes apart, as an operand of wgmma whose
// columns are the dimension that is summed over.
__device__ __forceinline__ u64 panel_descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (1ULL << 16) | (64ULL << 32) | (1ULL << 62);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most PENDING of the committed groups are not complete.
template <int PENDING = 0>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The half-precision type of a kernel: HALF_IS_BF16, and PAIR as in the names of instructions.
__device__ __forceinline__ float from_half(u16 half) {
#if HALF_IS_BF16
    return __uint_as_float((u32)half << 16);
#else
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(half));
    return result;
#endif
}

__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 result;
    asm("cvt.rn." PAIR ".f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
