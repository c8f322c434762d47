// The entry point of the fused kernel without tensor cores, for any pair of types. The build defines FS_COLUMNS (rows of the batch
// at a time), FS_QUANTISED (whether the weight is quantised) and FS_EPILOGUE.
#include "flash_sampling/epilogue/draw.cuh"
#include "flash_sampling/epilogue/summary.cuh"
#include "flash_sampling/fused_portable.cuh"
#include "flash_sampling/mainloop/plain.cuh"

using namespace flash_sampling;
using Mainloop = PlainMainloop<FS_COLUMNS, FS_QUANTISED>;
using Epilogue = FS_EPILOGUE<Mainloop::MAX_ROWS>;
using Kernel = FusedPortable<Mainloop, Epilogue>;

// For the host's launch: bytes of dynamic shared memory, threads per block, blocks per multiprocessor.
extern "C" {
__constant__ u32 fused_launch[3] = {Kernel::SHARED_BYTES, Kernel::THREADS, Kernel::BLOCKS};
}

extern "C" __global__ void __launch_bounds__(Kernel::THREADS, Kernel::BLOCKS)
    fused(const __grid_constant__ Call call, const __grid_constant__ Matrices matrices,
          const __grid_constant__ Epilogue::Arguments arguments) {
    extern __shared__ __align__(128) u8 memory[];
    Kernel::block(call, matrices, arguments, memory);
}
