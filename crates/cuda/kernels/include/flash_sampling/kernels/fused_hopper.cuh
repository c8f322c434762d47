// Fused tiled sampling on Hopper (paper Alg. 1): the weight streams once past the tensor cores, and every tile of logits
// dies in registers.
//
// The plain version:
//
//   for each tile of tokens (units of 64 weight rows)
//       D[tokens, rows] = weight[tokens, hidden] x hidden[rows, hidden]^T
//       for each (token, row) of D
//           best[row] = max(best[row], transform(D) + gumbel(seed, position, draw, token))
//
// What differs, and why the answer stays the same:
//
// 1. Noise does not depend on the matmul. While a tile's products run, three *scout* warps compute the Philox words of
//    the next and leave one bit for every word below a threshold; all other words have noise of at most `noise_bound`.
//    What the scouts cannot do in time the consumers do at the end of a tile.
// 2. So at the end of a tile a token can win only if its bit is set or its dot product is above `losing_dot(best)`.
//    Both are one compare per element; what passes is queued, and the scouts score it exactly while the next tile's
//    products run. `best` may be old: pruning by an older best only scores more tokens.
// 3. A block's first tile has no best yet. It is filtered three times: each row's largest logit gives a first best, which
//    the blocks exchange; then the tokens with bits (of a larger threshold); then all.
// 4. Winners are merged by integer maxima, so neither blocks nor order matter.
// 5. Dot products are one accumulator over hidden in ascending order, whatever the number of rows: a row's bits do not
//    depend on its neighbours.
#pragma once

#include "../perturb.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"

namespace flash_sampling {

// COLUMNS rows of the batch (wgmma's N), UNITS units of 64 tokens for each of the two consumer warpgroups, SLABS slabs of
// 64 hidden elements a stage.
template <int COLUMNS, int UNITS, int SLABS, int CLUSTER>
struct FusedHopper {
    static constexpr int UNIT = 64;
    static constexpr int GRANULE = 16;  // tokens are shared out among blocks in granules
    static constexpr int DEPTH = 64;    // hidden elements of a slab: one 128-byte swizzle row
    static constexpr int TILE_UNITS = 2 * UNITS;
    static constexpr int UNIT_BYTES = UNIT * DEPTH * 2;
    static constexpr int WEIGHT_BYTES = TILE_UNITS * UNIT_BYTES;
    static constexpr int HIDDEN_BYTES = COLUMNS * DEPTH * 2;
    static constexpr int SLAB_BYTES = WEIGHT_BYTES + HIDDEN_BYTES;
    static constexpr int STAGE_BYTES = SLABS * SLAB_BYTES;
    static constexpr int ACCUMULATORS = COLUMNS / 2;  // of a thread and unit
    static constexpr int WORDS = ACCUMULATORS < 32 ? 1 : ACCUMULATORS / 32;
    static constexpr int WORD_BITS = ACCUMULATORS < 32 ? ACCUMULATORS : 32;
    static constexpr int QUEUE = 64;
    static constexpr int CONSUMERS = 256;
    static constexpr int FIRST_CONSUMER = 128;
    static constexpr int SCOUT_WARPS = FIRST_CONSUMER / 32 - 1;
    // The scouts' columns. Three warps are too slow for 256 beside the products of a short hidden dimension, so there the
    // consumers look at the last 64 at the end of a tile.
    static __device__ __forceinline__ u32 scouted_columns(const Call& call) {
        return COLUMNS == 256 && call.hidden < 8192 ? 192 : COLUMNS;
    }
    static constexpr int THREADS = FIRST_CONSUMER + CONSUMERS;
    // What a block gets at its start, dealt out again.
    static constexpr int SCOUT_REGISTERS = 72;
    static constexpr int CONSUMER_REGISTERS = 216;
    static_assert(FIRST_CONSUMER * SCOUT_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= THREADS * (65536 / THREADS / 8 * 8),
                  "raise_registers would wait for ever");

    struct Entry {
        float dot;
        u32 place;  // row of the batch, then token within the tile
    };

    struct Shared {
        Best best[COLUMNS];
        Row rows[COLUMNS];
        float losing[COLUMNS];
        u32 largest[COLUMNS];  // the first tile's largest dot product, as monotone bits
        // Of this tile and the next. In the first tile the second half has the words between the two thresholds.
        u32 marks[2][TILE_UNITS][4][WORDS][32];
        Entry queue[8][QUEUE];
        u32 queued[8];
        u64 full[8];
        u64 empty[8];
        u64 scouted;
        u64 filtered;
        u32 last;
    };

