// Which rows with top-p alone keep the winner of the plain draw, from the largest logits of their granules and few of their logits.
//
// The plain version:
//
//   before, all = masses before the winner's place and of all
//   if not before < p all: the row is open
//
// 1. A granule whose largest logit is below the winner's has no token before it. It is not read, and only its largest logit
//    counts, rounded down: what is summed of `all` is a lower bound. So a row that is kept by it is kept.
// 2. The others are open, whether the winner is kept or not, and sum all logits.
// 3. A block has eight rows, whose tops lie together, and a part of their granules. Each warp lists those of one row that are to be
//    read, and all warps share what is listed: rows differ in it by far. The last block of eight rows adds up.
//
// The first token of all rows is a multiple of 4: SelectOpen reads rows by lines (RowLines::takes).
#pragma once

#include "open_rows.cuh"
#include "select_mass.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

// `Ranks`: what makes sums of a shard those of the vocabulary.
template <class Ranks>
struct TopsPass {
    static constexpr u32 THREADS = 512, WARPS = THREADS / 32, ROWS = GranuleTops::ROWS;
    // Warps that share a row within a block, and granules that a warp looks at in a round.
    static constexpr u32 SHARES = WARPS / ROWS, TURNS = 10, ROUND = 32 * TURNS;
    // Lanes that share a granule, loads under way at a time, and the granules that these make: what a warp takes of a list.
    static constexpr u32 LANES = GranuleTops::TOKENS / 4, LOADS = 4, PIECE = LOADS * (32 / LANES);

    struct Shared {
        u32 lists[WARPS][ROUND];
        u32 counts[WARPS];
        Draw plain[ROWS];
        float inv_temperature[ROWS];
        double sums[ROWS][2];  // before, all
        u32 is_last;
    };

    const SelectRows& call;
    const OpenRows& open;
    const Ranks& ranks;
    Shared& shared;

    __device__ __forceinline__ void run() {
        const u32 octets = (call.count + ROWS - 1) / ROWS, slices = gridDim.x / octets;
        const u32 octet = blockIdx.x % octets, slice = blockIdx.x / octets;
        if (slice >= slices) return;
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, parts = slices * SHARES, part = slice * SHARES + warp / ROWS;
        const u32 granules = GranuleTops::granules_of(call.tokens), rounds = (granules / parts + 1 + ROUND - 1) / ROUND;
        const u32 begin = static_cast<u32>(static_cast<u64>(granules) * part / parts);
        const u32 end = static_cast<u32>(static_cast<u64>(granules) * (part + 1) / parts);

        const u16* const tops = call.tops + GranuleTops::octet(octet, granules) + warp % ROWS;
        u16 bits[TURNS];
        load(bits, tops, begin, end);
        const u32 i = octet * ROWS + warp % ROWS;
        const bool is_row = i < call.count;
        const Draw plain = is_row ? call.draws[i] : Draw{0, 0.0f, 0.0f, Status::NoFiniteLogit};
        const float inv_temperature = is_row ? call.rows[i].inv_temperature : 1.0f;
        // What is invalid stays so.
        const bool is_asked = is_row && plain.status == Status::Drawn && call.filters[i].is_by_mass();
        if (warp < ROWS && lane == 0) {
            shared.plain[warp] = plain, shared.inv_temperature[warp] = inv_temperature;
            shared.sums[warp][0] = shared.sums[warp][1] = 0.0;
        }
        SelectMass::Weights weights(plain.logit, plain.token);
        // What a temperature takes to the place, or a little less; where it may have taken a number to zero, anything.
        const float raw = fabsf(plain.logit) > 1e-30f ? plain.logit / inv_temperature : -f32_infinity();
        const float least = GranuleTops::least_top(raw - fabsf(raw) * 1e-6f);
        for (u32 round = 0, at = begin; round < rounds; ++round, at += ROUND) {
            const u32 count = is_asked ? list(weights, bits, at, end, least, inv_temperature) : 0;
            if (lane == 0) shared.counts[warp] = count;
            load(bits, tops, at + ROUND, end);
            __syncthreads();
            read(octet);
            __syncthreads();
        }
        if (is_asked) add(warp % ROWS, weights);
        __syncthreads();
        // NOTE: the first two sums of a row, which are zeros again below; no row is open yet.
        const u32 sum_of = octet * ROWS + threadIdx.x / 2;
        if (threadIdx.x < 2 * ROWS && sum_of < call.count) {
            atomicAdd(&open.masses[sum_of * OpenRows::BINS + threadIdx.x % 2], shared.sums[threadIdx.x / 2][threadIdx.x % 2]);
            __threadfence();
        }
        __syncthreads();
        if (threadIdx.x == 0) shared.is_last = atomicAdd(&open.arrived[octet], 1u) == slices - 1;
        __syncthreads();
        if (!shared.is_last) return;
        __threadfence();
        if (threadIdx.x == 0) open.arrived[octet] = 0;
        const u32 row = octet * ROWS + threadIdx.x;
        if (threadIdx.x < ROWS && row < call.count) conclude(row, granules / parts + 1);
    }

  private:
    // A lane's tops of a round.
    static __device__ __forceinline__ void load(u16 (&bits)[TURNS], const u16* tops, u32 at, u32 end) {
#pragma unroll
        for (u32 k = 0; k < TURNS; ++k) {
            const u32 granule = at + 32 * k + threadIdx.x % 32;
            bits[k] = granule < end ? __ldg(tops + static_cast<u64>(granule) * ROWS) : 0;
        }
    }

