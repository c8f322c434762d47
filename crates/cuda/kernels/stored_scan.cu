// Scans of stored logits for rows with filters, besides the largest logits (top_list.cu) and the masses (row_summary.cu): the
// requests of core's backend/row_summary.rs.
//
//   frontiers      for each draw, the tokens that no other token of the same part of the row beats in logit and score; they
//                  contain the frontier of the row
//   tokens_above   the tokens with a logit of at least a cutoff
//   prefix_masses  the mass before a logit rank, within the rank's bin
//   prefix_counts  the number of tokens before a logit rank
//   moments        count, sum and squares of the logits on the grid of core's Moments
//
// All sums are sums of integers, so blocks add to them in any order.
#include "flash_sampling/summary/mass_histogram.cuh"
#include "flash_sampling/noise/noise.cuh"
#include "flash_sampling/scan/stored.cuh"

using namespace flash_sampling;

constexpr u32 THREADS = 256;
// Tokens per step of a warp: four of one granule per lane.
constexpr u32 TILE = 128;
// Tokens per block.
constexpr u32 TOKENS = 4096;
// The number of points that a block can compare a second time. The output gets further points without this comparison.
constexpr u32 POINTS = 512;

struct ScanTokens {
    StoredLogits stored;
    KeptTokens out;
    const Row* rows;    // [items] the noise; `inv_temperature` is the factor from logits to scores
    const Item* items;  // [items] `slack` is the cutoff of tokens_above
};
FS_LAYOUT(ScanTokens, 64, FS_AT(stored, 0) && FS_AT(out, 24) && FS_AT(rows, 48) && FS_AT(items, 56));

// A logit rank in a stored row, or the factor of the row's logits.
struct SumQuery {
    u32 source;
    u32 token;
    float value;
    u32 padding;
};
FS_LAYOUT(SumQuery, 16, FS_AT(source, 0) && FS_AT(token, 4) && FS_AT(value, 8) && FS_AT(padding, 12));

struct ScanSums {
    StoredLogits stored;
    const SumQuery* queries;
    u64* sums;  // zeros before the launch
};
FS_LAYOUT(ScanSums, 40, FS_AT(stored, 0) && FS_AT(queries, 24) && FS_AT(sums, 32));

// A token's rank in the order of descending logits. The larger key comes first. Zero has one sign.
struct PlaceKey {
    u32 logit;
    u32 token;  // inverted

    static __device__ __forceinline__ PlaceKey of(float logit, u32 token) {
        return {to_monotone_bits(add_rn(logit, 0.0f)), ~token};
    }
    __device__ __forceinline__ bool before(const PlaceKey& other) const {
        return logit > other.logit || (logit == other.logit && token > other.token);
    }
};

// A lane's best offer in a round: the first in rank of its candidates that beat the previous round's point.
struct Offer {
    PlaceKey place;
    Winner winner;
    float logit;

    static __device__ __forceinline__ Offer none() { return {{0, 0}, Winner::none(), 0.0f}; }
    __device__ __forceinline__ void add(const Candidate& c, const Winner& last) {
        const PlaceKey at = PlaceKey::of(c.logit, c.winner.token);
        if (c.winner.beats(last) && at.before(place)) place = at, winner = c.winner, logit = c.logit;
    }
};

// Finds the frontier of a warp's candidates, one point per round: the first in rank of the candidates that beat the previous
// point. offer(last) returns a lane's best candidate. take(point) runs on the lane that offered the point.
template <class OfferOf, class Take>
__device__ __forceinline__ void frontier_of_warp(const OfferOf& offer, const Take& take) {
    Winner last = Winner::none();
    while (true) {
        const Offer mine = offer(last);
        const u32 logit = __reduce_max_sync(0xffffffffu, mine.place.logit);
        // Only a NaN has monotone bits of zero.
        if (logit == 0) return;
        const u32 token = __reduce_max_sync(0xffffffffu, mine.place.logit == logit ? mine.place.token : 0);
        const bool is_mine = mine.place.logit == logit && mine.place.token == token;
        const u32 owner = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, is_mine))) - 1;
        last = {__shfl_sync(0xffffffffu, mine.winner.score, owner), ~token};
        if (threadIdx.x % 32 == owner) take(Candidate{last, mine.logit});
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) frontiers(const __grid_constant__ ScanTokens call) {
    __shared__ Candidate points[POINTS];
    __shared__ u32 count;
    const u32 i = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const StoredLogits& stored = call.stored;
    const float* const logits = stored.row(call.items[i].source);
    const Row& row = call.rows[i];
    const Noise noise{row.seed, row.position};
    const u32 draw = row.draw;
    const float rescale = row.inv_temperature;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();

    // Tiles are aligned to the vocabulary, so that a lane's tokens are in one granule.
    const u32 begin = stored.first_token / TILE * TILE + blockIdx.x * TOKENS, end = stored.first_token + stored.tokens;
    for (u32 tile = begin + warp * TILE; tile < min(begin + TOKENS, end); tile += THREADS / 32 * TILE) {
        const u32 first = tile + 4 * lane;
        float gumbels[4];
        noise.gumbels(Domain::Token, draw, first, gumbels);
        Candidate own[4];
#pragma unroll
        for (u32 w = 0; w < 4; ++w) {
            const u32 token = first + w, t = token - stored.first_token;
            const float logit = token < end && t < stored.tokens ? logits[t] : -f32_infinity();
            own[w] = Candidate::none();
            if (logit > -f32_infinity()) own[w] = {Winner::of(add_rn(mul_rn(logit, rescale), gumbels[w]), token), logit};
        }
        frontier_of_warp(
            [&](const Winner& last) {
                Offer offer = Offer::none();
#pragma unroll
                for (u32 w = 0; w < 4; ++w) offer.add(own[w], last);
                return offer;
            },
            [&](const Candidate& point) {
                const u32 at = atomicAdd(&count, 1u);
                if (at < POINTS) points[at] = point;
                else call.out.push({to_ordered_bits(point.winner), point.logit, i});
            });
    }
    __syncthreads();
    if (warp) return;
    const u32 held = min(count, POINTS);
    frontier_of_warp(
        [&](const Winner& last) {
            Offer offer = Offer::none();
            for (u32 p = lane; p < held; p += 32) offer.add(points[p], last);
            return offer;
        },
        [&](const Candidate& point) { call.out.push({to_ordered_bits(point.winner), point.logit, i}); });
}

