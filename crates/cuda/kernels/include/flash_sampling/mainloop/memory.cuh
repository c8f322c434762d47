// The limit of a block's shared memory.
#pragma once

#include "../platform.cuh"

namespace flash_sampling {

// Hopper and the Blackwell of data centres have 227 KiB, Ada and the Blackwell of desks 99. Code for 8.0 runs on 8.6 and
// 8.9 too, so it takes no more than they have.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr bool IS_ROOMY = true;
#else
constexpr bool IS_ROOMY = false;
#endif
constexpr int SHARED_LIMIT = (IS_ROOMY ? 227 : 99) * 1024;

}  // namespace flash_sampling
