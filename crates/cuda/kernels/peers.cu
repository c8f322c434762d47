// The entry points of the exchange over NVLink: 256 pairs of row and rank a block, or a row a block.
#include "flash_sampling/fan_out.cuh"

using namespace flash_sampling;

extern "C" __global__ void __launch_bounds__(JoinPeers::THREADS) join_peers(const __grid_constant__ Peers peers) {
    JoinPeers{peers}.block();
}

extern "C" __global__ void __launch_bounds__(JoinBlocks::THREADS) join_blocks(const __grid_constant__ Peers peers) {
    __shared__ JoinBlocks::Shared shared;
    JoinBlocks{peers}.block(shared);
}
