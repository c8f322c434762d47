// The limit of a block's shared memory.
#pragma once

#include "../platform.cuh"

namespace flash_sampling {

// Hopper and data-centre Blackwell have 227 KiB, Ada and desktop Blackwell 99 KiB. Code for 8.0 also runs on 8.6 and 8.9, so it
// takes no more than they have.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr bool IS_ROOMY = true;
#else
constexpr bool IS_ROOMY = false;
#endif
constexpr int SHARED_LIMIT = (IS_ROOMY ? 227 : 99) * 1024;

}  // namespace flash_sampling
