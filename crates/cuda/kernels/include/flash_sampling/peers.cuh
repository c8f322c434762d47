// The exchange over NVLink: each rank stores its rows' draws into the memory of every other rank, and finds theirs in its
// own (paper Alg. 1, lines 10 to 16). No barrier, no host, no library.
//
// The plain version, on rank `me`, step s:
//
//   for each row, for each rank `other`
//       mailbox[other][s % 2][me][row] = (draw of my shard, s)
//   for each row
//       wait until mailbox[me][s % 2][other][row] is of step s, for each rank `other`
//       draw = the draw with the largest key
//
// What differs, and why the answer stays the same:
//
// 1. A thread is a pair of row and rank: it sends the row to that rank, then waits for what that rank sends. The draws of
//    a row meet in shuffles, as the ranks of a row are neighbouring lanes.
// 2. There is no flag beside the data that would have to follow it: every 8-byte word is half data, half the step that it
//    is of. Aligned words of 8 bytes are stored and loaded whole, whatever link is between, so a word of step s has the
//    data of step s, in whatever order words arrive.
// 3. Two mailboxes in turn are enough. A rank stores step s over step s - 2 after its launch of step s - 1 has ended, so
//    every rank had sent step s - 1; and a rank sends that in a launch that begins when its launch of step s - 2, which
//    read all of step s - 2, has ended.
// 4. The step is counted in device memory, so a graph that captured the launch can be replayed.
// 5. A wait has a limit. A rank that does not come is noted, for good: the rank that missed it draws no more, so the
//    others, too, learn that the group is broken.
// 6. A word of step s may have been stored for a call that this rank never made: it failed before its launch, and the next
//    one is of step s. The call's mark, which counts such calls, is part of the digest.
//
// Draws may cross without this launch: see fan_out.cuh.
#pragma once

#include "exchange.cuh"

namespace flash_sampling {

// A row's draw on its way: four words, data above, step below.
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

// What a rank remembers from launch to launch.
struct PeerState {
    u32 step;     // launches that have ended; 0 is no step of any
    u32 arrived;  // blocks that are done; 0 between launches
    u32 late;     // a bit for each rank that did not come in time; any = the group is broken
    u32 unused;
};
FS_LAYOUT(PeerState, 16, FS_AT(step, 0) && FS_AT(arrived, 4) && FS_AT(late, 8) && FS_AT(unused, 12));

constexpr u32 MAX_PEERS = 32;  // the ranks of a row are lanes of a warp

// The parameters of a launch.
struct Peers {
    Slot* mailboxes[MAX_PEERS];  // of every rank: [turns, world, max_rows]
    const Row* rows;             // [row_count]
    Draw* draws;                 // [row_count] those of this shard before, of the whole vocabulary after
    PeerState* state;
    u64 limit;       // nanoseconds that a wait may take
    u64 pause;       // nanoseconds between sending and receiving; 0 but in tests
    u64 mark;        // of the call, the same on every rank
    u32 rank;
    u32 world;
    u32 lanes;       // the power of two at or above `world`
    u32 row_count;
    u32 max_rows;
    u32 turns;       // mailboxes used in turn: 2, but in the negative control
};
FS_LAYOUT(Peers, 328,
          FS_AT(mailboxes, 0) && FS_AT(rows, 256) && FS_AT(draws, 264) && FS_AT(state, 272) && FS_AT(limit, 280) &&
          FS_AT(pause, 288) && FS_AT(mark, 296) && FS_AT(rank, 304) && FS_AT(world, 308) && FS_AT(lanes, 312) &&
          FS_AT(row_count, 316) && FS_AT(max_rows, 320) && FS_AT(turns, 324));

// The step after another one. 0 is what mailboxes hold before the first; turns go on where the count begins again.
FS_FUNCTION u32 step_after(u32 step) { return step == 0xffffffffu ? 2 : step + 1; }

// Where what rank `from` sends for a row is, in each mailbox.
FS_FUNCTION u64 place_of(const Peers& peers, u32 step, u32 from, u32 row) {
    return (static_cast<u64>(step % peers.turns) * peers.world + from) * peers.max_rows + row;
}

#ifdef __CUDACC__

// Nanoseconds of a clock of the whole device.
__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Each word is stored whole; the words in any order.
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

// Other blocks of the launch may be adding to it.
__device__ __forceinline__ u32 load_late(const PeerState* state) {
    u32 late;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(late) : "l"(&state->late) : "memory");
    return late;
}

// Waits until a slot is of a step; false = it did not come.
__device__ __forceinline__ bool receive(const Slot* at, u32 step, u64 limit, Slot& slot) {
    constexpr u32 LOOKS = 64;  // loads between two looks at the clock, and before the first
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

// A pause of tests between sending and receiving.
__device__ __forceinline__ void pause(u64 length) {
    if (!length) return;
    const u64 begun = nanoseconds();
    while (nanoseconds() - begun < length) {
    }
}

// The end of a launch: every block has read the state before the last one changes it. All threads of a block.
__device__ __forceinline__ void end_step(PeerState* state, u32 step) {
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(&state->arrived, 1u) == gridDim.x - 1) {
        state->step = step;
        state->arrived = 0;
    }
}

// The draw of a key, but where a rank did not come or was called otherwise: a bit for each.
__device__ __forceinline__ Draw draw_or_blame(u64 key, float logit, u32 late, u32 others) {
    if (late) return {static_cast<u32>(__ffs(late)) - 1, 0.0f, 0.0f, Status::LateRank};
    if (others) return {static_cast<u32>(__ffs(others)) - 1, 0.0f, 0.0f, Status::OtherCall};
    return draw_of(key, logit);
}

// A row and a rank: a lane's part of a step. Lanes of a warp have pairs that follow one another, so that the ranks of a row are
// neighbours.
struct Meeting {
    const Peers& peers;
    const u32 step, missed, row, other;
    const bool takes_part;

    // `missed` are the ranks that were late before: one answer for all lanes of a warp, and so for a row: another block may note
    // one at this moment, and a row of which some lanes did not take part would pass for whole.
    __device__ __forceinline__ Meeting(const Peers& peers, u32 step, u32 missed, u32 pair)
        : peers(peers), step(step), missed(missed), row(pair / peers.lanes), other(pair % peers.lanes),
          takes_part(row < peers.row_count && other < peers.world && !missed) {}

    __device__ __forceinline__ void send(const Draw& mine, u32 digest) const {
        store_slot(peers.mailboxes[other] + place_of(peers, step, peers.rank, row),
                   Slot::of(key_of(mine), mine.logit, digest, step));
    }

    // Waits for what the rank sends, and leaves the row's draw. All lanes of a warp, with the row's own digest.
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
        // The largest key of the row's lanes, and who is to blame where there is none.
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

    // All threads of a block.
    __device__ __forceinline__ void block() const {
        const u32 step = step_after(peers.state->step);
        const u32 missed = __shfl_sync(0xffffffffu, load_late(peers.state), 0);
        const Meeting meeting(peers, step, missed, blockIdx.x * THREADS + threadIdx.x);
        u32 digest = 0;
        if (meeting.takes_part) {
            digest = digest_of(peers.rows[meeting.row], peers.row_count, peers.mark);
            meeting.send(peers.draws[meeting.row], digest);
        }
        meeting.receive(digest);
        end_step(peers.state, step);
    }
};

#endif

}  // namespace flash_sampling