extern "C" __global__ void __launch_bounds__(THREADS) tokens_above(const __grid_constant__ ScanTokens call) {
    const u32 i = blockIdx.y;
    const StoredLogits& stored = call.stored;
    const Item item = call.items[i];
    const float* const logits = stored.row(item.source);
    for (u32 t = blockIdx.x * THREADS + threadIdx.x; t < stored.tokens; t += gridDim.x * THREADS) {
        const float logit = logits[t];
        if (logit >= item.slack && logit > -f32_infinity())
            call.out.push({to_ordered_bits(Winner::of(logit, stored.first_token + t)), logit, i});
    }
}

// Adds the sums of a warp's lanes to a total.
__device__ __forceinline__ void add_warp(u64* to, u64 sum) {
    for (u32 distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (threadIdx.x % 32 == 0 && sum) atomicAdd(to, sum);
}

// Sums the values of the tokens before a query's logit rank. The rank's own token is not included.
template <class ValueOf>
__device__ __forceinline__ void sum_before(const ScanSums& call, const ValueOf& value) {
    const u32 i = blockIdx.y;
    const StoredLogits& stored = call.stored;
    const SumQuery query = call.queries[i];
    const float* const logits = stored.row(query.source);
    u64 sum = 0;
    for (u32 t = blockIdx.x * THREADS + threadIdx.x; t < stored.tokens; t += gridDim.x * THREADS) {
        const float logit = logits[t];
        const u32 token = stored.first_token + t;
        const bool is_before = logit > query.value || (logit == query.value && token < query.token);
        if (is_before && token != query.token) sum += value(logit, query.value);
    }
    __syncwarp();
    add_warp(call.sums + i, sum);
}

extern "C" __global__ void __launch_bounds__(THREADS) prefix_masses(const __grid_constant__ ScanSums call) {
    sum_before(call, [](float logit, float own) {
        const float edge = mass_edge(own);
        return mass_edge(logit) == edge ? mass_units(logit, edge) : 0;
    });
}

extern "C" __global__ void __launch_bounds__(THREADS) prefix_counts(const __grid_constant__ ScanSums call) {
    sum_before(call, [](float, float) { return 1u; });
}

// Writes nine words. The first is the count. With x = 2^30 h + l, the next are the sums of h (in two's complement) and of l. With
// |x| = 2^40 a + 2^20 b + c, the last are the sums of a a, a b, a c, b b, b c and c c. Sizes are at most 2^60, and rows have at
// most 2^23 tokens, so no sum overflows.
extern "C" __global__ void __launch_bounds__(THREADS) moments(const __grid_constant__ ScanSums call) {
    const u32 i = blockIdx.y;
    const StoredLogits& stored = call.stored;
    const SumQuery query = call.queries[i];
    const float* const logits = stored.row(query.source);
    constexpr float LIMIT = 1152921504606846976.0f;
    u64 sums[9] = {};
    for (u32 t = blockIdx.x * THREADS + threadIdx.x; t < stored.tokens; t += gridDim.x * THREADS) {
        const float logit = logits[t];
        if (!(logit > -f32_infinity())) continue;
        const float rounded = fminf(fmaxf(rintf(mul_rn(logit, query.value)), -LIMIT), LIMIT);
        const long long x = static_cast<long long>(rounded);
        const u64 size = static_cast<u64>(x < 0 ? -x : x);
        const u64 a = size >> 40, b = size >> 20 & 0xfffffu, c = size & 0xfffffu;
        sums[0] += 1;
        sums[1] += static_cast<u64>(x >> 30);
        sums[2] += static_cast<u64>(x) & 0x3fffffffu;
        sums[3] += a * a;
        sums[4] += a * b;
        sums[5] += a * c;
        sums[6] += b * b;
        sums[7] += b * c;
        sums[8] += c * c;
    }
    __syncwarp();
#pragma unroll
    for (u32 s = 0; s < 9; ++s) add_warp(call.sums + 9 * i + s, sums[s]);
}
