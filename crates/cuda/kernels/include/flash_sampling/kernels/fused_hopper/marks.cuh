// Marks: a bit for each element of a tile whose noise may be large. A word of marks belongs to the thread that holds the
// same elements of the products, bit for bit in the order of its accumulators.
#pragma once

#include "tile.cuh"

namespace flash_sampling::fused_hopper {

// Words below these leave a mark: about one in 1024 tokens, and one in 128 in a block's first tile.
constexpr u32 MARK_WORD = 1u << 22;
constexpr u32 FIRST_MARK_WORD = 1u << 25;
// -ln(word 2^-32), rounded up.
constexpr float MARK_NOISE_BOUND = 6.931473f;
constexpr float FIRST_MARK_NOISE_BOUND = 4.852032f;

// Marks the small words of a quad of tokens. `shift` is the first token of the tile within its first quad.
template <class T>
__device__ __forceinline__ void leave_marks(Shared<T>& shared, u32 t, const Words& words, u32 quad, u32 column, u32 shift,
                                            u32 size) {
    const u32 threshold = t == 0 ? FIRST_MARK_WORD : MARK_WORD;
    if (min(min(words.w[0], words.w[1]), min(words.w[2], words.w[3])) >= threshold) return;
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
        const u32 m = quad * 4 + k - shift;  // token within the tile; wraps before its first
        if (words.w[k] < threshold && m < size) {
            const u32 bit = column / 8 * 4 + column % 2 + m % 16 / 8 * 2;
            const u32 owner = m % 8 * 4 + column % 8 / 2;
            const u32 half = t == 0 ? words.w[k] >= MARK_WORD : t & 1;
            atomicOr(&shared.marks[half][m / 64][m % 64 / 16][bit / 32][owner], 1u << bit % 32);
        }
    }
}

// Marks the small words of a warp's slab of 16 tokens in the columns that are not the scouts'. Nothing runs beside it, so
// wide multiplications are the fast ones here.
template <class T>
__device__ __forceinline__ void scan(const Call& call, Shared<T>& shared, u32 t, u32 first, u32 size, u32 slab) {
    const u32 base = call.first_token + first, shift = base & 3;
    for (u32 column = T::scouted_columns(call) + threadIdx.x % 32; column < call.row_count; column += 32) {
        const Row& row = shared.rows[column];
        if (row.greedy) continue;
        const Words origin = counter(0, row.draw, row.position, domain_code(Domain::Token));
#pragma unroll 1
        for (u32 quad = (slab + shift) >> 2; quad <= (slab + 15 + shift) >> 2; quad += 4) {
            constexpr u32 AT_ONCE = 4;
            Words w[AT_ONCE];
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; ++j) w[j] = {{(base >> 2) + quad + j, origin.w[1], origin.w[2], origin.w[3]}};
            u32 k0 = static_cast<u32>(row.seed), k1 = static_cast<u32>(row.seed >> 32);
#pragma unroll 2
            for (u32 round = 0; round < 10; ++round) {
#pragma unroll
                for (u32 j = 0; j < AT_ONCE; ++j) w[j] = philox4x32_round(w[j], k0, k1);
                k0 += PHILOX_W32_0;
                k1 += PHILOX_W32_1;
            }
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; ++j)
                if (quad + j <= (slab + 15 + shift) >> 2) leave_marks(shared, t, w[j], quad + j, column, shift, size);
        }
    }
    __syncwarp();
}

}  // namespace flash_sampling::fused_hopper
