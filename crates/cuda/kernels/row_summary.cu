// Summaries of rows from their logits, in one pass: the masses of core's MassHistogram, integer for integer, the sum of them with
// the bits of core's, and the largest logits. The logits are transformed ones, or raw ones, which the kernel transforms, checks,
// and stores on request.
//
// A block holds a part of a row in registers, sums it in bins that it numbers from its largest logit down, and lists the tokens
// that may be among the largest of the row. The last block of a row adds the bins of all blocks, and sorts the tokens that reach
// the bin of the last requested one. Integer sums do not depend on the order of the blocks.
#include "flash_sampling/element.cuh"
#include "flash_sampling/perturb.cuh"
#include "flash_sampling/scan/stored.cuh"
#include "flash_sampling/summary/mass_histogram.cuh"

using namespace flash_sampling;

constexpr u32 THREADS = 512;
// The tokens of a thread, and of a block.
constexpr u32 EACH = 16;
constexpr u32 TOKENS = THREADS * EACH;
// The sums of a bin. Lanes that add to different ones do not collide.
constexpr u32 COPIES = 8;
// The most tokens that a block lists, and that the last block sorts.
constexpr u32 QUEUE = 512;
constexpr u32 SORTED = 1024;
// The mass of one token is below this.
constexpr float LARGEST_UNITS = 1216800000.0f;
// As the number of a bin: below the last one.
constexpr u32 ALL_TOKENS = MASS_BINS;
// As the length of a list: too many tokens may belong to it.
constexpr u32 LOST = ~0u;
static_assert(THREADS == MASS_BINS, "a thread has a bin");

// A request about a row.
struct SummaryRequest {
    u32 limit;   // largest logits
    u32 stores;  // whether transformed logits are stored
    u32 masses;  // whether the masses are written, beside their sum
    u32 padding;
};
FS_LAYOUT(SummaryRequest, 16, FS_AT(limit, 0) && FS_AT(stores, 4) && FS_AT(masses, 8) && FS_AT(padding, 12));

// The summary of a row: its mass is `sum * e^max`.
struct SummaryResult {
    u64 invalid;  // the first bad logit; all ones before, and without one
    double sum;
    float max;   // edge of the bin of the largest logit; -inf = no finite logit
    u32 listed;  // largest logits, at most as many as requested; LOST
};
FS_LAYOUT(SummaryResult, 24, FS_AT(invalid, 0) && FS_AT(sum, 8) && FS_AT(max, 16) && FS_AT(listed, 20));

// The masses of a part of a row.
struct PartMasses {
    float top;  // edge of the bin of the largest logit; -inf = no finite logit
    u32 count;  // bins, from the top down
    u64 bins[MASS_BINS];
};
static_assert(sizeof(PartMasses) == 8 + 8 * MASS_BINS, "the host sizes the memory");

// Between launches zeros.
struct SummaryCounters {
    u32 arrived;  // blocks
    u32 listed;   // tokens of all blocks
};
static_assert(sizeof(SummaryCounters) == 8, "the host sizes the memory");

struct RowSummaries {
    StoredLogits stored;             // [rows, tokens] written on request; may be the raw logits
    const void* raw;                 // [raw rows, tokens]
    const u32* sources;              // [rows] the raw row of each; null = its number
    const Row* rows;                 // [rows] transforms; null = the logits are transformed and valid
    const SummaryRequest* requests;  // [rows]
    SummaryResult* results;          // [rows]
    KeptToken* top;                  // [rows, top_stride] the largest logits, the largest first
    u64* words;                      // [rows, 1 + MASS_BINS] as core's to_words has them, of rows that request masses
    PartMasses* parts;               // [rows, blocks] scratch
    KeptToken* listed;               // [rows, LISTED] scratch
    SummaryCounters* counters;       // [rows]
    const double* weights;           // [MASS_BINS] core's weights of the bins below the highest
    u64 raw_stride;                  // elements
    Element element;
    u32 top_stride;

