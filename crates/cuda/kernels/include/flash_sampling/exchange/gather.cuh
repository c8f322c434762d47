// The logits of all shards in the memory of every rank, for filters and log-probabilities of calls that do not wait. Each rank
// then decides its rows alone, with the kernels for logits of one GPU, and all ranks decide alike.
//
// A rank stores the raw logits of its shard in its own matrix `[rows, vocab]`. On the stream, after these stores:
//
//   join_peers       exchanges the draws without filters. A rank that has received a draw knows that its sender has made its
//                    earlier calls, and so has read its matrix of the earlier call
//   gather_logits    copies the shard's columns into the matrices of the other ranks
//   join_logits      exchanges the draws again, and the digests of row_contents.cuh. A rank that has received a draw knows that
//                    its sender has copied its columns
//
// So one matrix is enough, and a captured graph can be replayed. A rank that has seen a late rank copies nothing: the late rank may
// still read its matrix.
#pragma once

#include "peers.cuh"

namespace flash_sampling {

struct GatherLogits {
    float* matrices[MAX_PEERS];  // one per rank: [rows, vocab]
    const PeerState* state;
    u64 row_stride;              // elements
    u32 first_token;
    u32 tokens;                  // of the shard
    u32 rank;
    u32 world;
};
FS_LAYOUT(GatherLogits, 288,
          FS_AT(matrices, 0) && FS_AT(state, 256) && FS_AT(row_stride, 264) && FS_AT(first_token, 272) && FS_AT(tokens, 276) &&
          FS_AT(rank, 280) && FS_AT(world, 284));

#ifdef __CUDACC__

// Copies a part of a row's logits: blockIdx.x is the part, blockIdx.y the row.
struct CopyColumns {
    static constexpr u32 THREADS = 256, EACH = 8;  // tokens per thread

    const GatherLogits& call;

    __device__ __forceinline__ void block() const {
        if (load_late(call.state)) return;
        const u64 at = blockIdx.y * call.row_stride + call.first_token;
        const float* const from = call.matrices[call.rank] + at;
        const u32 first = blockIdx.x * THREADS * EACH + threadIdx.x;
        float logits[EACH];
        // Starts all loads before the first store.
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) logits[i] = first + i * THREADS < call.tokens ? from[first + i * THREADS] : 0.0f;
#pragma unroll 1
        for (u32 apart = 1; apart < call.world; ++apart) {
            // Ranks begin with different peers.
            float* const to = call.matrices[(call.rank + apart) % call.world] + at;
#pragma unroll
            for (u32 i = 0; i < EACH; ++i)
                if (first + i * THREADS < call.tokens) to[first + i * THREADS] = logits[i];
        }
        __threadfence_system();
    }
};

#endif

}  // namespace flash_sampling
