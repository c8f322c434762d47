// A stand-alone check and timing of the fused Hopper kernel, built by nvcc.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "flash_sampling/kernels/fused_hopper.cuh"

using namespace flash_sampling;

#define CHECK(x)                                                                                   \
    do {                                                                                           \
        auto e_ = (x);                                                                             \
        if (e_ != 0) {                                                                             \
            printf("%s:%d: %s -> %d %s\n", __FILE__, __LINE__, #x, (int)e_, cudaGetErrorString((cudaError_t)e_)); \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

template <int COLUMNS, int UNITS, int SLABS, int CLUSTER, bool LAZY>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(FusedHopper<COLUMNS, UNITS, SLABS, CLUSTER, LAZY>::THREADS, 1)
    fused(const __grid_constant__ Call call,
          const __grid_constant__ typename FusedHopper<COLUMNS, UNITS, SLABS, CLUSTER, LAZY>::Maps maps) {
    extern __shared__ u8 memory[];
    FusedHopper<COLUMNS, UNITS, SLABS, CLUSTER, LAZY>::template block<ptx::Operand::BF16>(call, maps, memory);
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
                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    ptx::TensorMap t;
    static_assert(sizeof(t) == sizeof(m), "");
    memcpy(&t, &m, sizeof m);
    return t;
}

struct Problem {
    const __nv_bfloat16 *w, *h;
    Call call;
};

template <int COLUMNS, int UNITS, int SLABS, int CLUSTER, bool LAZY>
static void launch(const Problem& p, cudaStream_t s = 0) {
    using K = FusedHopper<COLUMNS, UNITS, SLABS, CLUSTER, LAZY>;
    static bool once = false;
    if (!once) {
        CHECK(cudaFuncSetAttribute(fused<COLUMNS, UNITS, SLABS, CLUSTER, LAZY>, cudaFuncAttributeMaxDynamicSharedMemorySize, K::SHARED_BYTES));
        once = true;
    }
    const typename K::Maps maps = {map_of(p.w, p.call.tokens, p.call.hidden, 64), map_of(p.w, p.call.tokens, p.call.hidden, 16),
                                   map_of(p.h, p.call.row_count, p.call.hidden, COLUMNS / CLUSTER)};
    const u32 units = (p.call.tokens + 15) / 16;
    u32 grid = std::min<u32>(sms / CLUSTER, (units + CLUSTER - 1) / CLUSTER) * CLUSTER;
    fused<COLUMNS, UNITS, SLABS, CLUSTER, LAZY><<<grid, K::THREADS, K::SHARED_BYTES, s>>>(p.call, maps);
    CHECK(cudaGetLastError());
}

typedef void (*Launch)(const Problem&, cudaStream_t);
struct Variant {
    const char* name;
    int columns;
    Launch launch;
};
static const Variant variants[] = {
    {"8x1x2x1S", 8, launch<8, 1, 2, 1, false>},
    {"16x1x2x1S", 16, launch<16, 1, 2, 1, false>},
    {"32x1x2x1S", 32, launch<32, 1, 2, 1, false>},
    {"64x2x1x1S", 64, launch<64, 2, 1, 1, false>},
    {"64x2x1x1L", 64, launch<64, 2, 1, 1, true>},
    {"64x1x2x1S", 64, launch<64, 1, 2, 1, false>},
    {"128x2x1x1S", 128, launch<128, 2, 1, 1, false>},
    {"128x2x1x1L", 128, launch<128, 2, 1, 1, true>},
    {"128x2x1x2S", 128, launch<128, 2, 1, 2, false>},
    {"128x1x1x2S", 128, launch<128, 1, 1, 2, false>},
    {"256x1x1x1S", 256, launch<256, 1, 1, 1, false>},
    {"256x1x1x2S", 256, launch<256, 1, 1, 2, false>},
    {"256x1x1x1L", 256, launch<256, 1, 1, 1, true>},
    {"256x1x1x2L", 256, launch<256, 1, 1, 2, true>},
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

static void* flush_buffer;
static std::pair<float, float> time_it(void (*f)(void*), void* arg, int warm = 25, int reps = 100) {
    CHECK(cudaDeviceSynchronize());
    usleep(250000);  // every measurement begins cool
    for (int i = 0; i < warm; ++i) f(arg);
    std::vector<cudaEvent_t> a(reps), b(reps);
    for (int i = 0; i < reps; ++i) cudaEventCreate(&a[i]), cudaEventCreate(&b[i]);
    for (int i = 0; i < reps; ++i) {
        cudaMemsetAsync(flush_buffer, i, 256 << 20);
        cudaEventRecord(a[i]);
        f(arg);
        cudaEventRecord(b[i]);
    }
    CHECK(cudaDeviceSynchronize());
    std::vector<float> t(reps);
    for (int i = 0; i < reps; ++i) cudaEventElapsedTime(&t[i], a[i], b[i]), cudaEventDestroy(a[i]), cudaEventDestroy(b[i]);
    std::sort(t.begin(), t.end());
    return {t[0] * 1e3f, t[reps / 2] * 1e3f};
}

static std::string only;
static int repetitions = 100;

static void bench(u32 V, u32 D, const std::vector<int>& batches) {
    auto* w = device<__nv_bfloat16>((u64)V * D);
    auto* h = device<__nv_bfloat16>(256ull * D);
    fill_normal<<<4096, 256>>>(w, (u64)V * D, 1, 1.0f);
    fill_normal<<<1024, 256>>>(h, 256ull * D, 2, 1.0f);
    CHECK(cudaDeviceSynchronize());
    u32* out = device<u32>(1);
    struct R { const uint4* p; u64 n; u32* out; } ra{(const uint4*)w, (u64)V * D / 8, out};
    auto rt = time_it([](void* x) { auto* a = (R*)x; read_all<<<sms * 4, 512>>>(a->p, a->n, a->out); }, &ra);
    printf("== %u x %u  read ceiling %.1f us min %.1f median  %.3f TB/s\n", V, D, rt.first, rt.second, V * 2e-6 * D / rt.first);
    const float temperature[] = {1.0f, sqrtf((float)D) / 2.2f, sqrtf((float)D)};
    for (int rows : batches) {
        for (const auto& v : variants) {
            if (v.columns < rows || (v.columns > 8 && v.columns >= 2 * rows)) continue;
            if (!only.empty() && only != v.name) continue;
            printf("rows %3d %-8s", rows, v.name);
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
                struct L { Problem p; Launch l; } a{{w, h, c}, v.launch};
                auto t = time_it([](void* x) { auto* l = (L*)x; l->l(l->p, 0); }, &a, repetitions / 4, repetitions);
                printf("  %s %7.1f %7.1f", mode == 0 ? "greedy" : mode == 1 ? "T=1" : mode == 2 ? "sd2.2" : "sd1", t.first, t.second);
                fflush(stdout);
            }
            printf("\n");
        }
    }
    cudaFree(w), cudaFree(h);
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
    if (what == "one") {  // variant V D rows: few launches, for a profiler
        only = argv[2];
        repetitions = 4;
        bench(atoi(argv[3]), atoi(argv[4]), {atoi(argv[5])});
        return 0;
    }
    if (what != "bench") {
        for (u32 R : {1u, 3u, 8u, 16u, 27u, 64u, 100u, 128u, 200u, 256u})
            for (int kind = 0; kind < 4; ++kind) check(1000 + R, 200, R, kind == 0 ? 0 : 37 * kind, kind, R * 4 + kind);
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
