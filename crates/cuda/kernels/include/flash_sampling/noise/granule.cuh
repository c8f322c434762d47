// Granules of sixteen tokens, with the smallest exponential drawn first: the twin of core's noise/granule.rs.
#pragma once

#include "uniform.cuh"

namespace flash_sampling {

struct Granule {
    static constexpr u32 TOKENS = 16;

    u32 leader;     // the index in the granule of the token with the smallest exponential
    float minimum;  // the smallest exponential

    // Returns the granule of a word. `refinement` is called for one word in 2^20.
    template <class Refinement>
    static FS_FUNCTION Granule of_word(u32 word, Refinement refinement) {
        const float e = exponential(u01_open<28>(minimum_bits(word), refinement));
        return {word % TOKENS, mul_rn(e, 1.0f / TOKENS)};
    }

    // Returns the 28 bits that determine the minimum: minimum >= minimum_bits 2^-32.
    static FS_FUNCTION u32 minimum_bits(u32 word) { return word / TOKENS; }

    // Returns the exponential of a token of the granule. `word` is called unless the token is the leader.
    template <class Word>
    FS_FUNCTION float exponential_of(u32 token, Word word) const {
        if (token % TOKENS == leader) return minimum;
        return add_rn(minimum, exponential(u01_open_coarse<32>(word())));
    }

    // Returns the leader's Gumbel. Rounding of the logarithm may make other tokens' Gumbels larger, by at most 1.2e-5.
    FS_FUNCTION float largest_gumbel() const { return -ln(minimum); }
};

}  // namespace flash_sampling
