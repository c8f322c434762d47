// The log-mass of a row beside its draw (paper App. L), for kernels that see every logit anyway: fast exponentials in
// float32, added up in float64. log Z of it is within 2e-6: an exponential of the logit x below the largest is off by at most
// 2.5e-7 + 2^-23 |x|, and what lies further down than the logarithm of the tokens' number has no share. LogMass and the
// integer masses of mass_histogram.cuh are for what must be closer, or the same everywhere.
#pragma once

#include "math.cuh"

namespace flash_sampling {

// Where masses go: the last parameter of the kernels that tell log Z.
struct Masses {
    double2* parts;  // the blocks' masses: max and sum
    double* log_z;   // one for each draw
};
FS_LAYOUT(Masses, 16, FS_AT(parts, 0) && FS_AT(log_z, 8));

#ifdef __CUDACC__

// e^x; 0 for -inf.
__device__ __forceinline__ float exp_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504088896340736f));
    return y;
}

// A largest logit and the sum of e^(logit - max); a set without finite logits has max -inf and sum 0.
struct RowMass {
    float max;
    double sum;

    static __device__ __forceinline__ RowMass empty() { return {-f32_infinity(), 0.0}; }

    // The same relative to a logit that is no smaller. Scaled again and again, so by the exact exponential.
    __device__ __forceinline__ double sum_at(float high) const {
        return max == high ? sum : sum * static_cast<double>(exp(sub_rn(max, high)));
    }

    // Adds eight logits of which `top` is the largest.
    __device__ __forceinline__ void add(const float (&logits)[8], float top) {
        if (top == -f32_infinity()) return;
        const float high = fmaxf(max, top);
        float e[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) e[i] = exp_fast(logits[i] - high);
        const float more = ((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7]));
        sum = sum_at(high) + static_cast<double>(more);
        max = high;
    }

    __device__ __forceinline__ RowMass merge(RowMass other) const {
        const float high = fmaxf(max, other.max);
        if (high == -f32_infinity()) return empty();
        return {high, sum_at(high) + other.sum_at(high)};
    }

    // That of all lanes, in every lane.
    __device__ __forceinline__ RowMass of_warp() const {
        RowMass mass = *this;
#pragma unroll
        for (u32 apart = 16; apart; apart /= 2)
            mass = mass.merge({__shfl_xor_sync(0xffffffffu, mass.max, apart), __shfl_xor_sync(0xffffffffu, mass.sum, apart)});
        return mass;
    }

    __device__ __forceinline__ double2 part() const { return {static_cast<double>(max), sum}; }
    static __device__ __forceinline__ RowMass of_part(double2 part) { return {static_cast<float>(part.x), part.y}; }

    // -inf of nothing.
    __device__ __forceinline__ double log_z() const {
        return sum == 0.0 ? -static_cast<double>(f32_infinity()) : static_cast<double>(max) + ::log(sum);
    }
};

#endif

}  // namespace flash_sampling
