// A stand-alone check and timing of the fused Hopper kernel, built by nvcc.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "flash_sampling/kernels/fused_hopper.cuh"

#ifndef FS_LAB_PROMOTION
#define FS_LAB_PROMOTION CU_TENSOR_MAP_L2_PROMOTION_L2_128B
#endif
using namespace flash_sampling;

#define CHECK(x)                                                                                   \
    do {                                                                                           \
        auto e_ = (x);                                                                             \
        if (e_ != 0) {                                                                             \
            printf("%s:%d: %s -> %d %s\n", __FILE__, __LINE__, #x, (int)e_, cudaGetErrorString((cudaError_t)e_)); \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

template <int COLUMNS, int UNITS, int SLABS, int CLUSTER>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(FusedHopper<COLUMNS, UNITS, SLABS, CLUSTER>::THREADS, 1)
    fused(const __grid_constant__ Call call,
          const __grid_constant__ typename FusedHopper<COLUMNS, UNITS, SLABS, CLUSTER>::Maps maps) {
    extern __shared__ u8 memory[];
    FusedHopper<COLUMNS, UNITS, SLABS, CLUSTER>::template block<ptx::Operand::BF16>(call, maps, memory);
}

typedef CUresult (*EncodeFn)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                             const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static EncodeFn encode;
static int sms;

static ptx::TensorMap map_of(const void* base, u64 rows, u64 cols, u32 box_rows) {
    CUtensorMap m;
    cuuint64_t dims[2] = {cols, rows}, strides[1] = {cols * 2};
    cuuint32_t box[2] = {64, box_rows}, step[2] = {1, 1};
    CHECK(encode(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)base, dims, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                 CU_TENSOR_MAP_SWIZZLE_128B, FS_LAB_PROMOTION, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    ptx::TensorMap t;
    static_assert(sizeof(t) == sizeof(m), "");
    memcpy(&t, &m, sizeof m);
    return t;
}

struct Problem {
    const __nv_bfloat16 *w, *h;
    Call call;
};

template <int COLUMNS, int UNITS, int SLABS, int CLUSTER>
static void launch(const Problem& p, cudaStream_t s = 0) {
    using K = FusedHopper<COLUMNS, UNITS, SLABS, CLUSTER>;
    static bool once = false;
    if (!once) {
        CHECK(cudaFuncSetAttribute(fused<COLUMNS, UNITS, SLABS, CLUSTER>, cudaFuncAttributeMaxDynamicSharedMemorySize, K::SHARED_BYTES));
        once = true;
    }
    const typename K::Maps maps = {map_of(p.w, p.call.tokens, p.call.hidden, 64), map_of(p.w, p.call.tokens, p.call.hidden, 16),
                                   map_of(p.h, p.call.row_count, p.call.hidden, COLUMNS / CLUSTER)};
    const u32 units = (p.call.tokens + 15) / 16;
    u32 grid = std::min<u32>(sms / CLUSTER, (units + CLUSTER - 1) / CLUSTER) * CLUSTER;
    fused<COLUMNS, UNITS, SLABS, CLUSTER><<<grid, K::THREADS, K::SHARED_BYTES, s>>>(p.call, maps);
    CHECK(cudaGetLastError());
}

typedef void (*Launch)(const Problem&, cudaStream_t);
struct Variant {
    const char* name;
    int columns;
    Launch launch;
};
#ifndef FS_LAB_SET
#define FS_LAB_SET 0
#endif
static const Variant variants[] = {
#if FS_LAB_SET == 6
    {"8x1x2x1S", 8, launch<8, 1, 2, 1>},
    {"16x1x2x1S", 16, launch<16, 1, 2, 1>},
    {"64x1x2x1S", 64, launch<64, 1, 2, 1>},
    {"128x1x1x2S", 128, launch<128, 1, 1, 2>},
    {"256x1x1x2S", 256, launch<256, 1, 1, 2>},
#endif
#if FS_LAB_SET == 5
    {"8x1x2x1S", 8, launch<8, 1, 2, 1>},
#endif
#if FS_LAB_SET == 4
    {"8x1x2x1S", 8, launch<8, 1, 2, 1>},
    {"8x2x1x1S", 8, launch<8, 2, 1, 1>},
    {"8x2x2x1S", 8, launch<8, 2, 2, 1>},
    {"8x3x1x1S", 8, launch<8, 3, 1, 1>},
    {"8x1x2x2S", 8, launch<8, 1, 2, 2>},
    {"16x1x2x1S", 16, launch<16, 1, 2, 1>},
    {"16x2x1x1S", 16, launch<16, 2, 1, 1>},
#endif
#if FS_LAB_SET == 0 || FS_LAB_SET == 1
    {"8x1x2x1S", 8, launch<8, 1, 2, 1>},
    {"16x1x2x1S", 16, launch<16, 1, 2, 1>},
    {"8x1x4x1S", 8, launch<8, 1, 4, 1>},
    {"16x1x4x1S", 16, launch<16, 1, 4, 1>},
#endif
#if FS_LAB_SET == 0
    {"32x1x2x1S", 32, launch<32, 1, 2, 1>},
    {"64x1x2x1S", 64, launch<64, 1, 2, 1>},
#endif
#if FS_LAB_SET == 0 || FS_LAB_SET == 2
    {"128x2x1x2S", 128, launch<128, 2, 1, 2>},
    {"128x1x1x2S", 128, launch<128, 1, 1, 2>},
#endif
#if FS_LAB_SET == 0 || FS_LAB_SET == 2 || FS_LAB_SET == 3
    {"256x1x1x2S", 256, launch<256, 1, 1, 2>},
#endif
};

// The scalar definition, one thread a token and row; integer inputs, so the sum is exact in any order.
__global__ void reference(Call call, const __nv_bfloat16* w, const __nv_bfloat16* h, u64* best, float* logits) {
    const u32 token = blockIdx.x * 32 + threadIdx.x % 32, r = blockIdx.y * 8 + threadIdx.x / 32;
    if (token >= call.tokens || r >= call.row_count) return;
    float dot = 0;
    for (u32 k = 0; k < call.hidden; ++k)
        dot += __bfloat162float(w[(u64)token * call.hidden + k]) * __bfloat162float(h[(u64)r * call.hidden + k]);
    const Row& row = call.rows[r];
    float l = call.head.apply(dot, call.bias ? call.bias[token] : 0, call.bias != nullptr);
    l = row.transform().apply(l, call.first_token + token);
    if (l == -INFINITY) return;
    const Noise noise{row.seed, row.position};
    const float score = row.greedy ? l : l + noise.gumbel(Domain::Token, row.draw, call.first_token + token);
    atomicMax(&best[r], to_ordered_bits(Winner::of(score, call.first_token + token)));
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

template <class T>
static T* device(size_t n) {
    T* p;
    CHECK(cudaMalloc(&p, n * sizeof(T)));
    CHECK(cudaMemset(p, 0xcd, n * sizeof(T)));
    return p;
}

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

static int failures = 0;

static void check(u32 V, u32 D, u32 R, u32 first, int kind, u32 seed) {
    auto* w = device<__nv_bfloat16>((u64)V * D);
    auto* h = device<__nv_bfloat16>((u64)R * D);
    fill_small<<<1024, 256>>>(w, (u64)V * D, seed, 2);
    fill_small<<<1024, 256>>>(h, (u64)R * D, seed + 1, 2);
    Call c = scratch(R);
    c.row_count = R;
    c.hidden = D;
    c.first_token = first;
    c.tokens = V;
    if (kind == 1) c.head = {30.0f, 1.5f};
    std::vector<float> bias(V);
    for (u32 i = 0; i < V; ++i) bias[i] = (int)(i * 2654435761u >> 28) * 0.25f;
    if (kind == 2) {
        float* b = device<float>(V);
        CHECK(cudaMemcpy(b, bias.data(), V * 4, cudaMemcpyHostToDevice));
        c.bias = b;
    }
    u32 words = (first + V + 31) / 32;
    std::vector<u32> mask(words);
    for (u32 i = 0; i < words; ++i) mask[i] = philox4x32_10({{i, 1, 2, 3}}, seed, 5).w[0] & (i % 3 ? 0 : ~0u);
    u32* dmask = device<u32>(words);
    CHECK(cudaMemcpy(dmask, mask.data(), words * 4, cudaMemcpyHostToDevice));
    std::vector<LogitBias> lb = {{first + 1, 3.5f}, {first + V / 2, -INFINITY}, {first + V - 1, 7.25f}};
    LogitBias* dlb = device<LogitBias>(3);
    CHECK(cudaMemcpy(dlb, lb.data(), 24, cudaMemcpyHostToDevice));
    std::vector<Row> rows(R);
    const float temps[] = {1.0f, 0.7f, 30.0f, 1000.0f, 1.3f, 100.0f, 0.01f, 50.0f};
    for (u32 r = 0; r < R; ++r) {
        Row q{};
        q.seed = 0x123456789abcdefull * (r + 1) + seed;
        q.position = r * 0x1000000ull + 5;
        q.inv_temperature = r % 8 == 0 ? 1.0f : 1.0f / temps[r % 8];
        q.draw = r % 3;
        q.greedy = r % 11 == 3;
        if (q.greedy) q.inv_temperature = 1.0f;
        if (kind == 3 && r % 2) q.mask = dmask, q.mask_words = words;
        if (kind == 3 && r % 3 == 0) q.bias = dlb, q.biases = 3, q.largest_bias = 7.25f;
        rows[r] = q;
    }
    CHECK(cudaMemcpy((void*)c.rows, rows.data(), R * sizeof(Row), cudaMemcpyHostToDevice));
    u64* best = device<u64>(R);
    CHECK(cudaMemset(best, 0, R * 8));
    reference<<<dim3((V + 31) / 32, (R + 7) / 8), 256>>>(c, w, h, best, nullptr);
    CHECK(cudaDeviceSynchronize());
    std::vector<u64> want(R);
    CHECK(cudaMemcpy(want.data(), best, R * 8, cudaMemcpyDeviceToHost));
    for (const auto& v : variants) {
        if (v.columns < (int)R) continue;
        for (int round = 0; round < 2; ++round) {
            CHECK(cudaMemset(c.draws, 0xcd, R * sizeof(Draw)));
            v.launch({w, h, c}, 0);
            CHECK(cudaDeviceSynchronize());
            std::vector<Draw> got(R);
            CHECK(cudaMemcpy(got.data(), c.draws, R * sizeof(Draw), cudaMemcpyDeviceToHost));
            int bad = 0;
            for (u32 r = 0; r < R; ++r) {
                Winner x = from_ordered_bits(want[r]);
                bool ok = got[r].status == Status::Drawn && got[r].token == x.token && f32_to_bits(got[r].score) == f32_to_bits(x.score);
                if (ok && rows[r].greedy) ok = got[r].logit == got[r].score;
                if (ok && !rows[r].greedy) {
                    const float g = Noise{rows[r].seed, rows[r].position}.gumbel(Domain::Token, rows[r].draw, x.token);
                    ok = got[r].logit + g == got[r].score;
                }
                if (!ok && bad++ < 3)
                    printf("   row %u: got %u %.9g (%.9g) status %u, want %u %.9g\n", r, got[r].token, got[r].score, got[r].logit,
                           (u32)got[r].status, x.token, x.score);
            }
            if (bad) ++failures, printf("FAIL V %u D %u R %u first %u kind %d %s round %d: %d rows\n", V, D, R, first, kind, v.name, round, bad);
        }
    }
    cudaFree(w), cudaFree(h);
}

// A NaN row, a row whose mask allows nothing, then an infinite bias: each row says so, the others stay right.
static void check_bad(u32 R) {
    const u32 V = 3000, D = 256;
    auto* w = device<__nv_bfloat16>((u64)V * D);
    auto* h = device<__nv_bfloat16>((u64)R * D);
    fill_small<<<1024, 256>>>(w, (u64)V * D, 5, 2);
    fill_small<<<1024, 256>>>(h, (u64)R * D, 6, 2);
    const __nv_bfloat16 nan = __float2bfloat16(NAN);
    CHECK(cudaMemcpy(h + D + 7, &nan, 2, cudaMemcpyHostToDevice));
    Call c = scratch(R);
    c.row_count = R, c.hidden = D, c.tokens = V;
    u32* none = device<u32>((V + 31) / 32);
    CHECK(cudaMemset(none, 0, (V + 31) / 32 * 4));
    std::vector<float> bias(V);
    bias[1234] = INFINITY;
    float* infinite = device<float>(V);
    CHECK(cudaMemcpy(infinite, bias.data(), V * 4, cudaMemcpyHostToDevice));
    std::vector<Row> rows(R);
    for (u32 r = 0; r < R; ++r) {
        rows[r] = Row{};
        rows[r].seed = r, rows[r].inv_temperature = 1.0f;
        if (r == 3) rows[r].mask = none, rows[r].mask_words = (V + 31) / 32;
    }
    CHECK(cudaMemcpy((void*)c.rows, rows.data(), R * sizeof(Row), cudaMemcpyHostToDevice));
    u64* best = device<u64>(R);
    CHECK(cudaMemset(best, 0, R * 8));
    reference<<<dim3((V + 31) / 32, (R + 7) / 8), 256>>>(c, w, h, best, nullptr);
    std::vector<u64> want(R);
    CHECK(cudaMemcpy(want.data(), best, R * 8, cudaMemcpyDeviceToHost));
    for (const auto& v : variants) {
        if (v.columns < (int)R) continue;
        for (int round = 0; round < 2; ++round) {
            c.bias = round ? infinite : nullptr;
            v.launch({w, h, c}, 0);
            CHECK(cudaDeviceSynchronize());
            std::vector<Draw> got(R);
            CHECK(cudaMemcpy(got.data(), c.draws, R * sizeof(Draw), cudaMemcpyDeviceToHost));
            for (u32 r = 0; r < R; ++r) {
                bool ok = got[r].status == Status::Drawn && got[r].token == from_ordered_bits(want[r]).token;
                if (round) ok = got[r].status == Status::PositiveInfinity && got[r].token == 1234;
                if (!round && r == 3) ok = got[r].status == Status::NoFiniteLogit;
                if (r == 1) ok = got[r].status == Status::NaN && got[r].token == 0;
                if (!ok) ++failures, printf("FAIL bad rows %u %s round %d row %u: status %u token %u\n", R, v.name, round, r, (u32)got[r].status, got[r].token);
            }
        }
    }
    cudaFree(w), cudaFree(h);
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
            candidates.push_back({"cuBLAS", [=] {
                                      const float one = 1, zero = 0;
                                      CHECK(gemm_ex(cublas, 1, 0, V, rows, D, &one, w, 14, D, h, 14, D, &zero, product, 14, V, 68, -1));
                                  }, {}});
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
#ifdef FS_LAB_TRACE
                CHECK(cudaMemset(flush_buffer, 1, 256 << 20));
                v.launch(p, 0);
                CHECK(cudaDeviceSynchronize());
                CHECK(cudaMemset(flush_buffer, 1, 256 << 20));
                v.launch(p, 0);
                CHECK(cudaDeviceSynchronize());
                static u64 tr[16 * 64 * 8];
                CHECK(cudaMemcpyFromSymbol(tr, lab_trace, sizeof tr));
                static u64 lt[3][256];
                CHECK(cudaMemcpyFromSymbol(lt, lab_times, sizeof lt));
                for (int k = 0; k < 2; ++k) std::sort(lt[k], lt[k] + sms);
                const u64 last = *std::max_element(lt[2], lt[2] + sms);
                printf("start 0 %lld %lld  end %lld %lld %lld %lld %lld  all %lld ns\n", lt[0][sms / 2] - lt[0][0], lt[0][sms - 1] - lt[0][0],
                       lt[1][0] - lt[0][0], lt[1][sms / 4] - lt[0][0], lt[1][sms / 2] - lt[0][0], lt[1][sms * 3 / 4] - lt[0][0],
                       lt[1][sms - 1] - lt[0][0], last - lt[0][0]);
                const int c0 = 4;
                u64 base = tr[c0 * 64 * 8];
                printf("%s mode %d\n", v.name, mode);
                for (int wp : {1, c0, c0 + 4})
                    for (int tt = 0; tt < 4; ++tt) {
                        printf("  warp %2d tile %d:", wp, tt);
                        for (int k = 0; k < 7; ++k) printf(" %8lld", tr[(wp * 64 + tt) * 8 + k] ? (long long)(tr[(wp * 64 + tt) * 8 + k] - base) : -1);
                        printf("\n");
                    }
#endif
                candidates.push_back({std::string(v.name) + (mode == 0 ? " greedy" : mode == 1 ? " T=1" : " sd2.2"), [=] { launch(p, 0); }, {}});
            }
        }
        printf("== %u x %u, %d rows\n", V, D, rows);
        time_rounds(candidates);
    }
    cudaFree(w), cudaFree(h), cudaFree(product);
}

int main(int argc, char** argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    std::string what = argc > 1 ? argv[1] : "all";
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    sms = prop.multiProcessorCount;
    cudaDriverEntryPointQueryResult q;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&encode, 12000, cudaEnableDefault, &q));
    printf("%s, %d SMs, L2 %d MB\n", prop.name, sms, prop.l2CacheSize >> 20);
    flush_buffer = device<u8>(256 << 20);
    open_cublas();
    if (what == "rows") {  // rows...: the heads of the benchmark
        std::vector<int> rows;
        for (int i = 2; i < argc; ++i) rows.push_back(atoi(argv[i]));
        bench(151936, 4096, rows);
        bench(128256, 8192, rows);
        return 0;
    }
    if (what == "head") {  // V D rows...
        std::vector<int> rows;
        for (int i = 4; i < argc; ++i) rows.push_back(atoi(argv[i]));
        bench(atoi(argv[2]), atoi(argv[3]), rows);
        return 0;
    }
    if (what == "one") {  // variant V D rows: few launches, for a profiler
        only = argv[2];
        repetitions = 4;
        bench(atoi(argv[3]), atoi(argv[4]), {atoi(argv[5])});
        return 0;
    }
    if (what == "count") {
        for (const auto& v : variants) printf("%s ", v.name);
        return 0;
    }
    if (what == "small") {  // for compute-sanitizer
        for (u32 R : {5u, 16u, 64u, 128u, 256u}) check(700, 200, R, 37, R % 3 + 1, R), check_bad(R);
        printf("checks: %d failures\n", failures);
        return failures != 0;
    }
    if (what != "bench") {
        for (u32 R : {1u, 3u, 8u, 16u, 27u, 64u, 100u, 128u, 200u, 256u})
            for (int kind = 0; kind < 4; ++kind) check(1000 + R, 200, R, kind == 0 ? 0 : 37 * kind, kind, R * 4 + kind);
        for (u32 R : {5u, 16u, 60u, 128u, 256u}) check_bad(R);
        check(64, 64, 5, 0, 0, 1);
        check(1, 8, 5, 0, 0, 2);
        check(50000, 512, 256, 3, 0, 3);
        check(50000, 512, 64, 2, 3, 4);
        check(33000, 1024, 128, 2, 2, 5);
        check(151936, 512, 256, 0, 0, 6);
        printf("checks: %d failures\n", failures);
    }
    if (what != "check") {
        bench(151936, 4096, {1, 16, 32, 64, 128, 256});
        bench(128256, 8192, {1, 16, 64, 128, 256});
    }
    return failures != 0;
}
