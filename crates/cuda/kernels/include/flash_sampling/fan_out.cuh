// Draws that leave for the other ranks from within the fused kernel (paper Alg. 1, line 11).
//
// LastBlock: the last block, which knows the shard's draws, does what the exchange's launch would: it stores them, waits for
// those of the other ranks, and leaves the draws of the whole vocabulary. There is no other launch, whose start, and the loads
// of what this block has at hand, take longer than the exchange itself. The other ranks see no difference, so each may do as
// it likes. A block that waits holds up no other of its grid: all have arrived.
//
// Blocks: each block stores its own winners when its last tile is done; the exchange's launch finds the best of all blocks of
// all ranks, one block of threads a row. This is the paper's, whose blocks are its tiles: ours walk over many, and what they
// store is what they keep in any case. Every rank does so, or none.
//
// 1. Every rank has room for as many blocks of each. A launch of fewer fills what is left with what it has: the largest key
//    of a row is the same.
// 2. An invalid logit is noted in one place for all blocks. The block that noted it reads it after that, and sends it, or one
//    that comes before it, in place of its winner.
// 3. A step's stores now begin with the fused kernel of that step, which follows the exchange of the step before on its
//    stream: the mailboxes' turns hold as they did.
#pragma once

#include "peers.cuh"

namespace flash_sampling {

// Where what a block of rank `from` sends for a row is, in each mailbox. Neighbouring rows are neighbours, for the sender.
FS_FUNCTION u64 place_of_block(const Peers& peers, u32 step, u32 from, u32 block, u32 row) {
    const u64 turn = step % peers.turns, draws = static_cast<u64>(peers.turns) * peers.world * peers.max_rows;
    return draws + ((turn * peers.world + from) * peers.blocks + block) * peers.max_rows + row;
}

#ifdef __CUDACC__

// What a thread of the fused kernel sends and receives. Nothing any more when the group is broken.
struct Sender {
    const Call& call;
    const Peers& peers;
    u32 step, missed;

    // Reads the state early, where `is_used`: it has left the caches since the step before. All lanes of a warp.
    __device__ __forceinline__ Sender(const Call& call, const Peers& peers, bool is_used)
        : call(call), peers(peers), step(is_used ? step_after(peers.state->step) : 0),
          missed(is_used ? __shfl_sync(0xffffffffu, load_late(peers.state), 0) : 0) {}

    __device__ __forceinline__ u32 digest(const Row& row) const { return digest_of(row, call.row_count, peers.mark); }

    // The shard's draw of a row.
    __device__ __forceinline__ void of_shard(u32 column, u32 digest, const Draw& draw) const {
        if (missed) return;
        const Slot sent = Slot::of(key_of(draw), draw.logit, digest, step);
        const u64 place = place_of(peers, step, peers.rank, column);
        for (u32 other = 0; other < peers.world; ++other) store_slot(peers.mailboxes[other] + place, sent);
    }

    // The draw of a row by block `index`.
    __device__ __forceinline__ void of_block(u32 index, u32 column, const Row& row, const Draw& draw) const {
        if (missed) return;
        const Slot sent = Slot::of(key_of(draw), draw.logit, digest(row), step);
        for (u32 other = 0; other < peers.world; ++other)
            for (u32 block = index; block < peers.blocks; block += gridDim.x)
                store_slot(peers.mailboxes[other] + place_of_block(peers, step, peers.rank, block, column), sent);
    }

    // The draws of the whole vocabulary, by `threads` threads, whole warps of the last block; with the rows' digests.
    __device__ __forceinline__ void join(const u32* digests, u32 thread, u32 threads) const {
#pragma unroll 1
        for (u32 first = thread / 32 * 32; first < peers.row_count * peers.lanes; first += threads) {
            const Meeting meeting(peers, step, missed, first + thread % 32);
            meeting.receive(meeting.takes_part ? digests[meeting.row] : 0);
        }
    }
};

// The exchange's launch for winners of blocks: a block of threads for each row.
struct JoinBlocks {
    static constexpr u32 THREADS = 256;
    static constexpr u32 WARPS = THREADS / 32;
    struct Shared {
        u64 key[WARPS];
        float logit[WARPS];
        u32 late[WARPS], others[WARPS];
        u32 missed;
    };

    const Peers& peers;

    __device__ __forceinline__ void block(Shared& shared) const {
        const u32 row = blockIdx.x, step = step_after(peers.state->step);
        if (threadIdx.x == 0) shared.missed = load_late(peers.state);
        __syncthreads();
        u64 key = 0;
        float logit = 0.0f;
        u32 late = shared.missed, others = 0;
        const u32 digest = digest_of(peers.rows[row], peers.row_count, peers.mark);
        if (!late) pause(peers.pause);
        for (u32 i = threadIdx.x; i < peers.world * peers.blocks && !late; i += THREADS) {
            const u32 from = i / peers.blocks;
            Slot slot;
            const Slot* const at = peers.mailboxes[peers.rank] + place_of_block(peers, step, from, i % peers.blocks, row);
            if (!receive(at, step, peers.limit, slot)) {
                late = 1u << from;
            } else if (slot.digest_value() != digest) {
                others |= 1u << from;
            } else if (slot.key() > key) {
                key = slot.key();
                logit = slot.logit_value();
            }
        }
        __syncwarp();
        best_of_warp(key, logit);
        late = __reduce_or_sync(0xffffffffu, late);
        others = __reduce_or_sync(0xffffffffu, others);
        const u32 warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0) {
            shared.key[warp] = key;
            shared.logit[warp] = logit;
            shared.late[warp] = late;
            shared.others[warp] = others;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            for (u32 w = 1; w < WARPS; ++w) {
                if (shared.key[w] > key) key = shared.key[w], logit = shared.logit[w];
                late |= shared.late[w];
                others |= shared.others[w];
            }
            peers.draws[row] = draw_or_blame(key, logit, late, others);
            if (late) atomicOr(&peers.state->late, late);
        }
        end_step(peers.state, step);
    }

  private:
    static __device__ __forceinline__ void best_of_warp(u64& key, float& logit) {
        for (u32 step = 16; step; step /= 2) {
            const u64 their_key = __shfl_xor_sync(0xffffffffu, key, step);
            const float their_logit = __shfl_xor_sync(0xffffffffu, logit, step);
            if (their_key > key) key = their_key, logit = their_logit;
        }
    }
};

#endif

}  // namespace flash_sampling