    static constexpr int SHARED_LIMIT = 227 * 1024;
    static constexpr int STAGES_THAT_FIT = (SHARED_LIMIT - 1024 - static_cast<int>(sizeof(Shared))) / STAGE_BYTES;
    static constexpr int STAGES = STAGES_THAT_FIT < 8 ? STAGES_THAT_FIT : 8;
    static constexpr int SHARED_BYTES = 1024 + STAGES * STAGE_BYTES + static_cast<int>(sizeof(Shared));
    static_assert(STAGES >= 3, "loads must run ahead of the products");

    // Which tokens a block works on; a cluster's blocks halve each tile. Clusters share the granules evenly, either in
    // one run each, or tile by tile in turn with one last tile each that shares the rest.
    struct Schedule {
        static constexpr u32 FULL = CLUSTER * TILE_UNITS * (UNIT / GRANULE);  // granules of a whole tile
        u32 tokens, group, groups, rank, waves, rest, tiles;

        __device__ __forceinline__ Schedule(u32 tokens, bool in_turn, u32 group, u32 groups, u32 rank)
            : tokens(tokens), group(group), groups(groups), rank(rank) {
            const u32 granules = (tokens + GRANULE - 1) / GRANULE;
            waves = in_turn ? granules / (groups * FULL) : 0;
            rest = granules - waves * groups * FULL;
            tiles = waves + (share(group + 1) - share(group) + FULL - 1) / FULL;
        }
        // The granules of the rest before a cluster's own.
        __device__ __forceinline__ u32 share(u32 of) const { return static_cast<u32>(static_cast<u64>(rest) * of / groups); }
        // The first token of a tile, and how many there are.
        __device__ __forceinline__ void tile(u32 t, u32& start, u32& size) const {
            u32 from = (t * groups + group) * FULL, to = from + FULL;
            if (t >= waves) {
                const u32 whole = waves * groups * FULL;
                from = whole + share(group) + (t - waves) * FULL;
                to = min(from + FULL, whole + share(group + 1));
            }
            const u32 half = CLUSTER == 2 ? (to - from + 1) / 2 : to - from;
            start = (from + (rank ? half : 0)) * GRANULE;
            size = min((rank ? to - from - half : half) * GRANULE, tokens - min(start, tokens));
        }
        // The block that works on a token.
        static __device__ __forceinline__ u32 owner(u32 tokens, bool in_turn, u32 groups, u32 token) {
            Schedule schedule(tokens, in_turn, 0, groups, 1);
            const u32 granule = token / GRANULE, whole = schedule.waves * groups * FULL;
            u32 t;
            if (granule < whole) {
                schedule.group = granule / FULL % groups;
                t = granule / FULL / groups;
            } else {
                schedule.group = static_cast<u32>(((granule - whole + 1ull) * groups - 1) / schedule.rest);
                t = schedule.waves + (granule - whole - schedule.share(schedule.group)) / FULL;
            }
            if (CLUSTER == 1) return schedule.group;
            u32 start, size;
            schedule.tile(t, start, size);
            return 2 * schedule.group + (token >= start);
        }
        // Measured: rows of the weight of 16 KiB stream faster by turns, of 8 KiB in runs.
        static __device__ __forceinline__ bool by_turns(const Call& call) { return call.hidden >= 8192; }
    };

    // The tensors as boxes of one slab.
    struct Maps {
        ptx::TensorMap weight;   // 64 tokens
        ptx::TensorMap granule;  // 16 tokens, for the end of a tile
        ptx::TensorMap hidden;   // COLUMNS / CLUSTER rows
    };

    template <ptx::Operand OPERAND>
    static __device__ __forceinline__ void block(const Call& call, const Maps& maps, u8* memory);
    static __device__ __forceinline__ void load(const Call& call, const Maps& maps, u8* stages, Shared& shared,
                                                const Schedule& schedule);
    static __device__ __forceinline__ void leave_marks(Shared& shared, u32 t, const Words& words, u32 quad, u32 column,
                                                       u32 shift, u32 size);
    static __device__ __forceinline__ void scan(const Call& call, Shared& shared, u32 t, u32 first, u32 size, u32 slab);
    static __device__ __forceinline__ void prepare(const Call& call, Shared& shared);
    static __device__ __forceinline__ void scout(const Call& call, Shared& shared, const Schedule& schedule);
    template <ptx::Operand OPERAND>
    static __device__ __forceinline__ void consume(const Call& call, const u8* stages, Shared& shared,
                                                   const Schedule& schedule);
};

// Words below these leave a mark: about one in 1024 tokens, and one in 128 in a block's first tile.
constexpr u32 MARK_WORD = 1u << 22;
constexpr u32 FIRST_MARK_WORD = 1u << 25;
// -ln(word 2^-32), rounded up.
constexpr float MARK_NOISE_BOUND = 6.931473f;
constexpr float FIRST_MARK_NOISE_BOUND = 4.852032f;

__device__ __forceinline__ u64 load_relaxed(const u64* pointer) {
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(pointer) : "memory");
    return value;
}

