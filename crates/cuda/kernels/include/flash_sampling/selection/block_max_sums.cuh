// The sums of rows with top-p alone: the mass before the winner of the plain draw, and the total mass, from the largest logit of
// each granule (block_maxima.cuh) and a few logits.
//
// The plain version:
//
//   before, all = mass of the tokens before the winner's place, mass of all tokens
//
// 1. A granule whose largest logit is below the winner's has no token before the winner. It is not read, and only its largest
//    logit counts, rounded down. So `all` is a lower bound. A winner kept by this bound is surely kept.
// 2. A thread block handles an octet of rows, whose maxima are adjacent in memory, and a range of their granules, divided among
//    its warps. A lane checks one granule for all eight rows, and the warp lists the granules to read. The number of reads
//    differs much between rows, but little between octets.
// 3. The warp reads the list regardless of rows. Each thread has its own column of sums for each row, so no thread waits.
//
// The first token of all rows is a multiple of 4, because TopPResolve reads rows by lines (RowLines::takes).
#pragma once

#include "undecided_rows.cuh"
#include "top_p.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

// Returns a / b of numbers below 2^20, in few instructions. (a + 1/2) / b is further from any integer than its rounding error.
__device__ __forceinline__ u32 small_quotient(u32 a, u32 b) {
    return static_cast<u32>(__fdividef(u32_to_f32(a) + 0.5f, u32_to_f32(b)));
}

struct BlockMaxSums {
    static constexpr u32 THREADS = 512, WARPS = THREADS / 32, ROWS = BlockMaxima::ROWS;
    // Granules per round of a lane and of a warp.
    static constexpr u32 TURNS = 3, ROUND = 32 * TURNS;
    // A lane's tokens per granule, lanes per granule, granules per read of a warp, and reads in flight.
    static constexpr u32 EACH = 4, LANES = BlockMaxima::TOKENS / EACH, AT_ONCE = 32 / LANES, LOADS = 4;
    static_assert(ROWS == 8 && ROUND <= 0x10000 / ROWS, "a row and a granule of a round are 16 bits");

    struct RowTerms {
        float least_maximum, scale, shift, place, inv_temperature;
        u32 token;
    };
    struct Shared {
        float before[ROWS][THREADS], all[ROWS][THREADS];
        u16 lists[WARPS][ROUND * ROWS];
        RowTerms rows[ROWS];
    };

    const FilterCall& call;
    const UndecidedRow* rows;  // of all draws; top-p is 1 if the row has no sums
    Shared& shared;

    // A warp's range of granules of an octet of rows.
    struct Part {
        u32 octet, begin, end;
    };

    // Returns the row of draw `threadIdx.x`, without sums. Invalid rows, and rows with other filters than top-p, get a top-p of 1,
    // and keep their draws. Call before draws change.
    __device__ __forceinline__ UndecidedRow row_of_thread(float error) const {
        const u32 i = threadIdx.x, at = min(i, call.count - 1);
        const Draw plain = call.draws[at];
        const Row& row = call.rows[at];
        const RowFilters& filters = call.filters[at];
        const bool is_summed = (i < call.count) & (plain.status == Status::Drawn) & filters.is_by_mass();
        return {0.0, 0.0, row.seed, row.position, plain.logit, plain.token, row.inv_temperature,
                is_summed ? filters.top_p : 1.0f, error, row.draw, i, 0};
    }

    // Returns the number of thread blocks per octet of rows.
    __device__ __forceinline__ u32 slices() const {
        return max(1u, min(small_quotient(gridDim.x, octets()), BlockMaxima::granules_of(call.tokens) / 64));
    }
    __device__ __forceinline__ u32 octets() const { return (call.count + ROWS - 1) / ROWS; }
    // Returns the maximum number of tokens that a thread adds up. Float rounding of the edges makes parts differ.
    __device__ __forceinline__ u32 most() const {
        const u32 granules = BlockMaxima::granules_of(call.tokens);
        const u32 each = static_cast<u32>(share()) + 3 + granules / (1u << 20);
        return (each + ROUND - 1) / ROUND * (TURNS + EACH * (ROUND / AT_ONCE + 1)) + WARPS;
    }

    // Returns this warp's part of a unit; there are octets() * slices() units.
    __device__ __forceinline__ Part part(u32 unit) const {
        const u32 slice = small_quotient(unit, octets()), part = slice * WARPS + threadIdx.x / 32;
        return {unit - slice * octets(), edge(part), edge(part + 1)};
    }

