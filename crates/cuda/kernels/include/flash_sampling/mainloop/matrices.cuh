// The two factors in device memory, in any layout, and a load of 16 bytes.
#pragma once

#include "../element.cuh"

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
};
FS_LAYOUT(Matrices, 48,
          FS_AT(weight, 0) && FS_AT(hidden, 8) && FS_AT(weight_stride, 16) && FS_AT(hidden_stride, 24) &&
          FS_AT(weight_type, 32) && FS_AT(hidden_type, 36) && FS_AT(weight_unit, 40) && FS_AT(hidden_unit, 44));

#ifdef __CUDACC__

// Loads the first `bytes` (an even number) of 16 bytes from an address that `unit` divides. Fills with zeros; reads no more.
__device__ __forceinline__ uint4 gather(const u8* from, u32 bytes, u32 unit) {
    if (bytes == 16 && unit >= 8) {
        const uint2* const at = reinterpret_cast<const uint2*>(from);
        const uint2 low = at[0], high = at[1];
        return {low.x, low.y, high.x, high.y};
    }
    if (bytes == 16 && unit == 4) {
        const u32* const at = reinterpret_cast<const u32*>(from);
        return {at[0], at[1], at[2], at[3]};
    }
    const u16* const at = reinterpret_cast<const u16*>(from);
    u32 w[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 low = 4 * i < bytes ? at[2 * i] : 0, high = 4 * i + 2 < bytes ? at[2 * i + 1] : 0;
        w[i] = high << 16 | low;
    }
    return {w[0], w[1], w[2], w[3]};
}

#endif

}  // namespace flash_sampling