// The threshold of a row from its best winner so far.
__device__ __forceinline__ float losing_dot_of(const Call& call, const Row& row, u64 key, float noise_bound, u32 next_token) {
    if (key == 0) return -f32_infinity();
    const Winner winner = from_ordered_bits(key);
    const bool plain = row.inv_temperature == 1.0f && row.biases == 0 && call.head.scale == 1.0f && call.head.soft_cap == 0.0f;
    // An equal logit of a later token loses a greedy row.
    if (row.greedy && plain && winner.token < next_token) return winner.score;
    return losing_dot(winner.score, row.greedy ? 0.0f : noise_bound, call.head, row);
}

// The same as below in a block's first tile, when every block has news: waits for what the others have found.
__device__ __forceinline__ float first_losing_dot(const Call& call, const Row* rows, const Best* best, u32 column,
                                                  float noise_bound, u32 next_token) {
    if (column >= call.row_count) return bits_to_f32(0x7f7fffffu);
    const u64 mine = best[column].key;
    const u64 theirs = atomicMax(&call.best[column], mine);
    return losing_dot_of(call, rows[column], mine > theirs ? mine : theirs, noise_bound, next_token);
}

// Tells the other blocks what this one has found for a row; returns the threshold from what all have found.
__device__ __forceinline__ float refreshed_losing_dot(const Call& call, const Row* rows, const Best* best, u32 column,
                                                      float noise_bound, u32 next_token) {
    if (column >= call.row_count) return bits_to_f32(0x7f7fffffu);
    const Row& row = rows[column];
    const u64 mine = *const_cast<volatile const u64*>(&best[column].key);
    const u64 theirs = load_relaxed(&call.best[column]);
    if (mine > theirs) atomicMax(&call.best[column], mine);
    return losing_dot_of(call, row, mine > theirs ? mine : theirs, noise_bound, next_token);
}

// One thread keeps the ring full.
template <int COLUMNS, int UNITS, int SLABS, int CLUSTER>
__device__ __forceinline__ void FusedHopper<COLUMNS, UNITS, SLABS, CLUSTER>::load(
    const Call& call, const Maps& maps, u8* stages, Shared& shared, const Schedule& schedule) {
        const u64 stream = ptx::policy_evict_first();
    const u64 keep = ptx::policy_evict_last();
    const u32 steps = (call.hidden + SLABS * DEPTH - 1) / (SLABS * DEPTH);
    u32 stage = 0, phase = 0;
    for (u32 t = 0; t < schedule.tiles; ++t) {
        u32 start, size;
        schedule.tile(t, start, size);
        const u32 granules = (size + GRANULE - 1) / GRANULE;
        const u32 units = granules / (UNIT / GRANULE);
        for (u32 step = 0; step < steps; ++step) {
            ptx::mbarrier_wait(&shared.empty[stage], phase ^ 1);
            u64* const full = &shared.full[stage];
            ptx::mbarrier_arrive_expect(full, SLABS * (granules * (UNIT_BYTES / (UNIT / GRANULE)) + HIDDEN_BYTES));
            u8* to = stages + stage * STAGE_BYTES;
            // The slabs of a unit follow each other: neighbours in device memory.
            for (u32 u = 0; u < units; ++u)
#pragma unroll
                for (int slab = 0; slab < SLABS; ++slab)
                    ptx::copy_box(to + slab * SLAB_BYTES + u * UNIT_BYTES, &maps.weight, full, (step * SLABS + slab) * DEPTH,
                                  start + u * UNIT, stream);
            for (u32 g = units * (UNIT / GRANULE); g < granules; ++g)
#pragma unroll
                for (int slab = 0; slab < SLABS; ++slab)
                    ptx::copy_box(to + slab * SLAB_BYTES + g * (UNIT_BYTES / (UNIT / GRANULE)), &maps.granule, full,
                                  (step * SLABS + slab) * DEPTH, start + g * GRANULE, stream);
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab) {
                u8* const at = to + slab * SLAB_BYTES + WEIGHT_BYTES;
                const u32 depth = (step * SLABS + slab) * DEPTH;
                if (CLUSTER == 1)
                    ptx::copy_box(at, &maps.hidden, full, depth, 0, keep);
                else
                    ptx::copy_box_multicast(at + schedule.rank * (HIDDEN_BYTES / 2), &maps.hidden, full, depth,
                                            schedule.rank * (COLUMNS / 2), 3, keep);
            }
            if (++stage == STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
    }
}

// Scouts and consumers fill in what they share; the first loads are under way meanwhile.
template <int COLUMNS, int UNITS, int SLABS, int CLUSTER>
__device__ __forceinline__ void FusedHopper<COLUMNS, UNITS, SLABS, CLUSTER>::prepare(const Call& call, Shared& shared) {
    constexpr u32 HANDS = THREADS - 32;
    const u32 hand = threadIdx.x - 32;
    for (u32 i = hand; i < COLUMNS; i += HANDS) {
        shared.best[i] = {0, 0.0f, 0};
        shared.largest[i] = 0;
    }
    for (u32 i = hand; i < sizeof(shared.marks) / 4; i += HANDS) (&shared.marks[0][0][0][0][0])[i] = 0;
    const u32 words = call.row_count * (sizeof(Row) / 8);
    for (u32 i = hand; i < words; i += HANDS)
        reinterpret_cast<u64*>(shared.rows)[i] = reinterpret_cast<const u64*>(call.rows)[i];
    ptx::named_barrier(2, HANDS);
}

// Marks the small words of a quad of tokens. `shift` is the first token of the tile within its first quad.
template <int COLUMNS, int UNITS, int SLABS, int CLUSTER>
__device__ __forceinline__ void FusedHopper<COLUMNS, UNITS, SLABS, CLUSTER>::leave_marks(
    Shared& shared, u32 t, const Words& words, u32 quad, u32 column, u32 shift, u32 size) {
    const u32 threshold = t == 0 ? FIRST_MARK_WORD : MARK_WORD;
    if (min(min(words.w[0], words.w[1]), min(words.w[2], words.w[3])) >= threshold) return;
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
        const u32 m = quad * 4 + k - shift;  // token within the tile; wraps before its first
        if (words.w[k] < threshold && m < size) {
            const u32 bit = column / 8 * 4 + column % 2 + m % 16 / 8 * 2;
            const u32 owner = m % 8 * 4 + column % 8 / 2;
            const u32 half = t == 0 ? words.w[k] >= MARK_WORD : t & 1;
            atomicOr(&shared.marks[half][m / 64][m % 64 / 16][bit / 32][owner], 1u << bit % 32);
        }
    }
}

