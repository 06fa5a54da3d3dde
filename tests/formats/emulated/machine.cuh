// CUDA's threads as fibers on a CPU, one block at a time, and what the compiler itself brings for them.
//
// What a GPU leaves open is made adverse: shared memory begins as NaN; `adverse` runs the threads in the reverse order and lets
// asynchronous copies arrive as late as they may, else as early.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "word.cuh"

#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)

using std::max;
using std::min;

struct alignas(8) uint2 { Word x, y; };
struct alignas(16) uint4 { Word x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index { unsigned x = 0, y = 0, z = 0; };

// The machine

constexpr size_t kSharedLimit = 228 << 10;
constexpr size_t kStack = 128 << 10;
alignas(128) char machine_shared[kSharedLimit];
size_t shared_bytes = 0;
bool adverse = false;
const char* failure = nullptr;
Index threadIdx, blockIdx, gridDim, blockDim;

// Of `size` bytes to shared memory, of which `bytes` are read.
struct Copy { Word to; const void* from; int bytes; Word size; };

struct Barrier { int arrived = 0; long generation = 0; };

struct Warp {
    Barrier barrier;
    uint64_t numbers[32];
    Word a[32][4], b[32][2];
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done = false;
    std::vector<std::vector<Copy>> committed;
    std::vector<Copy> open;
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
Barrier block_barrier;
ucontext_t scheduler;
long progress = 0;
void (*body)() = nullptr;

inline Fiber& self() { return fibers[threadIdx.x]; }
inline Warp& warp() { return warps[threadIdx.x / 32]; }
inline void fail(const char* what) { if (!failure) failure = what; }
inline void pause_fiber() { swapcontext(&self().context, &scheduler); }

inline void wait_at(Barrier& barrier, int count) {
    const long generation = barrier.generation;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.generation;
        ++progress;
        return;
    }
    while (barrier.generation == generation) pause_fiber();
}

inline void __syncthreads() { wait_at(block_barrier, blockDim.x); }
inline void __syncwarp() { wait_at(warp().barrier, 32); }

inline void enter() { body(); self().done = true; ++progress; pause_fiber(); }

inline void run_block(int threads) {
    fibers = std::vector<Fiber>(threads);
    warps = std::vector<Warp>((threads + 31) / 32);
    block_barrier = Barrier();
    std::memset(machine_shared, 0xff, sizeof machine_shared);
    for (Fiber& fiber : fibers) {
        fiber.stack.resize(kStack);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = kStack;
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, enter, 0);
    }
    for (bool alive = true; alive && !failure;) {
        const long before = progress;
        alive = false;
        for (int i = 0; i < threads; ++i) {
            threadIdx.x = adverse ? threads - 1 - i : i;
            if (self().done) continue;
            alive = true;
            swapcontext(&scheduler, &self().context);
        }
        if (alive && progress == before) fail("a barrier that some threads never reach");
    }
}

inline void do_copy(const Copy& copy) {
    std::memset(machine_shared + copy.to, 0, copy.size);
    std::memcpy(machine_shared + copy.to, copy.from, copy.bytes);
}

// Shows a lane's operands of a matrix product to the others of its warp.
inline const Warp& shown_to_warp(const Word (&a)[4], Word b0, Word b1) {
    Warp& all = warp();
    std::copy(a, a + 4, all.a[threadIdx.x % 32]);
    all.b[threadIdx.x % 32][0] = b0;
    all.b[threadIdx.x % 32][1] = b1;
    __syncwarp();
    return all;
}

// Functions that need no header

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

inline int __reduce_max_sync(Word mask, int value) {
    for (int step = 1; step < 32; step *= 2) {
        value = max(value, __shfl_sync<int>(mask, value, threadIdx.x % 32 ^ step));
    }
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

inline int __dp4a(Word a, Word b, Word sum) {
    for (int shift = 0; shift < 32; shift += 8) sum += (a >> shift & 255) * (b >> shift & 255);
    return sum;
}

template <typename T> T __ldg(const T* place) { return *place; }
template <typename T> T __ldcs(const T* place) { return *place; }
inline int __ffs(Word word) { return __builtin_ffs(word); }
inline int __popc(Word word) { return __builtin_popcount(word); }
template <typename T> T __ldcg(const T* place) { return *place; }
inline void __threadfence() {}
inline int atomicAdd(int* place, int more) { return std::exchange(*place, *place + more); }
inline float __fmul_rn(float a, float b) { return a * b; }  // no -march, no contraction to fma
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline Word __float_as_uint(float value) { Word bits; std::memcpy(&bits, &value, 4); return bits; }
inline float __uint_as_float(Word bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline uint2 make_uint2(Word x, Word y) { return {x, y}; }
inline Word __byte_perm(Word low, Word high, Word selector) {
    const uint64_t both = low | static_cast<uint64_t>(high) << 32;
    Word found = 0;
    for (int i = 0; i < 4; ++i) found |= static_cast<Word>(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return found;
}
inline Word __umulhi(Word a, Word b) { return static_cast<uint64_t>(a) * b >> 32; }
inline Word __vmaxu2(Word a, Word b) { return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff); }
inline Word atomicOr(Word* place, Word bits) { return std::exchange(*place, *place | bits); }

// Launching

template <typename... Parameters, size_t... i>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<i...>) {
    kernel(*static_cast<Parameters*>(arguments[i])...);
}

template <typename... Parameters>
size_t parameters_of(void (*)(Parameters...)) { return sizeof...(Parameters); }

static void** launch_arguments = nullptr;

#define LAUNCHER(kernel)                                                                                                \
    template <typename... Parameters> void start(void (*function)(Parameters...)) {                                     \
        call(function, launch_arguments, std::index_sequence_for<Parameters...>());                                     \
    }                                                                                                                   \
    extern "C" const char* launch(const int* grid, int threads, size_t bytes, bool hard, void** arguments, size_t count) { \
        failure = nullptr;                                                                                              \
        if (count != parameters_of(kernel)) return "the number of arguments";                                           \
        if (bytes > kSharedLimit) return "more shared memory than there is";                                            \
        shared_bytes = bytes;                                                                                           \
        adverse = hard;                                                                                                 \
        launch_arguments = arguments;                                                                                   \
        body = [] { start(kernel); };                                                                                   \
        gridDim = Index{unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2])};                                       \
        blockDim = Index{unsigned(threads), 1, 1};                                                                      \
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)                                                      \
            for (blockIdx.x = 0; blockIdx.x < gridDim.x && !failure; ++blockIdx.x) run_block(threads);                  \
        return failure;                                                                                                 \
    }
