// The data of a draw from a shadow: an 8-bit copy of the weight, with a bound on the error of each dot product.
//
// Four launches make a draw with the bits of the draw from the weight:
//
// 1. `hidden_digits` writes each hidden state as two 8-bit digits, with the factors of its bounds.
// 2. The Hopper kernel (fused_hopper/candidates.cuh) or the portable kernel (CandidatesEpilogue) multiplies the shadow by the
//    digits, and lists the tokens that can win.
// 3. `exact_winners` computes the logits of the listed tokens from the weight, in the order of sums of the full kernel.
// 4. The full kernel draws all rows again if the shadow does not decide a row. Otherwise its blocks end at once.
//
// On Hopper, a call with rows whose first filter is a min-p or a top-k uses these kernels after the first launch:
//
// 2. For these rows, the Hopper kernel lists the tokens that the filters may keep, with upper bounds and estimates of their
//    logits.
// 3. `exact_lists` also computes the logits of these tokens, and writes the lists for filter_list.cu.
// 4. `filter_list` draws. Rows that the shadow or the lists do not decide are Undecided, and take a pass over all logits.
//
// On Hopper, each launch except the first may start early, and waits for the previous launch (ptx/early.cuh).
#pragma once

#include "../abi.cuh"
#include "../element.cuh"

namespace flash_sampling {

// The numbers of a hidden state that give the error bound of each token (core's ShadowBound), and the factor of the digits. All
// numbers are zero for a row without finite bounds.
struct HiddenBound {
    float scale;
    float error;
    float norm;
    float constant;

    // Returns the error bound of a token's dot product.
    FS_FUNCTION float of(float token_error, float token_norm) const {
        return fma_rn(token_error, error, fma_rn(token_norm, norm, constant));
    }
};
FS_LAYOUT(HiddenBound, 16, FS_AT(scale, 0) && FS_AT(error, 4) && FS_AT(norm, 8) && FS_AT(constant, 12));

// The number of listed estimates of a row with a top-k, in bins of equal width. The last bin has no upper edge. If k estimates are
// at or above the lower edge of a bin, this edge is a cutoff of the row.
struct EstimateCounts {
    static constexpr u32 BINS = 30;

    float base;   // the lower edge of the first bin
    float width;  // of a bin; 0 until a block sets base and width
    u32 counts[BINS];
};
FS_LAYOUT(EstimateCounts, 128, FS_AT(base, 0) && FS_AT(width, 4) && FS_AT(counts, 8));

// The shadow's numbers per token, the lists of candidates, and the factors of the exact logits.
struct Candidates {
    static constexpr u32 ROOM = 16384;
    static constexpr u32 OPEN = 1u << 30;  // the count of a row that the shadow does not decide

    const float* scales;        // [tokens]
    const float* errors;        // [tokens]
    const float* norms;         // [tokens]
    const HiddenBound* bounds;  // [row_count]
    u32* counts;                // [row_count] number of listed candidates; above ROOM, the shadow does not decide the row
    u64* keys;                  // [row_count, ROOM] ordered bits of upper bounds: of scores, or of logits for rows with filters
    u32* estimates;             // [row_count, ROOM] monotone bits of estimated logits, only for rows with filters
    const u8* weight;           // [tokens, hidden]
    const u8* hidden;           // [row_count, hidden]
    u64 weight_stride;          // bytes
    u64 hidden_stride;          // bytes
    u32 width;                  // hidden elements
    Element element;            // of weight and hidden states, bf16 or f16
    EstimateCounts* estimated;  // [row_count]
};
FS_LAYOUT(Candidates, 104,
          FS_AT(scales, 0) && FS_AT(errors, 8) && FS_AT(norms, 16) && FS_AT(bounds, 24) && FS_AT(counts, 32) &&
          FS_AT(keys, 40) && FS_AT(estimates, 48) && FS_AT(weight, 56) && FS_AT(hidden, 64) && FS_AT(weight_stride, 72) &&
          FS_AT(hidden_stride, 80) && FS_AT(width, 88) && FS_AT(element, 92) && FS_AT(estimated, 96));

// Words of a planned head, which `hidden_digits` clears.
struct ShadowWords {
    u32 open;       // whether the full kernel draws
    u32 published;  // the Hopper kernel's counter
};
FS_LAYOUT(ShadowWords, 8, FS_AT(open, 0) && FS_AT(published, 4));

// The best of a part of a row's candidates.
struct alignas(16) PartWinner {
    u64 key;  // 0 = none
    float logit;
    u32 zero;
};
FS_LAYOUT(PartWinner, 16, FS_AT(key, 0) && FS_AT(logit, 8) && FS_AT(zero, 12));

// The argument of hidden_digits, exact_winners and exact_lists.
struct ShadowCall {
    Candidates candidates;
    u8* digits;           // [octets of rows, digits, 8] rows of digit_stride bytes
    u64 digit_stride;     // a multiple of 64
    HiddenBound* bounds;  // [rows]
    u64* best;            // [rows]
    PartWinner* winners;  // [rows, parts]
    u32* arrived;         // [rows]
    ShadowWords* words;
    float largest;        // the largest sum of norm and error of a token
    u32 zero;
    u32* undecided;       // in host memory: number of rows, over all launches, that the shadow did not decide
};
FS_LAYOUT(ShadowCall, 176,
          FS_AT(candidates, 0) && FS_AT(digits, 104) && FS_AT(digit_stride, 112) && FS_AT(bounds, 120) && FS_AT(best, 128) &&
          FS_AT(winners, 136) && FS_AT(arrived, 144) && FS_AT(words, 152) && FS_AT(largest, 160) && FS_AT(zero, 164) &&
              FS_AT(undecided, 168));

}  // namespace flash_sampling
