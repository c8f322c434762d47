// The consumers: two warpgroups that multiply, filter what they have, and leave the rest to the scouts.
#pragma once

#include "guess.cuh"
#include "knobs.cuh"
#include "masses.cuh"
#include "queue.cuh"
#include "stores.cuh"

namespace flash_sampling::fused_hopper {

template <class T, ptx::Operand OPERAND>
__device__ __forceinline__ void consume(const Call& call, const LogitStore& stored, const u8* stages, Shared<T>& shared,
                                        const Schedule<T>& schedule) {
    const Consumer self(threadIdx.x - T::FIRST_CONSUMER);
    const u32 steps = (call.hidden + T::SLABS * T::DEPTH - 1) / (T::SLABS * T::DEPTH);
    Contender* const queue = shared.queue[self.warp];
    Ring<T> ring;
    float d[T::ACCUMULATORS];

    for (u32 t = 0; t < schedule.tiles; ++t) {
        u32 first, size;
        schedule.tile(t, first, size);
        // NOTE: no branch: the compiler serialises products behind one.
        const bool has_tokens = !T::SKIPS || __any_sync(0xffffffffu, schedule.has_tokens(self.group, size));
        multiply<T, OPERAND>(d, stages, shared, ring, has_tokens ? steps : 0, self);
        const u32 real = add_bias<T>(d, call, first, size, self);
        if constexpr (T::KNOBS) {
            if (stored.logits) store_raw<T>(d, real, call, stored, first, self);
        }
        if constexpr (T::STORES) store_with_tops<T>(d, real, call, stored, first, self);
        if constexpr (T::LOG_Z) weigh<T>(d, real, call, shared, self);

        u32 counted[T::WORDS];
#pragma unroll
        for (int w = 0; w < T::WORDS; ++w) counted[w] = real;
        const bool is_masked = T::KNOBS && has_masks(call, shared, self);
        if constexpr (T::KNOBS) {
            if (is_masked) apply_masks<T>(counted, call, shared, first, self);
        }
        ptx::mbarrier_wait(&shared.scouted, t & 1);
        if (t == 0) guess<T>(d, counted, call, shared, first, size, self);
        if constexpr (T::KNOBS) {
            if (is_masked && may_be_invalid<T>(d, call)) {
#pragma unroll
                for (int w = 0; w < T::WORDS; ++w) counted[w] = real;
            }
        }

        u32 pending[T::WORDS], queued = 0;
        if (filter<T>(pending, d, counted, shared, self)) enqueue<T>(pending, queued, queue, d, call, shared, first, self);
        // The scouts score what is queued, while the next tile's products run.
        if (t + 1 == schedule.tiles) flush(queued, queue, call, shared, first, self);
        __syncwarp();
        if (self.lane == 0) {
            shared.queued[self.warp] = queued;
            ptx::mbarrier_arrive(&shared.filtered);
        }
    }
}

}  // namespace flash_sampling::fused_hopper
