// Launches that may start before earlier launches of the stream have finished (compute capability 9.0 and up). On older GPUs,
// every launch starts after them, and these functions do nothing.
#pragma once

#include "address.cuh"

#ifndef FS_EMULATED

namespace flash_sampling::ptx {

// Lets the blocks of the next launch start as soon as all blocks of this one have called this and there is room for them.
__device__ __forceinline__ void start_next_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until earlier launches have finished, and makes their stores visible. Returns at once in a launch that started after them.
__device__ __forceinline__ void await_earlier_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flash_sampling::ptx

#endif
