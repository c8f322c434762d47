// The tokens of stored rows whose score is within a slack of the known winner's score.
#include "flash_sampling/scan/scan.cuh"
#include "flash_sampling/scan/stored.cuh"

using namespace flash_sampling;

constexpr u32 WARPS = 4;

struct NearTies {
    StoredLogits stored;
    KeptTokens out;
    const Row* rows;    // [items] the noise
    const Item* items;  // [items]
    const Draw* draws;  // [items]
    u32 blocks;          // blocks of an item
    u32 parts_of_block;  // runs of 256 tokens that a block takes
};
FS_LAYOUT(NearTies, 80,
          FS_AT(stored, 0) && FS_AT(out, 24) && FS_AT(rows, 48) && FS_AT(items, 56) && FS_AT(draws, 64) &&
          FS_AT(blocks, 72) && FS_AT(parts_of_block, 76));

struct KeepNear {
    static constexpr bool RAISES = false;
    const KeptTokens& out;
    float least;
    u32 item;

    __device__ __forceinline__ float cut() const { return least; }
    __device__ __forceinline__ void offer(float score, u32 token, float logit) const {
        if (score >= least) out.push({to_ordered_bits(Winner::of(score, token)), logit, item});
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) near_ties(const __grid_constant__ NearTies call) {
    __shared__ Row row;
    __shared__ WarpScan<32> scans[WARPS];
    __shared__ u64 unused;
    const u32 i = blockIdx.x / call.blocks, block = blockIdx.x % call.blocks, warp = threadIdx.x / 32;
    copy_row(&row, call.rows + i);
    __syncthreads();
    const Item item = call.items[i];
    const Draw draw = call.draws[i];
    if (draw.status != Status::Drawn) return;
    const StoredLogits& stored = call.stored;
    KeepNear keep{call.out, sub_rn(draw.score, item.slack), i};
    const ExistingRow logits{stored.row(item.source), stored.first_token, stored.tokens};
    const u32 first = logits.begin_part() + block * call.parts_of_block, begin = first + warp;
    const u32 end = min(first + call.parts_of_block, logits.end_part());
    const RowParts<Element::F32> parts(logits);
    Raw<Element::F32> start{};
    if (begin < end) start = parts.load(begin);
    scan(parts, row, scans[warp], begin, end, WARPS, start, &unused, keep);
}
