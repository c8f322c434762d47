// The masses of rows with top-p alone before the winner of the plain draw and of all, from the largest logits of their granules and
// few of their logits.
//
// The plain version:
//
//   before, all = masses before the winner's place and of all
//
// 1. A granule whose largest logit is below the winner's has no token before it. It is not read, and only its largest logit
//    counts, rounded down: what is summed of `all` is a lower bound. So a row that is kept by it is kept.
// 2. A block has eight rows, whose tops lie together, and a part of their granules. A warp has its own of these: a lane looks at one
//    granule for all eight rows, and what is to be read is listed. Rows differ in it by far, warps with all eight hardly.
// 3. What is listed is read without regard to rows: every thread has its own column of sums for each row, so that none waits.
//
// The first token of all rows is a multiple of 4: SelectOpen reads rows by lines (RowLines::takes).
#pragma once

#include "open_rows.cuh"
#include "select_mass.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

struct TopsSums {
    static constexpr u32 THREADS = 512, WARPS = THREADS / 32, ROWS = GranuleTops::ROWS;
    // Granules that a lane looks at in a round, and a warp.
    static constexpr u32 TURNS = 3, ROUND = 32 * TURNS;
    // Lanes that share a granule, granules that a warp reads at a time, and how often before it looks at what it has read.
    static constexpr u32 LANES = GranuleTops::TOKENS / 4, AT_ONCE = 32 / LANES, LOADS = 4;
    static_assert(ROWS == 8 && ROUND <= 0x10000 / ROWS, "a row and a granule of a round are 16 bits");

    struct Asked {
        float least_top, scale, shift, place, inv_temperature;
        u32 token;
    };
    struct Shared {
        float before[ROWS][THREADS], all[ROWS][THREADS];
        u16 lists[WARPS][ROUND * ROWS];
        Asked rows[ROWS];
    };

    const SelectRows& call;
    const OpenRow* rows;  // of all draws, those that are not asked about with a top-p of 1
    Shared& shared;

    // How many blocks share eight rows.
    __device__ __forceinline__ u32 slices() const {
        const u32 granules = GranuleTops::granules_of(call.tokens);
        return max(1u, min(gridDim.x / octets(), granules / 64));
    }
    __device__ __forceinline__ u32 octets() const { return (call.count + ROWS - 1) / ROWS; }
    // Tokens that a thread adds up at most.
    __device__ __forceinline__ u32 most() const {
        const u32 granules = GranuleTops::granules_of(call.tokens) / (slices() * WARPS) + 1;
        return (granules + ROUND - 1) / ROUND * (TURNS + 4 * (ROUND / AT_ONCE + 1)) + WARPS;
    }

    // Adds the masses of this block's part to sums[row][2], before and all. `prepare` stores the rows while loads are under way.
    // All threads call it, and pass a barrier after it.
    template <class Prepare>
    __device__ __forceinline__ void add_to(double* sums, Prepare prepare) {
        const u32 slices = this->slices(), units = octets() * slices;
        if (blockIdx.x >= units) prepare();
        for (u32 unit = blockIdx.x; unit < units; unit += gridDim.x) {
            const u32 octet = unit % octets();
            sum(octet, unit / octets(), slices, [&] { if (unit == blockIdx.x) prepare(); });
            const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % ROWS, is_all = threadIdx.x / 32 / ROWS;
            const float* const columns = is_all ? shared.all[row] : shared.before[row];
            float of_lane = 0.0f;
#pragma unroll
            for (u32 i = 0; i < THREADS; i += 32) of_lane += columns[i + lane];
            const double of_row = SelectMass::sum_of_warp(of_lane);
            // Rows that are not asked about have no sums.
            if (lane == 0 && shared.rows[row].scale != 0.0f) atomicAdd(&sums[2 * (octet * ROWS + row) + is_all], of_row);
        }
    }

