// The instance for log Z: every warp of consumers adds up the masses of its tokens, row by row,
// while it still holds the tile. The head has no soft-cap, and rows have neither masks nor biases; otherwise log Z is NaN.
//
// A warp's sum is relative to a logit of its own, which rises when a logit is above it by more than RISE: in a row's first
// tile, and seldom after that.
#pragma once

#include "../../row_mass.cuh"
#include "halve.cuh"
#include "multiply.cuh"

namespace flash_sampling::fused_hopper {

constexpr float RISE = 8.0f;
constexpr float LOWEST = -3.402823466e38f;  // finite, so that differences from it are no NaN

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
    constexpr int AT_ONCE = HELD < 8 ? HELD : 8;
    float* const high = self.shared.high[self.warp];
    double* const sum = self.shared.sum[self.warp];
#pragma unroll
    for (int first = 0; first < HELD; first += AT_ONCE) {
        float l[AT_ONCE][2];
        bool rises = false;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const u32 column = self.column((first + i) / 2) + i % 2;
            const bool is_row = column < self.call.row_count;
            const float inv_temperature = is_row ? self.shared.rows[column].inv_temperature : 0.0f;
            const float limit = high[column] + RISE;
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const float dot = d[(first + i) / 2 * 4 + i % 2 + k * 2];
                const float raw = mul_rn(dot, self.call.head.scale);
                const bool counts = is_row && (real >> (k * 2) & 1);
                l[i][k] = counts ? mul_rn(raw, inv_temperature) : -f32_infinity();
                rises |= l[i][k] > limit;
            }
        }
        const u32 mine = first / 2 * 8 + self.lane % 4 * 2;
        if (__any_sync(0xffffffffu, rises)) {
            __syncwarp();  // all have read the old ones
            float top[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) top[i] = fmaxf(l[i][0], l[i][1]);
            u32 column = mine;
            const bool owns = reduce_by_halves<2, 4>(top, self.lane, column, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (!owns || !(top[i] > high[column + i])) continue;
                sum[column + i] *= static_cast<double>(exp(sub_rn(high[column + i], top[i])));
                high[column + i] = top[i];
            }
            __syncwarp();
        }
        float more[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const float from = high[self.column((first + i) / 2) + i % 2];
            more[i] = exp_fast(l[i][0] - from) + exp_fast(l[i][1] - from);
        }
        u32 column = mine;
        if (reduce_by_halves<2, 4>(more, self.lane, column, [](float a, float b) { return a + b; })) {
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

// Adds `count` blocks' masses of a row, `step` apart, eight at a time.
__device__ __forceinline__ RowMass mass_of_parts(const double2* parts, u32 count, u64 step) {
    RowMass mass = RowMass::empty();
    for (u32 first = 0; first < count; first += 8) {
        RowMass part[8];
#pragma unroll
        for (u32 i = 0; i < 8; ++i)
            part[i] = first + i < count ? RowMass::of_part(__ldcg(parts + (first + i) * step)) : RowMass::empty();
        float top = mass.max;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) top = fmaxf(top, part[i].max);
        if (top == -f32_infinity()) continue;
        double sum = mass.sum_at(top);
#pragma unroll
        for (u32 i = 0; i < 8; ++i) sum += part[i].sum_at(top);
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