// Marks the small words of a warp's slab of 16 tokens in the columns that are not the scouts'. Nothing runs beside it, so
// wide multiplications are the fast ones here.
template <int COLUMNS, int UNITS, int SLABS, int CLUSTER>
__device__ __forceinline__ void FusedHopper<COLUMNS, UNITS, SLABS, CLUSTER>::scan(const Call& call, Shared& shared, u32 t,
                                                                                       u32 first, u32 size, u32 slab) {
    const u32 base = call.first_token + first, shift = base & 3;
    for (u32 column = scouted_columns(call) + threadIdx.x % 32; column < call.row_count; column += 32) {
        const Row& row = shared.rows[column];
        if (row.greedy) continue;
        const Words origin = counter(0, row.draw, row.position, domain_code(Domain::Token));
#pragma unroll 1
        for (u32 quad = (slab + shift) >> 2; quad <= (slab + 15 + shift) >> 2; quad += 4) {
            constexpr u32 AT_ONCE = 4;
            Words w[AT_ONCE];
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; ++j) w[j] = {{(base >> 2) + quad + j, origin.w[1], origin.w[2], origin.w[3]}};
            u32 k0 = static_cast<u32>(row.seed), k1 = static_cast<u32>(row.seed >> 32);
#pragma unroll 2
            for (u32 round = 0; round < 10; ++round) {
#pragma unroll
                for (u32 j = 0; j < AT_ONCE; ++j) w[j] = philox4x32_round(w[j], k0, k1);
                k0 += PHILOX_W32_0;
                k1 += PHILOX_W32_1;
            }
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; ++j)
                if (quad + j <= (slab + 15 + shift) >> 2) leave_marks(shared, t, w[j], quad + j, column, shift, size);
        }
    }
    __syncwarp();
}