  private:
    template <class Prepare>
    __device__ __forceinline__ void sum(u32 octet, u32 slice, u32 slices, Prepare prepare) {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, parts = slices * WARPS, part = slice * WARPS + warp;
        const u32 granules = GranuleTops::granules_of(call.tokens);
        const u32 each = granules / parts, more = granules % parts;
        u32 begin = each * part + min(part, more);
        const u32 end = begin + each + (part < more);
        const u16* const tops = call.tops + GranuleTops::octet(octet, granules);
        u32 bits[TURNS][4];
        load(bits, tops, begin, end);
        prepare();
        __syncthreads();
        if (threadIdx.x < ROWS) shared.rows[threadIdx.x] = asked(octet * ROWS + threadIdx.x);
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) shared.before[r][threadIdx.x] = shared.all[r][threadIdx.x] = 0.0f;
        __syncthreads();
        while (true) {
            const u32 count = list(bits, begin, end);
            __syncwarp();
            const float* const logits = call.logits + static_cast<u64>(octet * ROWS) * call.row_stride;
            read(logits, begin, count);
            begin += ROUND;
            if (begin >= end) break;
            load(bits, tops, begin, end);
            __syncwarp();
        }
        __syncthreads();
    }

    __device__ __forceinline__ Asked asked(u32 i) const {
        const OpenRow& row = rows[i];
        // No top reaches NaN.
        if (!(row.top_p < 1.0f)) return {bits_to_f32(0x7fc00000u), 0.0f, 0.0f, 0.0f, 0.0f, 0};
        // What a temperature takes to the place, or a little less; where it may have taken a number to zero, anything.
        const float raw = fabsf(row.place) > 1e-30f ? row.place / row.inv_temperature : -f32_infinity();
        return {GranuleTops::least_top(raw - fabsf(raw) * 1e-6f),
                row.inv_temperature * SelectMass::Weights::LOG2_E,
                -row.place * SelectMass::Weights::LOG2_E,
                row.place,
                row.inv_temperature,
                row.token};
    }

    // A lane's tops of a round, of eight rows.
    static __device__ __forceinline__ void load(u32 (&bits)[TURNS][4], const u16* tops, u32 at, u32 end) {
#pragma unroll
        for (u32 k = 0; k < TURNS; ++k) {
            const u32 granule = at + 32 * k + threadIdx.x % 32;
            if (granule < end) load_16_bytes(tops + static_cast<u64>(granule) * ROWS, bits[k]);
        }
    }

    // Lists the granules of all rows from `at` on that may have a token before the place or at it, and returns how many. The
    // others count by their largest logits.
    __device__ __forceinline__ u32 list(const u32 (&bits)[TURNS][4], u32 at, u32 end) {
        const u32 lane = threadIdx.x % 32;
        u16* const listed = shared.lists[threadIdx.x / 32];
        u32 count = 0;
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            const Asked& row = shared.rows[r];
            const float least = row.least_top, scale = row.scale, shift = row.shift;
            float all = 0.0f;
#pragma unroll
            for (u32 k = 0; k < TURNS; ++k) {
                const float top = widen_f16(static_cast<u16>(r % 2 ? bits[k][r / 2] >> 16 : bits[k][r / 2]));
                const bool is_there = at + 32 * k + lane < end, is_read = is_there && top >= least;
                if (is_there && !is_read) all += SelectMass::Weights::exp2(fma_rn(GranuleTops::lower_bound(top), scale, shift));
                const u32 ballot = __ballot_sync(0xffffffffu, is_read);
                if (is_read)
                    listed[count + __popc(ballot & ((1u << lane) - 1))] = static_cast<u16>((32 * k + lane) * ROWS + r);
                count += __popc(ballot);
            }
            shared.all[r][threadIdx.x] += all;
        }
        return count;
    }

    // Weighs the tokens of what the warp has listed.
    __device__ __forceinline__ void read(const float* logits, u32 begin, u32 count) {
        const u32 lane = threadIdx.x % 32;
        const u16* const listed = shared.lists[threadIdx.x / 32];
#pragma unroll 1
        for (u32 at = lane / LANES; __any_sync(0xffffffffu, at < count); at += LOADS * AT_ONCE) {
            u32 words[LOADS][4], codes[LOADS];
#pragma unroll
            for (u32 k = 0; k < LOADS; ++k) {
                const u32 i = at + k * AT_ONCE;
                codes[k] = i < count ? listed[i] : 0;
                const u32 first = (begin + codes[k] / ROWS) * GranuleTops::TOKENS + lane % LANES * 4;
                // A row has room for whole 16 bytes.
                if (i < count && first < call.tokens) load_16_bytes(logits + codes[k] % ROWS * call.row_stride + first, words[k]);
            }
#pragma unroll
            for (u32 k = 0; k < LOADS; ++k) {
                const u32 i = at + k * AT_ONCE, r = codes[k] % ROWS;
                if (i >= count) break;
                const u32 first = (begin + codes[k] / ROWS) * GranuleTops::TOKENS + lane % LANES * 4;
                if (first + 4 > call.tokens) {
#pragma unroll
                    for (u32 e = 0; e < 4; ++e)
                        if (first + e >= call.tokens) words[k][e] = 0xff800000u;
                }
                const Asked& row = shared.rows[r];
                float l[4];
#pragma unroll
                for (u32 e = 0; e < 4; ++e) l[e] = mul_rn(bits_to_f32(words[k][e]), row.inv_temperature);
                SelectMass::Weights weights(row.place, row.token);
                weights.add(l, call.first_token + first);
                shared.before[r][threadIdx.x] += weights.before;
                shared.all[r][threadIdx.x] += weights.all;
            }
        }
    }
};

}  // namespace flash_sampling

#endif
