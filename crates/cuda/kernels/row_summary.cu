// Summaries of rows from their logits, in one pass: the masses of core's MassHistogram, integer for integer, and the largest logits.
// The logits are transformed ones, or raw ones, which the kernel transforms, checks, and stores on request.
//
// A block sums a part of a row, in bins that it numbers from its largest logit down, and lists the tokens that may be among the
// largest of the row. The last block of a row adds the bins of all blocks, and keeps the tokens that reach the bin of the last
// requested one. Integer sums do not depend on the order of the blocks.
#include "flash_sampling/element.cuh"
#include "flash_sampling/perturb.cuh"
#include "flash_sampling/scan/stored.cuh"
#include "flash_sampling/summary/mass_histogram.cuh"

using namespace flash_sampling;

constexpr u32 THREADS = 256;
// Tokens of a block: 32-bit sums of the halves of units hold as many, and shared memory the logits.
constexpr u32 TOKENS = 8192;
// Loads of a thread that are in flight at a time.
constexpr u32 AT_ONCE = 8;
// The mass of one token is below this.
constexpr u64 LARGEST_UNITS = 1216800000;
// As the number of a bin: below the last one.
constexpr u32 ALL_TOKENS = MASS_BINS;

// A request about a row.
struct SummaryRequest {
    u32 limit;   // largest logits
    u32 stores;  // whether transformed logits are stored
};
FS_LAYOUT(SummaryRequest, 8, FS_AT(limit, 0) && FS_AT(stores, 4));

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
    StoredLogits stored;              // [rows, tokens] written on request; may be the raw logits
    KeptTokens out;                   // the largest logits; none of a row whose blocks list more than LISTED tokens
    const void* raw;                  // [raw rows, tokens]
    const u32* sources;               // [rows] the raw row of each; null = its number
    const Row* rows;                  // [rows] transforms; null = the logits are transformed and valid
    const SummaryRequest* requests;   // [rows]
    u64* invalid;                     // [rows] the first bad logit; all ones before
    u64* words;                       // [rows, 1 + MASS_BINS] as core's to_words has them
    PartMasses* parts;                // [rows, blocks] scratch
    KeptToken* listed;                // [rows, LISTED] scratch
    SummaryCounters* counters;        // [rows]
    u64 raw_stride;                   // elements
    Element element;
    u32 padding;

    static constexpr u32 LISTED = 4096;
};
FS_LAYOUT(RowSummaries, 136,
          FS_AT(stored, 0) && FS_AT(out, 24) && FS_AT(raw, 48) && FS_AT(sources, 56) && FS_AT(rows, 64) && FS_AT(requests, 72) &&
          FS_AT(invalid, 80) && FS_AT(words, 88) && FS_AT(parts, 96) && FS_AT(listed, 104) && FS_AT(counters, 112) &&
          FS_AT(raw_stride, 120) && FS_AT(element, 128) && FS_AT(padding, 132));

struct Shared {
    union {
        float logits[TOKENS];
        u64 bins[MASS_BINS];  // of the row
    };
    // The halves of a part's bins, 16 and 15 bits of each unit.
    u32 low[MASS_BINS], high[MASS_BINS];
    u32 largest;  // monotone bits
    u32 count;    // bins
    u32 reached;  // the last bin that is listed
    bool is_last;
};

