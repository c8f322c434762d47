// The consumers: two warpgroups that multiply, filter what they have, and leave the rest to the scouts.
#pragma once

#include "filter.cuh"
#include "guess.cuh"
#include "knobs.cuh"
#include "masses.cuh"
#include "queue.cuh"
#include "stores.cuh"

namespace flash_sampling::fused_hopper {

// Waits for the marks of the tile, after adding those of the columns that are not the scouts'.
template <class T>
__device__ __forceinline__ void await_marks(const Call& call, Shared<T>& shared, u32 t, u32 first, u32 size,
                                            const Consumer& self) {
    if (T::CONSUMERS_SCAN && T::scouted_columns(call) < call.row_count) {
#pragma unroll 1
        for (u32 u = 0; u < T::UNITS; ++u) mark_slab(call, shared, t, first, size, self.slab(u));
        // A shard may begin within a quad: the neighbours' marks too.
        if ((call.first_token + first) & 3) ptx::named_barrier(CONSUMERS_BARRIER, T::CONSUMERS);
    }
    ptx::mbarrier_wait(&shared.scouted, t & 1);
}

template <class T, ptx::Operand OPERAND, bool KNOBS>
__device__ __forceinline__ void consume(const Call& call, const LogitStore& stored, const u8* stages, Shared<T>& shared,
                                        const Schedule<T>& schedule) {
    const Consumer self(threadIdx.x - T::FIRST_CONSUMER);
    const u32 steps = (call.hidden + T::SLABS * T::DEPTH - 1) / (T::SLABS * T::DEPTH);
    Contender* const queue = shared.queue[self.warp];
    Ring<T> ring;
    float d[T::UNITS][T::ACCUMULATORS];

    for (u32 t = 0; t < schedule.tiles; ++t) {
        u32 first, size;
        schedule.tile(t, first, size);
        u32 real[T::UNITS];
        // NOTE: no branch: the compiler serialises products behind one.
        const bool has_tokens = !T::SKIPS || __any_sync(0xffffffffu, schedule.has_tokens(self.group, size));
        multiply<T, OPERAND>(d, stages, shared, ring, has_tokens ? steps : 0, self);
        add_bias<T>(d, real, call, first, size, self);
        if constexpr (KNOBS) {
            if (stored.logits) store_raw<T>(d, real, call, stored, first, self);
        }
        if constexpr (T::STORES) store_with_tops<T>(d, real, call, stored, first, self);
        if constexpr (T::LOG_Z) weigh<T>(d, real, call, shared, self);
        await_marks(call, shared, t, first, size, self);
        if (T::GUESSES && t == 0) {
            if constexpr (KNOBS) {
                u32 allowed[T::UNITS][T::WORDS];
                look_at_masks<T>(allowed, call, shared, first, self);
                tell_guesses<T>(d, real, call, shared, first, self, allowed);
            } else {
                tell_guesses<T>(d, real, call, shared, first, self);
            }
            take_guesses<T>(call, shared, first, self);
        }

        u32 queued = 0;
        for (u32 pass = t == 0 && T::LISTS ? LARGEST : ALL; pass < PASSES; ++pass) {
            if (pass == LARGEST) {
                u32 allowed[T::UNITS][T::WORDS];
                look_at_masks<T>(allowed, call, shared, first, self);
                keep_largest<T>(d, real, call, shared, self.thread, allowed);
            }
            u32 pending[T::UNITS][T::WORDS], any = 0;
            filter<T>(pending, d, real, shared, t, pass, self);
            if constexpr (KNOBS) {
                if (has_masks(call, shared, self) && !may_be_invalid<T>(d, call)) {
                    u32 allowed[T::UNITS][T::WORDS];
                    look_at_masks<T>(allowed, call, shared, first, self);
#pragma unroll
                    for (int u = 0; u < T::UNITS; ++u)
#pragma unroll
                        for (int w = 0; w < T::WORDS; ++w) pending[u][w] &= allowed[u][w];
                }
            }
#pragma unroll
            for (int u = 0; u < T::UNITS; ++u)
#pragma unroll
                for (int w = 0; w < T::WORDS; ++w) any |= pending[u][w];
            if (__any_sync(0xffffffffu, any)) {
                if constexpr (KNOBS)
                    enqueue_by_words<T>(pending, queued, queue, d, call, shared, first, self);
                else
                    enqueue<T>(pending, queued, queue, d, call, shared, first, self);
            }
            // The scouts score what the last pass of a tile leaves, while the next one's products run.
            if (pass < ALL || t + 1 == schedule.tiles) flush(queued, queue, call, shared, first, self);
            if (pass < ALL) {
                ptx::named_barrier(CONSUMERS_BARRIER, T::CONSUMERS);
                for (u32 column = self.thread; column < T::COLUMNS; column += T::CONSUMERS)
                    first_losing(call, shared, column, pass == LARGEST ? NEAR_NOISE : FIRST_NOISE, pass == HINTED,
                                 size, call.first_token + first);
                ptx::named_barrier(CONSUMERS_BARRIER, T::CONSUMERS);
            }
        }
        __syncwarp();
        if (self.lane == 0) {
            shared.queued[self.warp] = queued;
            ptx::mbarrier_arrive(&shared.filtered);
        }
    }
}

}  // namespace flash_sampling::fused_hopper
