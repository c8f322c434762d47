// The instance for log Z: every warp of consumers adds up the masses of its tokens, row by row,
// while it still holds the tile. The head has no soft-cap, and rows have neither masks nor biases; otherwise log Z is NaN.
//
// A warp's sum is relative to a logit of its own. It rises to the largest of a tile when the tile's mass is more than
// LARGEST_MASS: in a row's first tile, and seldom after that.
#pragma once

#include "../../row_mass.cuh"
#include "halve.cuh"
#include "multiply.cuh"

namespace flash_sampling::fused_hopper {

[[maybe_unused]] constexpr float LOWEST = -3.402823466e38f;  // finite, so that differences from it are no NaN
[[maybe_unused]] constexpr float LARGEST_MASS = 0x1p8f;

template <class T>
__device__ __forceinline__ void prepare_masses(Shared<T>& shared, u32 hand, u32 hands) {
    for (u32 i = hand; i < T::CONSUMER_WARPS * T::COLUMNS; i += hands) {
        (&shared.high[0][0])[i] = LOWEST;
        (&shared.sum[0][0])[i] = 0.0;
    }
}

// Adds a warp's tokens to its masses. All lanes call it.
template <class T>
__device__ __forceinline__ void weigh(const float (&d)[T::ACCUMULATORS], u32 real, Consumer<T> self) {
    // NOTE: addresses of its own: those that it shared with the filter would be kept in registers, and spill.
    asm volatile("" : "+r"(self.lane), "+r"(self.warp));
    constexpr int HELD = T::ACCUMULATORS / 2;  // columns of a lane
    constexpr int AT_ONCE = HELD < 16 ? HELD : HELD % 16 ? 8 : 16;
    float* const high = self.shared.high[self.warp];
    double* const sum = self.shared.sum[self.warp];
#pragma unroll
    for (int first = 0; first < HELD; first += AT_ONCE) {
        const u32 mine = first / 2 * 8 + self.lane % 4 * 2;
        float more[AT_ONCE];
        u32 column;
        bool owns;
#pragma unroll 1
        for (bool has_risen = false;; has_risen = true) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const u32 of = self.column((first + i) / 2) + i % 2;
                const float inv_temperature = self.shared.rows[of].inv_temperature, from = high[of];
                const auto mass = [&](int k) {
                    const float raw = mul_rn(d[(first + i) / 2 * 4 + i % 2 + 2 * k], self.call.head.scale);
                    return real >> (2 * k) & 1 ? exp_fast(mul_rn(raw, inv_temperature) - from) : 0.0f;
                };
                more[i] = mass(0) + mass(1);
            }
            column = mine;
            owns = reduce_by_halves<2, 4>(more, self.lane, column, [](float a, float b) { return a + b; });
            // A column beyond the batch has no row, and its mass means nothing.
            const auto is_much = [&](int i) { return column + i < self.call.row_count && more[i] > LARGEST_MASS; };
            if (has_risen || !__any_sync(0xffffffffu, owns && (is_much(0) || is_much(1)))) break;
            float top[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const float* const at = &d[(first + i) / 2 * 4 + i % 2];
                top[i] = real & 1 ? at[0] : -f32_infinity();
                if (real & 4) top[i] = fmaxf(top[i], at[2]);
            }
            column = mine;
            reduce_by_halves<2, 4>(top, self.lane, column, [](float a, float b) { return fmaxf(a, b); });
            __syncwarp();  // all have read the old ones
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (!owns || column + i >= self.call.row_count) continue;
                // Scale and temperature are positive, so the largest dot product has the largest logit.
                const float raw = mul_rn(top[i], self.call.head.scale), old = high[column + i];
                const float to = mul_rn(raw, self.shared.rows[column + i].inv_temperature);
                if (!(to > old)) continue;
                sum[column + i] *= static_cast<double>(exp(sub_rn(old, to)));
                high[column + i] = to;
            }
            __syncwarp();
        }
        if (owns) {
            sum[column] += static_cast<double>(more[0]);
            sum[column + 1] += static_cast<double>(more[1]);
        }
    }
}

// The mass of a row within the block.
template <class T>
__device__ __forceinline__ RowMass mass_of_block(const Shared<T>& shared, u32 column) {
    RowMass mass = RowMass::empty();
#pragma unroll
    for (int w = 0; w < T::CONSUMER_WARPS; ++w)
        if (shared.sum[w][column] != 0.0) mass = mass.merge({shared.high[w][column], shared.sum[w][column]});
    return mass;
}

// Adds `count` blocks' masses of a row, `step` apart; many at a time, for the latency of reads.
__device__ __forceinline__ RowMass mass_of_parts(const double2* parts, u32 count, u64 step) {
    constexpr u32 AT_ONCE = 24;
    RowMass mass = RowMass::empty();
#pragma unroll 1
    for (u32 first = 0; first < count; first += AT_ONCE) {
        RowMass part[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i)
            part[i] = first + i < count ? RowMass::of_part(__ldcg(parts + (first + i) * step)) : RowMass::empty();
        float top = mass.max;
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) top = fmaxf(top, part[i].max);
        if (top == -f32_infinity()) continue;
        double sum = mass.sum_at(top);
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) sum += part[i].sum * static_cast<double>(exp_fast(part[i].max - top));
        mass = {top, sum};
    }
    return mass;
}

// Writes log Z of all rows, when every block's masses are there. A warp takes a row where there are few.
template <class T>
__device__ __forceinline__ void write_log_z(const Call& call, const Shared<T>& shared, const Masses& masses, u32 thread) {
    const u32 rows = call.row_count, blocks = gridDim.x;
    const auto write = [&](u32 column, const RowMass& mass) {
        const Row& row = shared.rows[column];
        const bool is_known = !row.mask && !row.biases && call.head.soft_cap == 0.0f;
        masses.log_z[column] = is_known ? mass.log_z() : static_cast<double>(bits_to_f32(0x7fc00000u));
    };
    if (rows > 32) {
        for (u32 column = thread; column < rows; column += T::CONSUMERS)
            write(column, mass_of_parts(masses.parts + column, blocks, rows));
        return;
    }
    const u32 lane = thread % 32;
    for (u32 column = thread / 32; column < rows; column += T::CONSUMER_WARPS) {
        const u32 count = lane < blocks ? (blocks - lane + 31) / 32 : 0;
        const u64 first = static_cast<u64>(lane) * rows + column;
        const RowMass mass = mass_of_parts(masses.parts + first, count, 32ull * rows).of_warp();
        if (lane == 0) write(column, mass);
    }
}

}  // namespace flash_sampling::fused_hopper