// Marks the words of each tile that are small enough to matter, and refreshes the thresholds.
template <int COLUMNS, int UNITS, int SLABS, int CLUSTER>
__device__ __forceinline__ void FusedHopper<COLUMNS, UNITS, SLABS, CLUSTER>::scout(const Call& call, Shared& shared,
                                                                            const Schedule& schedule) {
    constexpr u32 ACROSS = COLUMNS < 32 ? COLUMNS : 32;  // columns of a warp at a time
    constexpr u32 DOWN = 32 / ACROSS;                    // quads of tokens of a warp at a time
    constexpr u32 CHUNK = 8;                             // quads of a lane at a time
    constexpr u32 AT_ONCE = 2;                                     // blocks of a lane that hide each other's latency
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 1, hand = threadIdx.x - 32;
    const u32 across = scouted_columns(call) / ACROSS;
    for (u32 t = 0; t < schedule.tiles; ++t) {
        u32 first, size;
        schedule.tile(t, first, size);
        // Quads of four global token ids share a Philox block; a shard may begin within one.
        const u32 base = call.first_token + first;
        const u32 first_quad = base >> 2;
        const u32 quads = size ? ((base + size - 1) >> 2) - first_quad + 1 : 0;
        const u32 parts = (quads + CHUNK * DOWN - 1) / (CHUNK * DOWN);
        // The first tile uses both halves of the marks; after it the scouts run ahead of the filter by a tile.
        if (t == 1) ptx::mbarrier_wait(&shared.filtered, 0);
        for (u32 item = warp; item < parts * across; item += SCOUT_WARPS) {
            const u32 column = item % across * ACROSS + lane % ACROSS;
            if (column >= call.row_count) continue;
            const Row& row = shared.rows[column];
            if (row.greedy) continue;
            const u32 key0 = static_cast<u32>(row.seed), key1 = static_cast<u32>(row.seed >> 32);
            const Words origin = counter(0, row.draw, row.position, domain_code(Domain::Token));
            // Half of the first two rounds is the same for all tokens of a row.
            const u64 fixed1 = mul_wide(PHILOX_M4x32_1, origin.w[2]);
            const u64 fixed0 = mul_wide(PHILOX_M4x32_0, static_cast<u32>(fixed1 >> 32) ^ origin.w[1] ^ key0);
            const u32 in0 = static_cast<u32>(fixed1) ^ (key0 + PHILOX_W32_0);
            const u32 in2 = static_cast<u32>(fixed0 >> 32) ^ (key1 + PHILOX_W32_1);
            const u32 from = item / across * CHUNK * DOWN + lane / ACROSS;
#pragma unroll 1
            for (u32 i = 0; i < CHUNK; i += AT_ONCE) {
                Words w[AT_ONCE];
#pragma unroll
                for (u32 j = 0; j < AT_ONCE; ++j) {
                    const u64 product = mul_wide(PHILOX_M4x32_0, first_quad + from + (i + j) * DOWN);
                    const u32 second = static_cast<u32>(product >> 32) ^ origin.w[3] ^ key1;
                    w[j] = {{narrow_mul_high(PHILOX_M4x32_1, second) ^ in0, PHILOX_M4x32_1 * second,
                             static_cast<u32>(product) ^ in2, static_cast<u32>(fixed0)}};
                }
                u32 k0 = key0 + 2 * PHILOX_W32_0, k1 = key1 + 2 * PHILOX_W32_1;
#pragma unroll 4
                for (u32 round = 2; round < 10; ++round) {
#pragma unroll
                    for (u32 j = 0; j < AT_ONCE; ++j)
                        w[j] = narrow_philox4x32_round(w[j], k0, k1);
                    k0 += PHILOX_W32_0;
                    k1 += PHILOX_W32_1;
                }
#pragma unroll
                for (u32 j = 0; j < AT_ONCE; ++j) {
                    const u32 quad = from + (i + j) * DOWN;
                    if (quad < quads) leave_marks(shared, t, w[j], quad, column, base & 3, size);
                }
            }
        }
        if (t > 0) {
            ptx::mbarrier_wait(&shared.filtered, (t - 1) & 1);
            // Score what the tile before has left in the queues.
            u32 before, unused;
            schedule.tile(t - 1, before, unused);
            const u32 queue = hand % 8;
            for (u32 slot = hand / 8; slot < shared.queued[queue]; slot += SCOUT_WARPS * 4) {
                const Entry entry = shared.queue[queue][slot];
                offer(call, shared.rows, shared.best, entry.place & 0xffff, call.first_token + before + (entry.place >> 16), entry.dot);
            }
            ptx::named_barrier(3, SCOUT_WARPS * 32);
            for (u32 column = hand; column < COLUMNS; column += 32 * SCOUT_WARPS)
                shared.losing[column] = refreshed_losing_dot(call, shared.rows, shared.best, column, MARK_NOISE_BOUND, base);
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&shared.scouted);
    }
}

// A register picked by a run-time index through selects; LENGTH is a power of two.
template <int FIRST, int LENGTH, int ROWS, int COLS>
__device__ __forceinline__ float pick(const float (&d)[ROWS][COLS], u32 index) {
    if constexpr (LENGTH == 1) {
        return d[FIRST / COLS][FIRST % COLS];
    } else {
        const float low = pick<FIRST, LENGTH / 2>(d, index);
        const float high = pick<FIRST + LENGTH / 2, LENGTH / 2>(d, index);
        return index & (LENGTH / 2) ? high : low;
    }
}

