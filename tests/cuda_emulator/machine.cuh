// What a kernel sees of the machine that it runs on here: indices, warps, shared memory, barriers, and what CUDA C++ has without a
// header. machine.cpp is the machine itself, compiled once for all kernels. Standard headers are few: g++ reads them for each kernel.

#pragma once

#include <stddef.h>

#include <cstdint>
#include <cstring>

#include "ptx/word.cuh"

#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...) EMULATED_CLUSTER(__VA_ARGS__)
#define EMULATED_CLUSTER(...)
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL 1

extern "C" float exp2f(float), expf(float), fabsf(float), fmaxf(float, float), fminf(float, float), sqrtf(float);
inline bool isnan(float value) { return value != value; }
template <typename T> T max(T a, T b) { return a < b ? b : a; }
template <typename T> T min(T a, T b) { return b < a ? b : a; }

struct alignas(8) uint2 { Word x, y; };
struct alignas(16) uint4 { Word x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct Index { unsigned x = 0, y = 0, z = 0; };

struct Barrier { int arrived = 0; long generation = 0; };

struct Warp {
    Barrier barrier;
    uint64_t numbers[32];
    Word a[32][4], b[32][2];
};

struct Cta {
    Index index;
    unsigned rank = 0;       // in its cluster
    char* shared = nullptr;  // shared memory
    Warp* warps = nullptr;
    Barrier all, named[16];
};

constexpr size_t kSharedLimit = 228 << 10;  // dynamic shared memory, then static

extern size_t shared_bytes;  // dynamic shared memory of the launch
extern bool adverse;
extern const char* failure;
extern Index threadIdx, blockIdx, gridDim, blockDim;
extern unsigned cluster_size;
extern long progress;        // counts events of all threads for which others may be waiting
extern Cta* here;            // the CTA of the running thread

void pause_thread();         // lets the others run
void wait_at(Barrier& barrier, int count);
void barrier_cluster_sync();
Word static_end();           // of the CTA's static shared memory, which begins at kSharedLimit
Word static_address(const char* name, size_t bytes);

inline Warp& warp() { return here->warps[threadIdx.x / 32]; }
inline void fail(const char* what) { if (!failure) failure = what; }
inline void __syncthreads() { wait_at(here->all, blockDim.x); }
inline void __syncwarp() { wait_at(warp().barrier, 32); }

// Shared memory

inline char* shared_at(Word address, size_t bytes, size_t alignment) {
    const size_t end = address + bytes;
    if (end > shared_bytes && (address < kSharedLimit || end > static_end())) fail("outside shared memory");
    if (address % alignment) fail("an address in shared memory is not aligned");
    return here->shared + (failure ? 0 : address);
}

// The static shared array of this name and type, the CTA's own.
template <typename T> T& static_shared(const char* name) {
    return *reinterpret_cast<T*>(here->shared + static_address(name, sizeof(T)));
}

inline void check_aligned(const void* from, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(from) % bytes) fail("an address in global memory is not aligned");
}

// Shows a lane's operands of a matrix product to the others of its warp.
inline const Warp& shown_to_warp(const Word (&a)[4], Word b0, Word b1) {
    Warp& all = warp();
    std::memcpy(all.a[threadIdx.x % 32], a, sizeof a);
    all.b[threadIdx.x % 32][0] = b0;
    all.b[threadIdx.x % 32][1] = b1;
    __syncwarp();
    return all;
}

// What CUDA C++ has without a header

template <typename T> T __shfl_sync(Word, T value, int source) {
    const int lane = threadIdx.x % 32;
    std::memcpy(&warp().numbers[lane], &value, sizeof value);
    __syncwarp();
    std::memcpy(&value, &warp().numbers[source & 31], sizeof value);
    __syncwarp();
    return value;
}

template <typename T> T __shfl_xor_sync(Word mask, T value, int step) {
    return __shfl_sync(mask, value, threadIdx.x % 32 ^ step);
}

template <typename T> T __shfl_down_sync(Word mask, T value, int lanes) {
    const int lane = threadIdx.x % 32;
    return __shfl_sync(mask, value, lane + lanes < 32 ? lane + lanes : lane);
}

