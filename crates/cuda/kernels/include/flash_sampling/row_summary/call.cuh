// The argument of row_summary.cu, and the sizes of its blocks. crates/cuda/src/abi/stored.rs has the same types.
#pragma once

#include "../element.cuh"
#include "../scan/stored.cuh"
#include "../summary/mass_histogram.cuh"

namespace flash_sampling {

constexpr u32 THREADS = 512;
// Tokens per thread and per block.
constexpr u32 EACH = 16;
constexpr u32 TOKENS = THREADS * EACH;
// The number of bins of a block with sums per lane: 20 nats.
constexpr u32 NEAR_BINS = 160;
constexpr u32 MARGIN_BINS = 8;
// The units of a token are this number plus a fraction of it.
constexpr u64 UNITS_OF_ONE = 1073741824;
// The fields of a lane's sum, from the lowest bit: fractions / 2^COARSE, and tokens.
constexpr u32 COARSE = 14;
constexpr u32 COUNT_AT = 22;
// The maximum number of tokens that a part lists, and that are sorted for a row.
constexpr u32 QUEUE = 512;
constexpr u32 SORTED = 1024;
// The mass of one token is below this.
constexpr float LARGEST_UNITS = 1216800000.0f;
// As a bin number: below the last bin.
constexpr u32 ALL_TOKENS = MASS_BINS;
static_assert(THREADS == MASS_BINS, "a thread has a bin");
static_assert((static_cast<u64>(LARGEST_UNITS - UNITS_OF_ONE) >> COARSE) * (TOKENS / 32) < 1u << COUNT_AT, "sums of a lane");
static_assert(TOKENS / 32 < 1u << (32 - COUNT_AT), "the tokens of a lane in all warps");

// The masses of a part of a row.
struct PartMasses {
    float top;  // edge of the bin of the largest logit; -inf = no finite logit
    u32 count;  // bins, from the top down
    u64 bins[MASS_BINS];
};
static_assert(sizeof(PartMasses) == 8 + 8 * MASS_BINS, "the host sizes the memory");

struct RowSummaries {
    StoredLogits stored;             // [rows, tokens] written on request; may be the raw logits
    const void* raw;                 // [raw rows, tokens]
    const u32* sources;              // [rows] the raw row of each row; null = row r takes raw row r
    const Row* rows;                 // [rows] transforms; null = the logits are transformed and valid
    const SummaryRequest* requests;  // [rows]
    SummaryResult* results;          // [rows]
    KeptToken* top;                  // [rows, top_stride] the largest logits, the largest first
    u64* words;                      // [rows, 1 + MASS_BINS] as core's to_words, for rows that request masses
    PartMasses* parts;               // [rows, blocks] scratch
    KeptToken* listed;               // [rows, LISTED] scratch
    u32* listed_counts;              // [rows] tokens listed by all blocks; the host clears it
    const double* weights;           // [MASS_BINS] core's weights of the bins below the highest
    u64 raw_stride;                  // elements
    Element element;
    u32 top_stride;

    static constexpr u32 LISTED = 4096;
};
FS_LAYOUT(RowSummaries, 128,
          FS_AT(stored, 0) && FS_AT(raw, 24) && FS_AT(sources, 32) && FS_AT(rows, 40) && FS_AT(requests, 48) && FS_AT(results, 56) &&
          FS_AT(top, 64) && FS_AT(words, 72) && FS_AT(parts, 80) && FS_AT(listed, 88) && FS_AT(listed_counts, 96) &&
          FS_AT(weights, 104) && FS_AT(raw_stride, 112) && FS_AT(element, 120) && FS_AT(top_stride, 124));

}  // namespace flash_sampling