// Raises the largest dot product of each column (monotone bits) by a warp's accumulators. Eight lanes hold the rows of
// a column: they halve the columns among themselves three times, sixteen columns of a lane at a time.
template <int COLUMNS, int UNITS, int ACCUMULATORS>
__device__ __forceinline__ void raise_largest(const float (&d)[UNITS][ACCUMULATORS], const u32 (&real)[UNITS], u32* largest,
                                              u32 lane) {
    constexpr int HELD = ACCUMULATORS / 2;  // columns of a lane
    constexpr int AT_ONCE = HELD < 16 ? HELD : 16;
#pragma unroll
    for (int first = 0; first < HELD; first += AT_ONCE) {
        float m[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = (first + i) / 2 * 4 + i % 2;
            m[i] = -f32_infinity();
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                m[i] = fmaxf(m[i], real[u] & 1 ? d[u][at] : m[i]);
                m[i] = fmaxf(m[i], real[u] & 4 ? d[u][at + 2] : m[i]);
            }
        }
        u32 column = first / 2 * 8 + lane % 4 * 2;
        int held = AT_ONCE;
#pragma unroll
        for (int apart = 16; apart >= 4; apart /= 2) {
            const bool upper = lane & apart;
            if (held > 2) {
                held /= 2;
#pragma unroll
                for (int i = 0; i < AT_ONCE / 2; ++i) {
                    if (i < held) {
                        const float other = __shfl_xor_sync(0xffffffffu, upper ? m[i] : m[i + held], apart);
                        m[i] = fmaxf(upper ? m[i + held] : m[i], other);
                    }
                }
                column += upper ? held / 2 * 8 : 0;
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i) m[i] = fmaxf(m[i], __shfl_xor_sync(0xffffffffu, m[i], apart));
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) atomicMax(&largest[column + i], to_monotone_bits(m[i]));
    }
}