    static constexpr u32 LISTED = 4096;
};
FS_LAYOUT(RowSummaries, 128,
          FS_AT(stored, 0) && FS_AT(raw, 24) && FS_AT(sources, 32) && FS_AT(rows, 40) && FS_AT(requests, 48) && FS_AT(results, 56) &&
          FS_AT(top, 64) && FS_AT(words, 72) && FS_AT(parts, 80) && FS_AT(listed, 88) && FS_AT(counters, 96) &&
          FS_AT(weights, 104) && FS_AT(raw_stride, 112) && FS_AT(element, 120) && FS_AT(top_stride, 124));

// The sums of a part's bins: `high` counts how often a copy of `low` has passed 2^32.
struct PartSums {
    u32 low[MASS_BINS * COPIES];
    u32 high[MASS_BINS];
};

struct Queued {
    float logit;
    u32 token;  // of the part
};

// For the last block.
struct RowShared {
    double terms[MASS_BINS];  // of the sum
    // Parts, as many at a time as there are threads: the bin of their top, and their bins.
    u32 above[THREADS], counts[THREADS];
    u64 keys[SORTED];
    float logits[SORTED];
};

struct Shared {
    union {
        float logits[TOKENS];
        PartSums sums;
        Queued queue[QUEUE];
        RowShared row;
    };
    u32 fewest[MASS_BINS];  // tokens that a bin's mass cannot have come from fewer of
    u32 largest[THREADS / 32];  // monotone bits
    u32 count;    // bins
    u32 reached;  // the last bin that is listed
    u32 queued;   // tokens
    u32 listed_at;
    u32 sorted;   // tokens
    bool is_last;
};

// The largest of all threads. Contains a barrier.
__device__ __forceinline__ float largest_of_block(float own, Shared& shared) {
    const u32 largest = __reduce_max_sync(0xffffffffu, to_monotone_bits(own));
    if (threadIdx.x % 32 == 0) shared.largest[threadIdx.x / 32] = largest;
    __syncthreads();
    const u32 lane = threadIdx.x % 32;
    return from_monotone_bits(__reduce_max_sync(0xffffffffu, lane < THREADS / 32 ? shared.largest[lane] : 0));
}

// A number of tokens that a mass in one bin cannot have come from fewer of.
__device__ __forceinline__ u32 fewest_tokens(u64 units) {
    // The factor lowers the quotient by more than its rounding.
    return static_cast<u32>(ceilf(mul_rn(static_cast<float>(units >> 10), 0.999999f * 1024.0f / LARGEST_UNITS)));
}

// Finds the first bin from the top down by which `limit` tokens must have come. One warp calls this.
__device__ __forceinline__ u32 bin_reached(const u32 (&fewest)[MASS_BINS], u32 limit) {
    constexpr u32 LANE_BINS = MASS_BINS / 32;
    const u32 lane = threadIdx.x % 32;
    u32 own = 0;
    for (u32 i = 0; i < LANE_BINS; ++i) own += fewest[lane * LANE_BINS + i];
    u32 before = own;
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(0xffffffffu, before, step);
        if (lane >= step) before += other;
    }
    before -= own;
    u32 reached = ALL_TOKENS;
    for (u32 i = 0; i < LANE_BINS && reached == ALL_TOKENS; ++i) {
        before += fewest[lane * LANE_BINS + i];
        if (before >= limit) reached = lane * LANE_BINS + i;
    }
    // The smallest, as the largest of complements.
    return ~__reduce_max_sync(0xffffffffu, ~reached);
}

// The number of a logit's bin from the top down; ALL_TOKENS below the last one.
__device__ __forceinline__ u32 bin_below(float top, float edge) {
    const float below = sub_rn(top, edge);
    return below < MASS_WINDOW ? static_cast<u32>(mul_rn(below, 8.0f)) : ALL_TOKENS;
}

// The lower edge of a bin that has tokens; of ALL_TOKENS the smallest finite float.
__device__ __forceinline__ float least_of_bins(float top, u32 bin) {
    return bin == ALL_TOKENS ? -bits_to_f32(0x7f7fffffu) : sub_rn(top, mul_rn(static_cast<float>(bin), 0.125f));
}

// The token of a thread's logit within its part. Threads hold fours of neighbours.
__device__ __forceinline__ u32 token_of(u32 i) { return i / 4 * (4 * THREADS) + 4 * threadIdx.x + i % 4; }

