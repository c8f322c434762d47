// The draws of rows with top-p alone, in one launch whose blocks are all resident. The sums of BlockMaxSums decide most rows.
// After a barrier, all blocks decide the other rows, as TopPResolve does.
//
// Every block finds the undecided rows from the same sums, so no block waits for a list. Two sets of sums alternate: each launch
// clears the previous launch's set.
#pragma once

#include "top_p_resolve.cuh"
#include "block_max_sums.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

struct TopPBlockMax {
    using Select = TopPResolve<NoRanks>;
    static constexpr u32 THREADS = BlockMaxSums::THREADS, ROOM = UndecidedRows::ROOM;
    static_assert(THREADS == Select::THREADS && 2 * ROOM <= THREADS, "a thread each for the sums of all rows");

    struct Shared {
        union {
            BlockMaxSums::Shared pass;
            Select::Shared open;
        };
        UndecidedRow rows[ROOM];
        u32 opened[ROOM / 32];
        u32 chosen;
    };
    static_assert(sizeof(Shared) <= 99 * 1024, "the least of compute capability 8.0 and up");

    const FilterCall& call;
    const UndecidedRows& open;
    Shared& shared;

    __device__ __forceinline__ void run() {
        const u32 launch = __ldcg(&open.barrier[1]);
        double* const sums = open.sums + launch % 2 * (2 * ROOM);
        if (blockIdx.x == 0 && threadIdx.x < 2 * ROOM) open.sums[(launch + 1) % 2 * (2 * ROOM) + threadIdx.x] = 0.0;
        BlockMaxSums pass{call, shared.rows, shared.pass};
        const double error = TopPSearch::error_of(pass.most());
        const UndecidedRow own = pass.row_of_thread(static_cast<float>(error) * 1.000001f);
        pass.add_to(sums, [&] { if (threadIdx.x < ROOM) shared.rows[threadIdx.x] = own; });
        __syncthreads();
        constexpr u32 WAITS = THREADS - 1;
        if (threadIdx.x == WAITS) arrive(launch);
        const NoRanks ranks;
        Select select{call, open, ranks, shared.open};
        select.empty();
        if (threadIdx.x == WAITS)
            while (ptx::load_acquired(&open.barrier[1]) == launch) {}
        __syncthreads();
        const u32 i = threadIdx.x;
        bool is_open = false;
        if (i < ROOM && shared.rows[i].top_p < 1.0f) {
            const double2 of_row = __ldcg(reinterpret_cast<const double2*>(sums) + i);
            UndecidedRow& row = shared.rows[i];
            row.before = of_row.x, row.all = of_row.y * (1.0 - error);
            is_open = !(of_row.x * (1.0 + error) < row.top_p * row.all);
        }
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, ballot = __ballot_sync(0xffffffffu, is_open);
        if (warp < ROOM / 32 && lane == 0) shared.opened[warp] = ballot;
        __syncthreads();
        u32 count = 0, place = __popc(ballot & ((1u << lane) - 1));
#pragma unroll
        for (u32 w = 0; w < ROOM / 32; ++w) {
            if (w < warp) place += __popc(shared.opened[w]);
            count += __popc(shared.opened[w]);
        }
        if (count == 0) return;
        const u32 shares = max(1u, small_quotient(gridDim.x, count)), share = small_quotient(blockIdx.x, count);
        if (share >= shares) return;
#pragma unroll 1
        for (u32 at = blockIdx.x - share * count; at < count; at += gridDim.x) {
            if (at >= gridDim.x) {
                // There are more rows than blocks.
                __syncthreads();
                select.empty();
            }
            if (is_open && place == at) shared.chosen = i;
            __syncthreads();
            select.decide(shared.rows[shared.chosen], at, share, shares);
        }
    }

  private:
    // Makes this block's stores before its last barrier visible to all waiting blocks.
    __device__ __forceinline__ void arrive(u32 launch) const {
        if (ptx::add_ordered(&open.barrier[0], 1) != gridDim.x - 1) return;
        open.barrier[0] = 0;
        ptx::store_released(&open.barrier[1], launch + 1);
    }
};

}  // namespace flash_sampling

#endif
