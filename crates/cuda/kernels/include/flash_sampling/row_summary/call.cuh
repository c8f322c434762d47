// The argument of row_summary.cu, and the sizes of its blocks. crates/cuda/src/abi/stored.rs has the same types.
#pragma once

#include "../element.cuh"
#include "../scan/stored.cuh"
#include "../summary/mass_histogram.cuh"

namespace flash_sampling {

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
    u32* before;                     // [rows] tokens before the drawn one in the order of logits, 0 before the launch; null = not counted

    static constexpr u32 LISTED = 4096;
};
FS_LAYOUT(RowSummaries, 136,
          FS_AT(stored, 0) && FS_AT(raw, 24) && FS_AT(sources, 32) && FS_AT(rows, 40) && FS_AT(requests, 48) && FS_AT(results, 56) &&
          FS_AT(top, 64) && FS_AT(words, 72) && FS_AT(parts, 80) && FS_AT(listed, 88) && FS_AT(listed_counts, 96) &&
          FS_AT(weights, 104) && FS_AT(raw_stride, 112) && FS_AT(element, 120) && FS_AT(top_stride, 124) &&
          FS_AT(before, 128));

}  // namespace flash_sampling
