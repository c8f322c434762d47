// A tile of the kernel: its sizes, and what a block keeps in shared memory.
#pragma once

#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma.cuh"
#include "best.cuh"
#include "lists.cuh"
#include "loaded_rows.cuh"

namespace flash_sampling::fused_hopper {

// COLUMNS rows of the batch (wgmma's N), UNITS units of 64 tokens for each of the two consumer warpgroups, SLABS slabs of
// 64 hidden elements a stage, CLUSTER blocks that share the hidden states. LISTS: see lists.cuh; LOG_Z: see masses.cuh;
// FAN_OUT: see fan_out.cuh; STORES: see stores.cuh.
template <int COLUMNS_, int UNITS_, int SLABS_, int CLUSTER_, bool LISTS_ = false, bool LOG_Z_ = false, bool FAN_OUT_ = false,
          bool STORES_ = false>
struct Tile {
    static constexpr bool LISTS = LISTS_;
    static constexpr bool LOG_Z = LOG_Z_;
    static constexpr bool FAN_OUT = FAN_OUT_;
    static constexpr bool STORES = STORES_;
    static constexpr int COLUMNS = COLUMNS_;
    static constexpr int UNITS = UNITS_;
    static constexpr int SLABS = SLABS_;
    static constexpr int CLUSTER = CLUSTER_;

    static constexpr int UNIT = 64;
    static constexpr int GRANULE = 16;  // tokens are shared out among blocks in granules
    static constexpr int DEPTH = 64;    // hidden elements of a slab: one 128-byte swizzle row
    static constexpr int TILE_UNITS = 2 * UNITS;
    static constexpr int UNIT_GRANULES = UNIT / GRANULE;
    static constexpr bool EVEN = COLUMNS <= 96;    // see schedule.cuh
    static constexpr bool SKIPS = COLUMNS >= 192;  // see schedule.cuh
    // Steps of products under way when the next one is begun. With none a stage is free for loads a step sooner, which counts
    // where these are the limit. Measured: 37984 x 4096, 64 and 128 rows, 0.97 and 0.94 of the time, where one step ahead has
    // 0.975 and 0.95.
    static constexpr u32 AHEAD = COLUMNS == 256;
    // Whether a first tile has one pass, whose thresholds come of guesses: see guess.cuh.
    static constexpr bool GUESSES = !LISTS;
    // Whether early blocks wait a little for the guesses of others. Measured at 37984 x 4096, logits of deviation 2.2: 256 rows
    // 0.97 of three passes, without it 1.05; 192 rows 0.99 and 1.06; 128 rows 0.985, without it 0.985 and 1.07 on two GPUs.
    static constexpr bool AWAITS_GUESSES = COLUMNS >= 64;

    static constexpr int UNIT_BYTES = UNIT * DEPTH * 2;
    static constexpr int GRANULE_BYTES = UNIT_BYTES / UNIT_GRANULES;
    static constexpr int WEIGHT_BYTES = TILE_UNITS * UNIT_BYTES;
    static constexpr int HIDDEN_BYTES = COLUMNS * DEPTH * 2;
    static constexpr int SLAB_BYTES = WEIGHT_BYTES + HIDDEN_BYTES;
    static constexpr int STAGE_BYTES = SLABS * SLAB_BYTES;

    static FS_FUNCTION u32 loaded_rows(u32 row_count) { return fused_hopper::loaded_rows(COLUMNS, CLUSTER, row_count); }
    static constexpr u32 ROW_BYTES = DEPTH * 2;

    // A thread's accumulators of a unit, and how many words hold a bit of each; the words are alike.
    static constexpr int ACCUMULATORS = COLUMNS / 2;
    static constexpr int WORD_BITS = ACCUMULATORS < 32 ? ACCUMULATORS : ACCUMULATORS % 32 ? 16 : 32;
    static constexpr int WORDS = ACCUMULATORS / WORD_BITS;
    static_assert(WORDS * WORD_BITS == ACCUMULATORS, "every accumulator has a bit");

