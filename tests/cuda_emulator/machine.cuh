// The machine that kernels run on here: CUDA threads are fibers of one CPU thread, and this is their scheduler.
//
// CTAs start in the order of their numbers, a cluster at a time. The next cluster starts when every running thread has ended or
// waits: so CTAs that wait for one another are resident together, as on a GPU.
//
// Where a GPU may behave in several ways, the worst is chosen: shared memory starts as NaN; with `adverse`, threads run in
// reverse order, and asynchronous copies and wgmma products complete as late as possible, else at once.

#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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

using std::isnan;
using std::max;
using std::min;

struct alignas(8) uint2 { Word x, y; };
struct alignas(16) uint4 { Word x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct Index { unsigned x = 0, y = 0, z = 0; };

// The scheduler

constexpr size_t kSharedLimit = 228 << 10;   // dynamic shared memory, then
constexpr size_t kStaticLimit = 48 << 10;    // static
constexpr size_t kStack = 256 << 10;
size_t shared_bytes = 0;
bool adverse = false;
const char* failure = nullptr;
Index threadIdx, blockIdx, gridDim, blockDim;
unsigned cluster_size = 1;
long progress = 0;  // counts events of all fibers for which others may be waiting
ucontext_t scheduler;
void (*kernel_body)() = nullptr;

// A copy of `size` bytes to shared memory: `bytes` are read, the others become zeros.
struct Copy { Word to; const void* from; Word bytes, size; };

struct Barrier { int arrived = 0; long generation = 0; };

struct Mbarrier { int count = 0, pending = 0; long bytes = 0, phase = 0; };

struct Warp {
    Barrier barrier;
    uint64_t numbers[32];
    Word a[32][4], b[32][2];
};

struct Fiber {
    ucontext_t context;
    char* stack = nullptr;
    bool done = false;
    std::vector<std::vector<Copy>> committed;                  // cp.async groups
    std::vector<Copy> open;
    std::vector<std::vector<std::function<void()>>> products;  // wgmma groups
    std::vector<std::function<void()>> open_products;
    ~Fiber() { if (stack) munmap(stack, kStack); }
};

struct Cta {
    Index index;
    unsigned rank = 0;               // in its cluster
    std::unique_ptr<char[]> memory;  // shared memory
    char* shared = nullptr;          // aligned
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Barrier all, named[16];
    std::map<Word, Mbarrier> mbarriers;
    std::map<std::string, Word> statics;   // addresses of static shared arrays
    Word static_end = kSharedLimit;
    std::multimap<Word, std::function<void()>> bulk_copies;    // bulk copies that have not arrived, by their mbarrier
    struct Cluster* cluster = nullptr;
    int running = 0;
};

struct Cluster { std::vector<std::unique_ptr<Cta>> ctas; Barrier barrier; };

Cta* here = nullptr;  // the CTA of the running fiber

inline Fiber& self() { return here->fibers[threadIdx.x]; }
inline Warp& warp() { return here->warps[threadIdx.x / 32]; }
inline void fail(const char* what) { if (!failure) failure = what; }

inline void pause_fiber() {
    Cta* cta = here;
    const Index thread = threadIdx;
    swapcontext(&self().context, &scheduler);
    here = cta, threadIdx = thread, blockIdx = cta->index;
}

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

inline void __syncthreads() { wait_at(here->all, blockDim.x); }
inline void __syncwarp() { wait_at(warp().barrier, 32); }

inline void enter_fiber() {
    kernel_body();
    self().done = true;
    --here->running;
    ++progress;
    pause_fiber();
}

inline void start_cta(Cta& cta, Cluster& cluster, unsigned number) {
    cta.index = {number % gridDim.x, number / gridDim.x % gridDim.y, number / gridDim.x / gridDim.y};
    cta.rank = number % cluster_size;
    cta.cluster = &cluster;
    cta.memory = std::make_unique<char[]>(kSharedLimit + kStaticLimit + 1024);
    cta.shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(cta.memory.get()) + 1023) / 1024 * 1024);
    std::memset(cta.shared, 0xff, kSharedLimit + kStaticLimit);
    cta.fibers = std::vector<Fiber>(blockDim.x);
    cta.warps = std::vector<Warp>((blockDim.x + 31) / 32);
    cta.running = blockDim.x;
    for (Fiber& fiber : cta.fibers) {
        fiber.stack = static_cast<char*>(mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = kStack;
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, enter_fiber, 0);
    }
}

