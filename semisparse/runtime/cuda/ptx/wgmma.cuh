// wgmma: asynchronous matrix multiply-accumulate by a warpgroup, 64 rows at a time (Hopper).

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "word.cuh"

// Orders this warpgroup's register accesses before the next wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }

// Waits for all but the `pending` most recent groups.
template <int pending>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(pending) : "memory");
}

// Matrix descriptors. In a cluster, the upper bits of a shared-memory address hold the CTA's rank: they are masked out.

// The 16-byte units of 128-byte rows are in order, or unit u of row r is at u ^ r % 8.
enum Swizzle : Long { kNoSwizzle = 0, kSwizzle128 = 1 };

// `leading` and `stride` are byte offsets: to the next core matrix along the leading dimension, and to the next eight rows.
__device__ __forceinline__ Long smem_descriptor(Word address, Word leading, Word stride, Long swizzle) {
    return static_cast<Long>((address & 0x3ffff) >> 4) | static_cast<Long>(leading >> 4) << 16 |
           static_cast<Long>(stride >> 4) << 32 | swizzle << 62;
}

// The descriptor's low word for 128-byte swizzled rows. Adding 1 advances it by 16 bytes.
__device__ __forceinline__ Word smem_descriptor_low(Word address) { return (address & 0x3ffff) >> 4 | 1u << 16; }

constexpr Word kSmemDescriptorHigh = 64 | 1u << 30;  // its high word: 1,024 bytes from 8 rows to the next 8, 128-byte swizzle

// Parts of asm statements, by the number of accumulators: their constraints (HOLD), their placeholders (D), and the placeholders of
// the operands after them (OPERANDS).
#define WGMMA_HOLD8(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define WGMMA_HOLD16(c, i) WGMMA_HOLD8(c, i), WGMMA_HOLD8(c, i + 8)
#define WGMMA_HOLD32(c, i) WGMMA_HOLD16(c, i), WGMMA_HOLD16(c, i + 16)
#define WGMMA_HOLD64(c, i) WGMMA_HOLD32(c, i), WGMMA_HOLD32(c, i + 32)
#define WGMMA_HOLD80(c, i) WGMMA_HOLD64(c, i), WGMMA_HOLD16(c, i + 64)
#define WGMMA_HOLD96(c, i) WGMMA_HOLD64(c, i), WGMMA_HOLD32(c, i + 64)
#define WGMMA_HOLD128(c, i) WGMMA_HOLD64(c, i), WGMMA_HOLD64(c, i + 64)

#define WGMMA_D8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WGMMA_D16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_D32 WGMMA_D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_D64 WGMMA_D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
    ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_D80 WGMMA_D64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_D96 WGMMA_D80 \
    ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_D128 WGMMA_D96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
    ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_OPERANDS8 "%8", "%9", "%10", "%11", "%12", "%13", "%14"
#define WGMMA_OPERANDS16 "%16", "%17", "%18", "%19", "%20", "%21", "%22"
#define WGMMA_OPERANDS32 "%32", "%33", "%34", "%35", "%36", "%37", "%38"
#define WGMMA_OPERANDS64 "%64", "%65", "%66", "%67", "%68", "%69", "%70"
#define WGMMA_OPERANDS80 "%80", "%81", "%82", "%83", "%84", "%85", "%86"
#define WGMMA_OPERANDS96 "%96", "%97", "%98", "%99", "%100", "%101", "%102"
#define WGMMA_OPERANDS128 "%128", "%129", "%130", "%131", "%132", "%133", "%134"

#define WGMMA_EXPAND(MACRO, ...) MACRO(__VA_ARGS__)