template <int COLUMNS, int UNITS, int SLABS, int CLUSTER>
template <ptx::Operand OPERAND>
__device__ __forceinline__ void FusedHopper<COLUMNS, UNITS, SLABS, CLUSTER>::consume(const Call& call, const u8* stages,
                                                                              Shared& shared, const Schedule& schedule) {
    const u32 thread = threadIdx.x - FIRST_CONSUMER;
    const u32 lane = thread % 32, warp = thread / 32;  // of all consumers
    const u32 group = warp / 4;
    const u32 steps = (call.hidden + SLABS * DEPTH - 1) / (SLABS * DEPTH);
    Entry* const queue = shared.queue[warp];
    u32 stage = 0, phase = 0;
    float d[UNITS][ACCUMULATORS];

    for (u32 t = 0; t < schedule.tiles; ++t) {
        u32 first, size;
        schedule.tile(t, first, size);

        // The products: one accumulator over hidden, ascending.
        for (u32 step = 0; step < steps; ++step) {
            ptx::mbarrier_wait(&shared.full[stage], phase);
            const u8* const at = stages + stage * STAGE_BYTES;
            const u64 b = ptx::operand_descriptor(at + WEIGHT_BYTES);
            const u64 a = ptx::operand_descriptor(at + group * UNIT_BYTES);
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < SLABS * DEPTH / 16; ++k) {
                const u64 offset = k / 4 * (SLAB_BYTES >> 4) + k % 4 * ptx::DESCRIPTOR_STEP;
#pragma unroll
                for (int u = 0; u < UNITS; ++u)
                    ptx::Wgmma<COLUMNS, OPERAND>::multiply(d[u], a + u * (2 * UNIT_BYTES >> 4) + offset, b + offset, step + k > 0);
            }
            ptx::wgmma_commit();
            // The stage before this one has been read.
            ptx::wgmma_wait<1>();
            if (step > 0 && lane < CLUSTER) ptx::mbarrier_arrive_cluster(&shared.empty[stage == 0 ? STAGES - 1 : stage - 1], lane);
            if (++stage == STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
        ptx::wgmma_wait<0>();
        if (lane < CLUSTER) ptx::mbarrier_arrive_cluster(&shared.empty[stage == 0 ? STAGES - 1 : stage - 1], lane);

        // Which of the thread's two rows of each unit are tokens, as bits of a word of accumulators.
        u32 real[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const u32 m = (2 * u + group) * UNIT + warp % 4 * 16 + lane / 4;
            real[u] = (m < size ? 0x33333333u : 0u) | (m + 8 < size ? 0xccccccccu : 0u);
            if (call.bias) {
                const float low = m < size ? call.bias[first + m] : 0.0f;
                const float high = m + 8 < size ? call.bias[first + m + 8] : 0.0f;
#pragma unroll
                for (int i = 0; i < ACCUMULATORS; ++i) d[u][i] = add_rn(d[u][i], i & 2 ? high : low);
            }
        }

        u32 pending[UNITS][WORDS];
        // Puts what is pending into a queue, and scores the queue exactly, so that no lane idles.
        u32 queued = 0;
        const auto flush = [&] {
            __syncwarp();
            for (u32 e = lane; e < queued; e += 32) {
                const Entry entry = queue[e];
                offer(call, shared.rows, shared.best, entry.place & 0xffff, call.first_token + first + (entry.place >> 16), entry.dot);
            }
            __syncwarp();
            queued = 0;
        };
        const auto settle = [&] {
            for (;;) {
                u32 index = 0;
                bool found = false;
#pragma unroll
                for (int u = 0; u < UNITS; ++u) {
#pragma unroll
                    for (int w = 0; w < WORDS; ++w) {
                        if (!found && pending[u][w]) {
                            found = true;
                            index = u * ACCUMULATORS + w * 32 + (__ffs(pending[u][w]) - 1);
                            pending[u][w] &= pending[u][w] - 1;
                        }
                    }
                }
                const u32 ballot = __ballot_sync(0xffffffffu, found);
                if (ballot == 0) break;
                if (queued + __popc(ballot) > QUEUE) flush();
                const float dot = pick<0, UNITS * ACCUMULATORS>(d, index);
                if (found) {
                    const u32 i = index % ACCUMULATORS, unit = index / ACCUMULATORS * 2 + group;
                    const u32 column = i / 4 * 8 + lane % 4 * 2 + i % 2;
                    const u32 m = unit * UNIT + warp % 4 * 16 + lane / 4 + i % 4 / 2 * 8;
                    queue[queued + __popc(ballot & ((1u << lane) - 1))] = {dot, m << 16 | column};
                }
                queued += __popc(ballot);
            }
        };

        if (COLUMNS == 256 && scouted_columns(call) < call.row_count) {
#pragma unroll 1
            for (u32 u = 0; u < UNITS; ++u) scan(call, shared, t, first, size, (2 * u + group) * UNIT + warp % 4 * 16);
            // A shard may begin within a quad: the neighbours' marks too.
            if ((call.first_token + first) & 3) ptx::named_barrier(1, CONSUMERS);
        }
        ptx::mbarrier_wait(&shared.scouted, t & 1);
        // The first tile is filtered three times: its largest dot products give a first best, then the tokens with hints
        // are filtered by that, then all of them.
        for (u32 pass = t == 0 ? 0 : 2; pass < 3; ++pass) {
            if (pass == 0) {
                raise_largest<COLUMNS>(d, real, shared.largest, lane);
                ptx::named_barrier(1, CONSUMERS);
                for (u32 column = thread; column < COLUMNS; column += CONSUMERS) {
                    // The next smaller float, so that the largest is above it.
                    const float below = next_below(from_monotone_bits(max(shared.largest[column], 0x007fffffu)));
                    shared.losing[column] = column < call.row_count ? below : bits_to_f32(0x7f7fffffu);
                }
                ptx::named_barrier(1, CONSUMERS);
            }
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
#pragma unroll
                for (int w = 0; w < WORDS; ++w) {
                    // Is any dot product above what surely loses?
                    bool above = false;
#pragma unroll
                    for (int j = 0; j < WORD_BITS / 4; ++j) {
                        const float2 limit =
                            *reinterpret_cast<const float2*>(&shared.losing[w * 64 + j * 8 + lane % 4 * 2]);
#pragma unroll
                        for (int e = 0; e < 4; ++e) above |= !(d[u][w * 32 + j * 4 + e] <= (e & 1 ? limit.y : limit.x));
                    }
                    u32 bits = 0, allowed = ~0u;
                    if (pass == 1) {
                        u32& hints = shared.marks[1][2 * u + group][warp % 4][w][lane];
                        allowed = hints;
                        hints = 0;
                    }
                    if (pass == (t == 0 ? 1 : 2)) {
                        u32& marks = shared.marks[t & 1][2 * u + group][warp % 4][w][lane];
                        bits = marks;
                        if (bits) marks = 0;
                    }
                    if (above && allowed) {
                        u32 mask = 0;
#pragma unroll
                        for (int j = 0; j < WORD_BITS / 4; ++j) {
                            const float2 losing = *reinterpret_cast<const float2*>(&shared.losing[w * 64 + j * 8 + lane % 4 * 2]);
#pragma unroll
                            for (int e = 0; e < 4; ++e)
                                if (!(d[u][w * 32 + j * 4 + e] <= (e & 1 ? losing.y : losing.x))) mask |= 1u << (j * 4 + e);
                        }
                        bits |= mask & allowed;
                    }
                    pending[u][w] = bits & real[u];
                }
            }
            u32 any = 0;
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
#pragma unroll
                for (int w = 0; w < WORDS; ++w) any |= pending[u][w];
            if (__any_sync(0xffffffffu, any)) settle();
            // The scouts score what the last pass of a tile leaves, while the next one's products run.
            if (pass < 2 || t + 1 == schedule.tiles) flush();
            if (pass + 1 < 3) {
                ptx::named_barrier(1, CONSUMERS);
                for (u32 column = thread; column < COLUMNS; column += CONSUMERS)
                    shared.losing[column] = first_losing_dot(call, shared.rows, shared.best, column,
                                                             pass == 0 ? MARK_NOISE_BOUND : FIRST_MARK_NOISE_BOUND,
                                                             call.first_token + first);
                ptx::named_barrier(1, CONSUMERS);
            }
        }
        __syncwarp();
        if (lane == 0) {
            shared.queued[warp] = queued;
            ptx::mbarrier_arrive(&shared.filtered);
        }
    }

    // The block's own logits, then the last block to arrive concludes and leaves the scratch as it found it.
    ptx::named_barrier(1, CONSUMERS);
    for (u32 column = thread; column < call.row_count; column += CONSUMERS) {
        if (shared.best[column].key) atomicMax(&call.best[column], shared.best[column].key);
        call.logits[static_cast<u64>(blockIdx.x) * call.row_count + column] = shared.best[column].logit;
    }
    __threadfence();
    ptx::named_barrier(1, CONSUMERS);
    if (thread == 0) shared.last = atomicAdd(call.arrived, 1u) == gridDim.x - 1;
    ptx::named_barrier(1, CONSUMERS);
    if (!shared.last) return;
    __threadfence();
    for (u32 column = thread; column < call.row_count; column += CONSUMERS) {
        const u64 best = load_relaxed(&call.best[column]);
        const u64 invalid = load_relaxed(&call.invalid[column]);
        float logit = 0.0f;
        if (best) {
            const u32 token = from_ordered_bits(best).token - call.first_token;
            const u32 owner = Schedule::owner(call.tokens, Schedule::by_turns(call), gridDim.x / CLUSTER, token);
            logit = __ldcg(&call.logits[static_cast<u64>(owner) * call.row_count + column]);
        }
        call.draws[column] = conclude(best, invalid, logit);
        call.best[column] = 0;
        call.invalid[column] = ~0ull;
    }
    if (thread == 0) *call.arrived = 0;
}

