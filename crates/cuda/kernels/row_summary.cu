// Summaries of rows from their logits, in one pass: the masses of core's MassHistogram, integer for integer, the sum of them with
// the bits of core's, and the largest logits. The logits are transformed ones, or raw ones, which the kernel transforms, checks,
// and stores on request.
//
// A block of part_summaries holds a part of a row in registers, sums it in bins that it numbers from its largest logit down, and
// lists the tokens that may be among the largest of the row. A block of row_summaries adds the bins of a row's parts, and sorts
// the tokens that reach the bin of the last requested one. Integer sums do not depend on the order of the blocks.
#include "flash_sampling/row_summary/call.cuh"
#include "flash_sampling/row_summary/load_part.cuh"
#include "flash_sampling/warp.cuh"

using namespace flash_sampling;

// The number of bins of a block with sums per lane: 20 nats.
constexpr u32 NEAR_BINS = 160;
constexpr u32 MARGIN_BINS = 8;
// The units of a token are this number plus a fraction of it.
constexpr u64 UNITS_OF_ONE = 1073741824;
// The fields of a lane's sum, from the lowest bit: fractions / 2^COARSE, and tokens.
constexpr u32 COARSE = 14;
constexpr u32 COUNT_AT = 22;
// The maximum number of tokens that a part lists, and that are sorted for a row.
constexpr u32 QUEUE = 512;
constexpr u32 SORTED = 1024;
// The mass of one token is below this.
constexpr float LARGEST_UNITS = 1216800000.0f;
// As a bin number: below the last bin.
constexpr u32 ALL_TOKENS = MASS_BINS;
static_assert(THREADS == MASS_BINS, "a thread has a bin");
static_assert((static_cast<u64>(LARGEST_UNITS - UNITS_OF_ONE) >> COARSE) * (TOKENS / 32) < 1u << COUNT_AT, "sums of a lane");
static_assert(TOKENS / 32 < 1u << (32 - COUNT_AT), "the tokens of a lane in all warps");

// The sums of a part's bins. Almost all tokens are in near bins. Each lane has its own copy of a near bin, in its own bank.
struct PartSums {
    alignas(16) u32 fractions[NEAR_BINS][32];  // of the units, modulo 2^32
    u32 counts[NEAR_BINS][32];     // fractions / 2^COARSE, and tokens above COUNT_AT
    // Of the tokens that are in no near bin: units modulo 2^32, and how often they passed 2^32.
    u32 low[MASS_BINS], high[MASS_BINS];
    u64 near[NEAR_BINS];  // units of all copies

    // Clears what tokens add to.
    __device__ __forceinline__ void clear() {
        constexpr u32 FOURS = sizeof(fractions) / sizeof(float4);
        static_assert(2 * FOURS % THREADS == 0 && MASS_BINS == THREADS, "the same work for all threads");
#pragma unroll
        for (u32 i = 0; i < 2 * FOURS; i += THREADS) reinterpret_cast<float4*>(fractions)[i + threadIdx.x] = {};
        low[threadIdx.x] = high[threadIdx.x] = 0;
    }
};

struct Queued {
    float logit;
    u32 token;  // of the part
};

struct Shared {
    // Of each warp: the monotone bits of its largest logit, and a number of tokens.
    u32 largest[THREADS / 32], fewest[THREADS / 32];
    u32 count;    // bins
    u32 reached;  // the last bin that is listed
};

struct PartShared : Shared {
    union {
        float logits[TOKENS];
        PartSums sums;
        Queued queue[QUEUE];
    };
    u32 queued;  // tokens
    u32 listed_at;
};

