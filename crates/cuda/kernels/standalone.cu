// The sampler over existing logits (paper Alg. I.1): one launch, several blocks a draw, the last of them concludes.
// FS_ELEMENT (BF16, F16 or F32) is given by the build, and for fast-math FS_FAST_MATH.
#include "flash_sampling/scan.cuh"

using namespace flash_sampling;

constexpr u32 WARPS = 4;
// Blocks of a multiprocessor, by registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr u32 RESIDENT = 7;
#else
constexpr u32 RESIDENT = 8;
#endif
constexpr Element TYPE = Element::FS_ELEMENT;

// What the draws are made from.
struct Existing {
    const void* logits;   // [rows, tokens]
    const u32* sources;   // [draws] the row of each draw; null = draw i takes row i
    u64 row_stride;       // elements
    u32 blocks;           // blocks of a draw
    u32 parts_of_block;   // runs of 256 tokens that a block takes
};
FS_LAYOUT(Existing, 32,
          FS_AT(logits, 0) && FS_AT(sources, 8) && FS_AT(row_stride, 16) && FS_AT(blocks, 24) && FS_AT(parts_of_block, 28));

// The best of a thread, and the block's best score, which raises the cut.
struct KeepBest {
    u32* shared_cut;  // monotone bits
    u64 best;         // ordered bits; 0 = none

    __device__ __forceinline__ float cut() const {
        const u32 bits = *static_cast<volatile u32*>(shared_cut);
        return bits == 0 ? -f32_infinity() : from_monotone_bits(bits);
    }
    __device__ __forceinline__ float raise(float score) {
        if (threadIdx.x % 32 == 0 && score > -f32_infinity()) atomicMax(shared_cut, to_monotone_bits(score));
        return score;
    }
    __device__ __forceinline__ void offer(float score, u32 token, float) {
        const u64 key = to_ordered_bits(Winner::of(score, token));
        if (key <= best) return;
        best = key;
        atomicMax(shared_cut, static_cast<u32>(key >> 32));
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    standalone(const __grid_constant__ Call call, const __grid_constant__ Existing existing) {
    __shared__ Row row;
    __shared__ RowPhilox philox;
    __shared__ u64 bests[WARPS];
    __shared__ u32 cut;
    const u32 draw = blockIdx.x / existing.blocks, block = blockIdx.x % existing.blocks;
    // The first logits are on their way while the row is read.
    const u32 source = existing.sources ? existing.sources[draw] : draw;
    const u64 offset = source * existing.row_stride * element_bytes(TYPE);
    const ExistingRow logits{static_cast<const u8*>(existing.logits) + offset, call.first_token, call.tokens};
    const u32 warp = threadIdx.x / 32, first = call.first_token / SCAN_TOKENS + block * existing.parts_of_block;
    const u32 begin = first + warp;
    const u32 end = min(first + existing.parts_of_block, (call.first_token + call.tokens - 1) / SCAN_TOKENS + 1);
    Raw<TYPE> start{};
    if (begin < end) start = load_lane<TYPE>(logits, is_aligned<TYPE>(logits), begin * SCAN_TOKENS, threadIdx.x % 32);

    const Row* const given = call.rows + draw;
    copy_row(&row, given);
    // Blocks that were faster have raised the cut already.
    if (threadIdx.x == 64) cut = static_cast<u32>(*static_cast<volatile u64*>(call.best + draw) >> 32);
    if (threadIdx.x == 96) philox = RowPhilox::of(given->seed, given->position, given->draw, domain_code(Domain::Token));
    __syncthreads();
    KeepBest keep{&cut, 0};
    scan<TYPE>(logits, row, &philox, begin, end, WARPS, start, call.invalid + draw, keep);

    // The block's best.
    u64 best = keep.best;
    for (u32 distance = 16; distance > 0; distance /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, distance));
    if (threadIdx.x % 32 == 0) bests[warp] = best;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (u32 w = 1; w < WARPS; ++w) best = max(best, bests[w]);
    if (best) atomicMax(call.best + draw, best);
    __threadfence();
    if (atomicAdd(call.arrived + draw, 1u) != existing.blocks - 1) return;

    // The draw's last block concludes, and leaves the scratch as it was found.
    __threadfence();
    best = atomicExch(call.best + draw, 0ull);
    const u64 invalid = atomicExch(call.invalid + draw, ~0ull);
    call.arrived[draw] = 0;
    float logit = 0.0f;
    if (best) {
        const u32 token = from_ordered_bits(best).token;
        logit = row.transform().apply(element<TYPE>(logits.logits, token - call.first_token), token);
    }
    call.draws[draw] = conclude(best, invalid, logit);
}
