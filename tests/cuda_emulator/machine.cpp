// The machine that kernels run on here: CUDA threads are fibers of one CPU thread, and this is their scheduler, with what threads
// wait for: barriers, asynchronous copies, mbarriers, wgmma products. It is compiled once, and linked to each kernel.
//
// CTAs start in the order of their numbers, a cluster at a time. The next cluster starts when every running thread has ended or
// waits: so CTAs that wait for one another are resident together, as on a GPU.
//
// Where a GPU may behave in several ways, the worst is chosen: shared memory starts as NaN; with `adverse`, threads run in
// reverse order, and asynchronous copies and wgmma products complete as late as possible, else at once.

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "machine.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/st_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

size_t shared_bytes = 0;
bool adverse = false;
const char* failure = nullptr;
Index threadIdx, blockIdx, gridDim, blockDim;
unsigned cluster_size = 1;
long progress = 0;
Cta* here = nullptr;

namespace {

constexpr size_t kStaticLimit = 48 << 10;  // static shared memory
constexpr size_t kStack = 256 << 10;

void (*run_thread)(void**) = nullptr;
void** launch_arguments = nullptr;

// A copy of `size` bytes to shared memory: `bytes` are read, the others become zeros.
struct Copy { Word to; const void* from; Word bytes, size; };

struct Mbarrier { int count = 0, pending = 0; long bytes = 0, phase = 0; };

// Blocks of memory of one size, which threads and CTAs that end leave to later ones. All are freed at the end of a launch.
class Pool {
    size_t bytes;
    std::vector<char*> free;

  public:
    explicit Pool(size_t bytes) : bytes(bytes) {}
    char* take() {
        if (free.empty())
            return static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        char* block = free.back();
        free.pop_back();
        return block;
    }
    void give_back(char* block) { free.push_back(block); }
    void clear() {
        for (char* block : free) munmap(block, bytes);
        free.clear();
    }
};

Pool stacks(kStack), memories(kSharedLimit + kStaticLimit);

struct Fiber {
    jmp_buf at;
    char* stack = nullptr;  // none before it starts
    bool done = false;
    std::vector<std::vector<Copy>> committed;                  // cp.async groups
    std::vector<Copy> open;
    std::vector<std::vector<std::function<void()>>> products;  // wgmma groups
    std::vector<std::function<void()>> open_products;
};

struct Cluster;

struct ResidentCta : Cta {
    std::vector<Fiber> fibers;
    std::vector<Warp> all_warps;
    std::map<Word, Mbarrier> mbarriers;
    std::map<std::string, Word> statics;  // addresses of static shared arrays
    Word static_end = kSharedLimit;
    std::multimap<Word, std::function<void()>> bulk_copies;  // bulk copies that have not arrived, by their mbarrier
    Cluster* cluster = nullptr;
    int running = 0;
    ~ResidentCta() {
        for (Fiber& fiber : fibers) if (fiber.stack) stacks.give_back(fiber.stack);
        memories.give_back(shared);
    }
};

struct Cluster { std::vector<std::unique_ptr<ResidentCta>> ctas; Barrier barrier; };

ResidentCta& resident() { return *static_cast<ResidentCta*>(here); }
Fiber& self() { return resident().fibers[threadIdx.x]; }

// Fibers switch by setjmp: swapcontext would ask the kernel for the signal mask each time.
jmp_buf scheduler;

void run_fiber() {
    run_thread(launch_arguments);
    self().done = true;
    --resident().running;
    ++progress;
    pause_thread();
}

void start(Fiber& fiber) {
    fiber.stack = stacks.take();
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, run_fiber, 0);
    setcontext(&context);
}

// Runs a fiber until it pauses.
__attribute__((noinline)) void resume(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    if (!fiber.stack) start(fiber);
    _longjmp(fiber.at, 1);
}

void start_cta(ResidentCta& cta, Cluster& cluster, unsigned number) {
    cta.index = {number % gridDim.x, number / gridDim.x % gridDim.y, number / gridDim.x / gridDim.y};
    cta.rank = number % cluster_size;
    cta.cluster = &cluster;
    cta.shared = memories.take();
    std::memset(cta.shared, 0xff, kSharedLimit + kStaticLimit);
    cta.fibers = std::vector<Fiber>(blockDim.x);
    cta.all_warps = std::vector<Warp>((blockDim.x + 31) / 32);
    cta.warps = cta.all_warps.data();
    cta.running = blockDim.x;
}

void run_once(ResidentCta& cta) {
    for (unsigned i = 0; i < blockDim.x && !failure; ++i) {
        here = &cta;
        threadIdx.x = adverse ? blockDim.x - 1 - i : i;
        blockIdx = cta.index;
        if (!self().done) resume(self());
    }
}

