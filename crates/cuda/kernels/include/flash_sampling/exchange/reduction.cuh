// The exchange by an external max all-reduce (NCCL): one word per row before it, the draws of the whole vocabulary after it.
//
//   word r              the key of row r's draw; 0 for rows beyond the call
//   word max_rows, + 1  a digest of the call and its complement: their maxima show whether all ranks have the same call
//
// The number of words depends on the plan, not on the call. So ranks with different rows still reduce the same number of words,
// and detect the mismatch. Ranks do not send the logit: every rank computes it as score minus noise, up to the rounding of this
// subtraction.
#pragma once

#include "draw_key.cuh"
#include "../noise/noise.cuh"

namespace flash_sampling {

// The parameters of both launches.
struct Reduction {
    u64* words;       // [max_rows + 2] reduced in place, then this rank's own digest
    const Row* rows;  // [row_count]
    Draw* draws;      // [row_count] in: of this shard; out: of the whole vocabulary
    u64 mark;         // identifies the call; equal on every rank
    u32 row_count;
    u32 max_rows;
};
FS_LAYOUT(Reduction, 40, FS_AT(words, 0) && FS_AT(rows, 8) && FS_AT(draws, 16) && FS_AT(mark, 24) &&
                             FS_AT(row_count, 32) && FS_AT(max_rows, 36));

// Returns a row's share of the call's digest, which is the exclusive or of all shares. It contains the row's index, so row order
// counts.
FS_FUNCTION u64 share_of_digest(u32 digest, u32 row) {
    u64 hash = (static_cast<u64>(digest) << 32 | row) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 32;
    return hash * 0xd6e8feb86659fd93ull;
}

#ifdef __CUDACC__

struct ReduceWinners {
    static constexpr u32 THREADS = 256;

    const Reduction& call;

    // Writes the words of this rank, in one block. Shuffles reduce the digest, because 64-bit atomics on shared memory retry by
    // compare and swap, which takes several microseconds for 64 rows.
    __device__ __forceinline__ void to_words(u64 (&of_warp)[THREADS / 32]) const {
        u64 share = 0;
        for (u32 row = threadIdx.x; row < call.max_rows; row += THREADS) {
            const bool is_in_call = row < call.row_count;
            call.words[row] = is_in_call ? key_of(call.draws[row]) : 0;
            if (is_in_call) share ^= share_of_digest(digest_of(call.rows[row], call.row_count, call.mark), row);
        }
        __syncwarp();
        const u32 high = __reduce_xor_sync(0xffffffffu, static_cast<u32>(share >> 32));
        const u32 low = __reduce_xor_sync(0xffffffffu, static_cast<u32>(share));
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = static_cast<u64>(high) << 32 | low;
        __syncthreads();
        if (threadIdx.x) return;
        u64 digest = 0;
        for (u32 warp = 0; warp < THREADS / 32; ++warp) digest ^= of_warp[warp];
        call.words[call.max_rows] = digest;
        call.words[call.max_rows + 1] = ~digest;
        call.words[call.max_rows + 2] = digest;
    }

    // Writes the draws of the whole vocabulary, one row per thread.
    __device__ __forceinline__ void from_words() const {
        const u32 index = blockIdx.x * THREADS + threadIdx.x;
        if (index >= call.row_count) return;
        const u64 mine = call.words[call.max_rows + 2];
        if (call.words[call.max_rows] != mine || ~call.words[call.max_rows + 1] != mine) {
            call.draws[index] = {0xffffffffu, 0.0f, 0.0f, Status::OtherCall};
            return;
        }
        Draw draw = draw_of(call.words[index], 0.0f);
        const Row& row = call.rows[index];
        if (draw.status == Status::Drawn) {
            const float noise = row.greedy ? 0.0f : Noise{row.seed, row.position}.gumbel(Domain::Token, row.draw, draw.token);
            draw.logit = sub_rn(draw.score, noise);
        }
        call.draws[index] = draw;
    }
};

#endif

}  // namespace flash_sampling