inline void run_once(Cta& cta) {
    for (unsigned i = 0; i < blockDim.x && !failure; ++i) {
        here = &cta;
        threadIdx.x = adverse ? blockDim.x - 1 - i : i;
        blockIdx = cta.index;
        if (!self().done) swapcontext(&scheduler, &self().context);
    }
}

inline void run_grid() {
    const unsigned count = gridDim.x * gridDim.y * gridDim.z;
    if (count % cluster_size) return fail("a grid that is no multiple of the cluster");
    std::vector<std::unique_ptr<Cluster>> resident;
    for (unsigned next = 0; !failure && (next < count || !resident.empty());) {
        const long before = progress;
        for (auto& cluster : resident)
            for (auto& cta : cluster->ctas) run_once(*cta);
        resident.erase(std::remove_if(resident.begin(), resident.end(), [](const auto& cluster) {
            for (const auto& cta : cluster->ctas) if (cta->running) return false;
            return true;
        }), resident.end());
        if (progress != before && !resident.empty()) continue;
        if (next == count) {
            if (!resident.empty()) fail("a barrier that some threads never reach");
            break;
        }
        resident.push_back(std::make_unique<Cluster>());
        Cluster& cluster = *resident.back();
        for (unsigned i = 0; i < cluster_size; ++i, ++next) {
            cluster.ctas.push_back(std::make_unique<Cta>());
            start_cta(*cluster.ctas.back(), cluster, next);
        }
    }
}

// Shared memory

inline char* shared_at(Word address, size_t bytes, size_t alignment, Cta* cta = here) {
    const bool is_static = address >= kSharedLimit && address + bytes <= cta->static_end;
    if (address + bytes > shared_bytes && !is_static) fail("outside shared memory");
    if (address % alignment) fail("an address in shared memory is not aligned");
    return cta->shared + (failure ? 0 : address);
}

// The static shared array of this name and type, the CTA's own.
template <typename T> T& static_shared(const char* name) {
    auto found = here->statics.find(name);
    if (found == here->statics.end()) {
        const Word address = (here->static_end + 15) / 16 * 16;
        here->static_end = address + sizeof(T);
        if (here->static_end > kSharedLimit + kStaticLimit) fail("more static shared memory than there is");
        found = here->statics.emplace(name, address).first;
    }
    return *reinterpret_cast<T*>(here->shared + found->second);
}

inline void do_copy(const Copy& copy) {
    std::memset(here->shared + copy.to, 0, copy.size);
    std::memcpy(here->shared + copy.to, copy.from, copy.bytes);
}

inline void check_aligned(const void* from, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(from) % bytes) fail("an address in global memory is not aligned");
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
inline int atomicAdd(int* to, int more) { ++progress; return std::exchange(*to, *to + more); }
inline Word atomicOr(Word* to, Word bits) { return std::exchange(*to, *to | bits); }
inline float __fmul_rn(float a, float b) { return a * b; }  // no -march, no contraction to fma
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float rsqrtf(float value) { return 1 / std::sqrt(value); }
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

template <typename... Parameters, size_t... i>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<i...>) {
    kernel(*static_cast<Parameters*>(arguments[i])...);
}

template <typename... Parameters>
size_t parameters_of(void (*)(Parameters...)) { return sizeof...(Parameters); }

static void** launch_arguments = nullptr;

#define LAUNCHER(kernel)                                                                                              \
    template <typename... Parameters> void start(void (*function)(Parameters...)) {                                   \
        call(function, launch_arguments, std::index_sequence_for<Parameters...>());                                   \
    }                                                                                                                 \
    extern "C" const char* launch(const int* grid, int threads, int cluster, size_t bytes, bool hard,                 \
                                  void** arguments, size_t count) {                                                   \
        failure = nullptr;                                                                                            \
        if (count != parameters_of(kernel)) return "the number of arguments";                                         \
        if (bytes > kSharedLimit) return "more shared memory than there is";                                          \
        shared_bytes = bytes;                                                                                         \
        adverse = hard;                                                                                               \
        launch_arguments = arguments;                                                                                 \
        kernel_body = [] { start(kernel); };                                                                          \
        gridDim = Index{unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2])};                                     \
        blockDim = Index{unsigned(threads), 1, 1};                                                                    \
        cluster_size = cluster;                                                                                       \
        run_grid();                                                                                                   \
        return failure;                                                                                               \
    }
