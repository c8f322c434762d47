// The draws of the rows that the first pass leaves undecided, by all blocks of a launch.
//
//   1. The blocks are divided evenly among the undecided rows. Each block reads its share of a row once.
//   2. Only tokens before the plain winner's place can be the draw. They enter bins by place: larger logits by value, then
//      logits equal to the winner's by token. Bins are narrow where top-p is likely to end. A bin has a mass, and the best
//      score of its tokens. Each thread has its own column of masses, so no thread waits. The blocks also sum the total mass.
//      If the first pass has only a bound, the total mass decides whether top-p keeps the plain winner.
//   3. The last block of a row adds up the bins from the largest logits on. Top-p surely keeps a bin's best token if the mass up
//      to the bin's end, without the token's own mass, is below the limit. It surely drops the token if the mass up to the bin's
//      start exceeds the limit.
//   4. If the best surely kept token beats every token in doubt, it is the draw. Otherwise this block searches alone as
//      TopPSearch does, from the best token in doubt on: about one undecided row of a hundred.
#pragma once

#include "top_p_first_pass.cuh"
#include "../ptx/ordered.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

// The policy for one GPU, which has all tokens.
struct NoRanks {
    // Whether one block can decide a row that the bins leave in doubt.
    static constexpr bool DRAWS_ALONE = true;

    // The first token of the vocabulary.
    __device__ __forceinline__ u32 first_token(const FilterCall& call) const { return call.first_token; }
    // Replaces a shard's bins by the vocabulary's bins. Each lane of a warp has one bin: its mass, its best token and this
    // token's logit. False if a rank is late; then the draw names the rank.
    __device__ __forceinline__ bool bins(u32, double&, u64&, float&, double&, double&) const { return true; }
};

// `Ranks` merges the bins of shards: NoRanks, or RankSums of rank_sums.cuh.
template <class Ranks>
struct TopPResolve {
    static constexpr u32 THREADS = TopPSearch::THREADS, WARPS = TopPSearch::WARPS;
    static constexpr u32 TIES = 8, BINS = UndecidedRows::BINS;
    // Rows that a block loads before its own row is known.
    static constexpr u32 EXPECTED_ROWS = UndecidedRows::LEAST;
    using Lines = RowLines<2, true>;
    static_assert(BINS == 32 && TIES == 8, "a lane per bin; four bins on either side of the end among equal logits");
    // Ordered bits that no score and token have: the row is decided.
    static constexpr u64 DECIDED = ~0ull;

    struct Shared {
        float masses[BINS][THREADS];
        u64 best[BINS];
        float all[WARPS];
        UndecidedRow rows[EXPECTED_ROWS];
        TopPSearch::Shared select;
        u32 is_last;
    };
    static_assert(sizeof(Shared) <= 99 * 1024, "the least of compute capability 8.0 and up");

    // The bins of the tokens before a place. The bin is monotone in the place. So rounding moves the edges of bins, but keeps the
    // order of tokens. A bin has the same bits in every kernel.
    struct Bins {
        float place, per_nat, per_tie;
        u32 token, shift;

