// Stands in for the kernels' primitives.cuh: CUDA's threads as fibers on a CPU, one block at a time.
//
// What a GPU leaves open is made adverse: shared memory begins as NaN; `adverse` runs the threads in the reverse order and lets
// asynchronous copies arrive as late as they may, else as early. Places in shared memory are checked.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)

using std::max;
using std::min;
using Word = unsigned int;

constexpr Word kAll = 0xffffffff;

struct alignas(8) uint2 { Word x, y; };
struct alignas(16) uint4 { Word x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index { unsigned x = 0, y = 0, z = 0; };

struct __half {
    uint16_t bits = 0;
    __half() = default;
    explicit __half(float value) { const _Float16 h = static_cast<_Float16>(value); std::memcpy(&bits, &h, 2); }
};

struct __nv_bfloat16 {
    uint16_t bits = 0;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float value) {
        uint32_t wide;
        std::memcpy(&wide, &value, 4);
        bits = static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);  // to nearest even; no NaN comes here
    }
};

inline float to_float(float value) { return value; }
inline float to_float(__half value) { _Float16 h; std::memcpy(&h, &value.bits, 2); return static_cast<float>(h); }
inline float to_float(__nv_bfloat16 value) {
    const uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
    float narrow;
    std::memcpy(&narrow, &wide, 4);
    return narrow;
}
constexpr bool is_half(const __half*) { return true; }
constexpr bool is_half(const __nv_bfloat16*) { return false; }
template <typename Scalar> Scalar scalar_of(Word bits, const Scalar*) {
    Scalar value;
    value.bits = static_cast<uint16_t>(bits);
    return value;
}
template <typename T> void store(T* place, float value) { *place = T(value); }

// Pairs: each operation is exact in float32, or rounds there to what rounding to 16 bits once more gives.

struct __half2 { __half x, y; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline __half2 __hsub2(__half2 a, __half2 b) { return {__half(to_float(a.x) - to_float(b.x)), __half(to_float(a.y) - to_float(b.y))}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__half(to_float(a.x) * to_float(b.x)), __half(to_float(a.y) * to_float(b.y))}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
template <typename Scalar> Word pair_of(float first, float second, const Scalar*) {
    return static_cast<Word>(Scalar(second).bits) << 16 | Scalar(first).bits;
}
inline Word bits_of(__half2 pair) { return static_cast<Word>(pair.y.bits) << 16 | pair.x.bits; }
inline Word bits_of(__nv_bfloat162 pair) { return static_cast<Word>(pair.y.bits) << 16 | pair.x.bits; }
inline float __int_as_float(int bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float __uint_as_float(Word bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline __nv_bfloat162 __float2bfloat162_rn(float value) { return __floats2bfloat162_rn(value, value); }
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return __floats2bfloat162_rn(to_float(a.x) - to_float(b.x), to_float(a.y) - to_float(b.y));
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return __floats2bfloat162_rn(to_float(a.x) * to_float(b.x), to_float(a.y) * to_float(b.y));
}

// The machine

constexpr size_t kSharedLimit = 228 << 10;
constexpr size_t kStack = 128 << 10;
alignas(128) char machine_shared[kSharedLimit];
size_t shared_bytes = 0;
bool adverse = false;
const char* failure = nullptr;
Index threadIdx, blockIdx, gridDim, blockDim;

struct Copy { void* to; const void* from; bool wanted; };

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

// The kernels' instructions

inline void check_shared(const void* place, size_t bytes) {
    const char* at = static_cast<const char*>(place);
    if (at < machine_shared || at + bytes > machine_shared + shared_bytes) fail("outside shared memory");
    if (reinterpret_cast<uintptr_t>(place) % 16) fail("a place in shared memory is not aligned");
}

inline void do_copy(const Copy& copy) {
    if (copy.wanted) std::memcpy(copy.to, copy.from, 16);
    else std::memset(copy.to, 0, 16);
}

inline void copy_async(void* to, const void* from, bool wanted) {
    check_shared(to, 16);
    if (reinterpret_cast<uintptr_t>(from) % 16) fail("a copy's source is not aligned");
    if (failure) return;
    if (adverse) self().open.push_back({to, from, wanted});
    else do_copy({to, from, wanted});
}

inline void commit_copies() {
    self().committed.push_back(std::move(self().open));
    self().open.clear();
}

template <int pending> void wait_for_copies() {
    auto& groups = self().committed;
    while (groups.size() > pending) {
        for (const Copy& copy : groups.front()) do_copy(copy);
        groups.erase(groups.begin());
    }
}

inline uint4 read_once(const uint4* from) {
    if (reinterpret_cast<uintptr_t>(from) % 16) fail("a load is not aligned");
    return *from;
}

template <typename Scalar> float half_of(Word word, int index) {
    Scalar value;
    value.bits = static_cast<uint16_t>(word >> 16 * index);
    return to_float(value);
}

template <typename Scalar>
void mma(float (&sums)[4], const Word (&a)[4], Word b0, Word b1, const Scalar*) {
    const int lane = threadIdx.x % 32;
    Warp& all = warp();
    std::copy(a, a + 4, all.a[lane]);
    all.b[lane][0] = b0;
    all.b[lane][1] = b1;
    __syncwarp();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = 0;
        for (int k = 0; k < 16; ++k) {
            const Word left = all.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            const Word right = all.b[column * 4 + k % 8 / 2][k / 8];
            sum += static_cast<double>(half_of<Scalar>(left, k % 2)) * half_of<Scalar>(right, k % 2);
        }
        sums[i] += static_cast<float>(sum);
    }
    __syncwarp();
}

inline int byte_of(Word word, int index) { return word >> 8 * index & 255; }

inline void mma(int (&sums)[4], const Word (&a)[4], Word b0, Word b1) {
    const int lane = threadIdx.x % 32;
    Warp& all = warp();
    std::copy(a, a + 4, all.a[lane]);
    all.b[lane][0] = b0;
    all.b[lane][1] = b1;
    __syncwarp();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 32; ++k) {
            const Word left = all.a[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2];
            const Word right = all.b[column * 4 + k % 16 / 4][k / 16];
            sums[i] += byte_of(left, k % 4) * static_cast<int8_t>(byte_of(right, k % 4));
        }
    }
    __syncwarp();
}

inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(byte_of(a, i)) * static_cast<int8_t>(byte_of(b, i));
    return sum;
}

inline void check_aligned(const void* place, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(place) % bytes) fail("a load is not aligned");
}

template <int count> void load_words(Word (&words)[count], const Word* place) {
    check_aligned(place, 4 * count);
    std::memcpy(words, place, 4 * count);
}

template <int count> void read_words(Word* words, const void* place) {
    check_aligned(place, count % 4 ? 8 : 16);
    std::memcpy(words, place, 4 * count);
}

template <typename T> Word load(const T* place) { return *place; }

template <typename T> T __shfl_sync(Word, T value, int source) {
    const int lane = threadIdx.x % 32;
    std::memcpy(&warp().numbers[lane], &value, sizeof value);
    __syncwarp();
    std::memcpy(&value, &warp().numbers[source % 32], sizeof value);
    __syncwarp();
    return value;
}

inline float __shfl_xor_sync(Word mask, float value, int step) {
    return __shfl_sync(mask, value, threadIdx.x % 32 ^ step);
}

inline Word kept_constant(Word value, int) { return value; }

inline bool is_last(int* arrivals, int others) {
    __syncwarp();
    int before = 0;
    if (threadIdx.x % 32 == 0) {
        before = std::exchange(*arrivals, *arrivals + 1);
        if (before == others) *arrivals = 0;
    }
    return __shfl_sync(~0u, before, 0) == others;
}

inline Word __ballot_sync(Word, bool vote) {
    warp().numbers[threadIdx.x % 32] = vote;
    __syncwarp();
    Word votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= static_cast<Word>(warp().numbers[lane] != 0) << lane;
    __syncwarp();
    return votes;
}

template <typename T> T __ldg(const T* place) { return *place; }
inline int __popc(Word word) { return __builtin_popcount(word); }
template <typename T> T __ldcg(const T* place) { return *place; }
inline void __threadfence() {}
inline int atomicAdd(int* place, int more) { return std::exchange(*place, *place + more); }
inline Word __byte_perm(Word low, Word high, Word selector) {
    const uint64_t both = low | static_cast<uint64_t>(high) << 32;
    Word found = 0;
    for (int i = 0; i < 4; ++i) found |= static_cast<Word>(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return found;
}
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
