// From raw logits that exist to stored, transformed ones; invalid rows are noted.
#include "flash_sampling/element.cuh"
#include "flash_sampling/perturb.cuh"

using namespace flash_sampling;

struct Transform {
    const void* raw;     // [raw rows, tokens]
    float* stored;       // [rows, tokens]
    u64* invalid;        // [rows]; all ones before
    const Row* rows;     // [rows]
    const u32* sources;  // [rows] the raw row of each stored one
    u64 raw_stride;      // elements
    u64 stored_stride;
    u32 type;
    u32 first_token;
    u32 tokens;
    u32 padding;
};
static_assert(sizeof(Transform) == 72, "the host writes this layout");

// blockIdx.y is the row.
extern "C" __global__ void __launch_bounds__(256) transform(const __grid_constant__ Transform call) {
    const u32 r = blockIdx.y, source = call.sources[r];
    const RowTransform row = call.rows[r].transform();
    for (u32 t = blockIdx.x * 256 + threadIdx.x; t < call.tokens; t += gridDim.x * 256) {
        const u32 token = call.first_token + t;
        const float raw = element(static_cast<Element>(call.type), call.raw, source * call.raw_stride + t);
        u64 invalid = invalid_key(raw, token, 0);
        const float logit = row.apply(raw, token);
        if (invalid == ~0ull) invalid = invalid_key(logit, token, 1);
        if (invalid != ~0ull) atomicMin(call.invalid + r, invalid);
        call.stored[r * call.stored_stride + t] = logit;
    }
}
