// The instructions of the fused Hopper kernel on the processor, for a cluster of one block: FS_EMULATED names this file. Copies
// complete at once, products are plain sums, and a wait runs the other fibers.
#pragma once

#include "flash_sampling/element.cuh"
#include "flash_sampling/ptx/operand.cuh"

namespace flash_sampling::ptx {

alignas(1024) inline u8 shared_memory[228 << 10];

inline u32 shared_address(const void* pointer) { return static_cast<u32>(static_cast<const u8*>(pointer) - shared_memory); }
inline u32 uniform(u32 value) { return value; }
inline u64 policy_evict_unchanged() { return 0; }
inline u64 policy_evict_last() { return 0; }

struct Barrier {
    u16 arrivals, pending;
    u32 phase : 1;
    i32 bytes : 31;

    static Barrier& at(const u64* barrier) { return *reinterpret_cast<Barrier*>(const_cast<u64*>(barrier)); }
    static Barrier& at(u32 address) { return *reinterpret_cast<Barrier*>(shared_memory + address); }
    void change(u32 arrived, i32 more_bytes) {
        if (arrived > pending) abort();
        pending = static_cast<u16>(pending - arrived);
        bytes = bytes + more_bytes;
        if (pending == 0 && bytes == 0) {
            pending = arrivals;
            phase ^= 1;
        }
    }
    void wait(u32 parity) const {
        for (u64 turns = 0; phase == parity; emulator::next_fiber())
            if (++turns == 100000000) fprintf(stderr, "a barrier never completes\n"), abort();
    }
};

inline void mbarrier_init(u64* barrier, u32 arrivals) {
    Barrier::at(barrier) = {static_cast<u16>(arrivals), static_cast<u16>(arrivals), 0, 0};
}
inline void mbarrier_init_fence() {}
inline void shared_writes_fence() {}
inline void mbarrier_arrive(u64* barrier, u32 arrivals = 1) { Barrier::at(barrier).change(arrivals, 0); }
inline void mbarrier_arrive_expect(u64* barrier, u32 bytes) { Barrier::at(barrier).change(1, static_cast<i32>(bytes)); }
inline u32 cluster_address(const u64* barrier, u32) { return shared_address(barrier); }
inline void mbarrier_arrive_cluster(u32 address) { Barrier::at(address).change(1, 0); }
inline void mbarrier_wait(u32 address, u32 parity) { Barrier::at(address).wait(parity); }
inline void mbarrier_wait(const u64* barrier, u32 parity) { Barrier::at(barrier).wait(parity); }
inline u32 arrived[16], generation[16];  // of named barriers
inline void named_arrive(u32 id, u32 threads) {
    if (++arrived[id] == threads) arrived[id] = 0, ++generation[id];
}
inline void named_barrier(u32 id, u32 threads) {
    const u32 before = generation[id];
    named_arrive(id, threads);
    while (generation[id] == before) emulator::next_fiber();
}
inline void start_next_launch() {}
inline void await_earlier_launches() {}
inline u32 block_index() { return blockIdx.x; }
inline u32 cluster_rank() { return 0; }
inline void cluster_sync() {}
template <int REGISTERS>
void raise_registers() {}
template <int REGISTERS>
void lower_registers() {}

// Returns the address of a byte of a tile in rows of 128 bytes, after the swizzle of the copy engine.
inline u8* swizzled(u32 address) { return shared_memory + (address ^ (address >> 3 & 0x70)); }

// `words`: the address of a matrix, its rows, its columns, the rows of a box, bytes of an element, and bytes between rows.
template <class Map>
void prefetch_map(const Map*) {}
template <class Map>
void copy_box(void* to, const Map* map, u64* barrier, i32 column, i32 row, u64) {
    const auto* from = reinterpret_cast<const u8*>(map->words[0]);
    const i32 rows = static_cast<i32>(map->words[1]), box = static_cast<i32>(map->words[3]);
    const i32 bytes = static_cast<i32>(map->words[4]), row_bytes = static_cast<i32>(map->words[2]) * bytes;
    for (i32 i = 0; i < box * 128; ++i) {
        const i32 r = row + i / 128, c = column * bytes + i % 128;
        *swizzled(shared_address(to) + i) = r < rows && c < row_bytes ? from[static_cast<u64>(r) * map->words[5] + c] : 0;
    }
    Barrier::at(barrier).change(0, -box * 128);
}
inline void copy_bytes(u32 to, const void* from, u32 bytes, u64* barrier, u64) {
    if (bytes % 16 || to % 16) abort();
    memcpy(shared_memory + to, from, bytes);
    Barrier::at(barrier).change(0, -static_cast<i32>(bytes));
}
template <class Map>
void copy_box_multicast(void*, const Map*, u64*, i32, i32, u16, u64) {
    abort();
}

inline void wgmma_fence() {}
inline void wgmma_commit() {}
// All lanes have read a stage when one of them releases it.
template <int GROUPS>
void wgmma_wait() { __syncwarp(); }

template <int N, Operand T>
struct Wgmma {
    static_assert(T == Operand::BF16, "the emulated floats");
    template <Element TYPE = Element::BF16>
    static void load(float (&to)[16], u64 descriptor, u32 row) {
        u16 bits[16];
        memcpy(bits, swizzled(static_cast<u32>(descriptor & 0x3fff) * 16 + row * 128), 16);
        memcpy(bits + 8, swizzled(static_cast<u32>(descriptor & 0x3fff) * 16 + row * 128 + 16), 16);
        for (int k = 0; k < 16; ++k) to[k] = widen<TYPE>(bits[k], false);
    }
    static void multiply(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {
        const u32 thread = threadIdx.x % 128;
        float rows[2][16], column[16];
        for (u32 half = 0; half < 2; ++half) load(rows[half], a, thread / 32 * 16 + thread % 32 / 4 + 8 * half);
        for (int i = 0; i < N / 2; i += i % 2 ? 3 : 1) {
            load(column, b, i / 4 * 8 + thread % 4 * 2 + i % 2);
            for (u32 half = 0; half < 2; ++half) {
                float sum = accumulate ? d[i + 2 * half] : 0.0f;
                for (int k = 0; k < 16; ++k) sum += rows[half][k] * column[k];
                d[i + 2 * half] = sum;
            }
        }
    }
};

template <int N>
struct Wgmma<N, Operand::S8> {
    static void load(signed char (&to)[32], u64 descriptor, u32 row) {
        for (u32 half = 0; half < 2; ++half)
            memcpy(to + 16 * half, swizzled(static_cast<u32>(descriptor & 0x3fff) * 16 + row * 128 + 16 * half), 16);
    }
    static void multiply(i32 (&d)[N / 2], u64 a, u64 b, bool accumulate) {
        const u32 thread = threadIdx.x % 128;
        signed char rows[2][32], column[32];
        for (u32 half = 0; half < 2; ++half) load(rows[half], a, thread / 32 * 16 + thread % 32 / 4 + 8 * half);
        for (int i = 0; i < N / 2; i += i % 2 ? 3 : 1) {
            load(column, b, i / 4 * 8 + thread % 4 * 2 + i % 2);
            for (u32 half = 0; half < 2; ++half) {
                i32 sum = accumulate ? d[i + 2 * half] : 0;
                for (int k = 0; k < 32; ++k) sum += rows[half][k] * column[k];
                d[i + 2 * half] = sum;
            }
        }
    }
};

// The other lanes with the same rows hold the other columns.
template <int N, Operand T>
struct WgmmaRegisters {
    static constexpr Element TYPE = T == Operand::F16 ? Element::F16 : Element::BF16;
    static void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate) {
        const u32 lane = threadIdx.x % 32;
        float rows[2][16], column[16];
        for (u32 i = 0; i < 16; ++i) {
            const u32 at = i % 4, pair = __shfl_sync(0xffffffffu, a[at], lane / 4 * 4 + i / 4);
            for (u32 half = 0; half < 2; ++half) rows[at % 2][at / 2 * 8 + i / 4 * 2 + half] = widen<TYPE>(pair, half);
        }
        for (int i = 0; i < N / 2; i += i % 2 ? 3 : 1) {
            Wgmma<N, Operand::BF16>::template load<TYPE>(column, b, i / 4 * 8 + lane % 4 * 2 + i % 2);
            for (u32 half = 0; half < 2; ++half) {
                float sum = accumulate ? d[i + 2 * half] : 0.0f;
                for (int k = 0; k < 16; ++k) sum += rows[half][k] * column[k];
                d[i + 2 * half] = sum;
            }
        }
    }
};

inline u64 load_relaxed(const u64* pointer) { return *pointer; }
inline void exchange_if(void* at, u64& old_low, u64& old_high, u64 low, u64 high) {
    u64 was[2], now[2] = {low, high};
    memcpy(was, at, 16);
    if (was[0] == old_low && was[1] == old_high) memcpy(at, now, 16);
    old_low = was[0], old_high = was[1];
}

template <u32 VALUE>
u32 opaque() { return VALUE; }
inline float tagged(float x, u32 kept, u32 tag) { return bits_to_f32((f32_to_bits(x) & kept) | tag); }
// Only declared, for instances that are not emulated.
u32 pair_of_halves(float low, float high);
u32 max_of_pairs(u32 a, u32 b);

}  // namespace flash_sampling::ptx

#include "mma_ptx.hpp"