void run_grid() {
    const unsigned count = gridDim.x * gridDim.y * gridDim.z;
    if (count % cluster_size) return fail("a grid that is no multiple of the cluster");
    std::vector<std::unique_ptr<Cluster>> clusters;
    for (unsigned next = 0; !failure && (next < count || !clusters.empty());) {
        const long before = progress;
        for (auto& cluster : clusters)
            for (auto& cta : cluster->ctas) run_once(*cta);
        clusters.erase(std::remove_if(clusters.begin(), clusters.end(), [](const auto& cluster) {
            for (const auto& cta : cluster->ctas) if (cta->running) return false;
            return true;
        }), clusters.end());
        if (progress != before && !clusters.empty()) continue;
        if (next == count) {
            if (!clusters.empty()) fail("a barrier that some threads never reach");
            break;
        }
        clusters.push_back(std::make_unique<Cluster>());
        Cluster& cluster = *clusters.back();
        for (unsigned i = 0; i < cluster_size; ++i, ++next) {
            cluster.ctas.push_back(std::make_unique<ResidentCta>());
            start_cta(*cluster.ctas.back(), cluster, next);
        }
    }
}

void do_copy(const Copy& copy) {
    std::memset(here->shared + copy.to, 0, copy.size);
    std::memcpy(here->shared + copy.to, copy.from, copy.bytes);
}

// A phase ends once all have arrived and the bytes that were expected have come.
void check_phase(Mbarrier& mbarrier) {
    if (mbarrier.pending || mbarrier.bytes) return;
    mbarrier.pending = mbarrier.count;
    ++mbarrier.phase;
    ++progress;
}

Mbarrier& mbarrier_at(Word address, ResidentCta& cta) {
    const auto found = cta.mbarriers.find(address);
    if (found != cta.mbarriers.end()) return found->second;
    fail("an mbarrier that was not initialised");
    return cta.mbarriers[address];
}

void arrive_at(Word mbarrier, ResidentCta& cta) {
    Mbarrier& found = mbarrier_at(mbarrier, cta);
    if (found.pending == 0) fail("more arrivals than an mbarrier expects");
    --found.pending;
    check_phase(found);
}

// Calls `write` at an address in a CTA's shared memory, at once or (`adverse`) when a thread waits for it, and completes `bytes`.
template <typename Write>
void write_asynchronously(Word to, Word bytes, Word alignment, Word mbarrier, ResidentCta& cta, Write write) {
    Cta* const running = here;
    here = &cta;  // whose static shared memory counts
    shared_at(to, bytes, alignment);
    here = running;
    if (failure) return;
    auto arrive = [=, &cta] {
        write(cta.shared + to);
        Mbarrier& found = mbarrier_at(mbarrier, cta);
        found.bytes -= bytes;
        check_phase(found);
    };
    if (adverse) cta.bulk_copies.emplace(mbarrier, arrive);
    else arrive();
    ++progress;
}

void start_bulk_copy(Word to, const void* from, Word bytes, Word mbarrier, ResidentCta& cta) {
    check_aligned(from, 16);
    if (bytes % 16) fail("a bulk copy's length is no multiple of 16");
    write_asynchronously(to, bytes, 16, mbarrier, cta, [=](char* at) { std::memcpy(at, from, bytes); });
}

}  // namespace

void pause_thread() {
    Cta* cta = here;
    const Index thread = threadIdx;
    if (!_setjmp(self().at)) _longjmp(scheduler, 1);
    here = cta, threadIdx = thread, blockIdx = cta->index;
}

void wait_at(Barrier& barrier, int count) {
    const long generation = barrier.generation;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.generation;
        ++progress;
        return;
    }
    while (barrier.generation == generation) pause_thread();
}

void barrier_cluster_sync() { wait_at(resident().cluster->barrier, blockDim.x * cluster_size); }

Word static_end() { return resident().static_end; }

Word static_address(const char* name, size_t bytes) {
    ResidentCta& cta = resident();
    auto found = cta.statics.find(name);
    if (found == cta.statics.end()) {
        const Word address = (cta.static_end + 15) / 16 * 16;
        cta.static_end = address + bytes;
        if (cta.static_end > kSharedLimit + kStaticLimit) fail("more static shared memory than there is");
        found = cta.statics.emplace(name, address).first;
    }
    return found->second;
}

