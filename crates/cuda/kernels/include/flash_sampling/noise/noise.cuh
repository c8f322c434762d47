// Noise, version 2: the noise of (seed, position, draw, token) is a pure function. The twin of core's noise.
#pragma once

#include "counter.cuh"
#include "granule.cuh"

namespace flash_sampling {

// The noise of one row.
struct Noise {
    u64 seed;
    u64 position;

    FS_FUNCTION Words words_of_code(u32 code, u32 draw, u32 block) const {
        return philox4x32_10(counter(block, draw, position, code), static_cast<u32>(seed), static_cast<u32>(seed >> 32));
    }
    FS_FUNCTION Words words(Domain domain, u32 draw, u32 block) const {
        return words_of_code(domain_code(domain), draw, block);
    }
    FS_FUNCTION u32 word(Domain domain, u32 draw, u32 index) const {
        return pick(words(domain, draw, index >> 2), index & 3);
    }
    FS_FUNCTION u32 refinement(Domain domain, u32 draw, u32 index) const {
        return pick(words_of_code(refinement_code(domain), draw, index >> 2), index & 3);
    }
    // Returns the standard Gumbel of an index. A token's Gumbel comes from its granule, by two Philox blocks and three logarithms
    // (one block and two logarithms for a leader). A group's or shard's Gumbel comes from one word.
    FS_FUNCTION float gumbel(Domain domain, u32 draw, u32 index) const {
        if (!has_granules(domain))
            return gumbel_of_word(word(domain, draw, index), [&] { return refinement(domain, draw, index); });
        const u32 of_granule = word(granules_of(domain), draw, index / Granule::TOKENS);
        return gumbel_in(granule(domain, draw, index, of_granule), domain, draw, index);
    }
    // Returns the granule of a token from the granule's word.
    FS_FUNCTION Granule granule(Domain domain, u32 draw, u32 token, u32 word) const {
        return Granule::of_word(word, [&] { return refinement(granules_of(domain), draw, token / Granule::TOKENS); });
    }
    // Returns the standard Gumbel of a token of a computed granule.
    FS_FUNCTION float gumbel_in(const Granule& granule, Domain domain, u32 draw, u32 token) const {
        return -ln(granule.exponential_of(token, [&] { return word(domain, draw, token); }));
    }
    // Computes the standard Gumbels of the four tokens from `first` on, a multiple of four: two Philox blocks.
    FS_FUNCTION void gumbels(Domain domain, u32 draw, u32 first, float (&out)[4]) const {
        const Granule of_four = granule(domain, draw, first, word(granules_of(domain), draw, first / Granule::TOKENS));
        const Words own = words(domain, draw, first / 4);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) out[i] = -ln(of_four.exponential_of(first + i, [&] { return own.w[i]; }));
    }
    FS_FUNCTION double coin(u32 draw, u32 group) const {
        const Words w = words(Domain::MergeCoin, draw, group);
        return coin_open(w.w[0], w.w[1]);
    }
    // Returns a word through selects, so that the words stay in registers.
    FS_FUNCTION static u32 pick(const Words& w, u32 i) {
        const u32 low = i & 1 ? w.w[1] : w.w[0];
        const u32 high = i & 1 ? w.w[3] : w.w[2];
        return i & 2 ? high : low;
    }
};

}  // namespace flash_sampling
