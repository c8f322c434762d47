// What the lab needs of the host: errors, tensor maps, memory.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "flash_sampling/kernels/fused_hopper.cuh"

using namespace flash_sampling;

#define CHECK(x)                                                                                                     \
    do {                                                                                                             \
        auto e_ = (x);                                                                                               \
        if (e_ != 0) {                                                                                               \
            printf("%s:%d: %s -> %d %s\n", __FILE__, __LINE__, #x, (int)e_, cudaGetErrorString((cudaError_t)e_));    \
            exit(1);                                                                                                 \
        }                                                                                                            \
    } while (0)

typedef CUresult (*EncodeFn)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                             const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static EncodeFn encode;
static int sms;

// A matrix of bf16 as boxes of 64 elements.
static ptx::TensorMap map_of(const void* base, u64 rows, u64 cols, u32 box_rows) {
    CUtensorMap m;
    cuuint64_t dims[2] = {cols, rows}, strides[1] = {cols * 2};
    cuuint32_t box[2] = {64, box_rows}, step[2] = {1, 1};
    CHECK(encode(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)base, dims, strides, box, step,
                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    ptx::TensorMap t;
    static_assert(sizeof(t) == sizeof(m), "");
    memcpy(&t, &m, sizeof m);
    return t;
}

// Device memory, filled with something that is no answer.
template <class T>
static T* device(size_t n) {
    T* p;
    CHECK(cudaMalloc(&p, n * sizeof(T)));
    CHECK(cudaMemset(p, 0xcd, n * sizeof(T)));
    return p;
}

// A call with everything but the batch and the head.
static Call scratch(u32 max_rows) {
    Call c{};
    c.best = device<u64>(max_rows);
    c.invalid = device<u64>(max_rows);
    c.logits = device<float>(size_t(sms) * max_rows);
    c.arrived = device<u32>(1);
    c.draws = device<Draw>(max_rows);
    c.rows = device<Row>(max_rows);
    CHECK(cudaMemset(c.best, 0, max_rows * 8));
    CHECK(cudaMemset(c.invalid, 0xff, max_rows * 8));
    CHECK(cudaMemset(c.arrived, 0, 4));
    c.head = {0.0f, 1.0f};
    return c;
}

__global__ void fill_small(__nv_bfloat16* p, u64 n, u32 seed, int range) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        u32 x = philox4x32_10({{(u32)i, (u32)(i >> 32), 7, 7}}, seed, 1).w[0];
        p[i] = __float2bfloat16((float)(int)(x % (2 * range + 1)) - range);
    }
}
__global__ void fill_normal(__nv_bfloat16* p, u64 n, u32 seed, float scale) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        Words x = philox4x32_10({{(u32)i, (u32)(i >> 32), 9, 9}}, seed, 1);
        p[i] = __float2bfloat16(scale * sqrtf(-2 * logf((x.w[0] + 0.5f) * WORD_SCALE)) * cospif(2 * (x.w[1] * WORD_SCALE)));
    }
}
