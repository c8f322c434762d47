// The best tokens of stored rows by score (Gumbel-top-k, Kool et al. 2019) or by logit: the twin of core's TopList. A block takes
// an item at a time.
//
// The plain version sorts all tokens by (score, then lower token) and keeps the first. This kernel finds the key of the last kept
// token by radix select: a histogram of the next 11 bits among the keys that share the digits found so far. Keys have 64 bits and
// differ, so the limit is exact, ties included. Usually the digits of the score decide.
#include "flash_sampling/selection/digit.cuh"
#include "flash_sampling/noise/noise.cuh"
#include "flash_sampling/scan/stored.cuh"

using namespace flash_sampling;

constexpr u32 THREADS = 1024;
constexpr u32 DIGITS = 6;

struct Shared {
    u32 histogram[1 << DIGIT_BITS];
    u32 present;  // tokens that have a score
    u32 digit;    // the digit of the last kept key, in the current histogram
    u32 above;    // keys with larger digits
    u32 within;   // keys with this digit
};

// Returns the ordered bits of a token; 0 = it has no score.
__device__ __forceinline__ u64 key_of(u32 score, u32 token) {
    return score ? static_cast<u64>(score) << 32 | static_cast<u32>(~token) : 0;
}

// Returns the shift of a digit of a key. From the top, three digits are of the score, three of the token.
__device__ __forceinline__ u32 shift_of(u32 digit) {
    constexpr u32 SHIFT[DIGITS] = {53, 42, 32, 21, 10, 0};
    return SHIFT[digit];
}
__device__ __forceinline__ u32 bits_of(u32 digit) { return digit % 3 == 2 ? DIGIT_BITS - 1 : DIGIT_BITS; }

struct TopLists {
    StoredLogits stored;
    KeptTokens out;
    const Row* rows;    // [items] the noise; greedy = by logit
    const Item* items;  // [items]
    u32* scores;        // [blocks, tokens] scratch
    u32 item_count;
    u32 padding;
};
FS_LAYOUT(TopLists, 80,
          FS_AT(stored, 0) && FS_AT(out, 24) && FS_AT(rows, 48) && FS_AT(items, 56) && FS_AT(scores, 64) &&
          FS_AT(item_count, 72) && FS_AT(padding, 76));

extern "C" __global__ void __launch_bounds__(THREADS) top_list(const __grid_constant__ TopLists call) {
    __shared__ Shared shared;
    const StoredLogits& stored = call.stored;
    u32* const scores = call.scores + static_cast<u64>(blockIdx.x) * stored.tokens;
    const u32 end_token = stored.first_token + stored.tokens;
    for (u32 i = blockIdx.x; i < call.item_count; i += gridDim.x) {
        const Item item = call.items[i];
        if (item.limit == 0) continue;
        const Row& row = call.rows[i];
        const float* const logits = stored.row(item.source);
        const Noise noise{row.seed, row.position};
        const bool greedy = row.greedy;
        const u32 draw = row.draw;

        // Computes monotone bits of every score. A thread takes four tokens of a granule, which share a Philox block.
        if (threadIdx.x == 0) shared.present = 0;
        __syncthreads();
        u32 present = 0;
        for (u32 block = stored.first_token / 4 + threadIdx.x; block <= (end_token - 1) / 4; block += THREADS) {
            float gumbels[4]{};
            if (!greedy) noise.gumbels(Domain::Token, draw, 4 * block, gumbels);
#pragma unroll
            for (u32 w = 0; w < 4; ++w) {
                const u32 token = 4 * block + w, t = token - stored.first_token;
                if (t >= stored.tokens) continue;
                const float logit = logits[t];
                const bool alive = logit > -f32_infinity();
                scores[t] = alive ? to_monotone_bits(Winner::of(add_rn(logit, gumbels[w]), token).score) : 0;
                present += alive;
            }
        }
        present = __reduce_add_sync(0xffffffffu, present);
        if (threadIdx.x % 32 == 0) atomicAdd(&shared.present, present);
        __syncthreads();

        // The smallest kept key: the digits found so far, then zeros.
        u64 least = 1;
        u32 need = item.limit;
        const bool all = shared.present <= need || item.slack == f32_infinity();
        if (!all) {
            u64 found = 0;
            for (u32 digit = 0; digit < DIGITS; ++digit) {
                const u32 shift = shift_of(digit), bits = bits_of(digit);
                for (u32 b = threadIdx.x; b < 1u << DIGIT_BITS; b += THREADS) shared.histogram[b] = 0;
                __syncthreads();
                for (u32 t = threadIdx.x; t < stored.tokens; t += THREADS) {
                    const u64 key = key_of(scores[t], stored.first_token + t);
                    // The digits above this one agree. The first digit has none above it.
                    const bool agrees = digit == 0 || key >> (shift + bits) == found >> (shift + bits);
                    if (key && agrees) atomicAdd(&shared.histogram[key >> shift & ((1u << bits) - 1)], 1u);
                }
                __syncthreads();
                if (threadIdx.x < 32) find_digit(shared, need);
                __syncthreads();
                found |= static_cast<u64>(shared.digit) << shift;
                need -= shared.above;
                const bool whole = shared.within == need;
                // With a slack, the last score must be known exactly.
                if (item.slack > 0.0f ? digit == 2 : whole) break;
                __syncthreads();
            }
            least = found;
            if (item.slack > 0.0f) {
                const float cut = sub_rn(from_monotone_bits(static_cast<u32>(found >> 32)), item.slack);
                least = static_cast<u64>(to_monotone_bits(cut)) << 32;
            }
        }
        for (u32 t = threadIdx.x; t < stored.tokens; t += THREADS) {
            const u64 key = key_of(scores[t], stored.first_token + t);
            if (key && key >= least) call.out.push({key, logits[t], i});
        }
        __syncthreads();
    }
}
