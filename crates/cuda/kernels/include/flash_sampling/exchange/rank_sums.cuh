// Merges the sums and bins of shards into sums and bins of the vocabulary, through records between ranks.
#pragma once

#include "../selection/undecided_rows.cuh"
#include "peer_records.cuh"
#include "../selection/top_p.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

struct RankSums {
    static constexpr bool DRAWS_ALONE = false;
    // Words per record: a row's sums; a row's bins, with three words per lane and two more.
    static constexpr u32 SUMS = 3, BINS = UndecidedRows::BINS;
    static_assert(3 * BINS + 2 <= PeerRecords::WORDS, "a record has room");

    const RecordsStep step;
    Draw* const draws;

    __device__ __forceinline__ u32 first_token(const FilterCall&) const { return 0; }

    // Merges a row's sums; false if a rank is late. One thread calls this.
    __device__ __forceinline__ bool sums(u32 row, double& before, double& all, double& error) const {
        u32 late = step.missed;
        if (!late) {
            const u64 mine[SUMS] = {TopPSearch::bits_of(before), TopPSearch::bits_of(all), TopPSearch::bits_of(error)};
            for (u32 to = 0; to < step.world(); ++to)
#pragma unroll
                for (u32 at = 0; at < SUMS; ++at) step.send(to, row, at, mine[at]);
            before = all = error = 0.0;
            for (u32 from = 0; from < step.world(); ++from) {
                u64 theirs[SUMS]{};
                bool is_there = true;
#pragma unroll
                for (u32 at = 0; at < SUMS; ++at) is_there = is_there && step.receive(from, row, at, theirs[at]);
                if (!is_there) late |= 1u << from;
                before += TopPSearch::of_bits(theirs[0]);
                all += TopPSearch::of_bits(theirs[1]);
                error = fmax(error, TopPSearch::of_bits(theirs[2]));
            }
        }
        if (late) draws[row] = step.blame(late);
        return !late;
    }

    // Merges a row's bins, as NoRanks::bins describes. One warp calls this.
    __device__ __forceinline__ bool bins(u32 row, double& mass, u64& best, float& logit, double& all, double& error) const {
        const u32 lane = threadIdx.x % 32;
        u32 late = __shfl_sync(0xffffffffu, step.missed, 0);
        if (!late) {
            const u64 mine[3] = {TopPSearch::bits_of(mass), best, f32_to_bits(logit)};
            const u64 last = lane == 0 ? TopPSearch::bits_of(all) : TopPSearch::bits_of(error);
            for (u32 to = 0; to < step.world(); ++to) {
#pragma unroll
                for (u32 at = 0; at < 3; ++at) step.send(to, row, 3 * lane + at, mine[at]);
                if (lane < 2) step.send(to, row, 3 * BINS + lane, last);
            }
            mass = all = error = 0.0, best = 0, logit = 0.0f;
            for (u32 from = 0; from < step.world(); ++from) {
                u64 theirs[5]{};
                bool is_there = true;
#pragma unroll
                for (u32 at = 0; at < 5; ++at)
                    is_there = is_there && step.receive(from, row, at < 3 ? 3 * lane + at : 3 * BINS + at - 3, theirs[at]);
                if (!is_there) late |= 1u << from;
                mass += TopPSearch::of_bits(theirs[0]);
                if (theirs[1] > best) best = theirs[1], logit = bits_to_f32(static_cast<u32>(theirs[2]));
                all += TopPSearch::of_bits(theirs[3]);
                error = fmax(error, TopPSearch::of_bits(theirs[4]));
            }
            late = __reduce_or_sync(0xffffffffu, late);
        }
        if (late && lane == 0) draws[row] = step.blame(late);
        return !late;
    }
};

}  // namespace flash_sampling

#endif
