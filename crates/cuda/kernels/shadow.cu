// The entry points around the fused kernel in a draw from a shadow of the weight: shadow/pass.cuh. The build defines FS_OPERAND,
// the type of weight and hidden states. The fused kernel is the Hopper kernel; with FS_PORTABLE, the portable kernel.
#include "flash_sampling/shadow/digits.cuh"
#include "flash_sampling/shadow/exact_dots.cuh"
#include "flash_sampling/shadow/winners.cuh"

using namespace flash_sampling;
#ifdef FS_PORTABLE
using Dots = ExactDots<true>;
#else
using Dots = ExactDots<false>;
#endif
using Winners = ExactWinners<Dots, false>;
static_assert(Dots::SHARED_BYTES + sizeof(Winners::Shared) <= SHARED_LIMIT, "the block's shared memory");

// For the host's launch: bytes of dynamic shared memory, threads per block.
extern "C" {
__constant__ u32 exact_winners_launch[2] = {Dots::SHARED_BYTES, Dots::THREADS};
}

// One block per row.
extern "C" __global__ void __launch_bounds__(HiddenDigits::THREADS, 1) hidden_digits(const __grid_constant__ ShadowCall shadow) {
    __shared__ HiddenDigits::Shared shared;
    HiddenDigits::block<Element::FS_OPERAND>(shadow, blockIdx.x, shared);
}

// The same number of blocks for each row, at most ExactWinners::MAX_PARTS.
extern "C" __global__ void __launch_bounds__(Dots::THREADS, 1)
    exact_winners(const __grid_constant__ Call call, const __grid_constant__ ShadowCall shadow) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ Winners::Shared shared;
    const u32 parts = gridDim.x / call.row_count;
    const FilterListCall none{};
    Winners{call, shadow, none, shared, blockIdx.x / parts, blockIdx.x % parts, parts}.block<ptx::Operand::FS_OPERAND>(memory);
}

#ifndef FS_PORTABLE
extern "C" {
__constant__ u32 exact_lists_launch[2] = {Dots::SHARED_BYTES, Dots::THREADS};
}

// As exact_winners, in a call with rows whose first filter is a min-p or a top-k.
extern "C" __global__ void __launch_bounds__(Dots::THREADS, 1)
    exact_lists(const __grid_constant__ Call call, const __grid_constant__ ShadowCall shadow,
                const __grid_constant__ FilterListCall filtered) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ ExactWinners<Dots, true>::Shared shared;
    const u32 parts = gridDim.x / call.row_count;
    ExactWinners<Dots, true>{call, shadow, filtered, shared, blockIdx.x / parts, blockIdx.x % parts, parts}
        .block<ptx::Operand::FS_OPERAND>(memory);
}
#endif
