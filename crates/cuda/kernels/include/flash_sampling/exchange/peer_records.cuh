// The exchange of rows with filters through peers' memory: a record of words for each row and rank.
//
// As in peers.cuh, the step number is next to each half of a word, so no flag follows the data. The step is the step of the
// call's exchange of draws, which precedes on the stream. One mailbox per kind of record is enough:
//
//   A rank stores records of a call after its exchange of that call's draws, and so after every rank has sent its draws. A rank
//   sends draws in a launch that begins after its launches of the previous call, which read that call's records, have ended.
//
// Records of both kinds belong to one step, so they need separate mailboxes. One mailbox for both is the test's negative control.
#pragma once

#include "peers.cuh"

namespace flash_sampling {

// The parameters of a step of records.
struct PeerRecords {
    static constexpr u32 WORDS = 129;  // per record

    Peers peers;  // without rows and draws
    u64 offset;   // bytes from the start of a mailbox to its records: [kinds, world, max_rows, WORDS]
};
FS_LAYOUT(PeerRecords, 336, FS_AT(peers, 0) && FS_AT(offset, 328));

// A word in transit.
struct alignas(16) HalvedWord {
    u64 high;
    u64 low;
};
static_assert(sizeof(HalvedWord) == 16, "the host allocates this size");

#ifdef __CUDACC__

// The kind of a record. First: a list, or sums. Second: bins.
enum class RecordKind : u32 { First = 0, Second = 1 };

struct RecordsStep {
    const PeerRecords& records;
    RecordKind kind;
    u32 step;
    u32 missed;  // a bit for each rank that has already timed out; if any is set, nothing is sent
    u64 begun;   // start of one time limit for all waits of a block, because several ranks may fail, each with many words

    __device__ __forceinline__ RecordsStep(const PeerRecords& records, RecordKind kind)
        : records(records),
          kind(kind),
          step(records.peers.state->step),
          missed(load_late(records.peers.state)),
          begun(nanoseconds()) {}

    __device__ __forceinline__ u32 world() const { return records.peers.world; }

    // Returns the address, in a rank's mailbox, of word `at` in rank `from`'s record of a row.
    __device__ __forceinline__ HalvedWord* place(u32 mailbox, u32 from, u32 row, u32 at) const {
        const Peers& peers = records.peers;
        u8* const begin = reinterpret_cast<u8*>(peers.mailboxes[mailbox]) + records.offset;
        const u32 box = min(static_cast<u32>(kind), peers.turns - 1);
        const u64 record = (static_cast<u64>(box) * peers.world + from) * peers.max_rows + row;
        return reinterpret_cast<HalvedWord*>(begin) + record * PeerRecords::WORDS + at;
    }

    __device__ __forceinline__ void send(u32 to, u32 row, u32 at, u64 word) const {
        const u64 high = Slot::word(static_cast<u32>(word >> 32), step), low = Slot::word(static_cast<u32>(word), step);
        asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(place(to, records.peers.rank, row, at)), "l"(high),
                     "l"(low)
                     : "memory");
    }

    // Waits for a word; false = timeout.
    __device__ __forceinline__ bool receive(u32 from, u32 row, u32 at, u64& word) const {
        constexpr u32 LOOKS = 64;  // loads before each reading of the clock
        const HalvedWord* const there = place(records.peers.rank, from, row, at);
        pause(records.peers.pause);
        do {
#pragma unroll 1
            for (u32 look = 0; look < LOOKS; ++look) {
                u64 high, low;
                asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(high), "=l"(low) : "l"(there) : "memory");
                if (static_cast<u32>(high) == step && static_cast<u32>(low) == step) {
                    word = high >> 32 << 32 | low >> 32;
                    return true;
                }
            }
        } while (nanoseconds() - begun <= records.peers.limit);
        return false;
    }

    // Returns the draw of a row with late ranks, one bit each, and stores these ranks in the state permanently.
    __device__ __forceinline__ Draw blame(u32 late) const {
        atomicOr(&records.peers.state->late, late);
        return {static_cast<u32>(__ffs(static_cast<int>(late))) - 1, 0.0f, 0.0f, Status::LateRank};
    }
};

#endif

}  // namespace flash_sampling
