// One pass over a row of raw float32 logits that decides whether top-p keeps the winner of the plain draw.
//
// The blocks of a team take the row's lines in turn. The first loads are in flight before filters and draw are read, and nothing
// is copied, because all time besides the reads is latency at both ends.
#pragma once

#include "undecided_rows.cuh"
#include "top_p.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

struct TopPFirstPass {
    static constexpr u32 WARPS = TopPSearch::WARPS;

    TopPSearch::Lines lines;

    // Whether the row's only transform is a temperature, and its only filter top-p.
    static __device__ __forceinline__ bool takes(const RowFilters& filters, const Row& row) {
        return !filters.has_min_p() && filters.rescale == 1.0f && !row.mask && !row.biases;
    }

    __device__ __forceinline__ explicit TopPFirstPass(const ExistingRow& row)
        : lines(row, Team::rank() * WARPS + threadIdx.x / 32, Team::size() * WARPS) {}

    // Returns the mass before a place and the total mass in the first thread of the team, and nothing in other threads. All
    // threads call this, and then Team::sync_relaxed().
    __device__ __forceinline__ TopPSearch::Masses masses(TopPSearch::Shared& shared, float place, u32 token,
                                                         float inv_temperature) {
        TopPSearch::Weights weights(place, token);
        lines.each(inv_temperature, [&](const float(&l)[4], u32 first) { weights.add(l, first); });
        return masses_of(shared, weights);
    }

    // Returns the sums of all threads' masses in the first thread of the team. All threads call this, and then
    // Team::sync_relaxed().
    static __device__ __forceinline__ TopPSearch::Masses masses_of(TopPSearch::Shared& shared, const TopPSearch::Weights& weights) {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const double of_warp[2] = {TopPSearch::sum_of_warp(weights.before), TopPSearch::sum_of_warp(weights.all)};
        if (lane == 0) shared.before[warp] = of_warp[0], shared.all[warp] = of_warp[1];
        __syncthreads();
        if (warp == 0) {
            const double before = TopPSearch::sum_of_warp(lane < WARPS ? shared.before[lane] : 0.0);
            const double all = TopPSearch::sum_of_warp(lane < WARPS ? shared.all[lane] : 0.0);
            if (lane == 0) shared.shares[0] = {TopPSearch::bits_of(before), TopPSearch::bits_of(all), 0};
        }
        Team::sync();
        TopPSearch::Masses sums{0.0, 0.0, 0.0f};
        if (threadIdx.x != 0 || Team::rank() != 0) return sums;
        for (u32 r = 0; r < Team::size(); ++r) {
            sums.before += TopPSearch::of_bits(Team::load(&shared.shares[0].before, r));
            sums.all += TopPSearch::of_bits(Team::load(&shared.shares[0].all, r));
        }
        return sums;
    }
};

}  // namespace flash_sampling

#endif
