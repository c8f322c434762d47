// Copies of the hidden states in f16, for the Hopper kernel with a weight of 8-bit elements.
//
// Tensor cores multiply operands of one type. One instruction converts two e4m3 to f16, and four instructions
// convert them to bf16. So the kernel multiplies in f16, and its bf16 hidden states need copies in f16.
//
// Each row has a factor, a power of two. The kernel of this file divides the elements of a row by the factor, so that
// the largest element is just below the largest f16. A row is exact if every element is then 0 or a normal f16, which
// has more significant bits than a bf16: if no other element is below 2^-29 of the largest. If any row of the batch is
// not exact, the Hopper kernel multiplies all rows in bf16.
//
// The sums have the same bits in both types, because a power of two does not change the rounding of a sum. Subnormal
// f16 could change it, although their values are exact: tensor cores cut the terms of a sum at a bit that depends on
// the exponents of the factors, and a subnormal f16 has a larger exponent than the same number in bf16.
#pragma once

#include "../element.cuh"
#include "../math.cuh"
#include "../ptx/early.cuh"

namespace flash_sampling {

// The argument of scale_hidden.
struct ScaledHidden {
    const u8* hidden;   // [rows, width] in bf16, rows at multiples of 16 bytes
    u64 hidden_stride;  // bytes
    u16* copies;        // [2, copied_rows, stride]: f16, then bf16; zeros beyond rows and width
    float* factors;     // [copied_rows]: hidden state = f16 copy x factor; 0 if the row is not exact
    u32 rows;
    u32 copied_rows;
    u32 width;
    u32 stride;         // elements between rows of copies, a multiple of 16
};
FS_LAYOUT(ScaledHidden, 48,
          FS_AT(hidden, 0) && FS_AT(hidden_stride, 8) && FS_AT(copies, 16) && FS_AT(factors, 24) && FS_AT(rows, 32) &&
          FS_AT(copied_rows, 36) && FS_AT(width, 40) && FS_AT(stride, 44));

#ifdef __CUDACC__

struct HiddenScaler {
    static constexpr u32 THREADS = 256;
    static constexpr u32 WARPS = THREADS / 32;
    static constexpr u32 AT_ONCE = 8;  // elements of a load

    struct Shared {
        float largest[WARPS];
        bool is_exact[WARPS];
    };

    // Returns the index of element k in a copy. A product takes 16 columns of the weight, and thread q of four loads
    // the columns 4q to 4q + 3. The product takes these columns as 2q, 2q + 1, 2q + 8 and 2q + 9 (see wgmma.cuh), so
    // the copies have the same order.
    static FS_FUNCTION u32 permuted_index(u32 k) { return k / 16 * 16 + k % 16 / 4 * 2 + k % 4 / 2 * 8 + k % 2; }

    // Returns the factor of a row with this largest element: the copy of the element is in [2^15, 2^16). Returns 0 for
    // a NaN, and if the element is so small or so large that the sums of one type could leave the range of float32.
    static FS_FUNCTION float factor_of(float largest) {
        if (largest == 0.0f) return 1.0f;
        const bool is_in_range = largest >= 0x1p-60f && largest < 0x1p80f;
        return is_in_range ? bits_to_f32((f32_to_bits(largest) & 0x7f800000) - (15 << 23)) : 0.0f;
    }

    // Stores elements k to k + 7 of a copy.
    static __device__ __forceinline__ void store(u16* to, const u16 (&bits)[AT_ONCE], u32 k) {
        const auto four = [&](u32 i) {
            return bits[i] | static_cast<u64>(bits[i + 1]) << 16 | static_cast<u64>(bits[i + 4]) << 32 |
                   static_cast<u64>(bits[i + 5]) << 48;
        };
        *reinterpret_cast<u64*>(to + permuted_index(k)) = four(0);
        *reinterpret_cast<u64*>(to + permuted_index(k + 2)) = four(2);
    }

    // Writes both copies of a row, and its factor. Each row has one block. Rows beyond the batch are rows of zeros.
    static __device__ __forceinline__ void block(const ScaledHidden& call, u32 row, Shared& shared) {
        ptx::start_next_launch();
        const u32 width = row < call.rows ? call.width : 0;
        const u8* const from = call.hidden + row * call.hidden_stride;
        float largest = 0.0f;
        for (u32 k = AT_ONCE * threadIdx.x; k < width; k += AT_ONCE * THREADS) {
            float x[AT_ONCE];
            load_elements<Element::BF16>(x, from, k, width);
#pragma unroll
            for (const float element : x) largest = max_or_nan(largest, fabsf(element));
        }
#pragma unroll
        for (u32 apart = 16; apart > 0; apart /= 2)
            largest = max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, apart));
        shared.largest[threadIdx.x / 32] = largest;
        __syncthreads();
        for (u32 warp = 0; warp < WARPS; ++warp) largest = max_or_nan(largest, shared.largest[warp]);

        const float factor = factor_of(largest);
        const float inverse = factor > 0.0f ? bits_to_f32((254u << 23) - f32_to_bits(factor)) : 0.0f;
        u16* const f16 = call.copies + static_cast<u64>(row) * call.stride;
        u16* const bf16 = f16 + static_cast<u64>(call.copied_rows) * call.stride;
        bool is_exact = factor > 0.0f;
        for (u32 k = AT_ONCE * threadIdx.x; k < call.stride; k += AT_ONCE * THREADS) {
            float x[AT_ONCE];
            load_elements<Element::BF16>(x, from, k, width);
            u16 scaled[AT_ONCE], unscaled[AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i) {
                scaled[i] = static_cast<u16>(f16_bits(mul_rn(x[i], inverse)));
                unscaled[i] = static_cast<u16>(f32_to_bits(x[i]) >> 16);
                const bool is_normal = scaled[i] & 0x7c00;
                is_exact &= x[i] == 0.0f || (is_normal && mul_rn(widen_f16(scaled[i]), factor) == x[i]);
            }
            store(f16, scaled, k);
            store(bf16, unscaled, k);
        }
        const bool is_exact_in_warp = __all_sync(0xffffffffu, is_exact);
        shared.is_exact[threadIdx.x / 32] = is_exact_in_warp;
        __syncthreads();
        if (threadIdx.x > 0) return;
        for (u32 warp = 0; warp < WARPS; ++warp) is_exact &= shared.is_exact[warp];
        call.factors[row] = is_exact ? factor : 0.0f;
    }
};

#endif

}  // namespace flash_sampling
