// The entry point of the exchange over NVLink: 256 pairs of row and rank per block.
#include "flash_sampling/exchange/peers.cuh"

using namespace flash_sampling;

extern "C" __global__ void __launch_bounds__(JoinPeers::THREADS) join_peers(const __grid_constant__ Peers peers) {
    JoinPeers{peers}.block();
}