// Finds the first bin from the top down by which `limit` tokens must have come, by the least number of tokens with such masses.
// One warp calls this.
template <class BinOf>
__device__ __forceinline__ u32 bin_reached(const BinOf& bin_of, u32 limit) {
    constexpr u32 EACH = MASS_BINS / 32;
    const u32 lane = threadIdx.x % 32;
    const auto tokens = [&](u32 i) { return static_cast<u32>((bin_of(lane * EACH + i) + LARGEST_UNITS - 1) / LARGEST_UNITS); };
    u32 own = 0;
    for (u32 i = 0; i < EACH; ++i) own += tokens(i);
    u32 before = own;
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(0xffffffffu, before, step);
        if (lane >= step) before += other;
    }
    before -= own;
    u32 reached = ALL_TOKENS;
    for (u32 i = 0; i < EACH && reached == ALL_TOKENS; ++i) {
        before += tokens(i);
        if (before >= limit) reached = lane * EACH + i;
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

// Reads a part of a row, transforms it, and leaves it in shared memory.
template <Element ELEMENT>
__device__ __forceinline__ void load_part(const RowSummaries& call, u32 r, u32 first, u32 count, Shared& shared) {
    const u64 source = (call.sources ? call.sources[r] : r) * call.raw_stride + first;
    float* const stored = const_cast<float*>(call.stored.row(r)) + first;
    const bool stores = call.requests[r].stores, is_raw = call.rows;
    const RowTransform row = is_raw ? call.rows[r].transform() : RowTransform{};
    const bool is_in_place = static_cast<const void*>(call.stored.logits) == call.raw;
    u32 largest = 0;
    for (u32 begin = threadIdx.x; begin < count; begin += AT_ONCE * THREADS) {
        float raw[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i)
            raw[i] = begin + i * THREADS < count ? element<ELEMENT>(call.raw, source + begin + i * THREADS) : -f32_infinity();
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            const u32 t = begin + i * THREADS;
            if (t >= count) continue;
            const u32 token = call.stored.first_token + first + t;
            const float logit = is_raw ? checked_logit(raw[i], row, token, call.invalid + r) : raw[i];
            if (stores && !(is_in_place && f32_to_bits(logit) == f32_to_bits(raw[i]))) stored[t] = logit;
            shared.logits[t] = logit;
            largest = max(largest, to_monotone_bits(logit));
        }
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (threadIdx.x % 32 == 0) atomicMax(&shared.largest, largest);
}

// Sums a part of a row, and lists tokens of it.
__device__ __forceinline__ void sum_part(const RowSummaries& call, u32 r, u32 first, u32 count, Shared& shared) {
    const float top = mass_edge(from_monotone_bits(shared.largest));
    u32 last = 0;
    for (u32 t = threadIdx.x; t < count; t += THREADS) {
        const float logit = shared.logits[t];
        if (logit == -f32_infinity()) continue;
        const float edge = mass_edge(logit);
        const u32 bin = bin_below(top, edge);
        if (bin == ALL_TOKENS) continue;
        const u32 units = static_cast<u32>(mass_units(logit, edge));
        atomicAdd(&shared.low[bin], units & 0xffffu);
        atomicAdd(&shared.high[bin], units >> 16);
        last = max(last, bin + 1);
    }
    last = __reduce_max_sync(0xffffffffu, last);
    if (threadIdx.x % 32 == 0) atomicMax(&shared.count, last);
    __syncthreads();
    const auto bin = [&](u32 i) { return (static_cast<u64>(shared.high[i]) << 16) + shared.low[i]; };
    const u32 limit = call.requests[r].limit;
    if (limit) {
        if (threadIdx.x < 32) {
            const u32 reached = bin_reached(bin, limit);
            if (threadIdx.x == 0) shared.reached = reached;
        }
        __syncthreads();
        const float least = least_of_bins(top, shared.reached);
        for (u32 t = threadIdx.x; t < count; t += THREADS) {
            const float logit = shared.logits[t];
            if (!(logit >= least)) continue;
            const u32 at = atomicAdd(&call.counters[r].listed, 1u);
            const u64 key = to_ordered_bits(Winner::of(logit, call.stored.first_token + first + t));
            if (at < RowSummaries::LISTED) call.listed[static_cast<u64>(r) * RowSummaries::LISTED + at] = {key, logit, r};
        }
    }
    PartMasses& part = call.parts[static_cast<u64>(r) * gridDim.x + blockIdx.x];
    for (u32 i = threadIdx.x; i < shared.count; i += THREADS) part.bins[i] = bin(i);
    if (threadIdx.x == 0) part.top = top, part.count = shared.count;
}

// Adds the masses of all parts of a row, and keeps its largest logits.
__device__ __forceinline__ void finish_row(const RowSummaries& call, u32 r, Shared& shared) {
    const volatile PartMasses* const parts = call.parts + static_cast<u64>(r) * gridDim.x;
    float top = -f32_infinity();
    for (u32 b = 0; b < gridDim.x; ++b) top = fmaxf(top, parts[b].top);
    u64* const words = call.words + static_cast<u64>(r) * (1 + MASS_BINS);
    if (threadIdx.x == 0) words[0] = f32_to_bits(top);
    const u32 slot = top == -f32_infinity() ? 0 : mass_slot(top);
    for (u32 i = threadIdx.x; i < MASS_BINS; i += THREADS) {
        u64 sum = 0;
        for (u32 b = 0; b < gridDim.x; ++b) {
            if (parts[b].count == 0) continue;
            const u32 above = bin_below(top, parts[b].top);
            if (i >= above && i - above < parts[b].count) sum += parts[b].bins[i - above];
        }
        shared.bins[i] = sum;
        words[1 + ((slot - i) & (MASS_BINS - 1))] = sum;
    }
    __syncthreads();
    const u32 limit = call.requests[r].limit;
    const u32 count = *const_cast<volatile u32*>(&call.counters[r].listed);
    if (limit && count <= RowSummaries::LISTED) {
        if (threadIdx.x < 32) {
            const u32 reached = bin_reached([&](u32 i) { return shared.bins[i]; }, limit);
            if (threadIdx.x == 0) shared.reached = reached;
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < count; i += THREADS) {
            const volatile KeptToken& at = call.listed[static_cast<u64>(r) * RowSummaries::LISTED + i];
            const KeptToken token{at.key, at.logit, at.item};
            if (token.logit >= least_of_bins(top, shared.reached)) call.out.push(token);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) call.counters[r] = {};
}

// blockIdx.y is the row.
extern "C" __global__ void __launch_bounds__(THREADS) row_summaries(const __grid_constant__ RowSummaries call) {
    __shared__ Shared shared;
    const u32 r = blockIdx.y, first = blockIdx.x * TOKENS;
    const u32 count = call.stored.tokens - first < TOKENS ? call.stored.tokens - first : TOKENS;
    for (u32 i = threadIdx.x; i < MASS_BINS; i += THREADS) shared.low[i] = shared.high[i] = 0;
    if (threadIdx.x == 0) shared.largest = shared.count = 0;
    __syncthreads();
    switch (call.element) {
        case Element::BF16: load_part<Element::BF16>(call, r, first, count, shared); break;
        case Element::F16: load_part<Element::F16>(call, r, first, count, shared); break;
        default: load_part<Element::F32>(call, r, first, count, shared);
    }
    __syncthreads();
    sum_part(call, r, first, count, shared);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) shared.is_last = atomicAdd(&call.counters[r].arrived, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!shared.is_last) return;
    __threadfence();
    finish_row(call, r, shared);
}
