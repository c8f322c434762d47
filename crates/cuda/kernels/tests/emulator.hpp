// Runs the blocks of a kernel on the processor, so that tests of kernels need no GPU. Every thread of a block is a fiber, and
// barriers and warp functions switch to the next fiber. The emulator is slow, and runs one block at a time in one fixed order of
// threads. So it detects wrong results, but not races.
//
// Include this before every kernel header.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#define __CUDACC__
#define __host__
#define __device__
#define __forceinline__ inline

#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __noinline__
#define __shared__ static

struct float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

inline struct Index {
    unsigned x, y;
} blockIdx, gridDim;

// Reads a value from standard input.
template <class T>
T get() {
    T value;
    if (fread(&value, sizeof(T), 1, stdin) != 1) abort();
    return value;
}

// Reads `count` values from standard input.
template <class T>
std::vector<T> get_all(size_t count) {
    std::vector<T> values(count);
    if (count && fread(values.data(), sizeof(T), count, stdin) != count) abort();
    return values;
}

// Writes a value to standard output.
template <class T>
void put(const T& value) {
    fwrite(&value, sizeof(T), 1, stdout);
}

namespace emulator {

// A context starts a fiber. Then jumps switch between fibers: they do not change the signal mask, so they need no system call.
struct Fiber {
    ucontext_t context;
    jmp_buf place;
    bool is_started;
    bool is_done;
};

struct Block {
    std::vector<Fiber> fibers;
    jmp_buf scheduler;
    unsigned arrived = 0, generation = 0;              // of the block's barrier
    std::vector<unsigned> warp_arrived, warp_generation;
    std::vector<unsigned long long> slots[2];          // one value per thread, for two consecutive warp functions
    std::function<void()> body;
};

constexpr size_t STACK = 32 << 10;

inline Block* current;
inline bool is_backwards;  // the last thread runs first
inline unsigned thread;

inline void next_fiber() {
    if (!_setjmp(current->fibers[thread].place)) _longjmp(current->scheduler, 1);
}

inline void start() {
    current->body();
    current->fibers[thread].is_done = true;
    next_fiber();
}

inline bool rounds_end() {
    for (const Fiber& fiber : current->fibers)
        if (!fiber.is_done) return false;
    return true;
}

// Runs one block of `threads` threads to its end.
inline void run(unsigned threads, std::function<void()> body) {
    Block block;
    current = &block;
    block.body = body;
    block.fibers.resize(threads);
    block.warp_arrived.assign(threads / 32, 0);
    block.warp_generation.assign(threads / 32, 0);
    for (auto& slots : block.slots) slots.assign(threads, 0);
    static std::vector<char> stacks;  // reused by all blocks
    if (stacks.size() < threads * STACK) stacks.resize(threads * STACK);
    char* stack = stacks.data();
    for (auto& fiber : block.fibers) {
        fiber.is_done = fiber.is_started = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stack;
        fiber.context.uc_stack.ss_size = STACK;
        stack += STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, start, 0);
    }
    while (!rounds_end()) {
        for (unsigned i = 0; i < threads; ++i) {
            thread = is_backwards ? threads - 1 - i : i;
            Fiber& fiber = block.fibers[thread];
            if (fiber.is_done || _setjmp(block.scheduler)) continue;
            if (fiber.is_started) _longjmp(fiber.place, 1);
            fiber.is_started = true;
            setcontext(&fiber.context);
        }
    }
}

// Runs a launch of `x` by `y` blocks, one block after another.
inline void launch(unsigned x, unsigned y, unsigned threads, const std::function<void()>& kernel) {
    gridDim = {x, y};
    for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x) run(threads, kernel);
}

inline void block_barrier() {
    const unsigned generation = current->generation;
    if (++current->arrived == current->fibers.size()) {
        current->arrived = 0;
        ++current->generation;
        return;
    }
    while (current->generation == generation) next_fiber();
}

