// Raises the best lower bounds of candidates.cuh. The bounds of a shadow are far above its usual errors. So for each row, one block
// computes the logit of the token with the best lower bound from the weight. The lower bound of this logit has an error of
// rounding alone, which halves the distance between the best lower bound and the scores that can reach it.
//
// Each row is refined once, while a block's second tile is multiplied. Tiles of short weight rows leave the scouts too little time.
#pragma once

#include "../element.cuh"
#include "threshold.cuh"

namespace flash_sampling::fused_hopper {

// The shortest weight rows of refined heads.
#ifndef FS_EMULATED
constexpr u32 REFINED_WIDTH = 8192;
#else
constexpr u32 REFINED_WIDTH = 64;
#endif

// Returns a part of a dot product of the weight: every `workers`-th group of eight elements, and of the elements after them.
template <Element TYPE>
__device__ __forceinline__ float part_of_dot(const u8* weight, const u8* hidden, u32 width, u32 worker, u32 workers) {
    float sum = 0.0f;
#pragma unroll 4
    for (u32 k = 8 * worker; k + 8 <= width; k += 8 * workers) {
        const uint4 a = *reinterpret_cast<const uint4*>(weight + 2 * k), b = *reinterpret_cast<const uint4*>(hidden + 2 * k);
        const u32 pairs[4][2] = {{a.x, b.x}, {a.y, b.y}, {a.z, b.z}, {a.w, b.w}};
#pragma unroll
        for (const auto& pair : pairs) {
            sum = fma_rn(widen<TYPE>(pair[0], false), widen<TYPE>(pair[1], false), sum);
            sum = fma_rn(widen<TYPE>(pair[0], true), widen<TYPE>(pair[1], true), sum);
        }
    }
    for (u32 k = width / 8 * 8 + worker; k < width; k += workers)
        sum = fma_rn(element<TYPE>(weight, k), element<TYPE>(hidden, k), sum);
    return sum;
}

// Returns a lower bound of a token's score from its dot product in any order of sums; -inf if it is not finite.
template <class T>
__device__ __forceinline__ float lower_score(const Call& call, const Shared<T>& shared, u32 column, u32 token, float dot) {
    const Candidates& from = shared.candidates;
    const u32 at = token - call.first_token;
    const float rounding = fma_rn(from.norms[at] + from.errors[at], shared.norm_factor[column], shared.constant[column]);
    float least = dot - 1.00001f * rounding;
    if (call.bias) least = lowered(least + call.bias[at], fabsf(call.bias[at]));
    const Row& row = shared.rows[column];
    const float logit = row.apply(call.head.apply(lowered(least), 0.0f, false), token);
    if (!is_finite(logit)) return -f32_infinity();
    const Noise noise{row.seed, row.position};
    return row.greedy ? logit : add_rn(logit, noise.gumbel(Domain::Token, row.draw, token));
}

// Refines the rows of a block, except rows with lists. All scouts call this.
template <class T>
__device__ __forceinline__ void refine(const Call& call, Shared<T>& shared, u32 worker) {
    for (u32 column = ptx::block_index(); column < call.row_count; column += gridDim.x) {
        if (is_listed(shared, column)) continue;
        if (worker == 0) shared.refined = from_ordered_bits(ptx::load_relaxed(&call.best[column])).token;
        ptx::named_barrier(SCOUTS_BARRIER, T::SCOUTS);
        const u32 token = shared.refined;
        if (token != Winner::none().token) {
            const Candidates& from = shared.candidates;
            const u8* const weight = from.weight + (token - call.first_token) * from.weight_stride;
            const u8* const hidden = from.hidden + column * from.hidden_stride;
            float dot = from.element == Element::BF16
                            ? part_of_dot<Element::BF16>(weight, hidden, call.hidden, worker, T::SCOUTS)
                            : part_of_dot<Element::F16>(weight, hidden, call.hidden, worker, T::SCOUTS);
#pragma unroll
            for (u32 apart = 16; apart > 0; apart /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, apart);
            if (worker % 32 == 0) shared.dot_parts[worker / 32] = dot;
            ptx::named_barrier(SCOUTS_BARRIER, T::SCOUTS);
            if (worker == 0) {
                const float sum = shared.dot_parts[0] + shared.dot_parts[1] + shared.dot_parts[2];
                const float score = lower_score(call, shared, column, token, sum);
                if (is_finite(score)) improve(&shared.best[column], to_ordered_bits(Winner::of(score, token)), 0.0f);
            }
        }
        ptx::named_barrier(SCOUTS_BARRIER, T::SCOUTS);
    }
}

}  // namespace flash_sampling::fused_hopper