    // One loading warp, three scouts, two warpgroups of consumers.
    static constexpr int FIRST_CONSUMER = 128;
    static constexpr int CONSUMERS = 256;
    static constexpr int CONSUMER_WARPS = CONSUMERS / 32;
    static constexpr int SCOUT_WARPS = FIRST_CONSUMER / 32 - 1;
    static constexpr int THREADS = FIRST_CONSUMER + CONSUMERS;

    // What a block gets at its start, dealt out again.
    static constexpr int SCOUT_REGISTERS = 72;
    static constexpr int CONSUMER_REGISTERS = 216;
    static_assert(FIRST_CONSUMER * SCOUT_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= THREADS * (65536 / THREADS / 8 * 8),
                  "raise_registers would wait for ever");

    // The scouts' columns. Three warps are too slow for many columns beside the products of a short hidden dimension, so
    // the consumers look at the others at the end of a tile. Measured at 128 and 256 columns: all from 8192 hidden on,
    // 192 at 4096, 96 to 128 at 2880, 64 at 2048.
    static constexpr bool CONSUMERS_SCAN = COLUMNS >= 64;
    static __device__ __forceinline__ u32 scouted_columns(const Call& call) {
        if (!CONSUMERS_SCAN) return COLUMNS;
        return min(static_cast<u32>(COLUMNS), (max(call.hidden, 1024u) - 1024) / 512 * 32);
    }
};

// A token that may win.
struct Contender {
    float dot;
    u32 place;  // row of the batch, then token within the tile
};
constexpr int QUEUE = 64;

// What a block keeps in shared memory for log Z.
template <class T, bool LOG_Z>
struct MassShared {};
template <class T>
struct MassShared<T, true> {
    float high[T::CONSUMER_WARPS][T::COLUMNS];  // what a warp's sums are relative to
    double sum[T::CONSUMER_WARPS][T::COLUMNS];
};

template <class T>
struct Shared : ListShared<T::COLUMNS, T::LISTS>, MassShared<T, T::LOG_Z> {
    Best best[T::COLUMNS];
    Row rows[T::COLUMNS];
    float losing[T::COLUMNS];
    union {
        u32 largest[T::COLUMNS];   // the first tile's largest dot product, as monotone bits
        float hinted[T::COLUMNS];  // thresholds of its tokens with hints, later
    };
    // Of this tile and the next. In the first tile the second half has the words between the two thresholds.
    u32 marks[2][T::TILE_UNITS][4][T::WORDS][32];
    Contender queue[T::CONSUMER_WARPS][QUEUE];
    u32 queued[T::CONSUMER_WARPS];
    u64 full[8];
    u64 empty[8];
    u64 scouted;
    u64 filtered;
    u32 last;
};

// What is left of shared memory is the ring of stages.
template <class T>
struct Ring {
    static constexpr int LIMIT = 227 * 1024;
    static constexpr int ALIGNMENT = 1024;
    static constexpr int FIT = (LIMIT - ALIGNMENT - static_cast<int>(sizeof(Shared<T>))) / T::STAGE_BYTES;
    static constexpr int STAGES = FIT < 8 ? FIT : 8;
    static constexpr int SHARED_BYTES = ALIGNMENT + STAGES * T::STAGE_BYTES + static_cast<int>(sizeof(Shared<T>));
    static_assert(STAGES >= 3, "loads must run ahead of the products");

    // The stage that comes next, and the parity of its barriers.
    u32 stage = 0, phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    __device__ __forceinline__ u32 before() const { return stage == 0 ? STAGES - 1 : stage - 1; }
};

// Barriers of part of a block; 0 is the whole block's.
constexpr u32 CONSUMERS_BARRIER = 1;
constexpr u32 PREPARED_BARRIER = 2;
constexpr u32 SCOUTS_BARRIER = 3;

}  // namespace flash_sampling::fused_hopper
