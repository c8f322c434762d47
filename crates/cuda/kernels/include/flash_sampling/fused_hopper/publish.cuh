// The end of a block: merges its winners with the winners of other blocks. The last block writes the draws.
#pragma once

#include "../exchange/fan_out.cuh"
#include "initial_threshold.cuh"
#include "masses.cuh"

namespace flash_sampling::fused_hopper {

// Publishes the block's results. The consumers call this last. The last block clears the scratch.
template <class T>
__device__ __forceinline__ void publish(const Call& call, const Masses& masses, const Peers& peers, Shared<T>& shared) {
    const u32 thread = threadIdx.x - T::FIRST_CONSUMER;
    if constexpr (T::CANDIDATES) {
        for (u32 column = thread; column < call.row_count; column += T::CONSUMERS)
            if (shared.best[column].key) atomicMax(&call.best[column], shared.best[column].key);
        return;
    }
    const u32 block = ptx::block_index();
    const Sender sender(peers, T::FAN_OUT);
    for (u32 column = thread; column < call.row_count; column += T::CONSUMERS) {
        if (shared.best[column].key) atomicMax(&call.best[column], shared.best[column].key);
        call.logits[static_cast<u64>(block) * call.row_count + column] = shared.best[column].logit;
        if constexpr (T::LOG_Z) {
            masses.parts[static_cast<u64>(block) * call.row_count + column] = mass_of_block(shared, column).part();
        }
        // Computed while the atomics are in flight. `largest` is unused at this point.
        if constexpr (T::FAN_OUT) shared.largest[column] = sender.digest(shared.rows[column]);
    }
    __threadfence();
    ptx::named_barrier(CONSUMERS_BARRIER, T::CONSUMERS);
    if (thread == 0) shared.last = atomicAdd(call.arrived, 1u) % PUBLISHED == gridDim.x - 1;
    ptx::named_barrier(CONSUMERS_BARRIER, T::CONSUMERS);
    if (!shared.last) return;
    __threadfence();
    if constexpr (T::LOG_Z) write_log_z(call, shared, masses, thread);
    for (u32 column = thread; column < call.row_count; column += T::CONSUMERS) {
        const u64 best = ptx::load_relaxed(&call.best[column]);
        const u64 invalid = ptx::load_relaxed(&call.invalid[column]);
        float logit = 0.0f;
        if (best) {
            const u32 token = from_ordered_bits(best).token - call.first_token;
            const u32 owner =
                Schedule<T>::owner(call.tokens, Schedule<T>::by_turns(call), gridDim.x / T::CLUSTER, token);
            logit = __ldcg(&call.logits[static_cast<u64>(owner) * call.row_count + column]);
        }
        const Draw draw = conclude(best, invalid, logit);
        if constexpr (T::FAN_OUT)
            sender.send(column, shared.largest[column], draw);
        else
            call.draws[column] = draw;
        call.best[column] = 0;
        call.invalid[column] = ~0ull;
    }
    if (thread == 0) *call.arrived = 0;
    if constexpr (T::FAN_OUT) sender.join(shared.largest, thread, T::CONSUMERS);
}

}  // namespace flash_sampling::fused_hopper
