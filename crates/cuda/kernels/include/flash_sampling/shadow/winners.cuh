// The winner among the listed candidates of each row. Several blocks share a row's candidates, and the last of them writes the
// draw.
#pragma once

#include "../perturb.cuh"
#include "../ptx/early.cuh"
#include "../ptx/ordered.cuh"
#include "exact_dots.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

struct ExactWinners {
    static constexpr u32 THREADS = ExactDots::THREADS;
    static constexpr u32 MAX_PARTS = 32;

    struct Shared {
        u32 tokens[Candidates::ROOM];
        float dots[ExactDots::SLOTS];
        PartWinner best[THREADS / 32];
        Row row;
        u32 count, is_last;
    };

    const Call& call;
    const ShadowCall& shadow;
    Shared& shared;
    u32 row, part, parts;

    // Returns the better of a warp's winners, in every lane.
    static __device__ __forceinline__ PartWinner best_of_warp(const PartWinner& mine) {
        const u64 key = largest_of_warp(mine.key);
        const u32 owner = __ffs(__ballot_sync(0xffffffffu, mine.key == key)) - 1;
        return {key, __shfl_sync(0xffffffffu, mine.logit, owner), 0};
    }

    // Requests the full kernel.
    __device__ __forceinline__ void leave_open() const {
        shadow.words->open = 1;
        atomicAdd(&shadow.words->undecided, 1u);
    }

    // Copies the row, and compacts this block's part of the candidates whose scores can reach the largest lower bound.
    __device__ __forceinline__ void gather(u32 listed) const {
        if (threadIdx.x == 0) shared.count = 0;
        copy_row(&shared.row, &call.rows[row]);
        __syncthreads();
        const u32 least = static_cast<u32>(shadow.best[row] >> 32);
        const u64* const keys = shadow.candidates.keys + static_cast<u64>(row) * Candidates::ROOM;
        for (u32 i = part + threadIdx.x * parts; i < listed; i += THREADS * parts) {
            const u64 key = keys[i];
            if (static_cast<u32>(key >> 32) >= least) shared.tokens[atomicAdd(&shared.count, 1u)] = ~static_cast<u32>(key);
        }
        __syncthreads();
    }

    // Returns the noise of a token; 0 for a greedy row.
    __device__ __forceinline__ float noise_of(u32 token) const {
        const Noise noise{shared.row.seed, shared.row.position};
        return shared.row.greedy ? 0.0f : noise.gumbel(Domain::Token, shared.row.draw, token);
    }

    // Returns the exact candidate of a token; without a key if it is forbidden.
    __device__ __forceinline__ PartWinner score(u32 token, float dot, float noise) const {
        if (call.bias) dot = add_rn(dot, call.bias[token - call.first_token]);
        const Row& of_row = shared.row;
        // The logit is valid, because its upper bound is.
        const float logit = of_row.apply(call.head.apply(dot, 0.0f, false), token);
        if (!(logit > -f32_infinity())) return {0, 0.0f, 0};
        const float score = of_row.greedy ? logit : add_rn(logit, noise);
        return {to_ordered_bits(Winner::of(score, token)), logit, 0};
    }

    // Runs one block. `memory` is ExactDots::SHARED_BYTES.
    template <ptx::Operand OPERAND>
    __device__ __forceinline__ void block(u8* memory) const {
        ptx::start_next_launch();
        ptx::await_earlier_launches();
        const u32 listed = shadow.candidates.counts[row];
        if (listed > Candidates::ROOM) {
            if (part == 0 && threadIdx.x == 0) leave_open();
            return;
        }
        gather(listed);
        const u32 count = shared.count;
        PartWinner best{0, 0.0f, 0};
        for (u32 first = 0; first < count; first += ExactDots::SLOTS) {
            const u32 some = min(count - first, ExactDots::SLOTS);
            const bool has_token = threadIdx.x < some;
            float noise = 0.0f;
            const auto meanwhile = [&] { noise = has_token ? noise_of(shared.tokens[first + threadIdx.x]) : 0.0f; };
            ExactDots::compute<OPERAND>(shadow.candidates, row, call.first_token, shared.tokens + first, some, shared.dots, memory,
                                        meanwhile);
            __syncthreads();
            if (has_token) {
                const PartWinner next = score(shared.tokens[first + threadIdx.x], shared.dots[threadIdx.x], noise);
                if (next.key > best.key) best = next;
            }
            __syncthreads();
        }
        best = best_of_warp(best);
        if (threadIdx.x % 32 == 0) shared.best[threadIdx.x / 32] = best;
        __syncthreads();
        if (threadIdx.x >= 32) return;
        const u32 lane = threadIdx.x;
        best = best_of_warp(lane < THREADS / 32 ? shared.best[lane] : PartWinner{0, 0.0f, 0});
        PartWinner* const winners = shadow.winners + row * MAX_PARTS;
        u32 before = 0;
        if (lane == 0) {
            winners[part] = best;
            before = ptx::add_ordered(&shadow.arrived[row], 1);
        }
        if (__shfl_sync(0xffffffffu, before, 0) != parts - 1) return;
        best = best_of_warp(lane < parts ? load(winners + lane) : PartWinner{0, 0.0f, 0});
        if (lane > 0) return;
        if (best.key == 0) return leave_open();
        call.draws[row] = conclude(best.key, ~0ull, best.logit);
    }

  private:
    // Loads another block's winner.
    static __device__ __forceinline__ PartWinner load(const PartWinner* from) {
        return {__ldcg(&from->key), __ldcg(&from->logit), 0};
    }
};

}  // namespace flash_sampling

#endif
