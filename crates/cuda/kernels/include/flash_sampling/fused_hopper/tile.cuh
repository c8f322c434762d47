// A tile of the kernel: its sizes, and the shared memory of a block.
#pragma once

#include "../element.cuh"
#include "../noise/noise.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "candidates.cuh"
#include "lists.cuh"
#include "schedule.cuh"

namespace flash_sampling::fused_hopper {

// What an instance computes besides the plain draw. See masks_penalties.cuh, lists.cuh (which includes masks),
// masses.cuh, fan_out.cuh and store_logits.cuh. Instances of candidates.cuh list candidates instead of draws, and
// include masks; ListedCandidates also takes rows with filters.
enum class FusedVariant { Plain, MasksPenalties, Lists, LogZ, FanOut, StoreLogits, Candidates, ListedCandidates };

// The shape of a tile. COLUMNS: rows of the batch (wgmma's N). SLABS: slabs of a stage; a slab has 128 bytes of each
// weight row. CLUSTER: blocks that share the hidden states. WEIGHT: I8 or F8_E4M3 for such a weight; BF16 for all other
// weights. UNITS: units of 64 tokens, each with a warpgroup of consumers.
template <int COLUMNS_, int SLABS_, int CLUSTER_, FusedVariant VARIANT = FusedVariant::Plain,
          Element WEIGHT_ = Element::BF16, int UNITS = 2>
struct Tile {
    static constexpr bool LISTS = VARIANT == FusedVariant::Lists || VARIANT == FusedVariant::ListedCandidates;
    static constexpr bool CANDIDATES = VARIANT == FusedVariant::Candidates || VARIANT == FusedVariant::ListedCandidates;
    static constexpr bool MASKS_PENALTIES = VARIANT == FusedVariant::MasksPenalties || LISTS || CANDIDATES;
    static constexpr bool LOG_Z = VARIANT == FusedVariant::LogZ;
    static constexpr bool FAN_OUT = VARIANT == FusedVariant::FanOut;
    static constexpr bool STORE_LOGITS = VARIANT == FusedVariant::StoreLogits;
    static constexpr Element WEIGHT = WEIGHT_;
    static constexpr bool EIGHT_BITS = has_scales(WEIGHT);
    static constexpr int COLUMNS = COLUMNS_;
    static constexpr int SLABS = SLABS_;
    static constexpr int CLUSTER = CLUSTER_;

    static constexpr int UNIT = 64;
    static constexpr int GRANULE = 16;  // blocks divide tokens by granules; a consumer warp has one granule of a tile
    static constexpr int ELEMENT_BYTES = CANDIDATES || EIGHT_BITS ? 1 : 2;  // of the weight
    static constexpr int DIGITS = CANDIDATES ? 2 : 1;  // columns of the products for each row of the batch
    static constexpr int SLAB_ROW_BYTES = 128;         // one swizzle row
    static constexpr int DEPTH = SLAB_ROW_BYTES / ELEMENT_BYTES;  // hidden elements of a slab
    static constexpr int HIDDEN_PARTS = EIGHT_BITS ? 2 : 1;       // TMA boxes that hold the hidden states of a slab
    static constexpr int TILE_UNITS = UNITS;
    static constexpr int UNIT_GRANULES = UNIT / GRANULE;
    static constexpr int GRANULES = TILE_UNITS * UNIT_GRANULES;
    static constexpr int TOKENS = TILE_UNITS * UNIT;
    static constexpr u32 PLACES = TOKENS <= 128 ? 128 : 256;  // a power of two above every token's index in a tile
    static_assert(GRANULE == Granule::TOKENS, "a slab of a shard that begins with a granule is a granule of the noise");
    static constexpr bool EVEN = COLUMNS <= 96;    // see schedule.cuh
    static constexpr bool SKIPS = COLUMNS >= 192;  // see schedule.cuh
    // The number of steps of products in flight when the next step begins. With 0, a stage is free for loads one step
    // earlier, which matters if loads are the limit. Measured against an earlier version, 37984 x 4096 at 64 / 128
    // rows: 0.97 / 0.94 of the time with 0, and 0.975 / 0.95 with 1.
    static constexpr u32 AHEAD = COLUMNS == 256;
    // Whether warpgroups queue their products in turn (eight_bits.cuh). Without turns, all warpgroups wait for their
    // products at the same time. Then all of them convert elements, and the tensor cores are idle.
    static constexpr bool IN_TURN = TILE_UNITS > 2;
    // Whether early blocks wait for the estimates of other blocks. Measured without the wait, 37984 x 4096, logits of
    // deviation 2.2, noise version 1: 1.08 at 256 rows, 1.07 at 192 rows, 1.00 and 1.09 at 128 rows on two GPUs.
    static constexpr bool AWAITS_ESTIMATES = COLUMNS >= 64;

    static constexpr int UNIT_BYTES = UNIT * SLAB_ROW_BYTES;
    static constexpr int GRANULE_BYTES = UNIT_BYTES / UNIT_GRANULES;
    static constexpr int WEIGHT_BYTES = TILE_UNITS * UNIT_BYTES;
    static constexpr u32 ROW_BYTES = DIGITS * SLAB_ROW_BYTES;  // of a row of the batch in a part of a slab
    static constexpr int PART_BYTES = COLUMNS * ROW_BYTES;
    static constexpr int HIDDEN_BYTES = HIDDEN_PARTS * PART_BYTES;
    static constexpr int SLAB_BYTES = WEIGHT_BYTES + HIDDEN_BYTES;
    static constexpr int STAGE_BYTES = SLABS * SLAB_BYTES;

