// What row_summary.cu is called with, and the sizes of its blocks. crates/cuda/src/abi/stored.rs has the same types.
#pragma once

#include "../element.cuh"
#include "../scan/stored.cuh"
#include "../summary/mass_histogram.cuh"

namespace flash_sampling {

constexpr u32 THREADS = 512;
// The tokens of a thread, and of a block.
constexpr u32 EACH = 16;
constexpr u32 TOKENS = THREADS * EACH;
// The sums of a bin. Lanes that add to different ones do not collide.
constexpr u32 COPIES = 8;
// The most tokens that a block lists, and that the last block sorts.
constexpr u32 QUEUE = 512;
constexpr u32 SORTED = 1024;
// The mass of one token is below this.
constexpr float LARGEST_UNITS = 1216800000.0f;
// As the number of a bin: below the last one.
constexpr u32 ALL_TOKENS = MASS_BINS;
// As the length of a list: too many tokens may belong to it.
constexpr u32 LOST = ~0u;
static_assert(THREADS == MASS_BINS, "a thread has a bin");

// A request about a row.
struct SummaryRequest {
    u32 limit;   // largest logits
    u32 stores;  // whether transformed logits are stored
    u32 masses;  // whether the masses are written, beside their sum
    u32 padding;
};
FS_LAYOUT(SummaryRequest, 16, FS_AT(limit, 0) && FS_AT(stores, 4) && FS_AT(masses, 8) && FS_AT(padding, 12));

// The summary of a row: its mass is `sum * e^max`.
struct SummaryResult {
    u64 invalid;  // the first bad logit; all ones before, and without one
    double sum;
    float max;   // edge of the bin of the largest logit; -inf = no finite logit
    u32 listed;  // largest logits, at most as many as requested; LOST
};
FS_LAYOUT(SummaryResult, 24, FS_AT(invalid, 0) && FS_AT(sum, 8) && FS_AT(max, 16) && FS_AT(listed, 20));

// The masses of a part of a row.
struct PartMasses {
    float top;  // edge of the bin of the largest logit; -inf = no finite logit
    u32 count;  // bins, from the top down
    u64 bins[MASS_BINS];
};
static_assert(sizeof(PartMasses) == 8 + 8 * MASS_BINS, "the host sizes the memory");

// Between launches zeros.
struct SummaryCounters {
    u32 arrived;  // blocks
    u32 listed;   // tokens of all blocks
};
static_assert(sizeof(SummaryCounters) == 8, "the host sizes the memory");

struct RowSummaries {
    StoredLogits stored;             // [rows, tokens] written on request; may be the raw logits
    const void* raw;                 // [raw rows, tokens]
    const u32* sources;              // [rows] the raw row of each; null = its number
    const Row* rows;                 // [rows] transforms; null = the logits are transformed and valid
    const SummaryRequest* requests;  // [rows]
    SummaryResult* results;          // [rows]
    KeptToken* top;                  // [rows, top_stride] the largest logits, the largest first
    u64* words;                      // [rows, 1 + MASS_BINS] as core's to_words has them, of rows that request masses
    PartMasses* parts;               // [rows, blocks] scratch
    KeptToken* listed;               // [rows, LISTED] scratch
    SummaryCounters* counters;       // [rows]
    const double* weights;           // [MASS_BINS] core's weights of the bins below the highest
    u64 raw_stride;                  // elements
    Element element;
    u32 top_stride;

    static constexpr u32 LISTED = 4096;
};
FS_LAYOUT(RowSummaries, 128,
          FS_AT(stored, 0) && FS_AT(raw, 24) && FS_AT(sources, 32) && FS_AT(rows, 40) && FS_AT(requests, 48) && FS_AT(results, 56) &&
          FS_AT(top, 64) && FS_AT(words, 72) && FS_AT(parts, 80) && FS_AT(listed, 88) && FS_AT(counters, 96) &&
          FS_AT(weights, 104) && FS_AT(raw_stride, 112) && FS_AT(element, 120) && FS_AT(top_stride, 124));

}  // namespace flash_sampling
