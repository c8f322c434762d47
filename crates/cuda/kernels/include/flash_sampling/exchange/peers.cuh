// The exchange over NVLink: each rank stores its draws into the memory of every rank, and reads the draws of all ranks
// from its own memory (paper Alg. 1, lines 10 to 16). The exchange uses no barrier, no host and no library.
//
// The plain version, on rank `me`, step s:
//
//   for each row, for each rank `other`
//       mailbox[other][s % 2][me][row] = (draw of my shard, s)
//   for each row
//       wait until mailbox[me][s % 2][other][row] is of step s, for each rank `other`
//       draw = the draw with the largest key
//
// The deviations from it, and why each keeps the result:
//
// 1. A thread handles a pair of row and rank: it sends the row's draw to the rank, then waits for the rank's draw. The ranks of a
//    row are neighbouring lanes, so shuffles reduce the draws of a row.
// 2. No flag follows the data: every 8-byte word is half data and half step number. Every link stores and loads an aligned 8-byte
//    word whole. So a word of step s has the data of step s, in whatever order words arrive.
// 3. Two mailboxes, used in turn, are enough. A rank stores step s over step s - 2 after its launch of step s - 1 has ended, and
//    so after every rank has sent step s - 1. A rank sends step s - 1 in a launch that begins after its launch of step s - 2 has
//    ended, and so after it has read all of step s - 2.
// 4. Device memory holds the step number, so a captured graph can be replayed.
// 5. A wait has a time limit. The state stores every late rank permanently. A rank with a late rank in its state sends no more
//    draws, so the other ranks also detect the failure of the group.
// 6. A word of step s may belong to a call that this rank never launched, because the rank failed before the launch, and its next
//    launch is step s. The call's mark counts such calls, and the digest contains the mark.
//
// The fused kernel can exchange draws without this launch: see fan_out.cuh.
#pragma once

#include "draw_key.cuh"

namespace flash_sampling {

// A row's draw in the exchange: four words, each with data in the high half and the step in the low half.
struct alignas(16) Slot {
    u64 key_high;
    u64 key_low;
    u64 logit;
    u64 digest;