    // Clears the sums of this thread.
    __device__ __forceinline__ void empty() {
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) shared.before[r][threadIdx.x] = shared.all[r][threadIdx.x] = 0.0f;
    }

    // Adds the masses of this block's units to sums[row][2], before and all. While loads are in flight, calls `keep`: thread i
    // stores rows[i], which no other thread reads before a barrier. All threads call this; a barrier must follow.
    template <class Keep>
    __device__ __forceinline__ void add_to(double* sums, Keep keep) {
        const u32 units = octets() * slices();
        u32 bits[TURNS][4];
        Part part = this->part(blockIdx.x);
        if (blockIdx.x < units) load(bits, part, part.begin);
        keep();
#pragma unroll 1
        for (u32 unit = blockIdx.x; unit < units;) {
            empty();
            const bool is_own = threadIdx.x / ROWS == part.octet;
            if (is_own) shared.rows[threadIdx.x % ROWS] = terms_of(rows[threadIdx.x]);
            // The fused kernel may not have stored an octet of rows without sums.
            if (__syncthreads_or(is_own && rows[threadIdx.x].top_p < 1.0f)) add_unit(sums, part, bits);
            unit += gridDim.x;
            if (unit >= units) break;
            __syncthreads();
            part = this->part(unit);
            load(bits, part, part.begin);
        }
    }

  private:
    // Adds the masses of a unit, whose terms and first maxima are loaded. All threads call this.
    __device__ __forceinline__ void add_unit(double* sums, const Part& part, u32 (&bits)[TURNS][4]) {
        sum(part, bits);
        __syncthreads();
        const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % ROWS, is_all = threadIdx.x / 32 / ROWS;
        const float* const columns = is_all ? shared.all[row] : shared.before[row];
        float of_lane = 0.0f;
#pragma unroll
        for (u32 i = 0; i < THREADS; i += 32) of_lane += columns[i + lane];
        const double of_row = TopPSearch::sum_of_warp(of_lane);
        // A scale of 0 marks a row without sums.
        if (lane == 0 && shared.rows[row].scale != 0.0f) atomicAdd(&sums[2 * (part.octet * ROWS + row) + is_all], of_row);
    }

    // Returns the granules per part, as a float.
    __device__ __forceinline__ float share() const {
        return __fdividef(u32_to_f32(BlockMaxima::granules_of(call.tokens)), u32_to_f32(slices() * WARPS));
    }
    __device__ __forceinline__ u32 edge(u32 part) const {
        const u32 granules = BlockMaxima::granules_of(call.tokens);
        return part == slices() * WARPS ? granules : min(granules, static_cast<u32>(mul_rn(u32_to_f32(part), share())));
    }

    __device__ __forceinline__ void sum(const Part& part, u32 (&bits)[TURNS][4]) {
        u32 begin = part.begin;
        while (true) {
            const u32 count = list(bits, begin, part.end);
            __syncwarp();
            const float* const logits = call.logits + static_cast<u64>(part.octet * ROWS) * call.row_stride;
            read(logits, begin, count);
            begin += ROUND;
            if (begin >= part.end) break;
            load(bits, part, begin);
            __syncwarp();
        }
    }

    static __device__ __forceinline__ RowTerms terms_of(const UndecidedRow& row) {
        // No maximum reaches NaN.
        if (!(row.top_p < 1.0f)) return {bits_to_f32(0x7fc00000u), 0.0f, 0.0f, 0.0f, 0.0f, 0};
        // The raw logit of the place, lowered a little; -inf if the temperature may have rounded it to zero.
        const float raw = fabsf(row.place) > 1e-30f ? row.place / row.inv_temperature : -f32_infinity();
        return {BlockMaxima::least_maximum(raw - fabsf(raw) * 1e-6f),
                row.inv_temperature * TopPSearch::Weights::LOG2_E,
                -row.place * TopPSearch::Weights::LOG2_E,
                row.place,
                row.inv_temperature,
                row.token};
    }

    // Loads a lane's maxima of a round for eight rows.
    __device__ __forceinline__ void load(u32 (&bits)[TURNS][4], const Part& part, u32 at) const {
        const u16* const maxima = call.block_maxima + BlockMaxima::octet(part.octet, BlockMaxima::granules_of(call.tokens));
#pragma unroll
        for (u32 k = 0; k < TURNS; ++k) {
            const u32 granule = at + 32 * k + threadIdx.x % 32;
            if (granule < part.end) load_16_bytes(maxima + static_cast<u64>(granule) * ROWS, bits[k]);
        }
    }

    // Lists the granules from `at` on that may have a token at or before the place, for all rows, and returns their number. The
    // largest logits of other granules are added to the sums.
    __device__ __forceinline__ u32 list(const u32 (&bits)[TURNS][4], u32 at, u32 end) {
        u32 count = 0;
        if (end - at > 32) {
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r) list_of<TURNS>(bits, r, r, at, end, count);
        } else {
            // NOTE: a loop, because fetching unrolled instructions takes longer here than executing the loop: 1 us.
            u32 words[TURNS][4] = {{bits[0][0], bits[0][1], bits[0][2], bits[0][3]}};
#pragma unroll 1
            for (u32 pair = 0; pair < ROWS; pair += 2) {
                list_of<1>(words, pair, 0, at, end, count);
                list_of<1>(words, pair + 1, 1, at, end, count);
                words[0][0] = words[0][1], words[0][1] = words[0][2], words[0][2] = words[0][3];
            }
        }
        return count;
    }
    // Lists the granules of one row. Its maxima are the `which`-th halves of the words.
    template <u32 USED>
    __device__ __forceinline__ void list_of(const u32 (&bits)[TURNS][4], u32 r, u32 which, u32 at, u32 end, u32& count) {
        const u32 lane = threadIdx.x % 32;
        u16* const listed = shared.lists[threadIdx.x / 32];
        const RowTerms& row = shared.rows[r];
        const float least = row.least_maximum, scale = row.scale, shift = row.shift;
        float all = 0.0f;
#pragma unroll
        for (u32 k = 0; k < USED; ++k) {
            const float top = widen_f16(static_cast<u16>(which % 2 ? bits[k][which / 2] >> 16 : bits[k][which / 2]));
            const bool is_there = at + 32 * k + lane < end, is_read = is_there && top >= least;
            if (is_there && !is_read) all += TopPSearch::Weights::exp2(fma_rn(BlockMaxima::lower_bound(top), scale, shift));
            const u32 ballot = __ballot_sync(0xffffffffu, is_read);
            if (is_read) listed[count + __popc(ballot & ((1u << lane) - 1))] = static_cast<u16>((32 * k + lane) * ROWS + r);
            count += __popc(ballot);
        }
        shared.all[r][threadIdx.x] += all;
    }

    // Adds the masses of the tokens in the warp's list.
    __device__ __forceinline__ void read(const float* logits, u32 begin, u32 count) {
        if (count == 0) return;
        const u32 lane = threadIdx.x % 32, own = lane % LANES * EACH;
        const u16* const listed = shared.lists[threadIdx.x / 32];
#pragma unroll 1
        for (u32 first = 0; first < count; first += LOADS * AT_ONCE) {
            u32 words[LOADS][EACH], codes[LOADS];
#pragma unroll
            for (u32 k = 0; k < LOADS; ++k) {
                // Lanes without a granule read the last one, without a branch. Both clamps save 2 us at 64 rows, 3 us at 256.
                codes[k] = listed[min(first + k * AT_ONCE + lane / LANES, count - 1)];
                const u32 token = (begin + codes[k] / ROWS) * BlockMaxima::TOKENS + own;
                const float* const from = logits + codes[k] % ROWS * call.row_stride;
                // A row has room for whole 16 bytes. Beyond its end, the last 16 bytes are read.
                load_16_bytes(from + min(token, (call.tokens - 1) / EACH * EACH), words[k]);
            }
#pragma unroll
            for (u32 k = 0; k < LOADS; ++k) {
                if (k > 0 && first + k * AT_ONCE >= count) break;
                const u32 r = codes[k] % ROWS, token = (begin + codes[k] / ROWS) * BlockMaxima::TOKENS + own;
                const RowTerms& row = shared.rows[r];
                const float place = row.place, inv_temperature = row.inv_temperature;
                float l[EACH], before = 0.0f, all = 0.0f;
                bool is_rare = token + EACH > call.tokens;
#pragma unroll
                for (u32 e = 0; e < EACH; ++e) {
                    l[e] = mul_rn(bits_to_f32(words[k][e]), inv_temperature);
                    const float mass = mass_of(l[e], row);
                    all += mass;
                    if (l[e] > place) before += mass;
                    is_rare |= l[e] == place;
                }
                if (is_rare) {
                    if (token + EACH > call.tokens)
                        weigh_some(l, token, row, before, all);
                    else
                        before += equal_before(l, call.first_token + token, row);
                }
                if (first + k * AT_ONCE + lane / LANES >= count) continue;
                shared.before[r][threadIdx.x] += before;
                shared.all[r][threadIdx.x] += all;
            }
        }
    }
    static __device__ __forceinline__ float mass_of(float l, const RowTerms& row) {
        return TopPSearch::Weights::exp2(fma_rn(l, TopPSearch::Weights::LOG2_E, row.shift));
    }
    // Returns the mass of the tokens from `token` on with the winner's logit and a lower id.
    static __device__ __forceinline__ float equal_before(const float (&l)[EACH], u32 token, const RowTerms& row) {
        float before = 0.0f;
        const float each = mass_of(row.place, row);
#pragma unroll
        for (u32 e = 0; e < EACH; ++e)
            if (l[e] == row.place && token + e < row.token) before += each;
        return before;
    }
    // Computes the masses at the end of the row.
    __device__ __forceinline__ void weigh_some(const float (&l)[EACH], u32 token, const RowTerms& row, float& before,
                                               float& all) const {
        before = all = 0.0f;
#pragma unroll 1
        for (u32 e = 0; e < EACH && token + e < call.tokens; ++e) {
            const float at = TopPSearch::Weights::pick_of(l, e), mass = mass_of(at, row);
            all += mass;
            if (at > row.place || (at == row.place && call.first_token + token + e < row.token)) before += mass;
        }
    }
};

}  // namespace flash_sampling

#endif