// Takes one value per lane, and returns the address of all 32 values.
inline const unsigned long long* exchange(unsigned long long value) {
    const unsigned warp = thread / 32, generation = current->warp_generation[warp];
    auto& slots = current->slots[generation % 2];
    slots[thread] = value;
    if (++current->warp_arrived[warp] == 32) {
        current->warp_arrived[warp] = 0;
        ++current->warp_generation[warp];
    } else {
        while (current->warp_generation[warp] == generation) next_fiber();
    }
    return &slots[warp * 32];
}

template <class T>
T of_lane(T value, unsigned lane) {
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof(T));
    const unsigned long long found = exchange(bits)[lane];
    memcpy(&value, &found, sizeof(T));
    return value;
}

struct ThreadIndex {
    struct X {
        operator unsigned() const { return thread; }
    } x;
};

}  // namespace emulator

inline emulator::ThreadIndex threadIdx;

inline void __syncthreads() { emulator::block_barrier(); }
inline void __syncwarp() { emulator::exchange(0); }
inline unsigned __ballot_sync(unsigned, bool vote) {
    const unsigned long long* votes = emulator::exchange(vote);
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < 32; ++lane) ballot |= static_cast<unsigned>(votes[lane]) << lane;
    return ballot;
}
inline int __clzll(long long value) { return __builtin_clzll(static_cast<unsigned long long>(value)); }
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    const unsigned long long* values = emulator::exchange(value);
    unsigned max = 0;
    for (unsigned lane = 0; lane < 32; ++lane) max = values[lane] > max ? static_cast<unsigned>(values[lane]) : max;
    return max;
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    const unsigned long long* values = emulator::exchange(value);
    unsigned sum = 0;
    for (unsigned lane = 0; lane < 32; ++lane) sum += static_cast<unsigned>(values[lane]);
    return sum;
}
template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned mask) { return emulator::of_lane(value, emulator::thread % 32 ^ mask); }
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned distance) {
    const unsigned lane = emulator::thread % 32;
    return emulator::of_lane(value, lane < distance ? lane : lane - distance);
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned distance) {
    const unsigned lane = emulator::thread % 32;
    return emulator::of_lane(value, lane + distance < 32 ? lane + distance : lane);
}
// Divergent lanes run one by one, so the mask has only this lane.
inline unsigned __activemask() { return 1u << emulator::thread % 32; }
template <class T>
T __shfl_sync(unsigned mask, T value, unsigned lane) {
    return mask == 0xffffffffu ? emulator::of_lane(value, lane) : value;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline unsigned atomicMin(unsigned* at, unsigned value) {
    const unsigned old = *at;
    if (value < old) *at = value;
    return old;
}
inline unsigned atomicMax(unsigned* at, unsigned value) {
    const unsigned old = *at;
    if (value > old) *at = value;
    return old;
}
inline unsigned long long atomicMin(unsigned long long* at, unsigned long long value) {
    const unsigned long long old = *at;
    if (value < old) *at = value;
    return old;
}
inline unsigned long long atomicMax(unsigned long long* at, unsigned long long value) {
    const unsigned long long old = *at;
    if (value > old) *at = value;
    return old;
}
template <class T>
T atomicAdd(T* at, T value) {
    const T old = *at;
    *at = old + value;
    return old;
}
// Never contended, because fibers switch only at barriers.
template <class T>
T atomicCAS(T* at, T expected, T value) {
    const T old = *at;
    if (old == expected) *at = value;
    return old;
}
inline unsigned atomicExch(unsigned* at, unsigned value) {
    const unsigned old = *at;
    *at = value;
    return old;
}
inline unsigned atomicOr(unsigned* at, unsigned value) {
    const unsigned old = *at;
    *at = old | value;
    return old;
}
inline unsigned long long atomicExch(unsigned long long* at, unsigned long long value) {
    const unsigned long long old = *at;
    *at = value;
    return old;
}
inline void __threadfence_block() {}
inline void __threadfence() {}
inline void __threadfence_system() {}
template <class T>
T __ldcg(const T* at) { return *at; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
