// Granules of sixteen tokens, whose smallest exponential comes first: the twin of core's noise/granule.rs.
#pragma once

#include "uniform.cuh"

namespace flash_sampling {

struct Granule {
    static constexpr u32 TOKENS = 16;

    u32 leader;     // the place of the token with the smallest exponential
    float minimum;  // the smallest exponential

    // The granule of a word. `refinement` is called for one word in 2^20.
    template <class Refinement>
    static FS_FUNCTION Granule of_word(u32 word, Refinement refinement) {
        const float e = exponential(u01_open<28>(minimum_bits(word), refinement));
        return {word % TOKENS, mul_rn(e, 1.0f / TOKENS)};
    }

    // The 28 bits that the minimum comes from: minimum >= minimum_bits 2^-32.
    static FS_FUNCTION u32 minimum_bits(u32 word) { return word / TOKENS; }

    // The exponential of a token of the granule; `word` is called unless the token is the leader.
    template <class Word>
    FS_FUNCTION float exponential_of(u32 token, Word word) const {
        if (token % TOKENS == leader) return minimum;
        return add_rn(minimum, exponential(u01_open_coarse<32>(word())));
    }

    // The leader's Gumbel. The other tokens' are at most 1.2e-5 larger, by the rounding of the logarithm.
    FS_FUNCTION float largest_gumbel() const { return -outer_ln(minimum); }
};

}  // namespace flash_sampling
