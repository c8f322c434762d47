// The entry points around the fused kernel in a draw from a shadow of the weight: shadow/pass.cuh. The build defines FS_OPERAND,
// the type of weight and hidden states.
#include "flash_sampling/shadow/digits.cuh"
#include "flash_sampling/shadow/winners.cuh"

using namespace flash_sampling;
using Winners = ExactWinners<false>;
using Lists = ExactWinners<true>;
using Dots = Winners::Dots;
static_assert(Dots::SHARED_BYTES + sizeof(Lists::Shared) <= SHARED_LIMIT, "the block's shared memory");

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

extern "C" {
__constant__ u32 exact_lists_launch[2] = {Dots::SHARED_BYTES, Dots::THREADS};
}

// As exact_winners, in a call with rows whose first filter is a min-p or a top-k.
extern "C" __global__ void __launch_bounds__(Dots::THREADS, 1)
    exact_lists(const __grid_constant__ Call call, const __grid_constant__ ShadowCall shadow,
                const __grid_constant__ FilterListCall filtered) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ Lists::Shared shared;
    const u32 parts = gridDim.x / call.row_count;
    Lists{call, shadow, filtered, shared, blockIdx.x / parts, blockIdx.x % parts, parts}
        .block<ptx::Operand::FS_OPERAND>(memory);
}
