// The plain kernel, for any GPU and any types: one row of the batch, one thread a token. It stores the row's transformed
// logits (paper App. K) and, when asked, draws. The fused kernels are the fast ones; this one serves log-probabilities,
// float32, pairs of different types, and GPUs without a fused kernel.
#include "flash_sampling/perturb.cuh"

using namespace flash_sampling;

// What is multiplied. The host writes this layout.
struct Dense {
    const void* weight;  // [tokens, hidden]
    const void* hidden;  // [rows, hidden]
    float* logits;       // [tokens]
    u64 weight_stride;   // elements
    u64 hidden_stride;
    u32 weight_type;  // 0 = bf16, 1 = f16, 2 = f32
    u32 hidden_type;
    u32 row;
    u32 draw;  // 0 = logits alone
};
static_assert(sizeof(Dense) == 56, "the host writes this layout");

__device__ __forceinline__ float element(const void* matrix, u32 type, u64 at) {
    if (type == 2) return static_cast<const float*>(matrix)[at];
    const u16 bits = static_cast<const u16*>(matrix)[at];
    if (type == 0) return bits_to_f32(static_cast<u32>(bits) << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

extern "C" __global__ void __launch_bounds__(256) dense_row(const __grid_constant__ Call call, const __grid_constant__ Dense dense) {
    __shared__ u64 best;
    if (threadIdx.x == 0) best = 0;
    __syncthreads();
    const Row& row = call.rows[dense.row];
    const u32 t = blockIdx.x * 256 + threadIdx.x;
    if (t < call.tokens) {
        const u32 token = call.first_token + t;
        float dot = 0.0f;
        for (u32 k = 0; k < call.hidden; ++k)
            dot = fma_rn(element(dense.weight, dense.weight_type, t * dense.weight_stride + k),
                         element(dense.hidden, dense.hidden_type, dense.row * dense.hidden_stride + k), dot);
        const float raw = call.head.apply(dot, call.bias ? call.bias[t] : 0.0f, call.bias != nullptr);
        u64 invalid = invalid_key(raw, token, 0);
        const float logit = row.transform().apply(raw, token);
        if (invalid == ~0ull) invalid = invalid_key(logit, token, 1);
        dense.logits[t] = logit;
        if (dense.draw && invalid != ~0ull) {
            atomicMin(&call.invalid[dense.row], invalid);
        } else if (dense.draw && logit > -f32_infinity()) {
            const Noise noise{row.seed, row.position};
            const float score = row.greedy ? logit : add_rn(logit, noise.gumbel(Domain::Token, row.draw, token));
            atomicMax(&best, to_ordered_bits(Winner::of(score, token)));
        }
    }
    __syncthreads();
    if (threadIdx.x == 0 && best) atomicMax(&call.best[dense.row], best);
}

// One thread: the row's draw. Leaves the scratch as it was found.
extern "C" __global__ void dense_conclude(const __grid_constant__ Call call, const __grid_constant__ Dense dense) {
    const u64 best = call.best[dense.row], invalid = call.invalid[dense.row];
    const float logit = best ? dense.logits[from_ordered_bits(best).token - call.first_token] : 0.0f;
    call.draws[dense.row] = conclude(best, invalid, logit);
    call.best[dense.row] = 0;
    call.invalid[dense.row] = ~0ull;
}
