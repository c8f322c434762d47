// What crosses between the ranks of a group for a row: the shard's draw as a key whose order decides, and a digest of what
// the row was asked. The twin of core's ordered bits of a winner, with a place above them for rows that are invalid.
//
//   0                                       no token of the shard has a finite logit
//   to_ordered_bits(winner)                 below 0xff80'0000'0000'0000, as scores are finite
//   0xffc0'0000'0000'0000 | raw << 33 | ~token << 1 | k
//                                           an invalid logit: raw = 0 made by a transform, 1 not; k = 0 NaN, 1 +inf; as
//                                           within a shard, the larger key is that of a raw one, then of the lower token
#pragma once

#include "../abi.cuh"
#include "../summary/winner.cuh"

namespace flash_sampling {

constexpr u64 INVALID_KEY = 0xffc0000000000000ull;

// The draws of all shards are ordered by their keys: the largest is the draw of the whole vocabulary.
FS_FUNCTION u64 key_of(const Draw& draw) {
    if (draw.status == Status::Drawn) return to_ordered_bits({draw.score, draw.token});
    if (draw.status == Status::NoFiniteLogit) return 0;
    const u64 raw = draw.score == 0.0f, infinite = draw.status == Status::PositiveInfinity;
    return INVALID_KEY | raw << 33 | static_cast<u64>(~draw.token) << 1 | infinite;
}

// The draw of a key; the logit does not travel in it.
FS_FUNCTION Draw draw_of(u64 key, float logit) {
    if (key == 0) return {0xffffffffu, -f32_infinity(), -f32_infinity(), Status::NoFiniteLogit};
    if (key >= INVALID_KEY) {
        const Status status = key & 1 ? Status::PositiveInfinity : Status::NaN;
        return {~static_cast<u32>(key >> 1), key >> 33 & 1 ? 0.0f : 1.0f, 0.0f, status};
    }
    const Winner winner = from_ordered_bits(key);
    return {winner.token, winner.score, logit, Status::Drawn};
}

// Tells apart what ranks may be called with by mistake: the noise of a row, its temperature, whether it has a mask, how many
// rows the call has, and the call's mark: its number, the type of its hidden states, what is in the rows' lists. Addresses
// differ from rank to rank and do not count, nor do the lengths of lists, of which a rank may have its shard's share alone.
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