// Reads four neighbours at an address that is a multiple of their size.
template <Element ELEMENT>
__device__ __forceinline__ void load_four(const void* raw, u64 at, float* four) {
    if (ELEMENT == Element::F32) {
        const float4 values = *reinterpret_cast<const float4*>(static_cast<const float*>(raw) + at);
        four[0] = values.x, four[1] = values.y, four[2] = values.z, four[3] = values.w;
    } else {
        const u64 values = *reinterpret_cast<const u64*>(static_cast<const u16*>(raw) + at);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) four[i] = widen<ELEMENT>(static_cast<u32>(values >> 32 * (i / 2)), i % 2);
    }
}

// Stores those of four neighbours that are in the part. Stored rows begin at multiples of 16 bytes.
__device__ __forceinline__ void store_four(const float* four, float* stored, u32 t, u32 count) {
    if (t + 4 <= count) {
        *reinterpret_cast<float4*>(stored + t) = {four[0], four[1], four[2], four[3]};
    } else {
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            if (t + i < count) stored[t + i] = four[i];
    }
}

// Whether a transform multiplies logits, and nothing else.
__device__ __forceinline__ bool is_factor(const RowTransform& row) { return !row.mask && !row.biases; }

// The first logit of a part among the raw ones.
__device__ __forceinline__ u64 source_of(const RowSummaries& call, u32 r, u32 first) {
    return (call.sources ? call.sources[r] : r) * call.raw_stride + first;
}

// Reads a part of a row; -inf behind its end.
template <Element ELEMENT>
__device__ __forceinline__ void load_part(const RowSummaries& call, u64 source, u32 count, float (&logits)[EACH]) {
    const u32 bytes = element_bytes(ELEMENT);
    if (count == TOKENS && (reinterpret_cast<u64>(call.raw) + source * bytes) % (4 * bytes) == 0) {
#pragma unroll
        for (u32 i = 0; i < EACH; i += 4) load_four<ELEMENT>(call.raw, source + token_of(i), logits + i);
    } else {
#pragma unroll
        for (u32 i = 0; i < EACH; ++i)
            logits[i] = token_of(i) < count ? element<ELEMENT>(call.raw, source + token_of(i)) : -f32_infinity();
    }
}

// Reads a part of a row, transforms it, and stores it on request. Contains barriers.
__device__ __forceinline__ void transform_part(const RowSummaries& call, u32 r, u32 first, u32 count, float (&logits)[EACH],
                                               float (&room)[TOKENS]) {
    const RowTransform row = call.rows[r].transform();
    const u64 source = source_of(call, r, first);
    const bool stores = call.requests[r].stores, is_in_place = static_cast<const void*>(call.stored.logits) == call.raw;
    float* const stored = const_cast<float*>(call.stored.row(r)) + first;
#pragma unroll 4
    for (u32 t = threadIdx.x; t < TOKENS; t += THREADS) {
        float logit = -f32_infinity();
        if (t < count) {
            const float raw = element(call.element, call.raw, source + t);
            logit = checked_logit(raw, row, call.stored.first_token + first + t, &call.results[r].invalid);
            if (stores && !(is_in_place && f32_to_bits(logit) == f32_to_bits(raw))) stored[t] = logit;
        }
        room[t] = logit;
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) logits[i] = room[token_of(i)];
    __syncthreads();
}

// The largest of a thread's logits.
__device__ __forceinline__ float largest_of(const float (&logits)[EACH]) {
    float largest = logits[0];
#pragma unroll
    for (u32 i = 1; i < EACH; ++i) largest = fmaxf(largest, logits[i]);
    return largest;
}

