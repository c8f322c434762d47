// One pass over a row of raw float32 logits: is the winner of the plain draw kept by top-p?
//
// A team's blocks read the row's lines in turn. The first loads are under way before filters and draw are read, and nothing is
// copied: what a pass takes besides its reads is what it waits for at both ends.
#pragma once

#include "undecided_rows.cuh"
#include "top_p.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

struct TopPFirstPass {
    static constexpr u32 WARPS = TopPSearch::WARPS;

    TopPSearch::Lines lines;

    // Whether this row's logits need no more than a temperature, and top-p alone filters.
    static __device__ __forceinline__ bool takes(const RowFilters& filters, const Row& row) {
        return !filters.has_min_p() && filters.rescale == 1.0f && !row.mask && !row.biases;
    }

    __device__ __forceinline__ explicit TopPFirstPass(const ExistingRow& row)
        : lines(row, Team::rank() * WARPS + threadIdx.x / 32, Team::size() * WARPS) {}

    // The masses before a place and of all, in the first thread of the team; nothing elsewhere. All threads call it, and
    // Team::sync_relaxed() after it.
    __device__ __forceinline__ TopPSearch::Masses masses(TopPSearch::Shared& shared, float place, u32 token,
                                                         float inv_temperature) {
        TopPSearch::Weights weights(place, token);
        lines.each(inv_temperature, [&](const float(&l)[4], u32 first) { weights.add(l, first); });
        return masses_of(shared, weights);
    }

    // The masses of all threads of the team, in its first thread; nothing elsewhere. All threads call it, and Team::sync_relaxed() after
    // it.
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
