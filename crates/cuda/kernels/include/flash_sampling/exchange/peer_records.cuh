// What ranks tell one another of rows with filters, by peers' memory: a record of words for each row and rank.
//
// As the draws of peers.cuh go: each half of a word has the step beside it, so nothing has to follow a flag. The step is that of the
// exchange of the call's draws, which stands before on the stream. One mailbox for each kind of record is enough:
//
//   a rank stores records of a call after its exchange of that call's draws, for which every rank had sent its own; and a rank
//   sends these in a launch that begins when all its launches of the call before have ended, which read that call's records.
//
// Records of both kinds are of one step, so one mailbox for the two would not do: it is the negative control of the test.
#pragma once

#include "peers.cuh"

namespace flash_sampling {

// The parameters of a step of records.
struct PeerRecords {
    static constexpr u32 WORDS = 129;  // of a record

    Peers peers;  // without rows and draws
    u64 offset;   // bytes from the begin of a mailbox to its records: [kinds, world, max_rows, WORDS]
};
FS_LAYOUT(PeerRecords, 336, FS_AT(peers, 0) && FS_AT(offset, 328));

// A word on its way.
struct alignas(16) HalvedWord {
    u64 high;
    u64 low;
};
static_assert(sizeof(HalvedWord) == 16, "the host allocates this size");

#ifdef __CUDACC__

// What a record is of: a list or sums, or bins.
enum class RecordKind : u32 { First = 0, Second = 1 };

struct RecordsStep {
    const PeerRecords& records;
    RecordKind kind;
    u32 step;
    u32 missed;  // a bit for each rank that did not come before: nothing is sent then
    u64 begun;   // one limit for all waits of a block: several ranks may be gone, and each has many words

    __device__ __forceinline__ RecordsStep(const PeerRecords& records, RecordKind kind)
        : records(records),
          kind(kind),
          step(records.peers.state->step),
          missed(load_late(records.peers.state)),
          begun(nanoseconds()) {}

    __device__ __forceinline__ u32 world() const { return records.peers.world; }

    // Where word `at` of what rank `from` tells of a row is in the mailbox of a rank.
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

    // Waits for a word; false = it did not come.
    __device__ __forceinline__ bool receive(u32 from, u32 row, u32 at, u64& word) const {
        constexpr u32 LOOKS = 64;  // loads between two looks at the clock
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

    // The draw of a row whose ranks did not all come: a bit for each of those. Noted for good.
    __device__ __forceinline__ Draw blame(u32 late) const {
        atomicOr(&records.peers.state->late, late);
        return {static_cast<u32>(__ffs(static_cast<int>(late))) - 1, 0.0f, 0.0f, Status::LateRank};
    }
};

#endif

}  // namespace flash_sampling