template <int COLUMNS, int UNITS, int SLABS, int CLUSTER>
template <ptx::Operand OPERAND>
__device__ __forceinline__ void FusedHopper<COLUMNS, UNITS, SLABS, CLUSTER>::block(const Call& call, const Maps& maps,
                                                                            u8* memory) {
    u8* const stages = memory + (1024 - ptx::shared_address(memory) % 1024) % 1024;
    Shared& shared = *reinterpret_cast<Shared*>(stages + STAGES * STAGE_BYTES);
    const u32 rank = CLUSTER == 2 ? __shfl_sync(0xffffffffu, ptx::cluster_rank(), 0) : 0;
    const Schedule schedule(call.tokens, Schedule::by_turns(call), blockIdx.x / CLUSTER, gridDim.x / CLUSTER, rank);

    if (threadIdx.x == 0) {
        ptx::prefetch_map(&maps.weight);
        ptx::prefetch_map(&maps.hidden);
        for (int s = 0; s < STAGES; ++s) {
            ptx::mbarrier_init(&shared.full[s], 1);
            ptx::mbarrier_init(&shared.empty[s], 8 * CLUSTER);
        }
        ptx::mbarrier_init(&shared.scouted, SCOUT_WARPS);
        ptx::mbarrier_init(&shared.filtered, 8);
        ptx::mbarrier_init_fence();
    }
    __syncthreads();
    if (CLUSTER == 2) ptx::cluster_sync();

    // The same in every lane, and known to be: the compiler serialises wgmma behind branches that may diverge.
    const u32 warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (warpgroup < FIRST_CONSUMER / 128) {
        ptx::lower_registers<SCOUT_REGISTERS>();
        if (threadIdx.x == 0) load(call, maps, stages, shared, schedule);
        if (threadIdx.x >= 32) {
            prepare(call, shared);
            scout(call, shared, schedule);
        }
    } else {
        ptx::raise_registers<CONSUMER_REGISTERS>();
        prepare(call, shared);
        consume<OPERAND>(call, stages, shared, schedule);
    }
    // No block leaves while its peer may still write here or arrive here.
    if (CLUSTER == 2) {
        __syncwarp();
        ptx::cluster_sync();
    }
}

}  // namespace flash_sampling