        __device__ __forceinline__ Bins(const UndecidedRow& row, u32 first_token) : place(row.place), token(row.token) {
            // The dropped share of the mass before the place. With a larger share, top-p ends further from the place.
            const float lost = static_cast<float>((row.before - row.top_p * row.all) / row.before);
            // The bins divide a distance that is 1 at the place: four bins for each of six doublings, eight for each of three, or
            // equal bins. In simulations (normal bulk, top-p 0.95, 0.5 and 0.05), square roots are no better.
            const bool is_near = lost < 0.1f, is_far = lost >= 0.8f;
            static_assert(BINS - TIES == 24, "6 * 4 = 3 * 8 = 0.75 * 32");
            shift = is_near ? 21 : is_far ? 18 : 20;
            // No logit exceeds the logarithm of the total mass; `all` contains at least the largest logit.
            per_nat = (is_near ? 63.0f : is_far ? 0.75f : 7.0f) / fmaxf(logf(static_cast<float>(row.all)), 0.25f);
            // If equal, evenly spread logits are all the mass before the place, top-p ends this many tokens before the place.
            per_tie = 1.0f / fmaxf(lost * static_cast<float>(token - first_token), 1.0f);
        }
        // Returns the bin of a token above the place. Infinite products fall into the last bin.
        __device__ __forceinline__ u32 of_above(float l) const {
            const u32 bin = (f32_to_bits(fma_rn(sub_rn(l, place), per_nat, 1.0f)) - f32_to_bits(1.0f)) >> shift;
            return min(TIES + bin, BINS - 1);
        }
        // Returns the bin of a token with the place's logit.
        __device__ __forceinline__ u32 of_tie(u32 t) const {
            const float beyond = fma_rn(static_cast<float>(token - t), per_tie, -1.0f), far = fabsf(beyond);
            const u32 steps = (far >= 0.0625f) + (far >= 0.25f) + (far >= 0.5625f);
            return beyond < 0.0f ? TIES / 2 - 1 - steps : TIES / 2 + steps;
        }
        __device__ __forceinline__ u32 of(float l, u32 t) const { return l == place ? of_tie(t) : of_above(l); }
    };

    const FilterCall& call;
    const UndecidedRows& open;
    const Ranks& ranks;
    Shared& shared;

    // Decides the rows that an earlier launch lists.
    __device__ __forceinline__ void run() {
        const u32 count = prepare();
        if (count == 0) return;
        // NOTE: the host launches at least one block per row.
        const u32 at = blockIdx.x % count, share = blockIdx.x / count, shares = gridDim.x / count;
        if (share >= shares) return;
        const UndecidedRow row = at < EXPECTED_ROWS ? shared.rows[at] : open.rows[at];
        if (!decide(row, at, share, shares) || threadIdx.x != 0) return;
        if (atomicAdd(&open.counters[1], 1u) == count - 1) open.counters[0] = 0, open.counters[1] = 0;
    }

    // Decides a row as one of `shares` blocks. `at` is the row's index among the undecided rows. Bins are clear. Returns whether
    // this block was the last of the row. All threads call this.
    __device__ __forceinline__ bool decide(const UndecidedRow& row, u32 at, u32 share, u32 shares) {
        Lines lines(call.row(row.index), share * WARPS + threadIdx.x / 32, shares * WARPS);
        const Bins bins(row, ranks.first_token(call));
        const TopPSearch::Weights weights(row.place, row.token);
        // Kept tokens have at least p of the mass. So a score below this cutoff wins only with probability 10^-8.
        const float cut = row.place + logf(row.top_p * static_cast<float>(row.all)) - TopPSearch::BELOW_MASS;
        __syncthreads();
        float all = 0.0f;
        lines.each(row.inv_temperature, [&](const float(&l)[4], u32 first) { add_to_bins(l, first, row, bins, weights, cut, all); });
        const float of_warp = sum_of_warp(all);
        if (threadIdx.x % 32 == 0) shared.all[threadIdx.x / 32] = of_warp;
        __syncthreads();
        publish(at);
        __syncthreads();
        if (threadIdx.x == 0) shared.is_last = ptx::add_ordered(&open.arrived[at], 1) == shares - 1;
        __syncthreads();
        if (!shared.is_last) return false;
        if (threadIdx.x < 32) conclude(at, row, weights, TopPSearch::error_of(lines.most() + WARPS + 2 * 5));
        __syncthreads();
        if constexpr (Ranks::DRAWS_ALONE) {
            if (shared.best[0] != DECIDED) draw_alone(call, shared.select, row.index, shared.best[0]);
        }
        if (threadIdx.x == 0) open.arrived[at] = 0;
        return true;
    }

