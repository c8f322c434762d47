// Transforms existing raw logits, stores the results, and records invalid rows.
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
    Element element;
    u32 first_token;
    u32 tokens;
    u32 padding;
};
FS_LAYOUT(Transform, 72,
          FS_AT(raw, 0) && FS_AT(stored, 8) && FS_AT(invalid, 16) && FS_AT(rows, 24) && FS_AT(sources, 32) &&
          FS_AT(raw_stride, 40) && FS_AT(stored_stride, 48) && FS_AT(element, 56) && FS_AT(first_token, 60) &&
          FS_AT(tokens, 64) && FS_AT(padding, 68));

// blockIdx.y is the row.
extern "C" __global__ void __launch_bounds__(256) transform(const __grid_constant__ Transform call) {
    const u32 r = blockIdx.y, source = call.sources[r];
    const RowTransform row = call.rows[r].transform();
    for (u32 t = blockIdx.x * 256 + threadIdx.x; t < call.tokens; t += gridDim.x * 256) {
        const u32 token = call.first_token + t;
        const float raw = element(call.element, call.raw, source * call.raw_stride + t);
        call.stored[r * call.stored_stride + t] = checked_logit(raw, row, token, call.invalid + r);
    }
}
