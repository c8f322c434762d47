// The scouts: three warps that look at the noise of the next tile while this one's products run.
#pragma once

#include "schedule.cuh"
#include "threshold.cuh"

namespace flash_sampling::fused_hopper {

// Marks the small words of a tile: items of ACROSS columns and CHUNK x DOWN quads of tokens, by turns among the warps.
template <class T>
__device__ __forceinline__ void mark_tile(const Call& call, Shared<T>& shared, u32 t, u32 base, u32 size) {
    constexpr u32 ACROSS = T::COLUMNS < 32 ? T::COLUMNS : 32;  // columns of a warp at a time
    constexpr u32 DOWN = 32 / ACROSS;                          // quads of tokens of a warp at a time
    constexpr u32 CHUNK = 8;                                   // quads of a lane at a time
    constexpr u32 AT_ONCE = 2;                                 // blocks of a lane that hide each other's latency
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 1;
    const u32 across = T::scouted_columns(call) / ACROSS;
    // Quads of four global token ids share a Philox block; a shard may begin within one.
    const u32 first_quad = base >> 2;
    const u32 quads = size ? ((base + size - 1) >> 2) - first_quad + 1 : 0;
    const u32 parts = (quads + CHUNK * DOWN - 1) / (CHUNK * DOWN);
    // The first tile uses both halves of the marks; after it the scouts run ahead of the filter by a tile.
    if (t == 1) ptx::mbarrier_wait(&shared.filtered, 0);
    for (u32 item = warp; item < parts * across; item += T::SCOUT_WARPS) {
        const u32 column = item % across * ACROSS + lane % ACROSS;
        if (column >= call.row_count) continue;
        const Row& row = shared.rows[column];
        if (row.greedy) continue;
        const RowBlocks blocks(row);
        const u32 from = item / across * CHUNK * DOWN + lane / ACROSS;
#pragma unroll 1
        for (u32 i = 0; i < CHUNK; i += AT_ONCE) {
            Words w[AT_ONCE];
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; ++j) w[j] = blocks.begin<true>(first_quad + from + (i + j) * DOWN);
            blocks.finish<true>(w);
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; ++j) {
                const u32 quad = from + (i + j) * DOWN;
                if (quad < quads) leave_marks(shared, t, w[j], quad, column, base & 3, size);
            }
        }
    }
}

// Scores what the filter of the tile before has left in the queues.
template <class T>
__device__ __forceinline__ void score_queues(const Call& call, Shared<T>& shared, const Schedule<T>& schedule, u32 t) {
    const u32 hand = threadIdx.x - 32;
    ptx::mbarrier_wait(&shared.filtered, (t - 1) & 1);
    u32 before, unused;
    schedule.tile(t - 1, before, unused);
    const u32 queue = hand % T::CONSUMER_WARPS;
    for (u32 slot = hand / T::CONSUMER_WARPS; slot < shared.queued[queue]; slot += T::SCOUT_WARPS * 4) {
        const Contender contender = shared.queue[queue][slot];
        const u32 token = call.first_token + before + (contender.place >> 16);
        offer_to(call, shared, contender.place & 0xffff, token, contender.dot);
    }
    ptx::named_barrier(SCOUTS_BARRIER, T::SCOUT_WARPS * 32);
}

template <class T>
__device__ __forceinline__ void scout(const Call& call, Shared<T>& shared, const Schedule<T>& schedule) {
    for (u32 t = 0; t < schedule.tiles; ++t) {
        u32 first, size;
        schedule.tile(t, first, size);
        const u32 base = call.first_token + first;
        // What the first tile leaves is scored at once: the other blocks know of it when they look again.
        const bool at_once = T::GUESSES && t == 1;
        for (u32 look = at_once ? 0 : 1; look < 2; ++look) {
            if (look == 1) mark_tile(call, shared, t, base, size);
            if (t == 0) break;
            if (at_once == (look == 0)) score_queues(call, shared, schedule, t);
            for (u32 column = threadIdx.x - 32; column < T::COLUMNS; column += 32 * T::SCOUT_WARPS)
                refresh_losing(call, shared, column, base);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.scouted);
    }
}

}  // namespace flash_sampling::fused_hopper
