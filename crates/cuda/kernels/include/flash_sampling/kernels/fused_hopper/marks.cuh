// Marks: a bit for each element of a tile whose noise may be large. A word of marks belongs to the thread that holds the
// same elements of the products, bit for bit in the order of its accumulators.
#pragma once

#include "../../noise_bound.cuh"
#include "tile.cuh"

namespace flash_sampling::fused_hopper {

// Words below NEAR_WORD leave a mark: about one in 1024 tokens. In a block's first tile it is one in 128: the words below
// this one, and -ln(word 2^-32), rounded up.
constexpr u32 FIRST_WORD = 1u << 25;
constexpr float FIRST_NOISE = 4.852032f;

// Where the mark of a token of a tile and of a column is: the word of its half, and the bit within.
template <class T>
__device__ __forceinline__ u32& mark_word(Shared<T>& shared, u32 half, u32 m, u32 column, u32& bit) {
    const u32 at = column / 8 * 4 + column % 2 + m % 16 / 8 * 2;
    const u32 owner = m % 8 * 4 + column % 8 / 2;
    bit = at % T::WORD_BITS;
    return shared.marks[half][m / 64][m % 64 / 16][at / T::WORD_BITS][owner];
}

// Whether a token of a first tile has a mark of either kind.
template <class T>
__device__ __forceinline__ bool has_mark(Shared<T>& shared, u32 m, u32 column) {
    u32 bit;
    const u32 words = mark_word(shared, 0, m, column, bit) | mark_word(shared, 1, m, column, bit);
    return words >> bit & 1;
}

// Marks the small words of a quad of tokens. `shift` is the first token of the tile within its first quad.
template <class T>
__device__ __forceinline__ void leave_marks(Shared<T>& shared, u32 t, const Words& words, u32 quad, u32 column, u32 shift,
                                            u32 size) {
    const u32 threshold = t == 0 ? FIRST_WORD : NEAR_WORD;
    if (min(min(words.w[0], words.w[1]), min(words.w[2], words.w[3])) >= threshold) return;
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
        const u32 m = quad * 4 + k - shift;  // token within the tile; wraps before its first
        if (words.w[k] < threshold && m < size) {
            const u32 half = t == 0 ? words.w[k] >= NEAR_WORD : t & 1;
            u32 bit;
            u32& word = mark_word(shared, half, m, column, bit);
            atomicOr(&word, 1u << bit);
        }
    }
}

// A row's Philox blocks. Half of the first two rounds is the same for all tokens of a row.
struct RowBlocks {
    u32 key0, key1, last, in0, in2, fixed;

    __device__ __forceinline__ explicit RowBlocks(const Row& row)
        : key0(static_cast<u32>(row.seed)), key1(static_cast<u32>(row.seed >> 32)) {
        const Words origin = counter(0, row.draw, row.position, domain_code(Domain::Token));
        const u64 fixed1 = mul_wide(PHILOX_M4x32_1, origin.w[2]);
        const u64 fixed0 = mul_wide(PHILOX_M4x32_0, static_cast<u32>(fixed1 >> 32) ^ origin.w[1] ^ key0);
        last = origin.w[3] ^ key1;
        in0 = static_cast<u32>(fixed1) ^ (key0 + PHILOX_W32_0);
        in2 = static_cast<u32>(fixed0 >> 32) ^ (key1 + PHILOX_W32_1);
        fixed = static_cast<u32>(fixed0);
    }

    // The first two rounds of the block of a quad. NARROW: see narrow_philox4x32_round.
    template <bool NARROW>
    __device__ __forceinline__ Words begin(u32 quad) const {
        const u64 product = mul_wide(PHILOX_M4x32_0, quad);
        const u32 second = static_cast<u32>(product >> 32) ^ last;
        if (NARROW)
            return {{narrow_mul_high(PHILOX_M4x32_1, second) ^ in0, PHILOX_M4x32_1 * second,
                     static_cast<u32>(product) ^ in2, fixed}};
        const u64 other = mul_wide(PHILOX_M4x32_1, second);
        return {{static_cast<u32>(other >> 32) ^ in0, static_cast<u32>(other), static_cast<u32>(product) ^ in2, fixed}};
    }

    // The other eight rounds, of several blocks that hide each other's latency.
    template <bool NARROW, int BLOCKS>
    __device__ __forceinline__ void finish(Words (&w)[BLOCKS]) const {
        u32 k0 = key0 + 2 * PHILOX_W32_0, k1 = key1 + 2 * PHILOX_W32_1;
#pragma unroll(NARROW ? 4 : 8)
        for (u32 round = 2; round < 10; ++round) {
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j)
                w[j] = NARROW ? narrow_philox4x32_round(w[j], k0, k1) : philox4x32_round(w[j], k0, k1);
            k0 += PHILOX_W32_0;
            k1 += PHILOX_W32_1;
        }
    }
};

// Marks the small words of a warp's slab of 16 tokens in the columns that are not the scouts'. Little runs beside it, so
// wide multiplications are the fast ones here.
template <class T>
__device__ __forceinline__ void mark_slab(const Call& call, Shared<T>& shared, u32 t, u32 first, u32 size, u32 slab) {
    const u32 base = call.first_token + first, shift = base & 3;
    for (u32 column = T::scouted_columns(call) + threadIdx.x % 32; column < call.row_count; column += 32) {
        const Row& row = shared.rows[column];
        if (row.greedy) continue;
        const RowBlocks blocks(row);
#pragma unroll 1
        for (u32 quad = (slab + shift) >> 2; quad <= (slab + 15 + shift) >> 2; quad += 4) {
            Words w[4];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) w[j] = blocks.begin<false>((base >> 2) + quad + j);
            blocks.finish<false>(w);
#pragma unroll
            for (u32 j = 0; j < 4; ++j)
                if (quad + j <= (slab + 15 + shift) >> 2) leave_marks(shared, t, w[j], quad + j, column, shift, size);
        }
    }
    __syncwarp();
}

}  // namespace flash_sampling::fused_hopper
