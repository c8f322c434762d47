// Word to uniform to exponential to Gumbel: the twin of core's noise/uniform.rs.
#pragma once

#include "log.cuh"

namespace flash_sampling {

// A refinement word extends words below this.
constexpr u32 TAIL_WORDS = 256;
constexpr float WORD_SCALE = 1.0f / 4294967296.0f;

// A uniform in (0, 1) as its distance to the nearer end: v if low, else 1 - v.
struct U01 {
    float distance;
    bool low;
};

// Returns the uniform of a word below 2^BITS, without refinement.
template <u32 BITS>
FS_FUNCTION U01 u01_open_coarse(u32 word) {
    const u32 complement = word ^ (0xffffffffu >> (32 - BITS));
    const bool low = word < complement;
    return {mul_rn(add_rn(u32_to_f32(low ? word : complement), 0.5f), 1.0f / static_cast<float>(1ull << BITS)), low};
}

// Returns the uniform of a word. `refinement` is called only for words below TAIL_WORDS.
template <u32 BITS, class Refinement>
FS_FUNCTION U01 u01_open(u32 word, Refinement refinement) {
    if (word >= TAIL_WORDS) return u01_open_coarse<BITS>(word);
    const float fraction = add_rn(u32_to_f32(refinement()), 0.5f);
    return {mul_rn(fma_rn(fraction, WORD_SCALE, u32_to_f32(word)), 1.0f / static_cast<float>(1ull << BITS)), true};
}

FS_FUNCTION float exponential(U01 u) { return u.low ? neg_ln_1m(u.distance) : -ln(u.distance); }

// Returns the Gumbel of a 32-bit word: the map of groups and shards. Tokens use the map of granule.cuh.
template <class Refinement>
FS_FUNCTION float gumbel_of_word(u32 word, Refinement refinement) {
    return -ln(exponential(u01_open<32>(word, refinement)));
}

// Returns a uniform in (0, 1) with 64 bits.
FS_FUNCTION double coin_open(u32 high, u32 low) {
    const u64 bits = static_cast<u64>(high) << 32 | low;
    const double coin = mul_rn(add_rn(static_cast<double>(bits), 0.5), 1.0 / 18446744073709551616.0);
    const double below_one = 1.0 - 1.0 / 9007199254740992.0;
    return coin < below_one ? coin : below_one;
}

}  // namespace flash_sampling