    FS_FUNCTION static u64 word(u32 data, u32 step) { return static_cast<u64>(data) << 32 | step; }
    FS_FUNCTION static Slot of(u64 key, float logit, u32 digest, u32 step) {
        return {word(static_cast<u32>(key >> 32), step), word(static_cast<u32>(key), step),
                word(f32_to_bits(logit), step), word(digest, step)};
    }
    FS_FUNCTION bool is_of(u32 step) const {
        return static_cast<u32>(key_high) == step && static_cast<u32>(key_low) == step &&
               static_cast<u32>(logit) == step && static_cast<u32>(digest) == step;
    }
    FS_FUNCTION u64 key() const { return (key_high >> 32) << 32 | key_low >> 32; }
    FS_FUNCTION float logit_value() const { return bits_to_f32(static_cast<u32>(logit >> 32)); }
    FS_FUNCTION u32 digest_value() const { return static_cast<u32>(digest >> 32); }
};
static_assert(sizeof(Slot) == 32, "the host allocates this size");

// The state of a rank between launches.
struct PeerState {
    u32 step;     // of the last launch that has ended; 0 before the first
    u32 arrived;  // blocks that have finished; 0 between launches
    u32 late;     // a bit for each late rank; if any is set, the group has failed
    u32 unused;
};
FS_LAYOUT(PeerState, 16, FS_AT(step, 0) && FS_AT(arrived, 4) && FS_AT(late, 8) && FS_AT(unused, 12));

constexpr u32 MAX_PEERS = 32;  // the ranks of a row are lanes of one warp

// The parameters of a launch.
struct Peers {
    Slot* mailboxes[MAX_PEERS];  // one per rank: [turns, world, max_rows]
    const Row* rows;             // [row_count]
    Draw* draws;                 // [row_count] in: of this shard; out: of the whole vocabulary
    PeerState* state;
    u64 limit;       // of a wait, in nanoseconds
    u64 pause;       // between sending and receiving, in nanoseconds; 0 except in tests
    u64 mark;        // identifies the call, equal on every rank
    u32 rank;
    u32 world;
    u32 lanes;       // `world` rounded up to a power of two
    u32 row_count;
    u32 max_rows;
    u32 turns;       // mailboxes used in turn: 2, except in the negative control
};
FS_LAYOUT(Peers, 328,
          FS_AT(mailboxes, 0) && FS_AT(rows, 256) && FS_AT(draws, 264) && FS_AT(state, 272) && FS_AT(limit, 280) &&
          FS_AT(pause, 288) && FS_AT(mark, 296) && FS_AT(rank, 304) && FS_AT(world, 308) && FS_AT(lanes, 312) &&
          FS_AT(row_count, 316) && FS_AT(max_rows, 320) && FS_AT(turns, 324));

// Returns the step after another one. The count skips 0, which empty mailboxes hold, and wraps from an odd step to 2,
// so the turns still alternate.
FS_FUNCTION u32 step_after(u32 step) { return step == 0xffffffffu ? 2 : step + 1; }

// Returns the index, in each mailbox, of the slot that rank `from` fills for a row.
FS_FUNCTION u64 place_of(const Peers& peers, u32 step, u32 from, u32 row) {
    return (static_cast<u64>(step % peers.turns) * peers.world + from) * peers.max_rows + row;
}

#ifdef __CUDACC__

// Returns the time of the device-wide clock, in nanoseconds.
__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Stores each word whole, and the words in any order.
__device__ __forceinline__ void store_slot(Slot* to, const Slot& slot) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(slot.key_high), "l"(slot.key_low)
                 : "memory");
    asm volatile("st.relaxed.sys.global.v2.u64 [%0 + 16], {%1, %2};" ::"l"(to), "l"(slot.logit), "l"(slot.digest)
                 : "memory");
}
__device__ __forceinline__ Slot load_slot(const Slot* from) {
    Slot slot;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(slot.key_high), "=l"(slot.key_low) : "l"(from)
                 : "memory");
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2 + 16];" : "=l"(slot.logit), "=l"(slot.digest) : "l"(from)
                 : "memory");
    return slot;
}

// Loads the late ranks. Other blocks of the launch may add ranks at the same time.
__device__ __forceinline__ u32 load_late(const PeerState* state) {
    u32 late;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(late) : "l"(&state->late) : "memory");
    return late;
}

// Waits for the slot of a step; false = timeout.
__device__ __forceinline__ bool receive(const Slot* at, u32 step, u64 limit, Slot& slot) {
    constexpr u32 LOOKS = 64;  // loads before each reading of the clock
    for (u64 begun = 0;;) {
#pragma unroll 1
        for (u32 look = 0; look < LOOKS; ++look) {
            slot = load_slot(at);
            if (slot.is_of(step)) return true;
        }
        const u64 now = nanoseconds();
        if (begun == 0) begun = now;
        if (now - begun > limit) return false;
    }
}

// Delays receiving, in tests.
__device__ __forceinline__ void pause(u64 length) {
    if (!length) return;
    const u64 begun = nanoseconds();
    while (nanoseconds() - begun < length) {
    }
}

// Ends a launch. The last block changes the state after every block has read it. All threads of a block call this.
__device__ __forceinline__ void end_step(PeerState* state, u32 step) {
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(&state->arrived, 1u) == gridDim.x - 1) {
        state->step = step;
        state->arrived = 0;
    }
}

// Returns the draw of a key, or the error of a rank. `late` has the bits of late ranks, and `others` of ranks with different
// calls.
__device__ __forceinline__ Draw draw_or_blame(u64 key, float logit, u32 late, u32 others) {
    if (late) return {static_cast<u32>(__ffs(late)) - 1, 0.0f, 0.0f, Status::LateRank};
    if (others) return {static_cast<u32>(__ffs(others)) - 1, 0.0f, 0.0f, Status::OtherCall};
    return draw_of(key, logit);
}

