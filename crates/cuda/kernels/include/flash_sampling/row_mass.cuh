// The log-mass of a row beside its draw (paper App. L): float32, for kernels that see every logit anyway. log Z of it is
// within 2e-6; LogMass and the integer masses of mass_histogram.cuh are for what must be closer, or the same everywhere.
#pragma once

#include "platform.cuh"

namespace flash_sampling {

// Where masses go: the last parameter of the kernels that tell log Z.
struct Masses {
    float2* parts;  // the blocks' masses: max and sum
    double* log_z;  // one for each draw
};
FS_LAYOUT(Masses, 16, FS_AT(parts, 0) && FS_AT(log_z, 8));

#ifdef __CUDACC__

// e^x within 2e-7 + 2^-23 |x| of itself; 0 for -inf.
__device__ __forceinline__ float exp_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504088896340736f));
    return y;
}

// A largest logit and the sum of e^(logit - max); a set without finite logits has max -inf and sum 0.
struct RowMass {
    float max, sum;

    static __device__ __forceinline__ RowMass empty() { return {-f32_infinity(), 0.0f}; }

    // The same relative to a larger logit.
    __device__ __forceinline__ float sum_at(float high) const { return sum * exp_fast(max - high); }

    // Adds logits of which `top` is the largest.
    template <int COUNT>
    __device__ __forceinline__ void add(const float (&logits)[COUNT], float top) {
        if (top == -f32_infinity()) return;
        const float high = fmaxf(max, top);
        float more = sum_at(high);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) more += exp_fast(logits[i] - high);
        max = high;
        sum = more;
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

    // -inf of nothing.
    __device__ __forceinline__ double log_z() const {
        return sum == 0.0f ? -static_cast<double>(f32_infinity()) : static_cast<double>(max) + ::log(static_cast<double>(sum));
    }
};

#endif

}  // namespace flash_sampling