    // Clears all bins; a barrier must follow.
    __device__ __forceinline__ void empty() {
#pragma unroll
        for (u32 b = 0; b < BINS; ++b) shared.masses[b][threadIdx.x] = 0.0f;
        if (threadIdx.x < BINS) shared.best[threadIdx.x] = 0;
    }

  private:
    // Returns the number of undecided rows, copies the first of them to shared memory, and clears all bins.
    __device__ __forceinline__ u32 prepare() {
        const u32 count = __ldcg(&open.counters[0]);
        constexpr u32 PIECES = sizeof(UndecidedRow) / 16;
        uint4 piece{};
        const bool has_piece = threadIdx.x < EXPECTED_ROWS * PIECES;
        if (has_piece) piece = __ldcg(reinterpret_cast<const uint4*>(open.rows) + threadIdx.x);
        empty();
        if (has_piece) reinterpret_cast<uint4*>(shared.rows)[threadIdx.x] = piece;
        __syncthreads();
        return count;
    }

    // Adds the masses and scores of four tokens to their bins.
    __device__ __forceinline__ void add_to_bins(const float (&l)[4], u32 first, const UndecidedRow& row, const Bins& bins,
                                           const TopPSearch::Weights& weights, float cut, float& all) {
        float mass[4];
        u32 bin[4], hits = 0;
        bool is_tie = false;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            mass[i] = weights.mass_of(l[i]);
            all += mass[i];
            if (l[i] > bins.place) hits |= 1u << i;
            is_tie |= l[i] == bins.place;
        }
        if (!__any_sync(0xffffffffu, hits | is_tie)) return;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) bin[i] = bins.of_above(l[i]);
        if (is_tie) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                if (l[i] == bins.place && first + i < bins.token) bin[i] = bins.of_tie(first + i), hits |= 1u << i;
        }
        if (!__any_sync(0xffffffffu, hits)) return;
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            if (hits >> i & 1) shared.masses[bin[i]][threadIdx.x] += mass[i];
        const Noise noise{row.seed, row.position};
        const u32 word = noise.word(Domain::Granule, row.draw, first / Granule::TOKENS);
        const float threshold = logit_threshold(cut, noise_bound(Granule::minimum_bits(word)));
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            if (!(l[i] > threshold)) hits &= ~(1u << i);
#pragma unroll 1
        for (; hits; hits &= hits - 1) {
            const u32 i = __ffs(static_cast<int>(hits)) - 1, token = first + i;
            const float logit = TopPSearch::Weights::pick_of(l, i);
            const Granule granule = noise.granule(Domain::Token, row.draw, token, word);
            const float score = add_rn(logit, noise.gumbel_in(granule, Domain::Token, row.draw, token));
            if (score >= cut) atomicMax(&shared.best[bins.of(logit, token)], to_ordered_bits(Winner::of(score, token)));
        }
    }

    // Adds the block's bins and total mass to the row's. All threads call this.
    __device__ __forceinline__ void publish(u32 at) {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        constexpr u32 EACH = BINS / WARPS;
        float sums[EACH + 1]{};
#pragma unroll
        for (u32 e = 0; e < EACH; ++e)
#pragma unroll
            for (u32 i = 0; i < THREADS; i += 32) sums[e] += shared.masses[warp + e * WARPS][i + lane];
        // One warp also adds the total mass.
        const bool has_all = warp == WARPS - 1;
        sums[EACH] = lane < WARPS ? shared.all[lane] : 0.0f;
#pragma unroll
        for (u32 e = 0; e <= EACH; ++e) sums[e] = sum_of_warp(sums[e]);
        if (lane != 0) return;
#pragma unroll
        for (u32 e = 0; e < EACH; ++e) {
            const u32 b = at * BINS + warp + e * WARPS;
            const u64 best = shared.best[warp + e * WARPS];
            if (sums[e] > 0.0f) atomicAdd(&open.masses[b], static_cast<double>(sums[e]));
            if (best) atomicMax(&open.best[b], best);
        }
        if (has_all) atomicAdd(&open.all[at], static_cast<double>(sums[EACH]));
    }
    static __device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
        for (u32 distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
        return x;
    }

    // Writes the draw if it is certain. Otherwise sets shared.best[0] to the best token in doubt, or 0 if there is none. Clears
    // the row's bins. One warp calls this.
    __device__ __forceinline__ void conclude(u32 at, const UndecidedRow& row, const TopPSearch::Weights& weights, double own_error) {
        const u32 lane = threadIdx.x;
        double mass = __ldcg(&open.masses[at * BINS + lane]), all = __ldcg(&open.all[at]);
        u64 best = __ldcg(&open.best[at * BINS + lane]);
        const ExistingRow logits = call.row(row.index);
        float logit = 0.0f;
        if (best)
            logit = mul_rn(static_cast<const float*>(logits.logits)[from_ordered_bits(best).token - logits.first_token],
                           row.inv_temperature);
        __syncwarp();
        open.masses[at * BINS + lane] = 0.0, open.best[at * BINS + lane] = 0;
        if (lane == 0) open.all[at] = 0.0;
        if (!ranks.bins(row.index, mass, best, logit, all, own_error)) {
            if (lane == 0) shared.best[0] = DECIDED;
            return;
        }
        double upto = mass;  // of the bins of larger logits, and of this bin
#pragma unroll
        for (u32 distance = 1; distance < 32; distance *= 2) {
            const double more = __shfl_down_sync(0xffffffffu, upto, distance);
            if (lane + distance < 32) upto += more;
        }
        const Winner winner = from_ordered_bits(best);
        const double own = best ? weights.mass_of(logit) : 0.0;
        const double limit = row.top_p * all;
        const double least = limit * (1.0 - own_error), most = limit * (1.0 + own_error);
        const bool is_kept = upto * (1.0 + own_error) - own * (1.0 - own_error) < least;
        const bool is_lost = (upto - mass) * (1.0 - own_error) > most;
        const u64 kept = largest_of_warp(is_kept ? best : 0);
        const u64 perhaps = largest_of_warp(!is_kept && !is_lost ? best : 0);
        if (!(row.before * (1.0 - row.error) > most)) {
            // Top-p keeps the plain winner, or the host decides.
            if (lane == 0 && !(row.before * (1.0 + row.error) < least))
                call.draws[row.index] = {0, 0.0f, 0.0f, Status::Undecided};
            if (lane == 0) shared.best[0] = DECIDED;
            return;
        }
        const bool is_decided = kept > perhaps;
        // Exactly one lane has these ordered bits, because they contain the token.
        if (is_decided && best == kept) call.draws[row.index] = {winner.token, winner.score, logit, Status::Drawn};
        if (lane == 0) shared.best[0] = is_decided ? DECIDED : perhaps;
        if constexpr (!Ranks::DRAWS_ALONE) {
            if (lane == 0 && !is_decided) call.draws[row.index] = {0, 0.0f, 0.0f, Status::Undecided};
            if (lane == 0) shared.best[0] = DECIDED;
        }
    }

    // Decides the row by one block, starting at the best token in doubt, or at the plain winner. NOTE: static, because an object
    // would be in memory, and the compiler would not know that its pointers point to shared memory.
    static __device__ __noinline__ void draw_alone(const FilterCall& call, TopPSearch::Shared& shared, u32 i, u64 best) {
        const RowFilters filters = call.filters[i];
        call.begin(i, shared.row);
        TopPSearch select{filters, call.row(i), shared};
        Draw start = call.draws[i];
        if (best) start.token = from_ordered_bits(best).token, start.score = from_ordered_bits(best).score;
        if (best) start.logit = select.logit_of(start.token);
        const Draw draw = select.draw(start);
        __syncthreads();
        if (threadIdx.x == 0) call.draws[i] = draw;
    }
};

}  // namespace flash_sampling

#endif
