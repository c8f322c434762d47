// The exchange within the fused kernel (paper Alg. 1, line 11). The last block has the draws of the shard. It sends them, waits
// for the draws of the other ranks, and writes the draws of the whole vocabulary, as the exchange's launch does.
//
// This saves a launch. Its start, and its loads of data that the last block already has, take longer than the exchange. The other
// ranks see no difference, so each rank may exchange within the kernel or by a launch. The waiting block delays no other block of
// its grid, because all blocks have arrived.
#pragma once

#include "peers.cuh"

namespace flash_sampling {

#ifdef __CUDACC__

// The exchange by the threads of the last block. After a timeout in the group, it sends nothing and waits for nothing.
struct Sender {
    const Peers& peers;
    u32 step, missed;

    // Reads the state early if `is_used`, because the state is no longer in the caches. All lanes of a warp call this.
    __device__ __forceinline__ Sender(const Peers& peers, bool is_used)
        : peers(peers), step(is_used ? step_after(peers.state->step) : 0),
          missed(is_used ? __shfl_sync(0xffffffffu, load_late(peers.state), 0) : 0) {}

    __device__ __forceinline__ u32 digest(const Row& row) const { return digest_of(row, peers.row_count, peers.mark); }

    // Sends the shard's draw of a row to every rank.
    __device__ __forceinline__ void send(u32 column, u32 digest, const Draw& draw) const {
        if (missed) return;
        const Slot sent = Slot::of(key_of(draw), draw.logit, digest, step);
        const u64 place = place_of(peers, step, peers.rank, column);
        for (u32 other = 0; other < peers.world; ++other) store_slot(peers.mailboxes[other] + place, sent);
    }

    // Receives and writes the draws of the whole vocabulary. `threads` threads of the last block, in whole warps, call this with
    // the rows' digests.
    __device__ __forceinline__ void join(const u32* digests, u32 thread, u32 threads) const {
#pragma unroll 1
        for (u32 first = thread / 32 * 32; first < peers.row_count * peers.lanes; first += threads) {
            const PeerPair pair(peers, step, missed, first + thread % 32);
            pair.receive(pair.takes_part ? digests[pair.row] : 0);
        }
        if (thread == 0) peers.state->step = step;
    }
};

#endif

}  // namespace flash_sampling
