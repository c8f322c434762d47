// The first tile's largest dot product of each row: what there is to filter by before anything has been scored.
#pragma once

#include "multiply.cuh"
#include "threshold.cuh"

namespace flash_sampling::fused_hopper {

template <int WORD_BITS, int WORDS>
__device__ __forceinline__ u32 bit_of(const u32 (&words)[WORDS], int at) {
    return words[at / WORD_BITS] >> (at % WORD_BITS) & 1;
}

// Raises the largest value of each column (monotone bits) by those of a warp's accumulators; `value(u, at, otherwise)` is
// `otherwise` for one that does not count. Eight lanes hold the rows of a column: they halve the columns among themselves
// three times, up to sixteen columns of a lane at a time.
template <int UNITS, int ACCUMULATORS, class Value>
__device__ __forceinline__ void raise_largest(u32* largest, u32 lane, const Value& value) {
    constexpr int HELD = ACCUMULATORS / 2;  // columns of a lane
    constexpr int AT_ONCE = HELD < 16 ? HELD : HELD % 16 ? 8 : 16;
#pragma unroll
    for (int first = 0; first < HELD; first += AT_ONCE) {
        float m[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = (first + i) / 2 * 4 + i % 2;
            m[i] = -f32_infinity();
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                m[i] = fmaxf(m[i], value(u, at, m[i]));
                m[i] = fmaxf(m[i], value(u, at + 2, m[i]));
            }
        }
        u32 column = first / 2 * 8 + lane % 4 * 2;
        int held = AT_ONCE;
#pragma unroll
        for (int apart = 16; apart >= 4; apart /= 2) {
            const bool upper = lane & apart;
            if (held > 2) {
                held /= 2;
#pragma unroll
                for (int i = 0; i < AT_ONCE / 2; ++i) {
                    if (i < held) {
                        const float other = __shfl_xor_sync(0xffffffffu, upper ? m[i] : m[i + held], apart);
                        m[i] = fmaxf(upper ? m[i + held] : m[i], other);
                    }
                }
                column += upper ? held / 2 * 8 : 0;
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i) m[i] = fmaxf(m[i], __shfl_xor_sync(0xffffffffu, m[i], apart));
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) atomicMax(&largest[column + i], to_monotone_bits(m[i]));
    }
}

// Whether an element counts: it is a token, and no mask forbids it. `allowed`, if it is given, are the bits of the elements
// that masks allow, WORD_BITS a word.
template <class T, class... Allowed>
__device__ __forceinline__ bool counts(const u32 (&real)[T::UNITS], int u, int at, const Allowed&... allowed) {
    return (real[u] >> (at & 2) & 1) && (bit_of<T::WORD_BITS>(allowed[u], at) & ... & 1u);
}

// Thresholds that only each row's largest dot product passes.
template <class T, class... Allowed>
__device__ __forceinline__ void keep_largest(const float (&d)[T::UNITS][T::ACCUMULATORS], const u32 (&real)[T::UNITS],
                                             const Call& call, Shared<T>& shared, u32 thread, const Allowed&... allowed) {
    raise_largest<T::UNITS, T::ACCUMULATORS>(shared.largest, thread % 32, [&](int u, int at, float otherwise) {
        return counts<T>(real, u, at, allowed...) ? d[u][at] : otherwise;
    });
    ptx::named_barrier(CONSUMERS_BARRIER, T::CONSUMERS);
    for (u32 column = thread; column < T::COLUMNS; column += T::CONSUMERS) {
        // The next smaller float, so that the largest is above it.
        const float below = next_below(from_monotone_bits(max(shared.largest[column], 0x007fffffu)));
        shared.losing[column] = column < call.row_count ? below : bits_to_f32(LOSES_ALWAYS);
    }
    ptx::named_barrier(CONSUMERS_BARRIER, T::CONSUMERS);
}

}  // namespace flash_sampling::fused_hopper
