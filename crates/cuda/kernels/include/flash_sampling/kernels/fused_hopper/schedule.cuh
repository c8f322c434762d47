// Which tokens a block works on. A cluster's blocks halve each tile. Clusters share the granules evenly, either in one run
// each, or tile by tile in turn with one last tile each that shares the rest.
#pragma once

#include "tile.cuh"

namespace flash_sampling::fused_hopper {

template <class T>
struct Schedule {
    static constexpr u32 FULL = T::CLUSTER * T::TILE_UNITS * T::UNIT_GRANULES;  // granules of a whole tile
    u32 tokens, group, groups, rank, waves, rest, tiles;

    __device__ __forceinline__ Schedule(u32 tokens, bool in_turn, u32 group, u32 groups, u32 rank)
        : tokens(tokens), group(group), groups(groups), rank(rank) {
        const u32 granules = (tokens + T::GRANULE - 1) / T::GRANULE;
        waves = in_turn ? granules / (groups * FULL) : 0;
        rest = granules - waves * groups * FULL;
        tiles = waves + (share(group + 1) - share(group) + FULL - 1) / FULL;
    }

    // The granules of the rest before a cluster's own.
    __device__ __forceinline__ u32 share(u32 of) const {
        return static_cast<u32>(static_cast<u64>(rest) * of / groups);
    }

    // The first token of a tile, and how many there are.
    __device__ __forceinline__ void tile(u32 t, u32& start, u32& size) const {
        u32 from = (t * groups + group) * FULL, to = from + FULL;
        if (t >= waves) {
            const u32 whole = waves * groups * FULL;
            from = whole + share(group) + (t - waves) * FULL;
            to = min(from + FULL, whole + share(group + 1));
        }
        const u32 half = T::CLUSTER == 2 ? (to - from + 1) / 2 : to - from;
        start = (from + (rank ? half : 0)) * T::GRANULE;
        size = min((rank ? to - from - half : half) * T::GRANULE, tokens - min(start, tokens));
    }

    // The block that works on a token.
    static __device__ __forceinline__ u32 owner(u32 tokens, bool in_turn, u32 groups, u32 token) {
        Schedule schedule(tokens, in_turn, 0, groups, 1);
        const u32 granule = token / T::GRANULE, whole = schedule.waves * groups * FULL;
        u32 t;
        if (granule < whole) {
            schedule.group = granule / FULL % groups;
            t = granule / FULL / groups;
        } else {
            schedule.group = static_cast<u32>(((granule - whole + 1ull) * groups - 1) / schedule.rest);
            t = schedule.waves + (granule - whole - schedule.share(schedule.group)) / FULL;
        }
        if (T::CLUSTER == 1) return schedule.group;
        u32 start, size;
        schedule.tile(t, start, size);
        return 2 * schedule.group + (token >= start);
    }

    // Measured: rows of the weight of 16 KiB stream faster by turns, of 8 KiB in runs.
    static __device__ __forceinline__ bool by_turns(const Call& call) { return call.hidden >= 8192; }
};

}  // namespace flash_sampling::fused_hopper
