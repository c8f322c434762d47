// The kernels of the lab, by their tiles.
#pragma once

#include "host.cuh"

template <class T>
__global__ void __cluster_dims__(T::CLUSTER, 1, 1) __launch_bounds__(T::THREADS, 1)
    fused(const __grid_constant__ Call call, const __grid_constant__ fused_hopper::Maps maps) {
    extern __shared__ u8 memory[];
    fused_hopper::block<T, ptx::Operand::BF16>(call, maps, LogitStore{}, RowLists{}, Masses{}, Peers{}, memory);
}

struct Problem {
    const __nv_bfloat16 *w, *h;
    Call call;
};

template <int COLUMNS, int SLABS, int CLUSTER>
static void launch(const Problem& p) {
    using T = fused_hopper::Tile<COLUMNS, SLABS, CLUSTER>;
    constexpr int BYTES = fused_hopper::Ring<T>::SHARED_BYTES;
    static bool once = false;
    if (!once) CHECK(cudaFuncSetAttribute(fused<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    once = true;
    const u32 tokens = p.call.tokens, hidden = p.call.hidden;
    const fused_hopper::Maps maps = {map_of(p.w, tokens, hidden, 64), map_of(p.w, tokens, hidden, 16),
                                     map_of(p.h, p.call.row_count, hidden, T::loaded_rows(p.call.row_count))};
    const u32 granules = (tokens + 15) / 16;
    const u32 grid = std::min<u32>(sms / CLUSTER, (granules + CLUSTER - 1) / CLUSTER) * CLUSTER;
    fused<T><<<grid, T::THREADS, BYTES>>>(p.call, maps);
    CHECK(cudaGetLastError());
}

struct Variant {
    const char* name;
    int columns;
    void (*launch)(const Problem&);
};

// The tiles that the crate plans, and the candidates of the file that FS_LAB_MORE names: FS_LAB_TILE(...), lines.
#define FS_LAB_TILE(C, S, X) {#C "x" #S "x" #X, C, launch<C, S, X>}
static const Variant variants[] = {
    FS_LAB_TILE(8, 2, 1),
    FS_LAB_TILE(16, 2, 1),
    FS_LAB_TILE(32, 2, 1),
    FS_LAB_TILE(64, 2, 2),
    FS_LAB_TILE(96, 2, 2),
    FS_LAB_TILE(128, 1, 2),
    FS_LAB_TILE(192, 1, 2),
    FS_LAB_TILE(224, 1, 2),
    FS_LAB_TILE(256, 1, 2),
#ifdef FS_LAB_MORE
#include FS_LAB_MORE
#endif
};
