// The exchange within the fused kernel (paper Alg. 1, line 11): its last block, which knows the shard's draws, does what the
// exchange's launch would. It stores them, waits for those of the other ranks, and leaves the draws of the whole vocabulary.
// There is no other launch, whose start, and the loads of what this block has at hand, take longer than the exchange itself.
// The other ranks see no difference, so each may do either. A block that waits holds up no other of its grid: all have
// arrived.
#pragma once

#include "peers.cuh"

namespace flash_sampling {

#ifdef __CUDACC__

// What a thread of the last block sends and receives. Nothing any more when the group is broken.
struct Sender {
    const Peers& peers;
    u32 step, missed;

    // Reads the state early, where `is_used`: it has left the caches since the step before. All lanes of a warp.
    __device__ __forceinline__ Sender(const Peers& peers, bool is_used)
        : peers(peers), step(is_used ? step_after(peers.state->step) : 0),
          missed(is_used ? __shfl_sync(0xffffffffu, load_late(peers.state), 0) : 0) {}

    __device__ __forceinline__ u32 digest(const Row& row) const { return digest_of(row, peers.row_count, peers.mark); }

    // The shard's draw of a row, to every rank.
    __device__ __forceinline__ void send(u32 column, u32 digest, const Draw& draw) const {
        if (missed) return;
        const Slot sent = Slot::of(key_of(draw), draw.logit, digest, step);
        const u64 place = place_of(peers, step, peers.rank, column);
        for (u32 other = 0; other < peers.world; ++other) store_slot(peers.mailboxes[other] + place, sent);
    }

    // The draws of the whole vocabulary, by `threads` threads, whole warps of the last block; with the rows' digests.
    __device__ __forceinline__ void join(const u32* digests, u32 thread, u32 threads) const {
#pragma unroll 1
        for (u32 first = thread / 32 * 32; first < peers.row_count * peers.lanes; first += threads) {
            const Meeting meeting(peers, step, missed, first + thread % 32);
            meeting.receive(meeting.takes_part ? digests[meeting.row] : 0);
        }
        if (thread == 0) peers.state->step = step;
    }
};

#endif

}  // namespace flash_sampling
