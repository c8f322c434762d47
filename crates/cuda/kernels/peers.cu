// The entry points of the exchange over NVLink: 256 pairs of row and rank per block; and of the exchange of logits (gather.cuh).
#include "flash_sampling/exchange/gather.cuh"

using namespace flash_sampling;

extern "C" __global__ void __launch_bounds__(JoinPeers::THREADS) join_peers(const __grid_constant__ Peers peers) {
    JoinPeers{peers}.block(nullptr);
}

extern "C" __global__ void __launch_bounds__(CopyColumns::THREADS) gather_logits(const __grid_constant__ GatherLogits call) {
    CopyColumns{call}.block();
}

extern "C" __global__ void __launch_bounds__(JoinPeers::THREADS)
    join_logits(const __grid_constant__ Peers peers, const u32* contents) {
    JoinPeers{peers}.block(contents);
}
