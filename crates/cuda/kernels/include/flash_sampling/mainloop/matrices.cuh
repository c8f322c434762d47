// The two factors in device memory, in any layout.
#pragma once

#include "../quantised.cuh"

namespace flash_sampling {

struct Matrices {
    const u8* weight;   // [tokens, hidden]
    const u8* hidden;   // [rows, hidden]
    u64 weight_stride;  // bytes between rows
    u64 hidden_stride;
    Element weight_type;
    Element hidden_type;
    u32 weight_unit;    // bytes per read: a power of two up to 16 that divides address and stride
    u32 hidden_unit;
    WeightScales scales;
};
FS_LAYOUT(Matrices, 72,
          FS_AT(weight, 0) && FS_AT(hidden, 8) && FS_AT(weight_stride, 16) && FS_AT(hidden_stride, 24) &&
          FS_AT(weight_type, 32) && FS_AT(hidden_type, 36) && FS_AT(weight_unit, 40) && FS_AT(hidden_unit, 44) &&
          FS_AT(scales, 48));

}  // namespace flash_sampling