// Multiplies a thread's raw logits by the row's factor, checks them, and stores them on request. Returns the largest.
__device__ __forceinline__ float scale_part(const RowSummaries& call, u32 r, u32 first, u32 count, float (&logits)[EACH]) {
    const float factor = call.rows[r].inv_temperature;
    float largest = -f32_infinity();
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) largest = max_or_nan(largest, logits[i] = mul_rn(logits[i], factor));
    const bool is_valid = largest < f32_infinity();
    if (!is_valid) {
        const u64 source = source_of(call, r, first);
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            if (logits[i] < f32_infinity()) continue;
            const u32 t = token_of(i), token = call.stored.first_token + first + t;
            const u64 key = invalid_key(element(call.element, call.raw, source + t), token, 0);
            atomicMin(&call.results[r].invalid, key == ~0ull ? invalid_key(logits[i], token, 1) : key);
            logits[i] = -f32_infinity();
        }
        largest = largest_of(logits);
    }
    // A factor of 1 leaves every bit of a valid logit.
    const bool is_in_place = static_cast<const void*>(call.stored.logits) == call.raw;
    if (!call.requests[r].stores || (is_in_place && factor == 1.0f && is_valid)) return largest;
    float* const stored = const_cast<float*>(call.stored.row(r)) + first;
#pragma unroll
    for (u32 i = 0; i < EACH; i += 4) store_four(logits + i, stored, token_of(i), count);
    return largest;
}

// Counts a sum that passes 2^32 by `units`.
__device__ __forceinline__ void carry(u32 before, u32 units, u32 bin, PartSums& sums) {
    if (before > ~units) atomicAdd(&sums.high[bin], 1u);
}

// Adds a thread's masses to the bins of its part, whose top is below 2^17 in size: with fewer conversions, and no branch before
// the sums.
__device__ __forceinline__ void add_small_masses(const float (&logits)[EACH], float top, PartSums& sums) {
    constexpr u32 AT_ONCE = 8;
    // The lowest edge in the window begins its bin.
    const float least = sub_rn(top, MASS_WINDOW - 0.125f);
    const u32 top_eighths = f32_to_bits(floor_with_magic(mul_rn(top, 8.0f)));
    char* const low = reinterpret_cast<char*>(sums.low + threadIdx.x % COPIES);
    constexpr u32 STEP = COPIES * sizeof(u32);
#pragma unroll
    for (u32 begin = 0; begin < EACH; begin += AT_ONCE) {
        u32 places[AT_ONCE], units[AT_ONCE], before[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            const float logit = logits[begin + i];
            const float eighths = floor_with_magic(mul_rn(logit, 8.0f));
            // The bin times STEP. A logit below the window adds nothing to any bin.
            places[i] = (top_eighths * STEP - f32_to_bits(eighths) * STEP) & (MASS_BINS - 1) * STEP;
            const u32 own = mass_units_above(fma_rn(sub_rn(eighths, FLOOR_MAGIC), -0.125f, logit));
            units[i] = logit >= least ? own : 0;
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) before[i] = atomicAdd(reinterpret_cast<u32*>(low + places[i]), units[i]);
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) carry(before[i], units[i], places[i] / STEP, sums);
    }
}

// The same with any top.
__device__ __forceinline__ void add_masses(const float (&logits)[EACH], float top, PartSums& sums) {
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        if (logits[i] == -f32_infinity()) continue;
        const float edge = mass_edge(logits[i]);
        const u32 bin = bin_below(top, edge);
        if (bin == ALL_TOKENS) continue;
        const u32 units = mass_units_above(sub_rn(logits[i], edge));
        carry(atomicAdd(&sums.low[bin * COPIES + threadIdx.x % COPIES], units), units, bin, sums);
    }
}

// Lists the tokens of a part that reach a logit, as many as there is room for.
__device__ __forceinline__ void list_part(const RowSummaries& call, u32 r, u32 first, const float (&logits)[EACH], float least,
                                          Shared& shared) {
#pragma unroll
    for (u32 begin = 0; begin < EACH; begin += 4) {
        bool any = false;
#pragma unroll
        for (u32 i = begin; i < begin + 4; ++i) any |= logits[i] >= least;
        if (!any) continue;
#pragma unroll
        for (u32 i = begin; i < begin + 4; ++i) {
            if (!(logits[i] >= least)) continue;
            const u32 at = atomicAdd(&shared.queued, 1u);
            if (at < QUEUE) shared.queue[at] = {logits[i], token_of(i)};
        }
    }
    __syncthreads();
    const u32 queued = shared.queued;
    if (threadIdx.x == 0) shared.listed_at = atomicAdd(&call.counters[r].listed, queued <= QUEUE ? queued : RowSummaries::LISTED + 1);
    __syncthreads();
    const u32 at = shared.listed_at + threadIdx.x;
    if (threadIdx.x < queued && queued <= QUEUE && at < RowSummaries::LISTED) {
        const Queued own = shared.queue[threadIdx.x];
        const u64 key = to_ordered_bits(Winner::of(own.logit, call.stored.first_token + first + own.token));
        call.listed[static_cast<u64>(r) * RowSummaries::LISTED + at] = {key, own.logit, r};
    }
}

