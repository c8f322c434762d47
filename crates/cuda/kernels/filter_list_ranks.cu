// The entry point of draws with filters from the lists of several ranks: one block per row. The launch follows the exchange of
// the draws without filters, which reports invalid rows. The plain version:
//
//   list = the tokens of this shard's list that the row may keep: its first k, or the tokens above min-p's limit
//   send the list to all ranks; lists = the lists of all ranks
//   draw = the draw of filter_list.cu from all lists as one, with the largest of their cutoffs
//
// No filter keeps a token that is not sent: k tokens of its shard precede it, or it is below min-p's limit. Every rank has the
// same lists, and so the same draw. The draw of a listed row without filters is its largest logit. So with min-p alone, a rank
// knows which tokens of its shard min-p keeps, and sends only the best of them.
#include "flash_sampling/exchange/peer_records.cuh"
#include "flash_sampling/selection/filter_row.cuh"

using namespace flash_sampling;

// For the host's launch: bytes of dynamic shared memory, threads per block.
extern "C" {
__constant__ u32 filter_list_ranks_launch[2] = {sizeof(FilterRow::Shared), FilterRow::THREADS};
}

// The maximum number of tokens that a rank sends, after their count.
constexpr u32 SENT = PeerRecords::WORDS - 1;
static_assert(MAX_PEERS * SENT <= FilterRow::CAPACITY, "the lists of all ranks are candidates");

struct ReceivedCounters {
    u32 counts[MAX_PEERS];
    u32 cuts[MAX_PEERS];
    u32 late;
};

// Sends the candidates, replaces them by the candidates of all ranks, and returns the largest cutoff. Records late ranks.
static __device__ u32 exchange(FilterRow& select, ReceivedCounters& received, const RecordsStep& step, u32 row, const ListCounters& mine) {
    auto& c = select.shared.candidates;
    for (u32 i = threadIdx.x; i < step.world() * (1 + mine.count); i += FilterRow::THREADS) {
        const u32 to = i / (1 + mine.count), at = i % (1 + mine.count);
        step.send(to, row, at, at ? c.keys[at - 1] : static_cast<u64>(mine.count) << 32 | mine.cut);
    }
    // All threads have read the candidates that they send.
    __syncthreads();
    c.begin();
    if (threadIdx.x < step.world()) {
        u64 head = 0;
        if (!step.receive(threadIdx.x, row, 0, head)) atomicOr(&received.late, 1u << threadIdx.x);
        received.counts[threadIdx.x] = min(static_cast<u32>(head >> 32), SENT);
        received.cuts[threadIdx.x] = static_cast<u32>(head);
    }
    __syncthreads();
    u32 count = 0, cut = 0, top = 0;
    for (u32 from = 0; from < step.world(); ++from) {
        // Divides the ranks among the warps.
        const u32 first = (threadIdx.x + FilterRow::THREADS - from * SENT % FilterRow::THREADS) % FilterRow::THREADS;
        for (u32 at = first; at < received.counts[from]; at += FilterRow::THREADS) {
            u64 key = 0;
            if (!step.receive(from, row, 1 + at, key)) atomicOr(&received.late, 1u << from);
            c.keys[count + at] = key;
            top = max(top, static_cast<u32>(key >> 32));
        }
        count += received.counts[from];
        cut = max(cut, received.cuts[from]);
    }
    select.end_copy(top, count);
    return cut;
}

// Returns the draw of a row with min-p alone, in the first thread. `largest` is the row's largest logit. All threads call this.
static __device__ Draw draw_by_min_p(FilterRow& select, const RecordsStep& step, u32 row, const u64* list,
                                     const ListCounters& counters, float largest) {
    // Ordered bits that no score and token have.
    constexpr u64 LOST = ~0ull;
    auto& shared = select.shared;
    auto& c = shared.candidates;
    u64 best = LOST;
    if (counters.count <= FilterRow::CAPACITY) {
        select.copy_list(list, counters.count);
        c.compact(static_cast<u64>(to_monotone_bits(select.filters.least(largest))) << 32);
        best = select.best_of(c.count);
        for (u32 i = threadIdx.x; i < c.count; i += FilterRow::THREADS)
            if (best && from_ordered_bits(c.keys[i]).token == from_ordered_bits(best).token)
                shared.cut = f32_to_bits(from_ordered_bits(c.keys[i]).score);
        __syncthreads();
    }
    if (threadIdx.x >= 32) return {};
    // One lane per rank.
    const u32 lane = threadIdx.x;
    bool is_late = false;
    u64 logit = shared.cut;
    if (lane < step.world()) {
        step.send(lane, row, 0, best);
        step.send(lane, row, 1, logit);
    }
    best = 0;
    if (lane < step.world()) is_late = !(step.receive(lane, row, 0, best) && step.receive(lane, row, 1, logit));
    const u32 late = __ballot_sync(0xffffffffu, is_late);
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) {
        const u64 their_best = __shfl_xor_sync(0xffffffffu, best, distance), their_logit = __shfl_xor_sync(0xffffffffu, logit, distance);
        if (their_best > best) best = their_best, logit = their_logit;
    }
    if (late) return step.blame(late);
    const Winner winner = from_ordered_bits(best);
    const float found = mul_rn(bits_to_f32(static_cast<u32>(logit)), select.filters.rescale);
    // The host reports logits that a temperature after the filters makes infinite.
    if (best == 0 || best == LOST || !is_finite(found)) return {0, 0.0f, 0.0f, Status::Undecided};
    return {winner.token, winner.score, found, Status::Drawn};
}

extern "C" __global__ void __launch_bounds__(FilterRow::THREADS, 2)
    filter_list_ranks(const __grid_constant__ FilterListCall call, const __grid_constant__ PeerRecords records) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ ReceivedCounters received;
    FilterRow::Shared& shared = *reinterpret_cast<FilterRow::Shared*>(memory);
    const RecordsStep step(records, RecordKind::First);
    const u32 i = blockIdx.x;
    const RowFilters filters = call.lists.filters[i];
    const ListCounters counters = call.lists.counters[i];
    const Draw plain = call.draws[i];
    const Row* const given = call.rows + i;
    const bool is_greedy = given->greedy;
    copy_row(&shared.row, given);
    // One value for all threads, because another block may record a late rank at the same time.
    if (threadIdx.x == 0) received.late = step.missed;
    // All threads have read the counters. Clears the counters and posts.
    __syncthreads();
    const u32 missed = received.late;
    if (threadIdx.x == 0) call.lists.counters[i] = {0, 0};
    if (threadIdx.x < RowLists::POSTS) call.lists.posted[i * RowLists::POSTS + threadIdx.x] = 0;
    // Invalid rows stay invalid.
    if (plain.status == Status::Drawn && !is_greedy && filters.is_any()) {
        Draw draw{0, 0.0f, 0.0f, Status::Undecided};
        if (missed) {
            draw = step.blame(missed);
        } else if (filters.is_listed()) {
            FilterRow select{filters, ExistingRow{nullptr, 0, 0}, shared};
            const u64* const list = call.lists.keys + static_cast<u64>(i) * RowLists::ROOM;
            if (filters.is_min_p_alone()) {
                draw = draw_by_min_p(select, step, i, list, counters, plain.logit);
            } else {
                const ListCounters mine = select.shorten(list, counters, plain.logit, SENT);
                const u32 cut = exchange(select, received, step, i, mine);
                if (received.late) draw = step.blame(received.late);
                else if (shared.candidates.count > 0) draw = select.draw_copied(cut);
            }
        }
        if (threadIdx.x == 0) call.draws[i] = draw;
    }
}
