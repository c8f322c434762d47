// Fused tiled sampling on Hopper (paper Alg. 1). The kernel reads the weight once, and the logits of a tile stay in
// registers.
//
// The plain version:
//
//   for each tile of tokens (units of 64 weight rows)
//       D[tokens, rows] = weight[tokens, hidden] x hidden[rows, hidden]^T
//       for each (token, row) of D
//           best[row] = max(best[row], transform(D) + gumbel(seed, position, draw, token))
//
// The deviations from it, and why each keeps the result:
//
// 1. One noise word bounds the noise of a granule of sixteen tokens, and a consumer warp holds a granule of each tile.
//    While a tile's products run, three *scout* warps turn these bounds into thresholds, one for each granule and row:
//    a dot product at or below `dot_threshold(best, bound)` cannot win. If a shard begins within a granule, a warp
//    takes the larger bound of two granules.
// 2. At the end of a tile, the consumers compare each element with its threshold and queue the elements that pass. The
//    scouts score the queue exactly while the next tile's products run. If `best` is outdated, the scouts only score
//    more tokens.
// 3. A block's first tile has no best score yet. For each row, the blocks publish a lower bound of the score of one
//    likely token. The best of these estimates sets the first thresholds.
// 4. Integer maxima merge the winners, so the result does not depend on blocks or order.
// 5. A dot product has one accumulator over hidden in ascending order, whatever the number of rows. So a row's bits are
//    independent of other rows.
// 6. For a weight of 8-bit elements, threads convert the elements to f16 in registers, and an earlier launch converts
//    the hidden states to f16. If f16 does not hold all hidden states exactly, the threads convert the elements to bf16
//    instead (scaled_hidden.cuh). The scale of a weight row multiplies the sums of the row.
#pragma once

#include "../ptx/early.cuh"
#include "consume.cuh"
#include "load.cuh"
#include "publish.cuh"
#include "scout.cuh"