inline Word __reduce_or_sync(Word mask, Word value) {
    for (int step = 1; step < 32; step *= 2) value |= __shfl_sync<Word>(mask, value, threadIdx.x % 32 ^ step);
    return value;
}

template <typename T> T __reduce_max_sync(Word mask, T value) {
    for (int step = 1; step < 32; step *= 2) value = max(value, __shfl_sync<T>(mask, value, threadIdx.x % 32 ^ step));
    return value;
}

inline Word __ballot_sync(Word, bool vote) {
    warp().numbers[threadIdx.x % 32] = vote;
    __syncwarp();
    Word votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= static_cast<Word>(warp().numbers[lane] != 0) << lane;
    __syncwarp();
    return votes;
}

inline bool __any_sync(Word mask, bool vote) { return __ballot_sync(mask, vote); }

inline Word __dp4a(Word a, Word b, Word sum) {
    for (int shift = 0; shift < 32; shift += 8) sum += (a >> shift & 255) * (b >> shift & 255);
    return sum;
}

inline int __dp4a(int a, int b, int sum) {
    for (int shift = 0; shift < 32; shift += 8) sum += static_cast<int8_t>(a >> shift) * static_cast<int8_t>(b >> shift);
    return sum;
}

template <typename T> T __ldg(const T* from) { check_aligned(from, sizeof(T)); return *from; }
template <typename T> T __ldcs(const T* from) { check_aligned(from, sizeof(T)); return *from; }
template <typename T> T __ldcg(const T* from) { check_aligned(from, sizeof(T)); return *from; }
template <typename T> void __stcg(T* to, T value) { check_aligned(to, sizeof(T)); *to = value; }
inline int __ffs(Word word) { return __builtin_ffs(word); }
inline int __popc(Word word) { return __builtin_popcount(word); }
inline void __threadfence() {}
inline int atomicAdd(int* to, int more) { ++progress; return (*to += more) - more; }
inline Word atomicOr(Word* to, Word bits) { const Word before = *to; *to |= bits; return before; }
inline float __fmul_rn(float a, float b) { return a * b; }  // no -march, no contraction to fma
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float rsqrtf(float value) { return 1 / sqrtf(value); }
inline Word __float_as_uint(float value) { Word bits; std::memcpy(&bits, &value, 4); return bits; }
inline float __uint_as_float(Word bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
inline uint2 make_uint2(Word x, Word y) { return {x, y}; }
inline Word __umulhi(Word a, Word b) { return static_cast<uint64_t>(a) * b >> 32; }
inline Word __vmaxu2(Word a, Word b) { return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff); }

inline Word __byte_perm(Word low, Word high, Word selector) {
    const uint64_t both = low | static_cast<uint64_t>(high) << 32;
    Word found = 0;
    for (int i = 0; i < 4; ++i) found |= static_cast<Word>(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return found;
}

// Shift the high (low) word left (right) by the shift modulo 32, filled from the other.
inline Word __funnelshift_l(Word low, Word high, Word shift) {
    return (static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32;
}
inline Word __funnelshift_r(Word low, Word high, Word shift) {
    return static_cast<Word>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}

// Launching

const char* launch_kernel(void (*run_thread)(void**), const int* grid, int threads, int cluster, size_t bytes, bool adverse,
                          void** arguments);

template <int... i> struct Indices {};

template <typename... Parameters, int... i>
void call(void (*kernel)(Parameters...), void** arguments, Indices<i...>) {
    kernel(*static_cast<Parameters*>(arguments[i])...);
}

template <typename... Parameters> void call(void (*kernel)(Parameters...), void** arguments) {
    call(kernel, arguments, Indices<__integer_pack(sizeof...(Parameters))...>());
}

template <typename... Parameters>
size_t parameters_of(void (*)(Parameters...)) { return sizeof...(Parameters); }

#define LAUNCHER(kernel)                                                                                              \
    extern "C" __attribute__((visibility("default"))) const char* launch(                                            \
        const int* grid, int threads, int cluster, size_t bytes, bool adverse, void** arguments, size_t count) {      \
        if (count != parameters_of(kernel)) return "the number of arguments";                                         \
        return launch_kernel([](void** values) { call(kernel, values); }, grid, threads, cluster, bytes, adverse,     \
                             arguments);                                                                              \
    }
