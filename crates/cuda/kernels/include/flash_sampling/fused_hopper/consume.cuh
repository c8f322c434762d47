// The consumers: warpgroups that multiply and filter. The scouts score the tokens that pass the filter.
#pragma once

#include "eight_bits.cuh"
#include "initial_threshold.cuh"
#include "masks_penalties.cuh"
#include "masses.cuh"
#include "store_logits.cuh"
#include "upper_dots.cuh"

namespace flash_sampling::fused_hopper {

template <class T, ptx::Operand OPERAND>
__device__ __forceinline__ void consume(const Call& call, const WeightScales& scales, const LogitStore& stored,
                                        const u8* stages, Shared<T>& shared, const Schedule<T>& schedule) {
    Consumer<T> self(call, shared, threadIdx.x - T::FIRST_CONSUMER);
    const u32 steps = (call.hidden + T::SLABS * T::DEPTH - 1) / (T::SLABS * T::DEPTH);
    Ring<T> ring;
    float d[T::ACCUMULATORS];
    bool is_f16 = true;
    if constexpr (T::EIGHT_BITS) is_f16 = is_exact_in_f16(self);
    // The first warpgroup has the first turn. Its wait after the last tile balances this arrival.
    if (T::IN_TURN && self.group + 1 == T::TILE_UNITS) give_turn(0);

    for (u32 t = 0; t < schedule.tiles; ++t) {
        schedule.tile(t, self.first, self.size);
        // NOTE: without a branch, because the compiler serialises products behind a branch.
        const bool has_tokens = !T::SKIPS || __any_sync(0xffffffffu, schedule.has_tokens(self.group, self.size));
        if constexpr (T::CANDIDATES)
            multiply_shadow(d, stages, ring, steps, self);
        else if constexpr (T::EIGHT_BITS)
            multiply_eight_bits(d, stages, ring, steps, self, scales, is_f16);
        else
            multiply<T, OPERAND>(d, stages, ring, has_tokens ? steps : 0, self);
        const u32 real = add_bias(d, self);
        if constexpr (T::MASKS_PENALTIES) {
            if (stored.logits) store_raw(d, real, stored, self);
        }
        if constexpr (T::STORE_LOGITS) store_with_maxima(d, real, stored, self);
        if constexpr (T::LOG_Z) {
            hide_absent<T>(d, real);
            weigh(d, self);
        }

        u32 counted[T::WORDS], pending[T::WORDS], queued = 0;
        const auto count_all = [&] {
#pragma unroll
            for (int w = 0; w < T::WORDS; ++w) counted[w] = real;
        };
        count_all();
        const bool is_masked = T::MASKS_PENALTIES && has_masks(self);
        if (is_masked) apply_masks(counted, self);
        ptx::mbarrier_wait(&shared.scouted, t & 1);
        if (t == 0) estimate(d, counted, self);
        if (is_masked && may_be_invalid(d, self)) count_all();

        if (filter(pending, d, counted, self)) enqueue(pending, queued, d, self);
        // The scouts score the queue while the next tile's products run.
        if (self.lane == 0) shared.queued[self.warp] = queued;
        ptx::mbarrier_arrive(&shared.filtered);
    }
    if (T::IN_TURN && self.group == 0) await_turn(0);
    ptx::mbarrier_wait(&shared.scouted, schedule.tiles & 1);
}

}  // namespace flash_sampling::fused_hopper
