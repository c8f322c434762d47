// The exchanged data of a row: the shard's draw as a key, and a digest of the row's parameters. The largest key wins. Keys are
// core's ordered bits of a winner. An invalid row has a larger key than any winner.
//
//   0                                       no token of the shard has a finite logit
//   to_ordered_bits(winner)                 below 0xff80'0000'0000'0000, as scores are finite
//   0xffc0'0000'0000'0000 | raw << 33 | ~token << 1 | k
//                                           an invalid logit: raw = 1 if the raw logit is invalid, 0 if a transform made
//                                           it so; k = 0 NaN, 1 +inf. As within a shard, a raw one has the larger key,
//                                           then the lower token
#pragma once

#include "../abi.cuh"
#include "../summary/winner.cuh"

namespace flash_sampling {

constexpr u64 INVALID_KEY = 0xffc0000000000000ull;

// Returns the key of a draw. The largest key of all shards is the draw of the whole vocabulary.
FS_FUNCTION u64 key_of(const Draw& draw) {
    if (draw.status == Status::Drawn) return to_ordered_bits({draw.score, draw.token});
    if (draw.status == Status::NoFiniteLogit) return 0;
    const u64 raw = draw.score == 0.0f, infinite = draw.status == Status::PositiveInfinity;
    return INVALID_KEY | raw << 33 | static_cast<u64>(~draw.token) << 1 | infinite;
}

// Returns the draw of a key, which does not contain the logit.
FS_FUNCTION Draw draw_of(u64 key, float logit) {
    if (key == 0) return {0xffffffffu, -f32_infinity(), -f32_infinity(), Status::NoFiniteLogit};
    if (key >= INVALID_KEY) {
        const Status status = key & 1 ? Status::PositiveInfinity : Status::NaN;
        return {~static_cast<u32>(key >> 1), key >> 33 & 1 ? 0.0f : 1.0f, 0.0f, status};
    }
    const Winner winner = from_ordered_bits(key);
    return {winner.token, winner.score, logit, Status::Drawn};
}

// Returns a digest that differs if ranks are called with different parameters: a row's noise and temperature, whether it has a
// mask, the number of rows, and the call's mark (its number, the type of the hidden states, the contents of the rows' lists). The
// digest ignores addresses, and the lengths of lists, because a rank may have only its shard's part of a list.
FS_FUNCTION u32 digest_of(const Row& row, u32 row_count, u64 mark) {
    const u32 flags = row.greedy | (row.mask ? 2u : 0u);
    const u64 fields[5] = {row.seed, row.position, static_cast<u64>(row.draw) << 32 | row_count,
                           static_cast<u64>(f32_to_bits(row.inv_temperature)) << 32 | flags, mark};
    u64 hash = 0xcbf29ce484222325ull;
    for (const u64 field : fields) {
        hash = (hash ^ field) * 0x9e3779b97f4a7c15ull;
        hash ^= hash >> 29;
    }
    return static_cast<u32>(hash >> 32);
}

}  // namespace flash_sampling
