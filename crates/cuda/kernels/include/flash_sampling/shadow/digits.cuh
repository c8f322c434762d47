// The digits of a hidden state and the factors of its bounds: the twins of core's hidden_digits and ShadowBound::new.
#pragma once

#include "../ptx/early.cuh"
#include "pass.cuh"

#ifdef __CUDACC__

namespace flash_sampling {

// Returns the next larger float of a float from 0 on.
FS_FUNCTION float next_up(float x) { return bits_to_f32(f32_to_bits(x) + 1); }

// Returns a float above a number whose own error is at most 2^-20 of it.
FS_FUNCTION float round_up(double x) { return x == 0.0 ? 0.0f : next_up(static_cast<float>(x * (1.0 + 0x1p-20))); }

// Sets the factors of a hidden state with this norm, whose digits differ from it by a vector of norm `digits`. Returns whether
// the bounds are finite.
FS_FUNCTION bool make_bound(HiddenBound& bound, u32 width, double hidden, double digits, double largest) {
    if (!(hidden * largest < 0x1p100 && hidden < 0x1p100 && largest < 0x1p100)) return false;
    const double terms = width + 2.0, rounding = terms * (0x1p-23 + 0x1p-28) + 0x1p-18, tiny = terms * 0x1p-126;
    bound.error = round_up(hidden * (1.0 + rounding) + tiny);
    bound.norm = round_up(digits * (1.0 + rounding) + hidden * rounding + tiny);
    bound.constant = round_up(tiny * (hidden + 0x1p23));
    return true;
}

struct HiddenDigits {
    static constexpr u32 THREADS = 256;
    static constexpr u32 WARPS = THREADS / 32;
    static constexpr float MOST = 32639.0f;  // 256 * 127 + 127
    static constexpr u32 AT_ONCE = 8;        // elements of a load, and digits of a store

    struct Shared {
        float largest[WARPS];
        double norm[WARPS];
        double error[WARPS];
    };

    // Returns the sum of the block's values, in every thread.
    static __device__ __forceinline__ double sum_of_block(double x, double (&of_warps)[WARPS]) {
#pragma unroll
        for (u32 apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(0xffffffffu, x, apart);
        of_warps[threadIdx.x / 32] = x;
        __syncthreads();
        double sum = 0.0;
        for (u32 warp = 0; warp < WARPS; ++warp) sum += of_warps[warp];
        return sum;
    }

    // Writes a row's digits and bounds, and clears its results of the next launches. One block per row.
    template <Element TYPE>
    static __device__ __forceinline__ void block(const ShadowCall& call, u32 row, Shared& shared) {
        ptx::start_next_launch();
        const u32 width = call.candidates.width;
        const u8* const from = call.candidates.hidden + row * call.candidates.hidden_stride;
        float largest = 0.0f;
#pragma unroll 4
        for (u32 k = AT_ONCE * threadIdx.x; k < width; k += AT_ONCE * THREADS) {
            float x[AT_ONCE];
            load_elements<TYPE>(x, from, k, width);
#pragma unroll
            for (const float element : x) largest = max_or_nan(largest, fabsf(element));
        }
#pragma unroll
        for (u32 apart = 16; apart > 0; apart /= 2) largest = max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, apart));
        shared.largest[threadIdx.x / 32] = largest;
        __syncthreads();
        for (u32 warp = 0; warp < WARPS; ++warp) largest = max_or_nan(largest, shared.largest[warp]);

        // A scale that is not a normal number would not have the precision for the largest integer.
        const float scale = next_up(div_rn(largest, MOST));
        const bool has_digits = is_finite(largest) && scale >= 0x1p-126f;
        const float inverse = has_digits ? div_rn(1.0f, scale) : 0.0f;
        u8* const high = call.digits + (row / 8 * 16 + row % 8) * call.digit_stride;
        u8* const low = high + 8 * call.digit_stride;
        double norm = 0.0, error = 0.0;
#pragma unroll 4
        for (u32 k = AT_ONCE * threadIdx.x; k < width; k += AT_ONCE * THREADS) {
            float x[AT_ONCE];
            load_elements<TYPE>(x, from, k, width);
            u64 highs = 0, lows = 0;
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i) {
                const float rounded = rintf(mul_rn(x[i], inverse));
                const i32 integer = has_digits ? static_cast<i32>(fminf(fmaxf(rounded, -MOST), MOST)) : 0;
                const i32 low_digit = static_cast<signed char>(integer);
                highs |= static_cast<u64>((integer - low_digit) >> 8 & 0xff) << 8 * i;
                lows |= static_cast<u64>(low_digit & 0xff) << 8 * i;
                const double exact = static_cast<double>(x[i]);
                const double difference = exact - static_cast<double>(has_digits ? scale : 0.0f) * integer;
                norm += exact * exact;
                error += difference * difference;
            }
            *reinterpret_cast<u64*>(high + k) = highs;
            *reinterpret_cast<u64*>(low + k) = lows;
        }
        constexpr u32 WORDS = sizeof(EstimateCounts) / 4;
        if (threadIdx.x < WORDS) reinterpret_cast<u32*>(call.candidates.estimated + row)[threadIdx.x] = 0;
        norm = sqrt(sum_of_block(norm, shared.norm));
        error = sqrt(sum_of_block(error, shared.error)) + 1e-15 * norm;
        if (threadIdx.x > 0) return;
        HiddenBound bound{has_digits ? scale : 0.0f, 0.0f, 0.0f, 0.0f};
        const bool is_finite = make_bound(bound, width, norm, error, static_cast<double>(call.largest));
        call.bounds[row] = is_finite ? bound : HiddenBound{};
        call.candidates.counts[row] = is_finite ? 0 : Candidates::OPEN;
        call.best[row] = 0;
        call.arrived[row] = 0;
        if (row == 0) call.words->open = call.words->published = 0;
    }
};

}  // namespace flash_sampling

#endif