struct RowShared : Shared {
    double terms[MASS_BINS];  // of the sum
    // Parts, as many at a time as there are threads: the bin of their top, and their bins.
    u32 above[THREADS], counts[THREADS];
    u64 keys[SORTED];
    float logits[SORTED];
    u32 sorted;  // tokens
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

// Finds the first bin from the top down by which `limit` tokens must have come; a thread has a bin, whose mass cannot have come
// from fewer than `fewest` tokens. All threads see it in `reached` behind the next barrier. Contains a barrier.
__device__ __forceinline__ void find_reached_bin(u32 fewest, u32 limit, Shared& shared) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 of_warp = __reduce_add_sync(0xffffffffu, fewest);
    if (lane == 0) shared.fewest[warp] = of_warp;
    if (threadIdx.x == 0) shared.reached = ALL_TOKENS;
    __syncthreads();
    const u32 before = __reduce_add_sync(0xffffffffu, lane < warp ? shared.fewest[lane] : 0);
    if (before >= limit || before + of_warp < limit) return;
    const u32 lanes = __ballot_sync(0xffffffffu, before + sum_to_lane(fewest) >= limit);
    if (lane == 0) shared.reached = threadIdx.x + __ffs(lanes) - 1;
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

// The first near bin of a part: just above the lowest of its warps' largest logits, so that single peaks do not move it.
__device__ __forceinline__ u32 first_near_bin(float top, const Shared& shared) {
    const u32 lane = threadIdx.x % 32, own = lane < THREADS / 32 ? shared.largest[lane] : 0;
    const bool is_inside = from_monotone_bits(own) > sub_rn(top, MASS_WINDOW - 0.125f);
    // The smallest, as the largest of complements.
    const u32 lowest = ~__reduce_max_sync(0xffffffffu, is_inside ? ~own : 0);
    const u32 bin = bin_below(top, mass_edge(from_monotone_bits(lowest)));
    return min(bin < MARGIN_BINS ? 0 : bin - MARGIN_BINS, MASS_BINS - NEAR_BINS);
}

// Adds the mass of a token that is in no near bin.
__device__ __forceinline__ void add_far(u32 bin, u32 fraction, PartSums& sums) {
    const u32 units = UNITS_OF_ONE + fraction;
    if (atomicAdd(&sums.low[bin], units) > ~units) atomicAdd(&sums.high[bin], 1u);
}

// Adds a thread's masses to the bins of its part, whose top is below 2^17 in size.
__device__ __forceinline__ void add_small_masses(const float (&logits)[EACH], float top, u32 first, PartSums& sums) {
    constexpr u32 AT_ONCE = 4;
    constexpr u32 STEP = sizeof(sums.counts[0]);
    // An edge below the window.
    const float outside = sub_rn(top, MASS_WINDOW);
    const u32 first_eighths = f32_to_bits(floor_with_magic(mul_rn(top, 8.0f))) - first;
    char* const near = reinterpret_cast<char*>(&sums.fractions[0][threadIdx.x % 32]);
#pragma unroll
    for (u32 begin = 0; begin < EACH; begin += AT_ONCE) {
        u32 bins[AT_ONCE], fractions[AT_ONCE];
        bool is_any_far = false;
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            const float logit = fmaxf(logits[begin + i], outside);
            const float eighths = floor_with_magic(mul_rn(logit, 8.0f));
            bins[i] = first_eighths - f32_to_bits(eighths);
            fractions[i] = mass_fraction_above(fma_rn(sub_rn(eighths, FLOOR_MAGIC), -0.125f, logit));
            const bool is_near = bins[i] < NEAR_BINS;
            is_any_far |= !is_near;
            if (!is_near) continue;
            u32* const at = reinterpret_cast<u32*>(near + bins[i] * STEP);
            atomicAdd(at, fractions[i]);
            atomicAdd(at + NEAR_BINS * 32, (fractions[i] >> COARSE) + (1u << COUNT_AT));
        }
        if (!is_any_far) continue;
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i)
            if (bins[i] >= NEAR_BINS && first + bins[i] < MASS_BINS) add_far(first + bins[i], fractions[i], sums);
    }
}

// The same with any top, and no near bins.
__device__ __forceinline__ void add_masses(const float (&logits)[EACH], float top, PartSums& sums) {
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        if (logits[i] == -f32_infinity()) continue;
        const float edge = mass_edge(logits[i]);
        const u32 bin = bin_below(top, edge);
        if (bin != ALL_TOKENS) add_far(bin, mass_fraction_above(sub_rn(logits[i], edge)), sums);
    }
}

// Adds the copies of near bins. Four lanes have a bin, and lanes read different banks.
__device__ __forceinline__ void add_copies(PartSums& sums) {
    const u32 lane = threadIdx.x % 32;
    for (u32 bin = threadIdx.x / 4; bin < NEAR_BINS; bin += THREADS / 4) {
        u32 tokens = 0, coarse = 0, fractions = 0;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const u32 copy = (lane / 4 + 8 * (lane % 4) + i) % 32, count = sums.counts[bin][copy];
            tokens += count >> COUNT_AT;
            coarse += count & ((1u << COUNT_AT) - 1);
            fractions += sums.fractions[bin][copy];
        }
        u64 units = UNITS_OF_ONE * tokens + (static_cast<u64>(coarse) << COARSE) + (fractions - (coarse << COARSE));
        units += __shfl_xor_sync(0xffffffffu, units, 1);
        units += __shfl_xor_sync(0xffffffffu, units, 2);
        if (lane % 4 == 0) sums.near[bin] = units;
    }
}