// Sums a part of a row, and lists tokens of it. `largest` is the thread's.
__device__ __forceinline__ void sum_part(const RowSummaries& call, u32 r, u32 part, const float (&logits)[EACH], float largest,
                                         Shared& shared) {
    const float top = mass_edge(largest_of_block(largest, shared));
    if (fabsf(top) < 131072.0f) add_small_masses(logits, top, shared.sums); else add_masses(logits, top, shared.sums);
    __syncthreads();
    const u32 bin = threadIdx.x;
    u64 sum = static_cast<u64>(shared.sums.high[bin]) << 32;
    // Each lane begins with another copy, so that all read different banks.
#pragma unroll
    for (u32 i = 0; i < COPIES; ++i) sum += shared.sums.low[bin * COPIES + (i + bin / 4) % COPIES];
    shared.fewest[bin] = fewest_tokens(sum);
    const u32 count = __reduce_max_sync(0xffffffffu, sum > 0 ? bin + 1 : 0);
    if (bin % 32 == 0) atomicMax(&shared.count, count);
    __syncthreads();
    PartMasses& masses = call.parts[static_cast<u64>(r) * gridDim.y + part];
    if (bin < shared.count) masses.bins[bin] = sum;
    if (bin == 0) masses.top = top, masses.count = shared.count;
    const u32 limit = call.requests[r].limit;
    if (limit == 0) return;
    if (threadIdx.x < 32) {
        const u32 reached = bin_reached(shared.fewest, limit);
        if (threadIdx.x == 0) shared.reached = reached;
    }
    __syncthreads();
    list_part(call, r, part * TOKENS, logits, least_of_bins(top, shared.reached), shared);
}

// Adds the masses of all parts of a row. Returns the edge of the highest bin. A thread has a bin.
__device__ __forceinline__ float add_parts(const RowSummaries& call, u32 r, Shared& shared) {
    const PartMasses* const parts = call.parts + static_cast<u64>(r) * gridDim.y;
    float largest = -f32_infinity();
    for (u32 b = threadIdx.x; b < gridDim.y; b += THREADS) largest = fmaxf(largest, __ldcg(&parts[b].top));
    const float top = largest_of_block(largest, shared);
    const u32 bin = threadIdx.x;
    u64 sum = 0;
    for (u32 begin = 0; begin < gridDim.y; begin += THREADS) {
        const u32 own = begin + threadIdx.x;
        if (own < gridDim.y) {
            const u32 count = __ldcg(&parts[own].count);
            shared.row.above[threadIdx.x] = count ? bin_below(top, __ldcg(&parts[own].top)) : 0;
            shared.row.counts[threadIdx.x] = count;
        }
        __syncthreads();
        const u32 end = min(gridDim.y - begin, THREADS);
#pragma unroll 8
        for (u32 b = 0; b < end; ++b) {
            // Bins above the part's highest wrap around.
            const u32 of_part = bin - shared.row.above[b];
            if (of_part < shared.row.counts[b]) sum += __ldcg(&parts[begin + b].bins[of_part]);
        }
        __syncthreads();
    }
    shared.row.terms[bin] = mul_rn(mul_rn(static_cast<double>(sum), 1.0 / 1073741824.0), call.weights[bin]);
    shared.fewest[bin] = fewest_tokens(sum);
    const u32 count = __reduce_max_sync(0xffffffffu, sum > 0 ? bin + 1 : 0);
    if (bin % 32 == 0) atomicMax(&shared.count, count);
    if (call.requests[r].masses) {
        u64* const words = call.words + static_cast<u64>(r) * (1 + MASS_BINS);
        const u32 slot = top == -f32_infinity() ? 0 : mass_slot(top);
        if (bin == 0) words[0] = f32_to_bits(top);
        words[1 + ((slot - bin) & (MASS_BINS - 1))] = sum;
    }
    return top;
}

