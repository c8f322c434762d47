// Copies hidden states to f16, in the launch before the fused Hopper kernel with a weight of 8-bit elements.
#include "flash_sampling/fused_hopper/scaled_hidden.cuh"

using namespace flash_sampling;

// One block per copied row.
extern "C" __global__ void __launch_bounds__(HiddenScaler::THREADS, 1)
    scale_hidden(const __grid_constant__ ScaledHidden call) {
    __shared__ HiddenScaler::Shared shared;
    HiddenScaler::block(call, blockIdx.x, shared);
}
