// A block's part of a row: loads raw logits into registers, transforms and checks them, and stores them on request.
#pragma once

#include "../element.cuh"
#include "../perturb.cuh"
#include "../scan/stored.cuh"
#include "call.cuh"

namespace flash_sampling {

constexpr u32 THREADS = 512;
// Tokens per thread and per block.
constexpr u32 EACH = 16;
constexpr u32 TOKENS = THREADS * EACH;

// Returns the position, within its part, of a thread's logit i. Threads hold groups of four neighbours.
__device__ __forceinline__ u32 token_of(u32 i) { return i / 4 * (4 * THREADS) + 4 * threadIdx.x + i % 4; }

// Reads four neighbours at an address that is a multiple of their total size.
template <Element ELEMENT>
__device__ __forceinline__ void load_four(const void* raw, u64 at, float* four) {
    if (ELEMENT == Element::F32) {
        const float4 values = *reinterpret_cast<const float4*>(static_cast<const float*>(raw) + at);
        four[0] = values.x, four[1] = values.y, four[2] = values.z, four[3] = values.w;
    } else {
        const u64 values = *reinterpret_cast<const u64*>(static_cast<const u16*>(raw) + at);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) four[i] = widen<ELEMENT>(static_cast<u32>(values >> 32 * (i / 2)), i % 2);
    }
}

// Stores four neighbours, without logits beyond the part. Stored rows begin at multiples of 16 bytes.
__device__ __forceinline__ void store_four(const float* four, float* stored, u32 t, u32 count) {
    if (t + 4 <= count) {
        *reinterpret_cast<float4*>(stored + t) = {four[0], four[1], four[2], four[3]};
    } else {
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            if (t + i < count) stored[t + i] = four[i];
    }
}

// Whether a transform only multiplies logits.
__device__ __forceinline__ bool is_factor(const RowTransform& row) { return !row.mask && !row.biases; }

// Returns the index of a part's first logit in the raw logits.
__device__ __forceinline__ u64 source_of(const RowSummaries& call, u32 r, u32 first) {
    return (call.sources ? call.sources[r] : r) * call.raw_stride + first;
}

// Reads a part of a row; -inf beyond its end.
template <Element ELEMENT>
__device__ __forceinline__ void load_part(const RowSummaries& call, u64 source, u32 count, float (&logits)[EACH]) {
    const u32 bytes = element_bytes(ELEMENT);
    if (count == TOKENS && (reinterpret_cast<u64>(call.raw) + source * bytes) % (4 * bytes) == 0) {
#pragma unroll
        for (u32 i = 0; i < EACH; i += 4) load_four<ELEMENT>(call.raw, source + token_of(i), logits + i);
    } else {
#pragma unroll
        for (u32 i = 0; i < EACH; ++i)
            logits[i] = token_of(i) < count ? element<ELEMENT>(call.raw, source + token_of(i)) : -f32_infinity();
    }
}

// Reads a part of a row, transforms it, and stores it on request. Contains barriers.
__device__ __forceinline__ void transform_part(const RowSummaries& call, u32 r, u32 first, u32 count, float (&logits)[EACH],
                                               float (&room)[TOKENS]) {
    const RowTransform row = call.rows[r].transform();
    const u64 source = source_of(call, r, first);
    const bool stores = call.requests[r].stores, is_in_place = static_cast<const void*>(call.stored.logits) == call.raw;
    float* const stored = const_cast<float*>(call.stored.row(r)) + first;
#pragma unroll 4
    for (u32 t = threadIdx.x; t < TOKENS; t += THREADS) {
        float logit = -f32_infinity();
        if (t < count) {
            const float raw = element(call.element, call.raw, source + t);
            logit = checked_logit(raw, row, call.stored.first_token + first + t, &call.results[r].invalid);
            if (stores && !(is_in_place && f32_to_bits(logit) == f32_to_bits(raw))) stored[t] = logit;
        }
        room[t] = logit;
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) logits[i] = room[token_of(i)];
    __syncthreads();
}

// Returns the largest of a thread's logits.
__device__ __forceinline__ float largest_of(const float (&logits)[EACH]) {
    float largest = logits[0];
#pragma unroll
    for (u32 i = 1; i < EACH; ++i) largest = fmaxf(largest, logits[i]);
    return largest;
}

// Multiplies a thread's raw logits by the row's factor, checks them, and stores them on request. Returns the largest.
__device__ __forceinline__ float scale_part(const RowSummaries& call, u32 r, u32 first, u32 count, float (&logits)[EACH]) {
    const float factor = call.rows[r].inv_temperature;
    float largest = -f32_infinity();
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) largest = max_or_nan(largest, logits[i] = mul_rn(logits[i], factor));
    const bool is_valid = largest < f32_infinity();
    if (!is_valid) {
        const u64 source = source_of(call, r, first);
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            if (logits[i] < f32_infinity()) continue;
            const u32 t = token_of(i), token = call.stored.first_token + first + t;
            const u64 key = invalid_key(element(call.element, call.raw, source + t), token, 0);
            atomicMin(&call.results[r].invalid, key == ~0ull ? invalid_key(logits[i], token, 1) : key);
            logits[i] = -f32_infinity();
        }
        largest = largest_of(logits);
    }
    // A factor of 1 does not change a valid logit.
    const bool is_in_place = static_cast<const void*>(call.stored.logits) == call.raw;
    if (!call.requests[r].stores || (is_in_place && factor == 1.0f && is_valid)) return largest;
    float* const stored = const_cast<float*>(call.stored.row(r)) + first;
#pragma unroll
    for (u32 i = 0; i < EACH; i += 4) store_four(logits + i, stored, token_of(i), count);
    return largest;
}

}  // namespace flash_sampling