// Lists the tokens of a part that reach a logit, as many as there is room for.
__device__ __forceinline__ void list_part(const RowSummaries& call, u32 r, u32 first, const float (&logits)[EACH], float least,
                                          PartShared& shared) {
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
    if (threadIdx.x == 0) shared.listed_at = atomicAdd(&call.listed_counts[r], queued <= QUEUE ? queued : RowSummaries::LISTED + 1);
    __syncthreads();
    const u32 at = shared.listed_at + threadIdx.x;
    if (threadIdx.x < queued && queued <= QUEUE && at < RowSummaries::LISTED) {
        const Queued own = shared.queue[threadIdx.x];
        const u64 key = to_ordered_bits(Winner::of(own.logit, call.stored.first_token + first + own.token));
        call.listed[static_cast<u64>(r) * RowSummaries::LISTED + at] = {key, own.logit, r};
    }
}

// Counts the tokens of a part before the drawn token of the row: larger logits, and lower tokens with its logit.
__device__ __forceinline__ void count_before(const RowSummaries& call, const float (&logits)[EACH]) {
    const u32 r = blockIdx.x, first = (gridDim.y - 1 - blockIdx.y) * TOKENS;
    const float drawn = call.requests[r].logit;
    // Lower than the numbers of later tokens of this thread, if the drawn token is before them.
    const i32 token = static_cast<i32>(call.requests[r].token - first - 4 * threadIdx.x);
    u32 own = 0;
#pragma unroll
    for (u32 i = 0; i < EACH; ++i)
        own += logits[i] > drawn || (logits[i] == drawn && static_cast<i32>(i / 4 * (4 * THREADS) + i % 4) < token);
    own = __reduce_add_sync(0xffffffffu, own);
    if (own && threadIdx.x % 32 == 0) atomicAdd(&call.before[r], own);
}

// Sums a part of a row, and lists tokens of it. `largest` is the thread's.
__device__ __forceinline__ void sum_part(const RowSummaries& call, u32 r, u32 part, const float (&logits)[EACH], float largest,
                                         PartShared& shared) {
    const float top = mass_edge(largest_of_block(largest, shared));
    u32 first = MASS_BINS;
    if (fabsf(top) < 131072.0f) {
        first = first_near_bin(top, shared);
        add_small_masses(logits, top, first, shared.sums);
        __syncthreads();
        add_copies(shared.sums);
    } else {
        add_masses(logits, top, shared.sums);
    }
    __syncthreads();
    const u32 bin = threadIdx.x, near = bin - first;
    u64 sum = (static_cast<u64>(shared.sums.high[bin]) << 32) + shared.sums.low[bin];
    if (near < NEAR_BINS) sum += shared.sums.near[near];
    const u32 count = __reduce_max_sync(0xffffffffu, sum > 0 ? bin + 1 : 0);
    if (bin % 32 == 0) atomicMax(&shared.count, count);
    const u32 limit = call.requests[r].limit;
    find_reached_bin(fewest_tokens(sum), limit, shared);
    PartMasses& masses = call.parts[static_cast<u64>(r) * gridDim.y + part];
    if (bin < shared.count) masses.bins[bin] = sum;
    if (bin == 0) masses.top = top, masses.count = shared.count;
    if (call.before) count_before(call, logits);
    if (limit == 0) return;
    __syncthreads();
    list_part(call, r, part * TOKENS, logits, least_of_bins(top, shared.reached), shared);
}

// Adds the masses of all parts of a row, and finds the bin that is listed. Returns the edge of the highest bin.
__device__ __forceinline__ float add_parts(const RowSummaries& call, u32 r, RowShared& shared) {
    const u32 count = (call.stored.tokens + TOKENS - 1) / TOKENS;
    const PartMasses* const parts = call.parts + static_cast<u64>(r) * count;
    float largest = -f32_infinity();
    for (u32 b = threadIdx.x; b < count; b += THREADS) largest = fmaxf(largest, parts[b].top);
    const float top = largest_of_block(largest, shared);
    const u32 bin = threadIdx.x;
    u64 sum = 0;
    for (u32 begin = 0; begin < count; begin += THREADS) {
        const u32 own = begin + threadIdx.x;
        if (own < count) {
            shared.counts[threadIdx.x] = parts[own].count;
            shared.above[threadIdx.x] = parts[own].count ? bin_below(top, parts[own].top) : 0;
        }
        __syncthreads();
        const u32 end = min(count - begin, THREADS);
#pragma unroll 8
        for (u32 b = 0; b < end; ++b) {
            // Bins above the part's highest wrap around.
            const u32 of_part = bin - shared.above[b];
            if (of_part < shared.counts[b]) sum += parts[begin + b].bins[of_part];
        }
        __syncthreads();
    }
    shared.terms[bin] = mul_rn(mul_rn(static_cast<double>(sum), 1.0 / 1073741824.0), call.weights[bin]);
    const u32 bins = __reduce_max_sync(0xffffffffu, sum > 0 ? bin + 1 : 0);
    if (bin % 32 == 0) atomicMax(&shared.count, bins);
    find_reached_bin(fewest_tokens(sum), call.requests[r].limit, shared);
    if (call.requests[r].masses) {
        u64* const words = call.words + static_cast<u64>(r) * (1 + MASS_BINS);
        const u32 slot = top == -f32_infinity() ? 0 : mass_slot(top);
        if (bin == 0) words[0] = f32_to_bits(top);
        words[1 + ((slot - bin) & (MASS_BINS - 1))] = sum;
    }
    return top;
}

