// The first pass over a shard of rows with top-p alone, from the largest logit of each granule (block_max_sums.cuh). The last
// block merges its sums with the sums of the other ranks, and lists the undecided rows.
#pragma once

#include "rank_sums.cuh"
#include "../ptx/ordered.cuh"
#include "../selection/block_max_sums.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

struct TopPBlockMaxRanks {
    static constexpr u32 THREADS = BlockMaxSums::THREADS;

    struct Shared {
        BlockMaxSums::Shared pass;
        UndecidedRow rows[UndecidedRows::ROOM];
        u32 is_last;
    };
    // The driver reserves 1 KiB per block.
    static_assert(2 * (sizeof(Shared) + 1024) <= 228 * 1024, "a multiprocessor of Hopper holds two blocks");

    const FilterCall& call;
    const UndecidedRows& open;
    const RankSums& ranks;
    Shared& shared;

    __device__ __forceinline__ void run() {
        BlockMaxSums pass{call, shared.rows, shared.pass};
        // No row is listed yet, so the sums use the memory of the bins, which is cleared below.
        double* const sums = open.masses;
        pass.add_to(sums, [&, own = pass.row_of_thread(0.0f)] {
            if (threadIdx.x < UndecidedRows::ROOM) shared.rows[threadIdx.x] = own;
        });
        __syncthreads();
        if (threadIdx.x == 0) shared.is_last = ptx::add_ordered(&open.arrived[0], 1) == gridDim.x - 1;
        __syncthreads();
        if (!shared.is_last) return;
        if (threadIdx.x == 0) open.arrived[0] = 0;
        if (threadIdx.x < call.count) conclude(threadIdx.x, sums + 2 * threadIdx.x, TopPSearch::error_of(pass.most()));
    }

  private:
    // Lists the row unless its winner is surely kept.
    __device__ __forceinline__ void conclude(u32 i, double* sums, double error) const {
        UndecidedRow& row = shared.rows[i];
        double before = __ldcg(sums), all = __ldcg(sums + 1);
        sums[0] = sums[1] = 0.0;
        if (!(row.top_p < 1.0f) || !ranks.sums(i, before, all, error)) return;
        row.before = before, row.all = all * (1.0 - error), row.error = static_cast<float>(error) * 1.000001f;
        if (!(before * (1.0 + error) < row.top_p * row.all)) open.add(row);
    }
};

}  // namespace flash_sampling

#endif
