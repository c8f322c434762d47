// The log-mass of a row besides its draw (paper App. L), for the Hopper kernel: fast float32 exponentials, with sums
// in float64. Its log Z is within 2e-6. The error of the exponential of a logit at distance x from the reference is at most
// 2.5e-7 + 2^-23 |x|. A logit further below the reference than the logarithm of the number of tokens does not count. LogMass and
// the integer masses of mass_histogram.cuh are more exact, and have the same bits everywhere.
#pragma once

#include "../math.cuh"

namespace flash_sampling {

// The output of kernels that compute log Z: their last parameter.
struct Masses {
    float2* parts;  // the blocks' masses, as high and sum
    double* log_z;  // one per draw
};
FS_LAYOUT(Masses, 16, FS_AT(parts, 0) && FS_AT(log_z, 8));

#ifdef __CUDACC__

// Returns e^x; 0 for -inf.
__device__ __forceinline__ float exp_fast(float x) {
    x = mul_rn(x, 1.44269504088896340736f);
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

// The mass of a set of logits: `sum` is the sum of e^(logit - high). Without finite logits, high is -inf and sum is 0.
struct RowMass {
    float high;
    double sum;

    static __device__ __forceinline__ RowMass empty() { return {-f32_infinity(), 0.0}; }

    // Returns the sum relative to a logit that is no smaller. Uses the exact exponential, because a sum is scaled many times.
    __device__ __forceinline__ double sum_at(float to) const {
        return high == to ? sum : sum * static_cast<double>(exp(sub_rn(high, to)));
    }

    __device__ __forceinline__ RowMass merge(RowMass other) const {
        const float to = fmaxf(high, other.high);
        if (to == -f32_infinity()) return empty();
        return {to, sum_at(to) + other.sum_at(to)};
    }

    // Merges this mass with the masses of some parts.
    template <int COUNT>
    __device__ __forceinline__ RowMass with(const float2 (&parts)[COUNT]) const {
        static_assert(COUNT % 2 == 0, "two parts are added in float32");
        float to = high;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) to = fmaxf(to, parts[i].x);
        if (to == -f32_infinity()) return empty();
        double all = sum_at(to);
#pragma unroll
        for (int i = 0; i < COUNT; i += 2)
            all += static_cast<double>(parts[i].y * exp_fast(parts[i].x - to) + parts[i + 1].y * exp_fast(parts[i + 1].x - to));
        return {to, all};
    }

    // Merges the masses of all lanes. Every lane gets the result.
    __device__ __forceinline__ RowMass of_warp() const {
        RowMass mass = *this;
#pragma unroll
        for (u32 apart = 16; apart; apart /= 2)
            mass = mass.merge({__shfl_xor_sync(0xffffffffu, mass.high, apart), __shfl_xor_sync(0xffffffffu, mass.sum, apart)});
        return mass;
    }

    __device__ __forceinline__ float2 part() const { return {high, static_cast<float>(sum)}; }

    // Returns log Z; -inf without finite logits.
    __device__ __forceinline__ double log_z() const {
        return sum == 0.0 ? -static_cast<double>(f32_infinity()) : static_cast<double>(high) + ::log(sum);
    }
};

#endif

}  // namespace flash_sampling