// Sorts the listed tokens that reach the bin of the last requested one, and keeps as many as requested. Returns their number.
__device__ __forceinline__ u32 sort_largest(const RowSummaries& call, u32 r, u32 limit, u32 listed, float least,
                                            RowShared& shared) {
    if (listed > RowSummaries::LISTED) return SummaryResult::LOST;
    for (u32 i = threadIdx.x; i < listed; i += THREADS) {
        const KeptToken* const token = call.listed + static_cast<u64>(r) * RowSummaries::LISTED + i;
        const float logit = token->logit;
        if (!(logit >= least)) continue;
        const u32 at = atomicAdd(&shared.sorted, 1u);
        if (at < SORTED) shared.keys[at] = token->key, shared.logits[at] = logit;
    }
    __syncthreads();
    const u32 sorted = shared.sorted;
    if (sorted > SORTED) return SummaryResult::LOST;
    for (u32 i = threadIdx.x; i < sorted; i += THREADS) {
        const u64 key = shared.keys[i];
        u32 rank = 0;
        for (u32 other = 0; other < sorted; ++other) rank += shared.keys[other] > key;
        if (rank < limit) call.top[static_cast<u64>(r) * call.top_stride + rank] = {key, shared.logits[i], r};
    }
    return min(sorted, limit);
}

// Blocks of a multiprocessor: three with 40 registers a thread on Hopper and its like, else two. Elsewhere 40 registers spill, or
// the shared memory of three does not fit.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr u32 PART_BLOCKS = 3;
#else
constexpr u32 PART_BLOCKS = 2;
#endif

// Parts run from the last to the first, because the last logits that were stored may still be in the cache. blockIdx.x is the
// row.
extern "C" __global__ void __launch_bounds__(THREADS, PART_BLOCKS) part_summaries(const __grid_constant__ RowSummaries call) {
    __shared__ PartShared shared;
    const u32 r = blockIdx.x, part = gridDim.y - 1 - blockIdx.y, first = part * TOKENS;
    const u32 count = min(call.stored.tokens - first, TOKENS);
    float logits[EACH];
    // Before the row is known, so that the two reads overlap.
    const u64 source = source_of(call, r, first);
    switch (call.element) {
        case Element::BF16: load_part<Element::BF16>(call, source, count, logits); break;
        case Element::F16: load_part<Element::F16>(call, source, count, logits); break;
        default: load_part<Element::F32>(call, source, count, logits);
    }
    const bool scales = call.rows && is_factor(call.rows[r].transform());
    if (call.rows && !scales) transform_part(call, r, first, count, logits, shared.logits);
    shared.sums.clear();
    if (threadIdx.x == 0) shared.count = shared.queued = 0;
    const float largest = scales ? scale_part(call, r, first, count, logits) : largest_of(logits);
    sum_part(call, r, part, logits, largest, shared);
}

extern "C" __global__ void __launch_bounds__(THREADS) row_summaries(const __grid_constant__ RowSummaries call) {
    __shared__ RowShared shared;
    const u32 r = blockIdx.x, limit = call.requests[r].limit, listed = call.listed_counts[r];
    if (threadIdx.x == 0) shared.count = shared.sorted = 0;
    const float top = add_parts(call, r, shared);
    __syncthreads();
    SummaryResult& result = call.results[r];
    if (threadIdx.x == 0) {
        // The order of core's sum.
        const u32 bins = shared.count;
        double sum = 0.0;
#pragma unroll 8
        for (u32 i = 0; i < bins; ++i) sum = add_rn(sum, shared.terms[i]);
        result.sum = sum;
        result.max = top;
    }
    const u32 sorted = limit ? sort_largest(call, r, limit, listed, least_of_bins(top, shared.reached), shared) : 0;
    if (threadIdx.x == 0) result.listed = sorted;
}
