// The sampler over existing logits (paper Alg. I.1) in one launch with several blocks per draw. The last block writes the draw.
// The build defines FS_ELEMENT (BF16, F16 or F32).
#include "flash_sampling/ptx/ordered.cuh"
#include "flash_sampling/scan/scan.cuh"

using namespace flash_sampling;

constexpr u32 WARPS = 4;
// Blocks per multiprocessor, limited by registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr u32 RESIDENT = 7;
#else
constexpr u32 RESIDENT = 8;
#endif
constexpr Element TYPE = Element::FS_ELEMENT;

// The input of the draws.
struct Existing {
    const void* logits;   // [rows, tokens]
    const u32* sources;   // [draws] the row of each draw; null = draw i takes row i
    u64 row_stride;       // elements
    u32 blocks;           // blocks per draw
    u32 parts_of_block;   // runs of 256 tokens per block
};
FS_LAYOUT(Existing, 32,
          FS_AT(logits, 0) && FS_AT(sources, 8) && FS_AT(row_stride, 16) && FS_AT(blocks, 24) && FS_AT(parts_of_block, 28));

// Keeps the best winner of a thread, and the best score of the block as the cutoff.
struct KeepBest {
    static constexpr bool RAISES = true;
    u32* shared_cut;  // monotone bits
    u64 best;         // ordered bits; 0 = none

    __device__ __forceinline__ float cut() const {
        return from_monotone_bits(*static_cast<volatile u32*>(shared_cut));
    }
    __device__ __forceinline__ float raise(float score) {
        const float old = cut();
        if (threadIdx.x % 32 == 0 && score > old) atomicMax(shared_cut, to_monotone_bits(score));
        return fmaxf(score, old);
    }
    __device__ __forceinline__ void offer(float score, u32 token, float) {
        const u64 key = to_ordered_bits(Winner::of(score, token));
        if (key <= best) return;
        best = key;
        atomicMax(shared_cut, static_cast<u32>(key >> 32));
    }
};

// Makes a draw from existing logits by all of its blocks.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    standalone(const __grid_constant__ Call call, const __grid_constant__ Existing existing) {
    __shared__ Row row;
    __shared__ WarpScan<64> scans[WARPS];
    __shared__ u64 bests[WARPS];
    __shared__ u32 cut;
    const u32 draw = blockIdx.x / existing.blocks, block = blockIdx.x % existing.blocks;
    // The first loads are in flight while the row is read.
    const u32 source = existing.sources ? existing.sources[draw] : draw;
    const u64 offset = source * existing.row_stride * element_bytes(TYPE);
    const ExistingRow logits{static_cast<const u8*>(existing.logits) + offset, call.first_token, call.tokens};
    const u32 warp = threadIdx.x / 32, first = call.first_token / SCAN_TOKENS + block * existing.parts_of_block;
    const u32 begin = first + warp;
    const u32 end = min(first + existing.parts_of_block, (call.first_token + call.tokens - 1) / SCAN_TOKENS + 1);
    const RowParts<TYPE> of_row(logits);
    Raw<TYPE> start{};
    if (begin < end) start = of_row.load(begin);

    copy_row(&row, call.rows + draw);
    // Faster blocks may already have raised the cutoff.
    if (threadIdx.x == 64) {
        const u64 found = *static_cast<volatile u64*>(call.best + draw);
        cut = found ? static_cast<u32>(found >> 32) : to_monotone_bits(-f32_infinity());
    }
    __syncthreads();
    KeepBest keep{&cut, 0};
    scan(of_row, row, scans[warp], begin, end, WARPS, start, call.invalid + draw, keep);

    // The best winner of the block.
    u64 best = largest_of_warp(keep.best);
    if (threadIdx.x % 32 == 0) bests[warp] = best;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (u32 w = 1; w < WARPS; ++w) best = max(best, bests[w]);
    if (best) atomicMax(call.best + draw, best);
    if (ptx::add_ordered(call.arrived + draw, 1u) != existing.blocks - 1) return;

    // The last block writes the draw, and clears the scratch.
    best = __ldcg(call.best + draw);
    const u64 invalid = __ldcg(call.invalid + draw);
    call.best[draw] = 0;
    call.invalid[draw] = ~0ull;
    call.arrived[draw] = 0;
    float logit = 0.0f;
    if (best) {
        const u32 token = from_ordered_bits(best).token;
        logit = row.transform().apply(element<TYPE>(logits.logits, token - call.first_token), token);
    }
    call.draws[draw] = conclude(best, invalid, logit);
}
