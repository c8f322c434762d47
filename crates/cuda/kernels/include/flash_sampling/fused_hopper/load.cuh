// The loading thread, which keeps the ring of stages full.
#pragma once

#include "../quantised.cuh"
#include "schedule.cuh"
#include "tile.cuh"

namespace flash_sampling::fused_hopper {

// The tensor maps of the weight and of the hidden states, whose boxes are as wide as a slab. For a weight of 8-bit
// elements, `hidden` maps ScaledHidden::copies in boxes of half this width. Other weights do not use the fields from
// `scales` on.
struct Maps {
    ptx::TensorMap weight;   // boxes of 64 tokens
    ptx::TensorMap granule;  // the weight in boxes of 16 tokens, for the rest of a tile
    ptx::TensorMap hidden;   // boxes of Tile::loaded_rows rows of the batch; in candidates.cuh, of their digits
    WeightScales scales;
    const float* factors;  // ScaledHidden::factors
    u32 bf16_row;          // the first row of the bf16 copies in `hidden`
};
FS_LAYOUT(Maps, 448,
          FS_AT(weight, 0) && FS_AT(granule, 128) && FS_AT(hidden, 256) && FS_AT(scales, 384) && FS_AT(factors, 408) &&
          FS_AT(bf16_row, 416));

// Loads the slabs of all tiles of a block, in the order of the products.
template <class T>
__device__ __forceinline__ void load(const Call& call, const Maps& maps, u8* stages, Shared<T>& shared,
                                     const Schedule<T>& schedule) {
    // The weight does not have the policy evict-first. Loads with this policy evict dirty lines of earlier kernels, and
    // wait until these lines are in device memory. Measured: 303 microseconds with evict-first, 290 without it (151936
    // x 4096, 1 row, after a write of 256 MB).
    const u64 stream = ptx::policy_evict_unchanged();
    const u64 keep = ptx::policy_evict_last();
    const u32 steps = (call.hidden + T::SLABS * T::DEPTH - 1) / (T::SLABS * T::DEPTH);
    const u32 rows = T::loaded_rows(call.row_count);
    const auto load_weight = [&](u32 stage, u32 step, u32 start, u32 size) {
        const u32 granules = (size + T::GRANULE - 1) / T::GRANULE;
        const u32 units = granules / T::UNIT_GRANULES;
        u64* const full = &shared.full[stage];
        const u32 hidden_bytes = T::CLUSTER * rows * T::HIDDEN_PARTS * T::ROW_BYTES;
        ptx::mbarrier_arrive_expect(full, T::SLABS * (granules * T::GRANULE_BYTES + hidden_bytes));
        u8* const to = stages + stage * T::STAGE_BYTES;
        // The slabs of a unit are consecutive, because they are neighbours in device memory.
        for (u32 u = 0; u < units; ++u)
#pragma unroll
            for (int slab = 0; slab < T::SLABS; ++slab)
                ptx::copy_box(to + slab * T::SLAB_BYTES + u * T::UNIT_BYTES, &maps.weight, full,
                              (step * T::SLABS + slab) * T::DEPTH, start + u * T::UNIT, stream);
        for (u32 g = units * T::UNIT_GRANULES; g < granules; ++g)
#pragma unroll
            for (int slab = 0; slab < T::SLABS; ++slab)
                ptx::copy_box(to + slab * T::SLAB_BYTES + g * T::GRANULE_BYTES, &maps.granule, full,
                              (step * T::SLABS + slab) * T::DEPTH, start + g * T::GRANULE, stream);
    };
    u32 first_row = 0;  // the first row to load of `maps.hidden`
    // Each block of a cluster loads its part of the hidden states for both blocks.
    const auto load_hidden = [&](u32 stage, u32 step) {
#pragma unroll
        for (int i = 0; i < T::SLABS * T::HIDDEN_PARTS; ++i) {
            const u32 slab = i / T::HIDDEN_PARTS, part = i % T::HIDDEN_PARTS;
            u8* const hidden = stages + stage * T::STAGE_BYTES + slab * T::SLAB_BYTES + T::WEIGHT_BYTES;
            u8* const at = hidden + part * T::PART_BYTES;
            const u32 depth = (step * T::SLABS + slab) * T::DEPTH + part * (T::DEPTH / T::HIDDEN_PARTS);
            if (T::CLUSTER == 1)
                ptx::copy_box(at, &maps.hidden, &shared.full[stage], depth, first_row, keep);
            else
                ptx::copy_box_multicast(at + schedule.rank * rows * T::ROW_BYTES, &maps.hidden, &shared.full[stage],
                                        depth, first_row + schedule.rank * rows * T::DIGITS, 3, keep);
        }
    };
    u32 start, size, ahead = 0;
    if constexpr (T::CANDIDATES || T::EIGHT_BITS) {
        // The first loads of the weight do not wait until an earlier launch has written the digits or the copies.
        schedule.tile(0, start, size);
        for (; ahead < min(static_cast<u32>(Ring<T>::STAGES), steps); ++ahead) load_weight(ahead, ahead, start, size);
        ptx::await_earlier_launches();
    }
    if constexpr (T::EIGHT_BITS) {
        bool is_exact = true;
        const auto* const fours = reinterpret_cast<const float4*>(maps.factors);
#pragma unroll 8
        for (u32 i = 0; i < maps.bf16_row / 4; ++i) {
            const float4 four = fours[i];
            is_exact &= fminf(fminf(four.x, four.y), fminf(four.z, four.w)) > 0.0f;
        }
        if (!is_exact) first_row = maps.bf16_row;
    }
    Ring<T> ring;
    for (u32 t = 0; t < schedule.tiles; ++t) {
        schedule.tile(t, start, size);
        const u32 absent = T::SKIPS ? schedule.absent(t) : 0;
        for (u32 step = 0; step < steps; ++step) {
            ptx::mbarrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
            if (absent) ptx::mbarrier_arrive(&shared.empty[ring.stage], absent);
            if (t > 0 || step >= ahead) load_weight(ring.stage, step, start, size);
            load_hidden(ring.stage, step);
            ring.advance();
        }
    }
}

}  // namespace flash_sampling::fused_hopper
