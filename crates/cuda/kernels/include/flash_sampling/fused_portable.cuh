// A block of a kernel: a mainloop and an epilogue.
#pragma once

#include "mainloop/dot_tile.cuh"
#include "mainloop/memory.cuh"
#include "mainloop/matrices.cuh"

namespace flash_sampling {

template <class Mainloop, class Epilogue>
struct FusedPortable {
    static constexpr int KEPT_BYTES = (static_cast<int>(sizeof(typename Epilogue::Shared)) + 127) / 128 * 128;
    static constexpr int SHARED_BYTES = KEPT_BYTES + Mainloop::template Memory<KEPT_BYTES>::BYTES;
    static constexpr int THREADS = Mainloop::THREADS;
    static constexpr int BLOCKS = Mainloop::BLOCKS;
    static_assert(SHARED_BYTES <= SHARED_LIMIT, "the block's shared memory");

    static __device__ __forceinline__ void block(const Call& call, const Matrices& matrices,
                                                 const typename Epilogue::Arguments& arguments, u8* memory) {
        if (call.skip_if.holds()) return;
        const Run run = Run::of(blockIdx.x, gridDim.x, call.tokens, Epilogue::GRANULE);
        auto& shared = *reinterpret_cast<typename Epilogue::Shared*>(memory);
        Epilogue epilogue{call, arguments, run, shared};
        Mainloop::template run<KEPT_BYTES>(call, matrices, run, memory + KEPT_BYTES, epilogue);
    }
};

}  // namespace flash_sampling