// A lane's part of a step: a pair of row and rank. Consecutive lanes of a warp have consecutive pairs, so the ranks of
// a row are neighbours.
struct PeerPair {
    const Peers& peers;
    const u32 step, missed, row, other;
    const bool takes_part;

    // `missed` has the ranks that are already late, with the same value for all lanes of a warp, and so of a row. Separate loads
    // could differ, because another block may set a bit at any time. Then a row with only some of its lanes would look complete.
    __device__ __forceinline__ PeerPair(const Peers& peers, u32 step, u32 missed, u32 pair)
        : peers(peers), step(step), missed(missed), row(pair / peers.lanes), other(pair % peers.lanes),
          takes_part(row < peers.row_count && other < peers.world && !missed) {}

    __device__ __forceinline__ void send(const Draw& mine, u32 digest) const {
        store_slot(peers.mailboxes[other] + place_of(peers, step, peers.rank, row),
                   Slot::of(key_of(mine), mine.logit, digest, step));
    }

    // Waits for the rank's draw, and writes the row's draw. All lanes of a warp call this with this rank's digest of the row.
    __device__ __forceinline__ void receive(u32 digest) const {
        u64 key = 0;
        float logit = 0.0f;
        bool is_late = false, is_other = false;
        if (takes_part) {
            pause(peers.pause);
            Slot slot;
            const Slot* const at = peers.mailboxes[peers.rank] + place_of(peers, step, other, row);
            is_late = !flash_sampling::receive(at, step, peers.limit, slot);
            if (!is_late) {
                is_other = slot.digest_value() != digest;
                key = slot.key();
                logit = slot.logit_value();
            }
        }
        // Reduces over the row's lanes: the largest key, the late ranks, and the ranks with a different call.
        __syncwarp();
        const u32 first = threadIdx.x % 32 / peers.lanes * peers.lanes;
        const u32 of_row = (peers.lanes == 32 ? 0xffffffffu : (1u << peers.lanes) - 1) << first;
        const u32 late = (__ballot_sync(0xffffffffu, is_late) & of_row) >> first | missed;
        const u32 others = (__ballot_sync(0xffffffffu, is_other) & of_row) >> first;
        for (u32 apart = peers.lanes / 2; apart; apart /= 2) {
            const u64 their_key = __shfl_xor_sync(0xffffffffu, key, apart);
            const float their_logit = __shfl_xor_sync(0xffffffffu, logit, apart);
            if (their_key > key) key = their_key, logit = their_logit;
        }
        if (other == 0 && row < peers.row_count) {
            peers.draws[row] = draw_or_blame(key, logit, late, others);
            if (late) atomicOr(&peers.state->late, late);
        }
    }
};

struct JoinPeers {
    static constexpr u32 THREADS = 256;

    const Peers& peers;

    // Runs a block of the exchange's launch. All threads of the block call this. With digests of row_contents.cuh, the step also
    // orders memory: stores of each rank before its launch come before loads of the other ranks after their launches.
    __device__ __forceinline__ void block(const u32* contents) const {
        if (contents) __threadfence_system();
        const u32 step = step_after(peers.state->step);
        const u32 missed = __shfl_sync(0xffffffffu, load_late(peers.state), 0);
        const PeerPair pair(peers, step, missed, blockIdx.x * THREADS + threadIdx.x);
        u32 digest = 0;
        if (pair.takes_part) {
            digest = digest_of(peers.rows[pair.row], peers.row_count, peers.mark) + (contents ? contents[pair.row] : 0);
            pair.send(peers.draws[pair.row], digest);
        }
        pair.receive(digest);
        if (contents) __threadfence_system();
        end_step(peers.state, step);
    }
};

#endif

}  // namespace flash_sampling
