// Every variant against the vendor's matrix product and a plain read.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include "variants.cuh"

__global__ void read_all(const uint4* p, u64 n, u32* out) {
    u32 x = 0;
    u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
    for (; i + 7 * step < n; i += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __ldcs(p + i + j * step);
#pragma unroll
        for (int j = 0; j < 8; ++j) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < n; i += step) x ^= p[i].x;
    if (x == 0x12345679) *out = x;
}

static void* flush_buffer;
static std::string only;
static int repetitions = 100;

// The vendor's matrix product, if its library is found.
typedef int (*GemmEx)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int, const void*,
                      void*, int, int, int, int);
static void* cublas;
static GemmEx gemm_ex;
static void open_cublas() {
    const char* path = getenv("FS_CUBLAS");
    void* library = path ? dlopen(path, RTLD_NOW | RTLD_GLOBAL) : nullptr;
    if (!library) return (void)printf("no cuBLAS: %s\n", path ? dlerror() : "FS_CUBLAS is not set");
    CHECK(((int (*)(void**))dlsym(library, "cublasCreate_v2"))(&cublas));
    CHECK(((int (*)(void*, void*, size_t))dlsym(library, "cublasSetWorkspace_v2"))(cublas, device<u8>(64 << 20), 64 << 20));
    gemm_ex = (GemmEx)dlsym(library, "cublasGemmEx");
    CHECK(gemm_ex == nullptr);
}

struct Candidate_ {
    std::string name;
    std::function<void()> run;
    std::vector<float> times;
};

// Every candidate once a round, so that all meet the same clocks.
static void time_rounds(std::vector<Candidate_>& candidates) {
    cudaEvent_t a, b;
    cudaEventCreate(&a), cudaEventCreate(&b);
    for (int round = -repetitions / 4; round < repetitions; ++round) {
        for (size_t i = 0; i < candidates.size(); ++i) {
            auto& c = candidates[(i + round + repetitions) % candidates.size()];
            cudaMemsetAsync(flush_buffer, round, 256 << 20);
            cudaEventRecord(a);
            c.run();
            cudaEventRecord(b);
            CHECK(cudaEventSynchronize(b));
            float ms;
            cudaEventElapsedTime(&ms, a, b);
            if (round >= 0) c.times.push_back(ms * 1e3f);
            usleep(500);
        }
    }
    for (auto& c : candidates) {
        std::sort(c.times.begin(), c.times.end());
        printf("  %-18s %7.1f min %7.1f median\n", c.name.c_str(), c.times[0], c.times[c.times.size() / 2]);
    }
}

static void bench(u32 V, u32 D, const std::vector<int>& batches) {
    auto* w = device<__nv_bfloat16>((u64)V * D);
    auto* h = device<__nv_bfloat16>(256ull * D);
    auto* product = device<__nv_bfloat16>(256ull * V);
    fill_normal<<<4096, 256>>>(w, (u64)V * D, 1, 1.0f);
    fill_normal<<<1024, 256>>>(h, 256ull * D, 2, 1.0f);
    CHECK(cudaDeviceSynchronize());
    u32* out = device<u32>(1);
    const float temperature[] = {1.0f, sqrtf((float)D) / 2.2f};
    for (int rows : batches) {
        std::vector<Candidate_> candidates;
        candidates.push_back({"read", [=] { read_all<<<sms * 4, 512>>>((const uint4*)w, (u64)V * D / 8, out); }, {}});
        if (gemm_ex)
            candidates.push_back({"cuBLAS",
                                  [=] {
                                      const float one = 1, zero = 0;
                                      CHECK(gemm_ex(cublas, 1, 0, V, rows, D, &one, w, 14, D, h, 14, D, &zero, product,
                                                    14, V, 68, -1));
                                  },
                                  {}});
        for (const auto& v : variants) {
            if (v.columns < rows || (v.columns > 8 && v.columns >= 2 * rows)) continue;
            if (!only.empty() && only != v.name) continue;
            for (int mode = 0; mode < 3; ++mode) {
                Call c = scratch(rows);
                c.row_count = rows;
                c.hidden = D;
                c.tokens = V;
                std::vector<Row> q(rows);
                for (int r = 0; r < rows; ++r) {
                    q[r] = Row{};
                    q[r].seed = 77 + r;
                    q[r].position = r;
                    q[r].greedy = mode == 0;
                    q[r].inv_temperature = mode ? 1.0f / temperature[mode - 1] : 1.0f;
                }
                CHECK(cudaMemcpy((void*)c.rows, q.data(), rows * sizeof(Row), cudaMemcpyHostToDevice));
                const Problem p{w, h, c};
                const auto launch = v.launch;
                const char* what = mode == 0 ? " greedy" : mode == 1 ? " T=1" : " sd2.2";
                candidates.push_back({std::string(v.name) + what, [=] { launch(p); }, {}});
            }
        }
        printf("== %u x %u, %d rows\n", V, D, rows);
        time_rounds(candidates);
    }
    cudaFree(w), cudaFree(h), cudaFree(product);
}
