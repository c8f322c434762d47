// The entry points of the fused kernel on tensor cores of compute capability 8.0 and up. The build defines FS_COLUMNS
// (rows of the batch), FS_OPERAND and FS_EPILOGUE. For a weight of 8-bit elements, the build also defines its type,
// FS_WEIGHT. For a shadow, it defines FS_ALIGNED, because the operands are always aligned.
#include "flash_sampling/epilogue/draw.cuh"
#include "flash_sampling/epilogue/summary.cuh"
#include "flash_sampling/fused_portable.cuh"
#include "flash_sampling/mainloop/tensor.cuh"

using namespace flash_sampling;
using Epilogue = FS_EPILOGUE<FS_COLUMNS>;
#ifndef FS_WEIGHT
#define FS_WEIGHT BF16
#endif
template <bool ALIGNED>
using Mainloop = TensorMainloop<FS_COLUMNS, ptx::Operand::FS_OPERAND, ALIGNED, Element::FS_WEIGHT>;
template <bool ALIGNED>
using Kernel = FusedPortable<Mainloop<ALIGNED>, Epilogue>;

// For the host's launch: bytes of dynamic shared memory, threads per block, blocks per multiprocessor.
extern "C" {
__constant__ u32 fused_launch[3] = {Kernel<true>::SHARED_BYTES, Kernel<true>::THREADS, Kernel<true>::BLOCKS};
}

// For operands that asynchronous copies can read.
extern "C" __global__ void __launch_bounds__(Kernel<true>::THREADS, Kernel<true>::BLOCKS)
    fused(const __grid_constant__ Call call, const __grid_constant__ Matrices matrices,
          const __grid_constant__ Epilogue::Arguments arguments) {
    extern __shared__ __align__(128) u8 memory[];
    Kernel<true>::block(call, matrices, arguments, memory);
}

#ifndef FS_ALIGNED
// For any layout.
extern "C" __global__ void __launch_bounds__(Kernel<false>::THREADS, Kernel<false>::BLOCKS)
    fused_unaligned(const __grid_constant__ Call call, const __grid_constant__ Matrices matrices,
                    const __grid_constant__ Epilogue::Arguments arguments) {
    extern __shared__ __align__(128) u8 memory[];
    Kernel<false>::block(call, matrices, arguments, memory);
}
#endif
