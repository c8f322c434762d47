// The best candidate of each row within a block, in shared memory.
#pragma once

#include "../../perturb.cuh"
#include "../../ptx/mbarrier.cuh"

namespace flash_sampling::fused_hopper {

struct alignas(16) Best {
    u64 key;  // ordered bits of the winner; 0 = none
    float logit;
    u32 zero;
};

// What is there, when it equals `old`, becomes `now`; returns what was there. Whole: a key never stands beside another's
// logit.
__device__ __forceinline__ Best exchange_if(Best* best, const Best& old, const Best& now) {
    u64 key, rest;
    asm volatile(
        "{ .reg .b128 old, now, was;\n"
        "mov.b128 old, {%3, %4};\n"
        "mov.b128 now, {%5, %6};\n"
        "atom.relaxed.cta.shared.cas.b128 was, [%2], old, now;\n"
        "mov.b128 {%0, %1}, was; }"
        : "=l"(key), "=l"(rest)
        : "r"(ptx::shared_address(best)), "l"(old.key), "l"(static_cast<u64>(f32_to_bits(old.logit))), "l"(now.key),
          "l"(static_cast<u64>(f32_to_bits(now.logit)))
        : "memory");
    return {key, bits_to_f32(static_cast<u32>(rest)), 0};
}

// Takes the candidate when it is better. The first exchange only reads, in all rows that have a best.
__device__ __forceinline__ void improve(Best* best, u64 key, float logit) {
    const Best now{key, logit, 0};
    Best expected{0, 0.0f, 0};
    while (key > expected.key) {
        const Best was = exchange_if(best, expected, now);
        if (was.key == expected.key) return;
        expected = was;
    }
}

// Scores one token exactly and offers it. `dot` has the head's bias already.
__device__ __forceinline__ void offer(const Call& call, const Row* rows, Best* best, u32 column, u32 token, float dot) {
    // A column beyond the batch is all zeros; its products with an infinite or NaN weight are NaN.
    if (column >= call.row_count) return;
    const Row& row = rows[column];
    const float raw = call.head.apply(dot, 0.0f, false);
    float logit = 0.0f;
    if (!check_logit(raw, row, token, &call.invalid[column], logit) || logit == -f32_infinity()) return;
    const Noise noise{row.seed, row.position};
    const float score = row.greedy ? logit : add_rn(logit, noise.gumbel(Domain::Token, row.draw, token));
    improve(&best[column], to_ordered_bits(Winner::of(score, token)), logit);
}

}  // namespace flash_sampling::fused_hopper
