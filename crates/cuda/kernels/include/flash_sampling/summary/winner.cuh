// The maximum of perturbed scores: the twin of core's winner.rs.
#pragma once

#include "../platform.cuh"

namespace flash_sampling {

// The larger score wins, then the smaller token. Scores are never NaN, and zero is always +0.
struct Winner {
    float score;
    u32 token;

    FS_FUNCTION static Winner none() { return {-f32_infinity(), 0xffffffffu}; }
    FS_FUNCTION static Winner of(float score, u32 token) { return {add_rn(score, 0.0f), token}; }
    FS_FUNCTION bool is_none() const { return token == 0xffffffffu; }
    FS_FUNCTION bool beats(const Winner& other) const {
        return score > other.score || (score == other.score && token < other.token);
    }
    FS_FUNCTION Winner merge(const Winner& other) const { return other.beats(*this) ? other : *this; }
};

// Returns monotone bits of a float: a larger float has larger bits.
FS_FUNCTION u32 to_monotone_bits(float x) {
    const u32 bits = f32_to_bits(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
FS_FUNCTION float from_monotone_bits(u32 bits) {
    return bits_to_f32(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

// Returns an integer whose order is the order of winners, for atomic maxima.
FS_FUNCTION u64 to_ordered_bits(const Winner& winner) {
    return static_cast<u64>(to_monotone_bits(winner.score)) << 32 | static_cast<u32>(~winner.token);
}
FS_FUNCTION Winner from_ordered_bits(u64 bits) {
    return {from_monotone_bits(static_cast<u32>(bits >> 32)), ~static_cast<u32>(bits)};
}

#ifdef __CUDACC__
// Returns the largest of a warp's ordered bits. Every lane gets the result.
__device__ __forceinline__ u64 largest_of_warp(u64 key) {
    const u32 high = __reduce_max_sync(0xffffffffu, static_cast<u32>(key >> 32));
    const u32 low = __reduce_max_sync(0xffffffffu, static_cast<u32>(key >> 32) == high ? static_cast<u32>(key) : 0);
    return static_cast<u64>(high) << 32 | low;
}
#endif

// A winner and its transformed logit.
struct Candidate {
    Winner winner;
    float logit;

    FS_FUNCTION static Candidate none() { return {Winner::none(), -f32_infinity()}; }
    FS_FUNCTION Candidate merge(const Candidate& other) const { return other.winner.beats(winner) ? other : *this; }
};

}  // namespace flash_sampling