const char* launch_kernel(void (*kernel)(void**), const int* grid, int threads, int cluster, size_t bytes, bool hard,
                          void** arguments) {
    failure = nullptr;
    if (bytes > kSharedLimit) return "more shared memory than there is";
    shared_bytes = bytes;
    adverse = hard;
    launch_arguments = arguments;
    run_thread = kernel;
    gridDim = Index{unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2])};
    blockDim = Index{unsigned(threads), 1, 1};
    cluster_size = cluster;
    run_grid();
    stacks.clear();
    memories.clear();
    return failure;
}

// ptx/cp_async.cuh

void start_copy(Word to, const void* from, Word bytes, Word size) {
    shared_at(to, size, size);
    check_aligned(from, size);
    if (failure) return;
    if (adverse) self().open.push_back({to, from, bytes, size});
    else do_copy({to, from, bytes, size});
}

void cp_async_commit_group() {
    self().committed.push_back(std::move(self().open));
    self().open.clear();
}

void wait_for_copies(size_t pending) {
    auto& groups = self().committed;
    while (groups.size() > pending) {
        for (const Copy& copy : groups.front()) do_copy(copy);
        groups.erase(groups.begin());
    }
}

// ptx/mbarrier.cuh

void mbarrier_init(Word mbarrier, int count) {
    shared_at(mbarrier, 8, 8);
    resident().mbarriers[mbarrier] = {count, count, 0, 0};
}

void mbarrier_arrive(Word mbarrier) { arrive_at(mbarrier, resident()); }

void mbarrier_arrive_expect_tx(Word mbarrier, int bytes) {
    mbarrier_at(mbarrier, resident()).bytes += bytes;
    mbarrier_arrive(mbarrier);
}

void mbarrier_arrive_cluster(Word mbarrier, Word rank) {
    if (rank >= cluster_size) return fail("a CTA that the cluster does not have");
    arrive_at(mbarrier, *resident().cluster->ctas[rank]);
}

// With `adverse`, bulk copies arrive when a thread waits for them.
void mbarrier_wait_parity(Word mbarrier, int parity) {
    while (!failure && (mbarrier_at(mbarrier, resident()).phase & 1) == parity) {
        auto& copies = resident().bulk_copies;
        const auto waiting = copies.find(mbarrier);
        if (waiting == copies.end()) {
            pause_thread();
            continue;
        }
        const auto copy = std::move(waiting->second);
        copies.erase(waiting);
        copy();
    }
}

// ptx/cp_async_bulk.cuh

void cp_async_bulk(Word to, const void* from, int bytes, Word mbarrier) {
    start_bulk_copy(to, from, bytes, mbarrier, resident());
}

void cp_async_bulk_multicast(Word to, const void* from, Word bytes, Word mbarrier, unsigned short cta_mask) {
    if (cta_mask >> cluster_size) return fail("a CTA that the cluster does not have");
    for (unsigned rank = 0; rank < cluster_size; ++rank)
        if (cta_mask >> rank & 1) start_bulk_copy(to, from, bytes, mbarrier, *resident().cluster->ctas[rank]);
}

// ptx/wgmma.cuh

void defer(void (*compute)(void*), void* product) { self().open_products.push_back([=] { compute(product); }); }

void wgmma_commit_group() {
    self().products.push_back(std::move(self().open_products));
    self().open_products.clear();
}

void wait_for_products(size_t pending) {
    auto& groups = self().products;
    while (groups.size() > pending) {
        for (const auto& product : groups.front()) product();
        groups.erase(groups.begin());
    }
}

// ptx/cvt.cuh

unsigned char e4m3_of(float value) {
    const unsigned char sign = std::signbit(value) ? 0x80 : 0;
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return sign | 0x7f;
    if (magnitude >= 464) return sign | 0x7e;
    const int exponent = std::max(magnitude > 0 ? std::ilogb(magnitude) : -6, -6);
    const int eighths = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));  // 8 to 16, less if subnormal
    return sign | std::min((exponent + 6) * 8 + eighths, 0x7e);
}

float e4m3_value(unsigned char bits) {
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    if ((bits & 0x7f) == 0x7f) return NAN;
    const float magnitude = exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp(float(fraction), -9);
    return bits & 0x80 ? -magnitude : magnitude;
}

// ptx/st_async.cuh

template <typename T> void store_in(Word to, T value, Word mbarrier, Word rank) {
    if (rank >= cluster_size) return fail("a CTA that the cluster does not have");
    ResidentCta& cta = *resident().cluster->ctas[rank];
    write_asynchronously(to, sizeof(T), sizeof(T), mbarrier, cta, [=](char* at) { std::memcpy(at, &value, sizeof(T)); });
}

void st_async(Word to, Word word, Word mbarrier, Word rank) { store_in(to, word, mbarrier, rank); }
void st_async_v4(Word to, float4 values, Word mbarrier, Word rank) { store_in(to, values, mbarrier, rank); }
