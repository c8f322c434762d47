// The counter of every random word: the twin of core's noise/counter.rs.
//
//   key      k0 = seed bits 0..32      k1 = seed bits 32..64
//   counter  c0 = block                c1 = draw
//            c2 = position bits 0..32  c3 = domain (bits 24..32) | position bits 32..56 (bits 0..24)
#pragma once

#include "philox.cuh"

namespace flash_sampling {

enum class Domain : u8 {
    Token = 0,
    Group = 1,
    MergeCoin = 2,
    Shard = 3,
    Accept = 4,
    Residual = 5,
    Generator = 6,
    Xtc = 7,
    Granule = 8,
    ResidualGranule = 9,
};

FS_FUNCTION u32 domain_code(Domain domain) { return static_cast<u32>(domain); }
FS_FUNCTION u32 refinement_code(Domain domain) { return static_cast<u32>(domain) | 0x80u; }

// Whether a domain's noise comes from granules (tokens and residuals), and the domain of these granules.
FS_FUNCTION bool has_granules(Domain domain) { return domain == Domain::Token || domain == Domain::Residual; }
FS_FUNCTION Domain granules_of(Domain domain) {
    return domain == Domain::Residual ? Domain::ResidualGranule : Domain::Granule;
}

FS_FUNCTION Words counter(u32 block, u32 draw, u64 position, u32 code) {
    return {{block, draw, static_cast<u32>(position), code << 24 | (static_cast<u32>(position >> 32) & 0x00ffffffu)}};
}

}  // namespace flash_sampling
