// The instance for log Z: every consumer warp adds up the masses of its tokens for each row while it holds the tile. The head has
// no soft-cap, and rows have neither masks nor biases; otherwise log Z is NaN.
//
// Each warp keeps a reference for each row, and sums e^(logit - reference). If the mass of a tile exceeds LARGEST_MASS, the
// reference rises above the tile's largest logit. A row's first tile raises the reference; later tiles seldom do.
#pragma once

#include "../summary/row_mass.cuh"
#include "halve.cuh"
#include "multiply.cuh"

namespace flash_sampling::fused_hopper {

[[maybe_unused]] constexpr float LOWEST = -3.402823466e38f;  // finite, so that differences from it are not NaN
// The mass of a logit that is 7 nats above the reference. The error of an exponential grows with the distance from the reference:
// in a search for the worst row, 2^14 gave an error of 2.3e-6, and 2^10 gave 1.8e-6.
[[maybe_unused]] constexpr float LARGEST_MASS = 0x1p10f;

// Returns the reference for logits with the largest logit `top`. An integer reference makes the difference to a larger logit
// exact. The reference is above `top`, so later tokens may be larger.
__device__ __forceinline__ float reference_above(float top) {
    return fabsf(top) < 0x1p22f ? rintf(top) + 4.0f : top;
}

template <class T>
__device__ __forceinline__ void prepare_masses(const Call& call, Shared<T>& shared, u32 worker, u32 workers) {
    if (worker == 0) shared.scale = call.head.scale;
    for (u32 i = worker; i < T::COLUMNS; i += workers)
        shared.inv_temperature[i] = i < call.row_count ? call.rows[i].inv_temperature : 0.0f;
    for (u32 i = worker; i < T::CONSUMER_WARPS * T::COLUMNS; i += workers) {
        (&shared.high[0][0])[i] = LOWEST;
        (&shared.sum[0][0])[i] = 0.0;
    }
}

// Sets tokens beyond the tile to -inf: they have no mass, and pass no threshold.
template <class T>
__device__ __forceinline__ void hide_absent(float (&d)[T::ACCUMULATORS], u32 real) {
    if (__all_sync(0xffffffffu, real == ~0u)) return;
#pragma unroll
    for (int i = 0; i < T::ACCUMULATORS; ++i)
        if (!(real >> i % 4 & 1)) d[i] = -f32_infinity();
}

// Adds the masses of a warp's tokens to its sums. All lanes call this.
template <class T>
__device__ __forceinline__ void weigh(const float (&d)[T::ACCUMULATORS], Consumer<T> self) {
    // NOTE: the next line forces separate addresses. Addresses shared with the filter would stay in registers and spill.
    asm volatile("" : "+r"(self.lane), "+r"(self.warp));
    constexpr int HELD = T::ACCUMULATORS / 2;  // columns per lane
    constexpr int AT_ONCE = HELD < 16 ? HELD : HELD % 16 ? 8 : 16;
    constexpr int TURNS = HELD / AT_ONCE;
    float* const high = self.shared.high[self.warp];
    double* const sum = self.shared.sum[self.warp];
    float more[TURNS][2];
    u32 begins[TURNS];  // the column of more[turn][0]
    bool owns;
#pragma unroll 1
    for (bool has_risen = false;; has_risen = true) {
        bool is_much = false;
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            // NOTE: every iteration loads the scale. Otherwise the compiler scales all products at once, and spills.
            const float scale = *static_cast<volatile float*>(&self.shared.scale);
            const auto logit = [&](float dot, float inv_temperature) { return mul_rn(mul_rn(dot, scale), inv_temperature); };
            float masses[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i += 2) {
                const int j = (turn * AT_ONCE + i) / 2;
                const float2 inv_temperature = self.pair(self.shared.inv_temperature, j);
                const float2 from = self.pair(self.shared.high[self.warp], j);
                masses[i] = exp_fast(sub_rn(logit(d[4 * j], inv_temperature.x), from.x)) +
                            exp_fast(sub_rn(logit(d[4 * j + 2], inv_temperature.x), from.x));
                masses[i + 1] = exp_fast(sub_rn(logit(d[4 * j + 1], inv_temperature.y), from.y)) +
                                exp_fast(sub_rn(logit(d[4 * j + 3], inv_temperature.y), from.y));
            }
            begins[turn] = self.column(turn * AT_ONCE / 2);
            owns = reduce_by_halves<2, 4>(masses, self.lane, begins[turn], [](float a, float b) { return a + b; });
            // A column beyond the batch has no row, so its mass is meaningless.
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                more[turn][i] = masses[i];
                is_much |= begins[turn] + i < self.call.row_count && masses[i] > LARGEST_MASS;
            }
        }
        if (has_risen || !__any_sync(0xffffffffu, is_much)) break;
        __syncwarp();  // all lanes have read the old references
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            float top[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int at = (turn * AT_ONCE + i) / 2 * 4 + i % 2;
                top[i] = fmaxf(d[at], d[at + 2]);
            }
            u32 first = self.column(turn * AT_ONCE / 2);
            reduce_by_halves<2, 4>(top, self.lane, first, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                if (!owns || first + i >= self.call.row_count) continue;
                // Scale and temperature are positive, so the largest dot product has the largest logit.
                const float raw = mul_rn(top[i], self.shared.scale), old = high[first + i];
                const float to = reference_above(mul_rn(raw, self.shared.inv_temperature[first + i]));
                if (!(to > old)) continue;
                sum[first + i] = RowMass{old, sum[first + i]}.sum_at(to);
                high[first + i] = to;
            }
        }
        __syncwarp();
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        if (!owns) continue;
        sum[begins[turn]] += static_cast<double>(more[turn][0]);
        sum[begins[turn] + 1] += static_cast<double>(more[turn][1]);
    }
}

// Returns the mass of a row within the block.
template <class T>
__device__ __forceinline__ RowMass mass_of_block(const Shared<T>& shared, u32 column) {
    float2 parts[T::CONSUMER_WARPS];
#pragma unroll
    for (int w = 0; w < T::CONSUMER_WARPS; ++w) parts[w] = {shared.high[w][column], static_cast<float>(shared.sum[w][column])};
    return RowMass::empty().with(parts);
}

// Adds the masses of a row from `count` blocks, `step` elements from each other. Twelve reads are in flight during the additions
// of the previous twelve. A launch loads the code from memory and executes it once, so a longer unrolled loop costs more.
__device__ __forceinline__ RowMass mass_of_parts(const float2* parts, u32 count, u64 step) {
    constexpr u32 AT_ONCE = 12;
    const auto read = [&](u32 i) { return i < count ? __ldcg(parts + i * step) : float2{-f32_infinity(), 0.0f}; };
    float2 next[AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; ++i) next[i] = read(i);
    RowMass mass = RowMass::empty();
#pragma unroll 1
    for (u32 first = 0; first < count; first += AT_ONCE) {
        float2 part[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            part[i] = next[i];
            next[i] = read(first + AT_ONCE + i);
        }
        mass = mass.with(part);
    }
    return mass;
}

// Writes log Z of all rows after every block has stored its masses. With few rows, a warp handles each row.
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
