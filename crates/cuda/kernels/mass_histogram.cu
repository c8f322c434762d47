// The masses of stored logits: the twin of core's MassHistogram, integer for integer. One kernel finds the largest logit of each
// row, the other sums. Integer sums do not depend on the order, so any number of blocks may share a row.
#include "flash_sampling/summary/mass_histogram.cuh"
#include "flash_sampling/scan/stored.cuh"

using namespace flash_sampling;

constexpr u32 THREADS = 256;
// Tokens per block: as many as 32-bit sums can hold.
constexpr u32 TOKENS = 1 << 14;

// [rows] monotone bits of each row's largest logit; zero before.
extern "C" __global__ void __launch_bounds__(THREADS)
    row_tops(const __grid_constant__ StoredLogits stored, u32* tops) {
    const u32 row = blockIdx.y;
    const float* const logits = stored.row(row);
    const u32 first = blockIdx.x * TOKENS, end = min(first + TOKENS, stored.tokens);
    u32 top = 0;
    for (u32 t = first + threadIdx.x; t < end; t += THREADS) top = max(top, to_monotone_bits(logits[t]));
    top = __reduce_max_sync(0xffffffffu, top);
    if (threadIdx.x % 32 == 0 && top) atomicMax(tops + row, top);
}

// [rows, 1 + MASS_BINS] as core's to_words has them; zero before.
extern "C" __global__ void __launch_bounds__(THREADS)
    row_masses(const __grid_constant__ StoredLogits stored, const u32* tops, u64* words) {
    __shared__ u32 low[MASS_BINS], high[MASS_BINS];
    const u32 row = blockIdx.y;
    u64* const out = words + row * (1 + MASS_BINS);
    const float largest = tops[row] ? from_monotone_bits(tops[row]) : -f32_infinity();
    if (largest == -f32_infinity()) {
        if (blockIdx.x == 0 && threadIdx.x == 0) out[0] = f32_to_bits(largest);
        return;
    }
    const float top = mass_edge(largest);
    if (blockIdx.x == 0 && threadIdx.x == 0) out[0] = f32_to_bits(top);
    for (u32 i = threadIdx.x; i < MASS_BINS; i += THREADS) low[i] = high[i] = 0;
    __syncthreads();

    // A unit is below 2^31. Its halves, 16 and 15 bits, are summed apart: 2^14 of them stay below 2^32.
    const float* const logits = stored.row(row);
    const u32 first = blockIdx.x * TOKENS, end = min(first + TOKENS, stored.tokens);
    for (u32 t = first + threadIdx.x; t < end; t += THREADS) {
        const float logit = logits[t];
        if (logit == -f32_infinity()) continue;
        const float edge = mass_edge(logit);
        if (!(sub_rn(top, edge) < MASS_WINDOW)) continue;
        const u32 units = static_cast<u32>(mass_units(logit, edge)), slot = mass_slot(edge);
        atomicAdd(&low[slot], units & 0xffffu);
        atomicAdd(&high[slot], units >> 16);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < MASS_BINS; i += THREADS)
        if (low[i] | high[i]) atomicAdd(out + 1 + i, (static_cast<u64>(high[i]) << 16) + low[i]);
}
