// The entry points around a max all-reduce: this rank's words, and the draws of all ranks.
#include "flash_sampling/exchange/reduction.cuh"

using namespace flash_sampling;

extern "C" __global__ void __launch_bounds__(ReduceWinners::THREADS) to_words(const __grid_constant__ Reduction call) {
    __shared__ u64 of_warp[ReduceWinners::THREADS / 32];
    ReduceWinners{call}.to_words(of_warp);
}

extern "C" __global__ void __launch_bounds__(ReduceWinners::THREADS) from_words(const __grid_constant__ Reduction call) {
    ReduceWinners{call}.from_words();
}