    static FS_FUNCTION u32 loaded_rows(u32 row_count) { return fused_hopper::loaded_rows(COLUMNS, CLUSTER, row_count); }

    // A thread's accumulators, and the words with one bit per accumulator. All words have the same number of bits.
    static constexpr int ACCUMULATORS = COLUMNS / 2;
    static constexpr int WORD_BITS = ACCUMULATORS < 32 ? ACCUMULATORS : ACCUMULATORS % 32 ? 16 : 32;
    static constexpr int WORDS = ACCUMULATORS / WORD_BITS;
    static_assert(WORDS * WORD_BITS == ACCUMULATORS, "every accumulator has a bit");

    // A block has one loading warp, three scout warps, and a warpgroup of consumers for each unit.
    static constexpr int FIRST_CONSUMER = 128;
    static constexpr int CONSUMERS = 128 * TILE_UNITS;
    static constexpr int CONSUMER_WARPS = CONSUMERS / 32;
    static constexpr int SCOUTS = FIRST_CONSUMER - 32;
    static constexpr int THREADS = FIRST_CONSUMER + CONSUMERS;
    static_assert(CONSUMER_WARPS == GRANULES, "a consumer warp has a granule of a tile");

    // A block starts with an equal number of registers per thread, and then redistributes them.
    static constexpr int SCOUT_REGISTERS = 72;
    static constexpr int CONSUMER_REGISTERS =
        (THREADS * (65536 / THREADS / 8 * 8) - FIRST_CONSUMER * SCOUT_REGISTERS) / CONSUMERS / 8 * 8;
};

// The best candidate of a row within the block.
struct alignas(16) Best {
    u64 key;  // ordered bits of the winner; 0 = none
    float logit;
    u32 zero;
};

// A token that may win.
struct Contender {
    float dot;
    u32 place;  // row of the batch in the low half, token within the tile in the high half
};
constexpr int QUEUE = 64;

// The shared memory for log Z.
template <class T, bool LOG_Z>
struct MassShared {};
template <class T>
struct MassShared<T, true> {
    float inv_temperature[T::COLUMNS];
    float high[T::CONSUMER_WARPS][T::COLUMNS];  // the logit that is the reference of a warp's sum
    double sum[T::CONSUMER_WARPS][T::COLUMNS];
    float scale;
};

// The shared memory for the factors of hidden states (scaled_hidden.cuh).
template <int COLUMNS, bool EIGHT_BITS>
struct FactorShared {};
template <int COLUMNS>
struct FactorShared<COLUMNS, true> {
    float factors[COLUMNS];  // one for each row of the batch; 0 if the row is not exact in f16
};

template <class T>
struct Shared : ListShared<T::COLUMNS, T::LISTS>,
                CandidateShared<T::COLUMNS, T::CANDIDATES>,
                FactorShared<T::COLUMNS, T::EIGHT_BITS>,
                MassShared<T, T::LOG_Z> {
    Best best[T::COLUMNS];
    Row rows[T::COLUMNS];
    // For each granule of a tile and each row, the largest dot product that surely loses. Before a block's first
    // thresholds, a bound on the granule's noise (initial_threshold.cuh).
    float thresholds[T::GRANULES][T::COLUMNS];
    float nat[T::COLUMNS];    // the dot product that equals 1 nat of noise; 0 if noise does not count
    u32 largest[T::COLUMNS];  // the first tile's likeliest token, as monotone bits
    Contender queue[T::CONSUMER_WARPS][QUEUE];
    u32 queued[T::CONSUMER_WARPS];
    u64 full[8];
    u64 empty[8];
    u64 scouted;
    u64 filtered;
    u32 last;
    Schedule<T> schedule;
    u32 stored_octets;  // a bit for each octet of rows whose logits are stored
};

// The ring of stages, which takes the rest of shared memory.
template <class T>
struct Ring {
    static constexpr int LIMIT = 227 * 1024;
    static constexpr int ALIGNMENT = 1024;
    static constexpr int FIT = (LIMIT - ALIGNMENT - static_cast<int>(sizeof(Shared<T>))) / T::STAGE_BYTES;
    static constexpr int STAGES = FIT < 8 ? FIT : 8;
    static constexpr int SHARED_BYTES = ALIGNMENT + STAGES * T::STAGE_BYTES + static_cast<int>(sizeof(Shared<T>));
    static_assert(STAGES >= 3, "loads must run ahead of the products");

    // The next stage, and the parity of its barriers.
    u32 stage = 0, phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    __device__ __forceinline__ u32 before() const { return stage == 0 ? STAGES - 1 : stage - 1; }
};

// Barriers of part of a block. Barrier 0 belongs to the whole block.
constexpr u32 CONSUMERS_BARRIER = 1;
constexpr u32 PREPARED_BARRIER = 2;
constexpr u32 SCOUTS_BARRIER = 3;
constexpr u32 TURN_THREADS = 256;  // the warpgroup that waits for the turn, and the warpgroup that gives the turn
constexpr u32 TURN_BARRIER = 4;  // the turn of the first warpgroup of consumers; later warpgroups have the next numbers

}  // namespace flash_sampling::fused_hopper
