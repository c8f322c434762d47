// The scouts: three warps that score the queues of a tile, and compute the thresholds of the next tile while its products run.
// After the queues of the last tile, the consumers write the results.
#pragma once

#include "initial_threshold.cuh"
#include "refine.cuh"

namespace flash_sampling::fused_hopper {

// Calls take(g, word) for each granule g of a tile that begins with token `base`. If the shard begins within a granule, sixteen
// tokens overlap two granules. Then take() gets the smaller word, which has the larger bound.
template <class T, class Take>
__device__ __forceinline__ void for_granules(const Row& row, u32 base, const Take& take) {
    const Noise noise{row.seed, row.position};
    const u32 first = base / Granule::TOKENS, apart = base % Granule::TOKENS != 0;
    Words words;
    u32 before = 0;
#pragma unroll 1
    for (u32 i = 0; i < T::GRANULES + apart; ++i) {
        const u32 granule = first + i;
        if (i == 0 || granule % 4 == 0) words = noise.words(Domain::Granule, row.draw, granule / 4);
        const u32 word = Noise::pick(words, granule % 4);
        if (i >= apart) take(i - apart, apart ? min(before, word) : word);
        before = word;
    }
}

// Sets the thresholds of a tile. For a block's first tile, sets the noise bounds for initial_threshold.cuh instead.
template <class T>
__device__ __forceinline__ void make_thresholds(const Call& call, Shared<T>& shared, u32 t, u32 base, u32 worker) {
    for (u32 column = worker; column < T::COLUMNS; column += T::SCOUTS) {
        if constexpr (T::LISTS && T::CANDIDATES)
            if (t > 0 && column < call.row_count) raise_cut(shared, column);
        const ThresholdLine line = t == 0 ? ThresholdLine::flat(0.0f)
                                          : thresholds_of(call, shared, column, exchange_best(call, shared, column), base);
        const float flat = t == 0 ? 0.0f : line.dot_threshold(0.0f, call.head);
        if (!has_noise(call, shared, column)) {
#pragma unroll
            for (u32 g = 0; g < T::GRANULES; ++g) shared.thresholds[g][column] = flat;
            continue;
        }
        for_granules<T>(shared.rows[column], base, [&](u32 g, u32 word) {
            const float bound = noise_bound(Granule::minimum_bits(word));
            shared.thresholds[g][column] =
                t == 0 ? with_leader(bound, word % Granule::TOKENS) : line.dot_threshold(bound, call.head);
        });
    }
}

template <class T>
__device__ __forceinline__ void scout(const Call& call, Shared<T>& shared, const Schedule<T>& schedule) {
    constexpr u32 QUEUES = T::CONSUMER_WARPS;
    const u32 worker = threadIdx.x - 32, queue = worker % QUEUES;
    for (u32 t = 0; t < schedule.tiles; ++t) {
        u32 first, unused;
        schedule.tile(t, first, unused);
        make_thresholds(call, shared, t, call.first_token + first, worker);
        ptx::mbarrier_arrive(&shared.scouted);
        if constexpr (T::CANDIDATES)
            if (t == 1 && t + 1 < schedule.tiles && call.hidden >= REFINED_WIDTH) refine(call, shared, worker);
        // Candidates score a token of no use first. So the instructions of scoring are read from memory while the products of the
        // first tile run.
#pragma unroll 1
        for (u32 is_real = T::CANDIDATES && t == 0 ? 0 : 1; is_real < 2; ++is_real) {
            if (is_real) ptx::mbarrier_wait(&shared.filtered, t & 1);
            score(call, shared, queue, is_real ? shared.queued[queue] : 1, first, worker / QUEUES, T::SCOUTS / QUEUES, is_real);
            ptx::named_barrier(SCOUTS_BARRIER, T::SCOUTS);
        }
    }
    ptx::mbarrier_arrive(&shared.scouted);
}

}  // namespace flash_sampling::fused_hopper
