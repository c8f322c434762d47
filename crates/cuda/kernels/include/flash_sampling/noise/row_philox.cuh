// Philox for many blocks of one row, position and draw: what does not depend on the block is done once.
//
// Round 0 turns (block, draw, c2, c3) into (A, B, hi(p) ^ C, lo(p)) with p = M0 block; A, B and C are the row's. Round 1
// multiplies A, which is the row's, and hi(p) ^ C: two of its products are left out as well. Rounds 2 to 9 are
// as they are, with keys that were added up beforehand.
#pragma once

#include "counter.cuh"

namespace flash_sampling {

struct alignas(16) RowPhilox {
    u32 third;      // C = c3 ^ k1 of round 0
    u32 first;      // B ^ k0 of round 1
    u32 low;        // hi(M0 A) ^ k1 of round 1
    u32 last;       // lo(M0 A)
    u32 keys[16];   // k0 and k1 of rounds 2 to 9

    FS_FUNCTION static RowPhilox of(u64 seed, u64 position, u32 draw, u32 code) {
        u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
        const Words start = philox4x32_round(counter(0, draw, position, code), k0, k1);
        RowPhilox row;
        row.third = start.w[2];
        k0 += PHILOX_W32_0;
        k1 += PHILOX_W32_1;
        const u64 product = mul_wide(PHILOX_M4x32_0, start.w[0]);
        row.first = start.w[1] ^ k0;
        row.low = static_cast<u32>(product >> 32) ^ k1;
        row.last = static_cast<u32>(product);
        for (u32 round = 0; round < 8; ++round) {
            row.keys[2 * round] = k0 += PHILOX_W32_0;
            row.keys[2 * round + 1] = k1 += PHILOX_W32_1;
        }
        return row;
    }

    // The words of N blocks. `four(i)` gives words 4 i to 4 i + 3 of this struct.
    template <u32 N, class Four>
    FS_FUNCTION static void words(const u32 (&blocks)[N], Four four, Words (&out)[N]) {
        const Words head = four(0);
#if defined(__CUDACC__)
#pragma unroll
#endif
        for (u32 n = 0; n < N; ++n) {
            const u64 p = mul_wide(PHILOX_M4x32_0, blocks[n]);
            const u64 q = mul_wide(PHILOX_M4x32_1, static_cast<u32>(p >> 32) ^ head.w[0]);
            out[n].w[0] = static_cast<u32>(q >> 32) ^ head.w[1];
            out[n].w[1] = static_cast<u32>(q);
            out[n].w[2] = static_cast<u32>(p) ^ head.w[2];
            out[n].w[3] = head.w[3];
        }
#if defined(__CUDACC__)
#pragma unroll
#endif
        for (u32 pair = 1; pair < 5; ++pair) {
            const Words keys = four(pair);
#if defined(__CUDACC__)
#pragma unroll
#endif
            for (u32 n = 0; n < N; ++n) {
                out[n] = philox4x32_round(out[n], keys.w[0], keys.w[1]);
                out[n] = philox4x32_round(out[n], keys.w[2], keys.w[3]);
            }
        }
    }

    FS_FUNCTION Words words(u32 block) const {
        const u32 blocks[1] = {block};
        Words out[1];
        const u32* const all = &third;
        words(blocks, [&](u32 i) -> Words { return {{all[4 * i], all[4 * i + 1], all[4 * i + 2], all[4 * i + 3]}}; }, out);
        return out[0];
    }
};
static_assert(sizeof(RowPhilox) == 80, "five loads of 16 bytes");

#ifdef __CUDACC__

// The words of N blocks from a row in shared memory.
// NOTE: volatile, or the compiler keeps all twenty words in registers.
template <u32 N>
__device__ __forceinline__ void row_words(const RowPhilox* shared, const u32 (&blocks)[N], Words (&out)[N]) {
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(shared));
    const auto four = [&](u32 i) {
        Words w;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w.w[0]), "=r"(w.w[1]), "=r"(w.w[2]), "=r"(w.w[3])
                     : "r"(at + 16 * i));
        return w;
    };
    RowPhilox::words(blocks, four, out);
}

#endif

}  // namespace flash_sampling
