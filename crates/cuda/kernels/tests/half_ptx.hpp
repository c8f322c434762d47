// The instruction of find_block_maxima.cuh on the processor: FS_EMULATED names this file.
#pragma once

#include <string.h>

namespace flash_sampling::ptx {

// Returns two floats rounded to f16, with `low` in the low half.
inline u32 pair_of_halves(float low, float high) {
    const _Float16 halves[2] = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
    u32 pair;
    memcpy(&pair, halves, sizeof(pair));
    return pair;
}

}  // namespace flash_sampling::ptx
