// Rows with top-p first whose plain winner is not surely kept. The first pass lists them; then all blocks decide them
// (top_p_resolve.cuh).
#pragma once

#include "filter_call.cuh"

namespace flash_sampling {

// The data that decides such a row, in one load. Sums are relative to `place`.
struct alignas(16) UndecidedRow {
    double before;  // the mass before the winner
    double all;     // a lower bound of the total mass
    u64 seed;
    u64 position;
    float place;    // the winner's logit
    u32 token;      // the winner
    float inv_temperature;
    float top_p;
    float error;    // a bound on the relative error of `before`
    u32 draw;       // of the row's noise
    u32 index;      // of the draw in the call
    u32 padding;
};

struct UndecidedRows {
    static constexpr u32 BINS = 32, LEAST = 32, ROOM = 256;

    u32* counters;   // the number of listed rows, and of rows decided since; zeros between calls
    u32* arrived;    // [draws] zeros between calls
    double* masses;  // [draws, BINS] zeros between calls
    double* all;     // [draws] zeros between calls
    u64* best;       // [draws, BINS] ordered bits; zeros between calls
    UndecidedRow* rows;   // [draws], and LEAST at least
    double* sums;    // [2, ROOM, 2] of the rows of TopPBlockMax; zeros before the first call
    u32* barrier;    // the blocks that have arrived, zero between calls, and the number of launches

#ifdef __CUDACC__
    __device__ __forceinline__ void add(const UndecidedRow& row) const { rows[atomicAdd(&counters[0], 1u)] = row; }
#endif
};
FS_LAYOUT(UndecidedRows, 64,
          FS_AT(counters, 0) && FS_AT(arrived, 8) && FS_AT(masses, 16) && FS_AT(all, 24) && FS_AT(best, 32) && FS_AT(rows, 40) &&
          FS_AT(sums, 48) && FS_AT(barrier, 56));
static_assert(sizeof(UndecidedRow) == 64 && UndecidedRows::BINS == 32 && UndecidedRows::LEAST == 32, "the host has room for these");

}  // namespace flash_sampling