// Sorts the listed tokens that reach the bin of the last requested one, and keeps as many as requested. Returns their number.
__device__ __forceinline__ u32 sort_largest(const RowSummaries& call, u32 r, u32 limit, float least, Shared& shared) {
    const u32 listed = __ldcg(&call.counters[r].listed);
    if (listed > RowSummaries::LISTED) return LOST;
    for (u32 i = threadIdx.x; i < listed; i += THREADS) {
        const KeptToken* const token = call.listed + static_cast<u64>(r) * RowSummaries::LISTED + i;
        const float logit = __ldcg(&token->logit);
        if (!(logit >= least)) continue;
        const u32 at = atomicAdd(&shared.sorted, 1u);
        if (at < SORTED) shared.row.keys[at] = __ldcg(&token->key), shared.row.logits[at] = logit;
    }
    __syncthreads();
    const u32 sorted = shared.sorted;
    if (sorted > SORTED) return LOST;
    for (u32 i = threadIdx.x; i < sorted; i += THREADS) {
        const u64 key = shared.row.keys[i];
        u32 rank = 0;
        for (u32 other = 0; other < sorted; ++other) rank += shared.row.keys[other] > key;
        if (rank < limit) call.top[static_cast<u64>(r) * call.top_stride + rank] = {key, shared.row.logits[i], r};
    }
    return min(sorted, limit);
}

// Sums a row from its parts, and keeps its largest logits.
__device__ __forceinline__ void finish_row(const RowSummaries& call, u32 r, Shared& shared) {
    if (threadIdx.x == 0) shared.count = shared.sorted = 0;
    const float top = add_parts(call, r, shared);
    __syncthreads();
    const u32 limit = call.requests[r].limit;
    SummaryResult& result = call.results[r];
    if (threadIdx.x < 32) {
        const u32 reached = bin_reached(shared.fewest, limit);
        if (threadIdx.x == 0) shared.reached = reached;
    } else if (threadIdx.x == 32) {
        // The order of core's sum.
        const u32 count = shared.count;
        double sum = 0.0;
#pragma unroll 8
        for (u32 i = 0; i < count; ++i) sum = add_rn(sum, shared.row.terms[i]);
        result.sum = sum;
        result.max = top;
    }
    __syncthreads();
    const u32 listed = limit ? sort_largest(call, r, limit, least_of_bins(top, shared.reached), shared) : 0;
    if (threadIdx.x == 0) result.listed = listed;
    __syncthreads();
    if (threadIdx.x == 0) call.counters[r] = {};
}

// blockIdx.x is the row. Parts run from the last to the first, because the last logits that were stored may still be in the cache.
extern "C" __global__ void __launch_bounds__(THREADS, 2) row_summaries(const __grid_constant__ RowSummaries call) {
    __shared__ Shared shared;
    const u32 r = blockIdx.x, part = gridDim.y - 1 - blockIdx.y, first = part * TOKENS;
    const u32 count = min(call.stored.tokens - first, TOKENS);
    const bool scales = call.rows && is_factor(call.rows[r].transform());
    float logits[EACH];
    if (call.rows && !scales) {
        transform_part(call, r, first, count, logits, shared.logits);
    } else {
        const u64 source = source_of(call, r, first);
        switch (call.element) {
            case Element::BF16: load_part<Element::BF16>(call, source, count, logits); break;
            case Element::F16: load_part<Element::F16>(call, source, count, logits); break;
            default: load_part<Element::F32>(call, source, count, logits);
        }
    }
    for (u32 i = threadIdx.x; i < MASS_BINS * COPIES; i += THREADS) shared.sums.low[i] = 0;
    shared.sums.high[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.count = shared.queued = 0;
    sum_part(call, r, part, logits, scales ? scale_part(call, r, first, count, logits) : largest_of(logits), shared);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) shared.is_last = atomicAdd(&call.counters[r].arrived, 1u) == gridDim.y - 1;
    __syncthreads();
    if (!shared.is_last) return;
    __threadfence();
    finish_row(call, r, shared);
}
