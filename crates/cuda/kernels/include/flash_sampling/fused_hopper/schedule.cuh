// The tokens of a block. The blocks of a cluster halve each tile. Clusters divide the granules evenly. Either each cluster has
// one contiguous run, or clusters alternate tile by tile and then divide the remaining granules into one last tile each. If reads
// are the limit, a short run is divided evenly into its tiles, because a tile of few tokens keeps few loads in flight.
#pragma once

#include "../abi.cuh"

namespace flash_sampling::fused_hopper {

// Returns the number of rows of the batch that each block of a cluster loads: the fewest groups of eight rows (the swizzle's
// unit) that hold the batch. The host makes boxes of this size (fused_hopper.rs). The copy engine takes longer to fill absent
// rows with zeros than to read rows. Measured against loads of all columns: 151936 x 4096, 130 of 192 columns 0.89, 100 of 128
// 0.97, 40 of 64 0.97; with 256 columns, 240 rows of 37984 x 4096 1.05.
FS_FUNCTION u32 loaded_rows(u32 columns, u32 cluster, u32 row_count) {
    const bool loads_all = columns == 256;
    return loads_all ? columns / cluster : (row_count + 8 * cluster - 1) / (8 * cluster) * 8;
}

template <class T>
struct Schedule {
    static constexpr u32 FULL = T::CLUSTER * T::TILE_UNITS * T::UNIT_GRANULES;  // granules of a whole tile
    u32 tokens, group, groups, rank, tiles;
    u32 waves;       // whole tiles that alternate between clusters, per cluster
    u32 begin, end;  // granules of the run after these tiles

    FS_FUNCTION Schedule(u32 tokens, bool in_turn, u32 group, u32 groups, u32 rank)
        : tokens(tokens), group(group), groups(groups), rank(rank) {
        const u32 granules = (tokens + T::GRANULE - 1) / T::GRANULE;
        waves = in_turn ? granules / (groups * FULL) : 0;
        const u32 whole = waves * groups * FULL;
        begin = whole + share(granules - whole, group);
        end = whole + share(granules - whole, group + 1);
        tiles = waves + (end - begin + FULL - 1) / FULL;
    }

    // Computes the first token and the size of a tile.
    FS_FUNCTION void tile(u32 t, u32& start, u32& size) const { tile_of(rank, t, start, size); }
    FS_FUNCTION void tile_of(u32 rank, u32 t, u32& start, u32& size) const {
        const bool in_turn = t < waves;
        const u32 from = in_turn ? (t * groups + group) * FULL : edge(t - waves);
        const u32 to = in_turn ? from + FULL : edge(t - waves + 1);
        const u32 half = T::CLUSTER == 2 ? (to - from + 1) / 2 : to - from;
        start = (from + (rank ? half : 0)) * T::GRANULE;
        size = min((rank ? to - from - half : half) * T::GRANULE, tokens - min(start, tokens));
    }

    // Whether a warpgroup takes part in a tile of a block. A warpgroup without tokens takes no part; only the last tile of a
    // block is so short. The first warpgroup always takes part, because a thread must wait for the loaded data.
    static FS_FUNCTION bool has_tokens(u32 warpgroup, u32 size) { return warpgroup == 0 || warpgroup * T::UNIT < size; }

    // Returns the number of consumer warps, of all blocks of the cluster, that take no part in a tile.
    FS_FUNCTION u32 absent(u32 t) const {
        u32 warps = 0;
        for (u32 of = 0; of < T::CLUSTER; ++of) {
            u32 start, size;
            tile_of(of, t, start, size);
            for (u32 group = 1; group < T::TILE_UNITS; ++group) warps += has_tokens(group, size) ? 0 : T::UNIT_GRANULES;
        }
        return warps;
    }

    // Returns the block of a token.
    static FS_FUNCTION u32 owner(u32 tokens, bool in_turn, u32 groups, u32 token) {
        const u32 granules = (tokens + T::GRANULE - 1) / T::GRANULE, granule = token / T::GRANULE;
        const u32 whole = in_turn ? granules / (groups * FULL) * groups * FULL : 0;
        const u32 group = granule < whole
                              ? granule / FULL % groups
                              : static_cast<u32>(((granule - whole + 1ull) * groups - 1) / (granules - whole));
        if (T::CLUSTER == 1) return group;
        const Schedule schedule(tokens, in_turn, group, groups, 1);
        u32 start, size;
        schedule.tile(granule < whole ? granule / FULL / groups : schedule.waves + schedule.part(granule), start, size);
        return 2 * group + (token >= start);
    }

    // Whether clusters alternate tile by tile. Measured: weight rows of 16 KiB stream faster so, rows of 8 KiB in runs.
    static FS_FUNCTION bool by_turns(const Call& call) { return call.hidden * T::ELEMENT_BYTES >= 16384; }

  private:
    // Whether the run is divided evenly. Measured: 37984 x 4096 in three equal tiles, against two whole tiles and a quarter,
    // takes 0.95 / 0.95 / 0.93 at 1 / 16 / 64 rows. With five tiles there is no gain.
    FS_FUNCTION bool is_even() const { return T::EVEN && tiles - waves <= 3; }

    // Return the first granule of tile i of the run, and the tile of the run that contains a granule.
    FS_FUNCTION u32 edge(u32 i) const {
        return is_even() ? begin + (end - begin) * i / (tiles - waves) : min(begin + i * FULL, end);
    }
    FS_FUNCTION u32 part(u32 granule) const {
        const u32 at = granule - begin;
        return is_even() ? ((at + 1) * (tiles - waves) - 1) / (end - begin) : at / FULL;
    }

    // Returns the number of granules of `rest` before a group's own granules.
    FS_FUNCTION u32 share(u32 rest, u32 of) const {
        return static_cast<u32>(static_cast<u64>(rest) * of / groups);
    }
};

}  // namespace flash_sampling::fused_hopper