    // Lists the granules from `at` on that may have a token before the place or at it, and returns how many. The others count by
    // their largest logits.
    __device__ __forceinline__ u32 list(SelectMass::Weights& weights, const u16 (&bits)[TURNS], u32 at, u32 end, float least,
                                        float inv_temperature) {
        const u32 lane = threadIdx.x % 32;
        u32* const listed = shared.lists[threadIdx.x / 32];
        u32 count = 0;
#pragma unroll
        for (u32 k = 0; k < TURNS; ++k) {
            const u32 granule = at + 32 * k + lane;
            const float top = widen_f16(bits[k]);
            const bool is_read = granule < end && top >= least;
            if (granule < end && !is_read) weights.all += weights.mass_of(GranuleTops::lower_bound(top) * inv_temperature);
            const u32 ballot = __ballot_sync(0xffffffffu, is_read);
            if (is_read) listed[count + __popc(ballot & ((1u << lane) - 1))] = granule;
            count += __popc(ballot);
        }
        return count;
    }

    // Weighs the tokens of what is listed. The pieces of all lists are dealt out to the warps in runs, of few rows each.
    __device__ __forceinline__ void read(u32 octet) {
        const u32 lane = threadIdx.x % 32;
        const u32 count = lane < WARPS ? shared.counts[lane] : 0, pieces = (count + PIECE - 1) / PIECE;
        u32 upto = pieces;
#pragma unroll
        for (u32 distance = 1; distance < WARPS; distance *= 2) {
            const u32 more = __shfl_up_sync(0xffffffffu, upto, distance);
            if (lane >= distance) upto += more;
        }
        const u32 all = __shfl_sync(0xffffffffu, upto, WARPS - 1);
        const u32 warp = threadIdx.x / 32, end = all * (warp + 1) / WARPS;
        u32 row = ROWS;
        SelectMass::Weights weights(0.0f, 0);
#pragma unroll 1
        for (u32 piece = all * warp / WARPS; piece < end; ++piece) {
            const u32 of = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, lane < WARPS && upto > piece))) - 1;
            if (of % ROWS != row) {
                if (row < ROWS) add(row, weights);
                row = of % ROWS;
                weights = SelectMass::Weights(shared.plain[row].logit, shared.plain[row].token);
            }
            const u32 first = PIECE * (piece - __shfl_sync(0xffffffffu, upto - pieces, of));
            const u32 left = __shfl_sync(0xffffffffu, count, of) - first;
            weigh(weights, call.row(octet * ROWS + row), shared.inv_temperature[row], shared.lists[of] + first, left);
        }
        if (row < ROWS) add(row, weights);
    }

    // Weighs up to PIECE granules of a row.
    static __device__ __forceinline__ void weigh(SelectMass::Weights& weights, const ExistingRow& row, float inv_temperature,
                                                 const u32* listed, u32 count) {
        const u32 lane = threadIdx.x % 32;
        const float* const logits = static_cast<const float*>(row.logits);
        u32 words[LOADS][4], first[LOADS];
#pragma unroll
        for (u32 k = 0; k < LOADS; ++k) {
            const u32 at = k * (32 / LANES) + lane / LANES;
#pragma unroll
            for (u32 e = 0; e < 4; ++e) words[k][e] = 0xff800000u;
            first[k] = at < count ? listed[at] * GranuleTops::TOKENS + lane % LANES * 4 : row.tokens;
            // A row has room for whole 16 bytes.
            if (first[k] < row.tokens) load_16_bytes(logits + first[k], words[k]);
        }
#pragma unroll
        for (u32 k = 0; k < LOADS; ++k) {
            float l[4];
#pragma unroll
            for (u32 e = 0; e < 4; ++e)
                l[e] = first[k] + e < row.tokens ? mul_rn(bits_to_f32(words[k][e]), inv_temperature) : -f32_infinity();
            weights.add(l, row.first_token + first[k]);
        }
    }

    // A warp's sums join those of its block.
    __device__ __forceinline__ void add(u32 row, const SelectMass::Weights& weights) {
        const double before = SelectMass::sum_of_warp(weights.before), all = SelectMass::sum_of_warp(weights.all);
        if (threadIdx.x % 32 != 0) return;
        atomicAdd(&shared.sums[row][0], before);
        atomicAdd(&shared.sums[row][1], all);
    }

    // Lists the row, unless its winner is surely kept.
    __device__ __forceinline__ void conclude(u32 i, u32 granules) const {
        double* const sums = open.masses + i * OpenRows::BINS;
        double before = __ldcg(sums), all = __ldcg(sums + 1);
        sums[0] = sums[1] = 0.0;
        const Draw plain = call.draws[i];
        const RowFilters filters = call.filters[i];
        if (plain.status != Status::Drawn || !filters.is_by_mass()) return;
        const Row& row = call.rows[i];
        // A lane adds up the tops that it looks at, and tokens of a warp's part of what is listed.
        double error = SelectMass::error_of(granules / 32 + TURNS + 4 * LOADS * (ROUND / PIECE + 1));
        if (!ranks.sums(i, before, all, error)) return;
        if (before * (1.0 + error) < filters.top_p * all * (1.0 - error)) return;
        open.add({before, all * (1.0 - error), row.seed, row.position, plain.logit, plain.token, row.inv_temperature, filters.top_p,
                  static_cast<float>(error) * 1.000001f, row.draw, i, 0});
    }
};

}  // namespace flash_sampling

#endif
