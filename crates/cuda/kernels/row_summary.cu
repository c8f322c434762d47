// Summaries of rows from their logits, in one pass: the masses of core's MassHistogram, integer for integer, the sum of them with
// the bits of core's, and the largest logits. The logits are transformed ones, or raw ones, which the kernel transforms, checks,
// and stores on request.
//
// A block holds a part of a row in registers, sums it in bins that it numbers from its largest logit down, and lists the tokens
// that may be among the largest of the row. The last block of a row adds the bins of all blocks, and sorts the tokens that reach
// the bin of the last requested one. Integer sums do not depend on the order of the blocks.
#include "flash_sampling/row_summary/call.cuh"
#include "flash_sampling/row_summary/load_part.cuh"

using namespace flash_sampling;

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