namespace flash_sampling::fused_hopper {

// Clears the rows of hidden states that no load fills, in all stages. Old bytes may be NaN, which passes every filter.
template <class T>
__device__ __forceinline__ void clear_rest(const Call& call, u8* stages, u32 worker, u32 workers) {
    const u32 loaded = T::CLUSTER * T::loaded_rows(call.row_count) * T::ROW_BYTES;
    if (loaded >= T::PART_BYTES) return;
    for (u32 part = 0; part < Ring<T>::STAGES * T::SLABS * T::HIDDEN_PARTS; ++part) {
        u8* const slab = stages + part / T::HIDDEN_PARTS * T::SLAB_BYTES;
        u8* const hidden = slab + T::WEIGHT_BYTES + part % T::HIDDEN_PARTS * T::PART_BYTES;
        for (u32 at = loaded + worker * 16; at < T::PART_BYTES; at += workers * 16)
            *reinterpret_cast<uint4*>(hidden + at) = uint4{0, 0, 0, 0};
    }
    ptx::shared_writes_fence();
}

// Initialises the shared memory of scouts and consumers while the first loads are in flight.
template <class T>
__device__ __forceinline__ void prepare(const Call& call, const Maps& maps, const LogitStore& stored,
                                        const RowLists& lists, const Candidates& candidates, u8* stages,
                                        Shared<T>& shared) {
    constexpr u32 WORKERS = T::THREADS - 32;
    const u32 worker = threadIdx.x - 32;
    clear_rest<T>(call, stages, worker, WORKERS);
    for (u32 i = worker; i < T::COLUMNS; i += WORKERS) {
        shared.best[i] = {T::CANDIDATES ? to_ordered_bits({LEAST_SCORE, Winner::none().token}) : 0, 0.0f, 0};
        shared.largest[i] = 0;
        shared.nat[i] = i < call.row_count ? nat_of(call, call.rows[i]) : 0.0f;
    }
    const u32 words = call.row_count * (sizeof(Row) / 8);
    for (u32 i = worker; i < words; i += WORKERS)
        reinterpret_cast<u64*>(shared.rows)[i] = reinterpret_cast<const u64*>(call.rows)[i];
    if ((T::STORE_LOGITS || T::MASKS_PENALTIES) && stored.logits && worker >= WORKERS - 32) {
        const u32 octets = octets_to_store<T::COLUMNS>(call, stored, worker % 32);
        if (worker == WORKERS - 32) shared.stored_octets = octets;
    }
    if constexpr (T::LISTS) {
        ptx::named_barrier(PREPARED_BARRIER, WORKERS);
        prepare_lists(call, lists, shared, worker, WORKERS);
    }
    if constexpr (T::CANDIDATES || T::EIGHT_BITS) ptx::await_earlier_launches();
    if constexpr (T::EIGHT_BITS) prepare_factors(call, maps.factors, shared, T::COLUMNS, worker, WORKERS);
    // Each queue begins with a placeholder token that cannot win: see scout.cuh.
    if (T::CANDIDATES && worker < T::CONSUMER_WARPS) shared.queue[worker][0] = {-1e38f, 0};
    if constexpr (T::CANDIDATES) prepare_candidates(call, candidates, shared, T::COLUMNS, worker, WORKERS);
    if constexpr (T::LOG_Z) prepare_masses(call, shared, worker, WORKERS);
    ptx::named_barrier(PREPARED_BARRIER, WORKERS);
}

// Runs one block of the kernel. `memory` has Ring<T>::SHARED_BYTES bytes of shared memory.
template <class T, ptx::Operand OPERAND>
__device__ __forceinline__ void block(const Call& call, const Maps& maps, const LogitStore& stored,
                                      const RowLists& lists, const Masses& masses, const Peers& peers,
                                      const Candidates& candidates, u8* memory) {
    if constexpr (T::CANDIDATES) ptx::start_next_launch();
    if (call.skip_if.word) {
        // Only a launch that lists candidates reads its word at once: the previous launch does not write the word.
        if (!T::CANDIDATES) ptx::await_earlier_launches();
        if (call.skip_if.holds()) {
            if (T::CANDIDATES) ptx::await_earlier_launches();
            return;
        }
    }
    constexpr u32 ALIGNMENT = Ring<T>::ALIGNMENT;
    u8* const stages = memory + (ALIGNMENT - ptx::shared_address(memory) % ALIGNMENT) % ALIGNMENT;
    Shared<T>& shared = *reinterpret_cast<Shared<T>*>(stages + Ring<T>::STAGES * T::STAGE_BYTES);
    const u32 rank = T::CLUSTER == 2 ? __shfl_sync(0xffffffffu, ptx::cluster_rank(), 0) : 0;
    const Schedule<T>& schedule = shared.schedule;

    if (threadIdx.x == 0) {
        shared.schedule = Schedule<T>(call.tokens, Schedule<T>::by_turns(call), blockIdx.x / T::CLUSTER,
                                      gridDim.x / T::CLUSTER, rank);
        ptx::prefetch_map(&maps.weight);
        ptx::prefetch_map(&maps.hidden);
        for (int s = 0; s < Ring<T>::STAGES; ++s) {
            ptx::mbarrier_init(&shared.full[s], 1);
            ptx::mbarrier_init(&shared.empty[s], T::CONSUMER_WARPS * T::CLUSTER);
        }
        ptx::mbarrier_init(&shared.scouted, T::SCOUTS);
        ptx::mbarrier_init(&shared.filtered, T::CONSUMERS);
        ptx::mbarrier_init_fence();
    }
    __syncthreads();
    if (T::CLUSTER == 2) ptx::cluster_sync();

    if (threadIdx.x >= 32) prepare(call, maps, stored, lists, candidates, stages, shared);
    // NOTE: the shuffle makes the value uniform for the compiler, which serialises wgmma behind branches that may
    // diverge.
    const u32 warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (warpgroup < T::FIRST_CONSUMER / 128) {
        ptx::lower_registers<T::SCOUT_REGISTERS>();
        if (threadIdx.x == 0) load(call, maps, stages, shared, schedule);
        if (threadIdx.x >= 32) scout(call, shared, schedule);
    } else {
        ptx::raise_registers<T::CONSUMER_REGISTERS>();
        consume<T, OPERAND>(call, maps.scales, stored, stages, shared, schedule);
        publish(call, masses, peers, shared);
    }
    // No block ends while the other block of its cluster may still write to its memory or arrive at its barriers.
    if (T::CLUSTER == 2) {
        __syncwarp();
        ptx::cluster_sync();
    }
}

}  // namespace flash_sampling::fused_hopper