// d[64, N] = (scale_d ? d : 0) + a[64, 16] b[16, N], N twice the length of d. `a` is a warp's fragment of its 16 rows, as for
// mma.m16n8k16; `b` is the descriptor's low word for N rows of 128 swizzled bytes. The last argument gives the type.
#define WGMMA_RS(TYPE, ELEMENT, N, COUNT, A0, A1, A2, A3, B, SCALE, HIGH)                                                   \
    __device__ __forceinline__ void wgmma_m64k16(float (&d)[COUNT], const Word (&a)[4], Word b, int scale_d, const ELEMENT*) { \
        asm volatile("{\n.reg .pred scale;\n.reg .b64 b;\nsetp.ne.b32 scale, " SCALE ", 0;\nmov.b64 b, {" B ", " HIGH "};\n"  \
            "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" WGMMA_D##COUNT "}, {" A0 "," A1 "," A2      \
            "," A3 "}, b, scale, 1, 1, 0;\n}"                                                                               \
            : WGMMA_HOLD##COUNT("+f", 0)                                                                                    \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(scale_d), "n"(kSmemDescriptorHigh));                   \
    }
#define WGMMA_RS_BOTH(N, COUNT, ...)                                \
    WGMMA_RS("f16", __half, N, COUNT, __VA_ARGS__)                  \
    WGMMA_RS("bf16", __nv_bfloat16, N, COUNT, __VA_ARGS__)

WGMMA_EXPAND(WGMMA_RS_BOTH, "16", 8, WGMMA_OPERANDS8)
WGMMA_EXPAND(WGMMA_RS_BOTH, "32", 16, WGMMA_OPERANDS16)
WGMMA_EXPAND(WGMMA_RS_BOTH, "64", 32, WGMMA_OPERANDS32)
WGMMA_EXPAND(WGMMA_RS_BOTH, "128", 64, WGMMA_OPERANDS64)
WGMMA_EXPAND(WGMMA_RS_BOTH, "160", 80, WGMMA_OPERANDS80)
WGMMA_EXPAND(WGMMA_RS_BOTH, "192", 96, WGMMA_OPERANDS96)
WGMMA_EXPAND(WGMMA_RS_BOTH, "256", 128, WGMMA_OPERANDS128)

// d[64, 128] += a[64, 32] b[32, 128], a 2:4 sparse: 16 kept values per row in registers, their positions in `metadata`. `b` is
// the descriptor of an N-major matrix in swizzled 128-byte rows: 64 tokens of a column of x each.
#define WGMMA_SP_RS(TYPE, ELEMENT, A0, A1, A2, A3, B, METADATA, UNUSED)                                                      \
    __device__ __forceinline__ void wgmma_sp_m64n128k32(float (&d)[64], const Word (&a)[4], Long b, Word metadata,          \
                                                        const ELEMENT*) {                                                   \
        asm volatile("wgmma.mma_async.sp.sync.aligned.m64n128k32.f32." TYPE "." TYPE " {" WGMMA_D64 "}, {" A0 "," A1 "," A2  \
            "," A3 "}, " B ", " METADATA ", 0, 1, 1, 1, 1;"                                                                  \
            : WGMMA_HOLD64("+f", 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(metadata));                     \
    }

WGMMA_EXPAND(WGMMA_SP_RS, "f16", __half, WGMMA_OPERANDS64)
WGMMA_EXPAND(WGMMA_SP_RS, "bf16", __nv_bfloat16, WGMMA_OPERANDS64)

// 8-bit element types.
struct Int8 {};
struct Fp8 {};  // e4m3

// d[64, N] = (scale_d ? d : 0) + a[64, 64 bytes of K] b[64 bytes of K, N], a 2:4 sparse, stored in 32 bytes per row; a and b
// are descriptors of K-major matrices. `selector` picks the threads whose metadata is used. The last argument gives the type.
#define WGMMA_SP_SS(TYPE, ELEMENT, ACCUMULATOR, HOLD, REST, N, COUNT, A, B, METADATA, SCALE, SELECTOR, UNUSED1, UNUSED2)       \
    template <int selector>                                                                                                 \
    __device__ __forceinline__ void wgmma_sp_m64(ACCUMULATOR (&d)[COUNT], Long a, Long b, Word metadata, int scale_d,       \
                                                 const ELEMENT*) {                                                          \
        asm volatile("{\n.reg .pred scale;\nsetp.ne.b32 scale, " SCALE ", 0;\nwgmma.mma_async.sp.sync.aligned.m64n" N TYPE   \
            " {" WGMMA_D##COUNT "}, " A ", " B ", " METADATA ", " SELECTOR ", scale" REST ";\n}"                             \
            : WGMMA_HOLD##COUNT(HOLD, 0) : "l"(a), "l"(b), "r"(metadata), "r"(scale_d), "n"(selector));                      \
    }
#define WGMMA_SP_SS_ALL(N, COUNT, ...)                                                                       \
    WGMMA_SP_SS("k64.s32.s8.s8", Int8, int, "+r", "", N, COUNT, __VA_ARGS__)                                 \
    WGMMA_SP_SS("k64.f32.e4m3.e4m3", Fp8, float, "+f", ", 1, 1", N, COUNT, __VA_ARGS__)                      \
    WGMMA_SP_SS("k32.f32.bf16.bf16", __nv_bfloat16, float, "+f", ", 1, 1, 0, 0", N, COUNT, __VA_ARGS__)      \
    WGMMA_SP_SS("k32.f32.f16.f16", __half, float, "+f", ", 1, 1, 0, 0", N, COUNT, __VA_ARGS__)

WGMMA_EXPAND(WGMMA_SP_SS_ALL, "64", 32, WGMMA_OPERANDS32)
WGMMA_EXPAND(WGMMA_SP_SS_ALL, "128", 64, WGMMA_OPERANDS64)
WGMMA_EXPAND(WGMMA_SP_SS_ALL, "192", 96, WGMMA_OPERANDS96)
WGMMA_EXPAND(WGMMA_SP_SS_ALL, "256", 128, WGMMA_OPERANDS128)
