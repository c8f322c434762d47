// The tokens of stored rows whose score is within a slack of the winner's: one draw a blockIdx.y, its winner known.
#include "flash_sampling/scan.cuh"
#include "flash_sampling/stored.cuh"

using namespace flash_sampling;

constexpr u32 WARPS = 4;

struct NearTies {
    StoredLogits stored;
    Entries out;
    const Row* rows;    // [items] the noise
    const Item* items;  // [items]
    const Draw* draws;  // [items]
    u32 blocks;          // blocks of an item
    u32 parts_of_block;  // runs of 256 tokens that a block takes
};
static_assert(sizeof(NearTies) == 80, "the host writes this layout");

struct KeepNear {
    const Entries& out;
    float least;
    u32 item;

    __device__ __forceinline__ float cut() const { return least; }
    __device__ __forceinline__ float raise(float) const { return least; }
    __device__ __forceinline__ void offer(float score, u32 token, float logit) const {
        if (score >= least) out.push({to_ordered_bits(Winner::of(score, token)), logit, item});
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) near_ties(const __grid_constant__ NearTies call) {
    __shared__ Row row;
    __shared__ u64 unused;
    const u32 i = blockIdx.x / call.blocks, block = blockIdx.x % call.blocks;
    if (threadIdx.x < sizeof(Row) / 4)
        reinterpret_cast<u32*>(&row)[threadIdx.x] = reinterpret_cast<const u32*>(call.rows + i)[threadIdx.x];
    __syncthreads();
    const Item item = call.items[i];
    const Draw draw = call.draws[i];
    const StoredLogits& stored = call.stored;
    if (draw.status != Status::Drawn) return;
    const KeepNear keep{call.out, sub_rn(draw.score, item.slack), i};
    const ExistingRow logits{stored.row(item.source), stored.first_token, stored.tokens};
    const u32 end = (stored.first_token + stored.tokens - 1) / SCAN_TOKENS + 1;
    const u32 begin = stored.first_token / SCAN_TOKENS + block * call.parts_of_block;
    scan<Element::F32>(logits, row, begin + threadIdx.x / 32, min(begin + call.parts_of_block, end), WARPS, &unused, keep);
}
