// How many rows of the batch a block loads: the host makes the copy engine's boxes of as many (fused_hopper.rs).
#pragma once

#include "../../abi.cuh"

namespace flash_sampling::fused_hopper {

// The rows of the batch that each block of a cluster loads: as few groups of eight, the swizzle's, as hold the batch. Those
// beyond it, which the copy engine fills with zeros, take longer than rows that it reads. Measured, of all columns loaded:
// 151936 x 4096, 130 of 192 columns 0.89, 100 of 128 0.97, 40 of 64 0.97; with 256 columns, 240 rows of 37984 x 4096 1.05.
FS_FUNCTION u32 loaded_rows(u32 columns, u32 cluster, u32 row_count) {
    const bool loads_all = columns == 256;
    return loads_all ? columns / cluster : (row_count + 8 * cluster - 1) / (8 * cluster) * 8;
}

}  // namespace flash_sampling::fused_hopper
