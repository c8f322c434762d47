// A stand-alone check and timing of rows with filters and masks: compiled instances of the Hopper kernel (FOLDER/p256.cubin and
// so on: plain, with knobs, with lists) and of select_list.cu, against the definition on the host.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "flash_sampling/kernels/fused_hopper/load.cuh"
#include "flash_sampling/epilogue/store.cuh"
#include "flash_sampling/mass_histogram.cuh"
#include "flash_sampling/perturb.cuh"
#include "flash_sampling/row_lists.cuh"

using namespace flash_sampling;

#define CHECK(x)                                                              \
    do {                                                                      \
        const int e_ = static_cast<int>(x);                                   \
        if (e_ != 0) {                                                        \
            printf("%s:%d: %s -> %d\n", __FILE__, __LINE__, #x, e_);          \
            exit(1);                                                          \
        }                                                                     \
    } while (0)

struct SelectLists {
    RowLists lists;
    const Row* rows;
    Draw* draws;
};

static int sms, failures;
static decltype(&cuTensorMapEncodeTiled) encode;

template <class T>
static T* device(size_t n, int byte = 0xcd) {
    T* p;
    CHECK(cudaMalloc(&p, n * sizeof(T)));
    CHECK(cudaMemset(p, byte, n * sizeof(T)));
    return p;
}

static ptx::TensorMap map_of(const void* base, u64 rows, u64 cols, u32 box_rows) {
    CUtensorMap m;
    cuuint64_t dims[2] = {cols, rows}, strides[1] = {cols * 2};
    cuuint32_t box[2] = {64, box_rows}, step[2] = {1, 1};
    CHECK(encode(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(base), dims, strides, box, step,
                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    ptx::TensorMap t;
    memcpy(&t, &m, sizeof m);
    return t;
}

// A compiled kernel.
struct Kernel {
    cudaKernel_t kernel{};
    u32 bytes = 0, threads = 0;

    Kernel(const std::string& file, const char* name) {
        cudaLibrary_t library;
        CHECK(cudaLibraryLoadFromFile(&library, file.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
        CHECK(cudaLibraryGetKernel(&kernel, library, name));
        void* at;
        size_t size;
        CHECK(cudaLibraryGetGlobal(&at, &size, library, (std::string(name) + "_launch").c_str()));
        u32 values[2];
        CHECK(cudaMemcpy(values, at, 8, cudaMemcpyDeviceToHost));
        bytes = values[0], threads = values[1];
        CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    }
    void launch(u32 blocks, void** arguments) const {
        CHECK(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads), arguments, bytes, nullptr));
    }
};

// Normal numbers; then peaks: token peak(r, i) gets `height` h_r / |h_r|^2 besides.
__device__ u32 peak(u32 r, u32 i, u32 tokens) { return philox4x32_10({{r, i, 3, 3}}, 11, 1).w[0] % tokens; }
__global__ void fill_normal(__nv_bfloat16* p, u64 n, u32 seed, float scale) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        const Words x = philox4x32_10({{(u32)i, (u32)(i >> 32), 9, 9}}, seed, 1);
        p[i] = __float2bfloat16(scale * sqrtf(-2 * logf((x.w[0] + 0.5f) * 2.3283064e-10f)) * cospif(2 * (x.w[1] * 2.3283064e-10f)));
    }
}
__global__ void fill_small(__nv_bfloat16* p, u64 n, u32 seed, int range) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
        p[i] = __float2bfloat16((float)(int)(philox4x32_10({{(u32)i, (u32)(i >> 32), 7, 7}}, seed, 1).w[0] % (2 * range + 1)) - range);
}
__global__ void add_peaks(__nv_bfloat16* w, const __nv_bfloat16* h, u32 tokens, u32 hidden) {
    const u32 r = blockIdx.x, i = blockIdx.y;
    const float height = 11.0f + (r % 8) * 0.7f - i * 0.5f;
    for (u32 k = threadIdx.x; k < hidden; k += blockDim.x) {
        __nv_bfloat16& at = w[(u64)peak(r, i, tokens) * hidden + k];
        at = __float2bfloat16(__bfloat162float(at) + height * __bfloat162float(h[(u64)r * hidden + k]) / hidden);
    }
}

struct Problem {
    u32 tokens, hidden, rows, first;
    __nv_bfloat16 *w, *h;
    Call call{};
    RowLists lists{};
    std::vector<Row> host_rows;
    u32 columns, cluster;

    Problem(u32 tokens, u32 hidden, u32 rows, u32 first) : tokens(tokens), hidden(hidden), rows(rows), first(first) {
        columns = rows <= 8 ? 8 : rows <= 64 ? 64 : 256;
        cluster = columns == 8 ? 1 : 2;
        w = device<__nv_bfloat16>((u64)tokens * hidden);
        h = device<__nv_bfloat16>((u64)rows * hidden);
        call.best = device<u64>(rows, 0);
        call.invalid = device<u64>(rows, 0xff);
        call.logits = device<float>((size_t)sms * rows);
        call.arrived = device<u32>(1, 0);
        call.draws = device<Draw>(rows);
        call.rows = device<Row>(rows);
        call.head = {0.0f, 1.0f};
        call.row_count = rows, call.hidden = hidden, call.first_token = first, call.tokens = tokens;
        lists.filters = device<RowFilters>(rows);
        lists.counters = device<ListCounters>(rows, 0);
        lists.posted = device<u32>(rows * RowLists::POSTS, 0);
        lists.keys = device<u64>((u64)rows * RowLists::ROOM);
        host_rows.resize(rows);
        for (u32 r = 0; r < rows; ++r) {
            Row q{};
            q.seed = 0x123456789abcdefull * (r + 1), q.position = 17 + r, q.inv_temperature = 1.0f;
            host_rows[r] = q;
        }
        copy_rows();
    }
    ~Problem() {
        for (void* p : {(void*)w, (void*)h, (void*)call.best, (void*)call.invalid, (void*)call.logits, (void*)call.arrived,
                        (void*)call.draws, (void*)call.rows, (void*)lists.filters, (void*)lists.counters, (void*)lists.posted,
                        (void*)lists.keys})
            cudaFree(p);
    }
    void copy_rows() { CHECK(cudaMemcpy((void*)call.rows, host_rows.data(), rows * sizeof(Row), cudaMemcpyHostToDevice)); }
    void filter(const std::vector<RowFilters>& f) {
        CHECK(cudaMemcpy((void*)lists.filters, f.data(), rows * sizeof(RowFilters), cudaMemcpyHostToDevice));
    }
    fused_hopper::Maps maps() const {
        return {map_of(w, tokens, hidden, 64), map_of(w, tokens, hidden, 16), map_of(h, rows, hidden, columns / cluster)};
    }
    u32 blocks() const {
        const u32 granules = (tokens + 15) / 16;
        return std::min<u32>(sms / cluster, (granules + cluster - 1) / cluster) * cluster;
    }
};

static std::string folder;
static const Kernel& kernel(char kind, u32 columns) {
    static std::vector<std::pair<std::string, Kernel>> loaded;
    const std::string name = kind + std::to_string(columns);
    for (auto& [n, k] : loaded)
        if (n == name) return k;
    loaded.reserve(32);
    loaded.emplace_back(name, Kernel(folder + "/" + name + ".cubin", "fused_hopper"));
    return loaded.back().second;
}
static const Kernel& selection() {
    static Kernel k(folder + "/select_list.cubin", "select_list");
    return k;
}

static void launch_plain(Problem& p) {
    auto maps = p.maps();
    void* a[] = {&p.call, &maps};
    kernel('p', p.columns).launch(p.blocks(), a);
}
static void launch_knobs(Problem& p, LogitStore stored) {
    auto maps = p.maps();
    void* a[] = {&p.call, &maps, &stored};
    kernel('k', p.columns).launch(p.blocks(), a);
}
static void launch_lists(Problem& p) {
    auto maps = p.maps();
    void* a[] = {&p.call, &maps, &p.lists};
    kernel('l', p.columns).launch(p.blocks(), a);
}
static void launch_selection(Problem& p) {
    SelectLists call{p.lists, p.call.rows, p.call.draws};
    void* a[] = {&call};
    selection().launch(p.rows, a);
}

struct Case {
    const char* name;
    RowFilters f;
};
static const Case cases[] = {
    {"off", {-INFINITY, 1.0f, 0, 1.0f, 0}},
    {"min-p 0.05", {std::log((double)0.05f), 1.0f, 0, 1.0f, 0}},
    {"top-k 20", {-INFINITY, 1.0f, 20, 1.0f, 0}},
    {"top-k 50, top-p 0.9", {-INFINITY, 0.9f, 50, 1.0f, 0}},
    {"min-p 0.05, top-k 20, top-p 0.9", {std::log((double)0.05f), 0.9f, 20, 1.0f, 0}},
    {"top-k 50, min-p 0.05 last", {-INFINITY, 1.0f, 50, 1.0f, 1}},
    {"top-k 50, rescaled 0.7", {-INFINITY, 1.0f, 50, 0.7f, 0}},
    {"top-p 0.95", {-INFINITY, 0.95f, 0, 1.0f, 0}},
};

// The draw of a row by the definition; `close`: a mass meets its limit to within 1e-7.
static Draw define(const RowFilters& f, const Row& row, std::vector<u64> keys, bool& close) {
    std::sort(keys.begin(), keys.end(), [](u64 a, u64 b) { return a > b; });
    const auto logit = [&](size_t i) { return from_monotone_bits((u32)(keys[i] >> 32)); };
    size_t length = keys.size();
    const float least = f.least(logit(0));
    if (f.has_min_p() && !f.min_p_last) while (length > 1 && logit(length - 1) < least) --length;
    if (f.top_k) length = std::min<size_t>(length, f.top_k);
    if (f.has_top_p()) {
        std::vector<double> upto(length);
        double sum = 0;
        for (size_t i = 0; i < length; ++i) upto[i] = sum += std::exp((double)logit(i) - logit(0));
        const double limit = (double)f.top_p * sum;
        size_t end = 0;
        while (upto[end] < limit) ++end;
        close = std::fabs(upto[end] - limit) < 1e-7 * sum || (end && std::fabs(upto[end - 1] - limit) < 1e-7 * sum);
        length = end + 1;
    }
    if (f.has_min_p() && f.min_p_last) while (length > 1 && logit(length - 1) < least) --length;
    Draw best{0, 0, 0, Status::NoFiniteLogit};
    u64 best_key = 0;
    for (size_t i = 0; i < length; ++i) {
        const u32 token = ~(u32)keys[i];
        const float l = f.rescale != 1.0f ? logit(i) * f.rescale : logit(i);
        const float s = row.greedy ? l : l + Noise{row.seed, row.position}.gumbel(Domain::Token, row.draw, token);
        const u64 key = to_ordered_bits(Winner::of(s, token));
        if (key > best_key) best_key = key, best = {token, s, l, Status::Drawn};
    }
    return best;
}

// Every case against the definition over the logits that the instance with knobs stores.
static void check(Problem& p, const char* what, bool mixed) {
    const u64 stride = (p.tokens + 7) / 8 * 8;
    float* stored = device<float>(stride * p.rows);
    launch_knobs(p, {stored, stride});
    CHECK(cudaDeviceSynchronize());
    std::vector<float> logits(stride * p.rows);
    CHECK(cudaMemcpy(logits.data(), stored, logits.size() * 4, cudaMemcpyDeviceToHost));
    cudaFree(stored);
    std::vector<std::vector<u64>> keys(p.rows);
    for (u32 r = 0; r < p.rows; ++r) {
        const RowTransform t = p.host_rows[r].transform();
        RowTransform host = t;
        host.mask = nullptr;
        auto& k = keys[r];
        for (u32 i = 0; i < p.tokens; ++i) k.push_back(RowLists::key_of(host.apply(logits[r * stride + i], p.first + i), p.first + i));
    }
    const size_t count = sizeof cases / sizeof *cases;
    for (size_t c = 0; c < (mixed ? 1 : count); ++c) {
        std::vector<RowFilters> f(p.rows);
        for (u32 r = 0; r < p.rows; ++r) f[r] = cases[mixed ? r % count : c].f;
        p.filter(f);
        for (int round = 0; round < 2; ++round) {
            CHECK(cudaMemset(p.call.draws, 0xcd, p.rows * sizeof(Draw)));
            launch_lists(p);
            std::vector<ListCounters> counters(p.rows);
            CHECK(cudaMemcpy(counters.data(), p.lists.counters, p.rows * 8, cudaMemcpyDeviceToHost));
            launch_selection(p);
            CHECK(cudaDeviceSynchronize());
            std::vector<Draw> got(p.rows);
            CHECK(cudaMemcpy(got.data(), p.call.draws, p.rows * sizeof(Draw), cudaMemcpyDeviceToHost));
            u32 bad = 0, undecided = 0, listed = 0, most = 0, wrongly = 0;
            for (u32 r = 0; r < p.rows; ++r) {
                listed += counters[r].count, most = std::max(most, counters[r].count);
                if (got[r].status == Status::Undecided) {
                    ++undecided;
                    wrongly += f[r].is_listed();
                    continue;
                }
                bool close = false;
                auto top = keys[r];
                if (f[r].is_listed() && top.size() > 20000) {
                    std::nth_element(top.begin(), top.begin() + 20000, top.end(), [](u64 a, u64 b) { return a > b; });
                    top.resize(20000);
                }
                const Draw want = define(f[r], p.host_rows[r], top, close);
                const bool ok = got[r].status == want.status && got[r].token == want.token &&
                                f32_to_bits(got[r].score) == f32_to_bits(want.score) && f32_to_bits(got[r].logit) == f32_to_bits(want.logit);
                if (!ok && !close && bad++ < 3)
                    printf("   row %u: got %u %.9g (%.9g) status %u, want %u %.9g (%.9g); listed %u cut %.6g\n", r, got[r].token,
                           got[r].score, got[r].logit, (u32)got[r].status, want.token, want.score, want.logit, counters[r].count,
                           counters[r].cut ? from_monotone_bits(counters[r].cut) : -INFINITY);
            }
            failures += bad != 0;
            printf("%s %s rows %u: %-32s bad %u undecided %u (of listed rows %u), listed %.0f a row, at most %u\n", bad ? "FAIL" : "ok  ",
                   what, p.rows, mixed ? "mixed" : cases[c].name, bad, undecided, wrongly, (double)listed / p.rows, most);
        }
    }
}

static u8* flush_buffer;
static float time_of(const std::function<void()>& call) {
    cudaEvent_t a, b;
    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    float best = 1e9f;
    for (int i = 0; i < 16; ++i) {
        CHECK(cudaMemsetAsync(flush_buffer, i, 256 << 20));
        CHECK(cudaEventRecord(a));
        call();
        CHECK(cudaEventRecord(b));
        CHECK(cudaEventSynchronize(b));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, a, b));
        if (i > 3) best = std::min(best, ms * 1000);
    }
    return best;
}

// The draws with masks against the definition over the logits that the instance with knobs stores.
static void check_masks(Problem& p, const std::vector<u32>& masks, u32 words) {
    const u64 stride = (p.tokens + 7) / 8 * 8;
    float* stored = device<float>(stride * p.rows);
    launch_knobs(p, {stored, stride});
    CHECK(cudaDeviceSynchronize());
    std::vector<float> logits(stride * p.rows);
    std::vector<Draw> got(p.rows);
    CHECK(cudaMemcpy(logits.data(), stored, logits.size() * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(got.data(), p.call.draws, p.rows * sizeof(Draw), cudaMemcpyDeviceToHost));
    cudaFree(stored);
    u32 bad = 0;
    for (u32 r = 0; r < p.rows; ++r) {
        const Row& row = p.host_rows[r];
        u64 best = 0;
        for (u32 i = 0; i < p.tokens; ++i)
            if (masks[r * words + i / 32] >> i % 32 & 1)
                best = std::max(best, to_ordered_bits(Winner::of(
                    logits[r * stride + i] + Noise{row.seed, row.position}.gumbel(Domain::Token, row.draw, i), i)));
        bad += got[r].token != from_ordered_bits(best).token;
    }
    failures += bad != 0;
    printf("%s masks rows %u: bad %u\n", bad ? "FAIL" : "ok  ", p.rows, bad);
}

static void bench(Problem& p) {
    const float plain = time_of([&] { launch_plain(p); });
    printf("%3u rows: plain %.1f\n", p.rows, plain);
    const auto say = [&](const char* name, float t) { printf("   %-34s %.1f (%.3f)\n", name, t, t / plain); };
    {
        const u64 stride = (p.tokens + 7) / 8 * 8;
        float* stored = device<float>(stride * p.rows);
        say("all logits stored", time_of([&] { launch_knobs(p, {stored, stride}); }));
        CHECK(cudaDeviceSynchronize());
        cudaFree(stored);
    }
    for (const Case& c : cases) {
        p.filter(std::vector<RowFilters>(p.rows, c.f));
        if (c.f.has_top_p() && !c.f.top_k) continue;
        const float fused = time_of([&] { launch_lists(p); launch_selection(p); });
        say(c.name, fused);
        CHECK(cudaDeviceSynchronize());
        // The fused part alone; the selection empties the lists outside the clock's events.
        launch_lists(p);
        const float select = time_of([&] { launch_selection(p); });
        printf("   %-34s %.1f (lists of one launch, then empty)\n", "  selection alone", select);
    }
    u32* mask = device<u32>(p.tokens / 32, 0);
    std::vector<u32> words(p.tokens / 32);
    for (u32 i = 0; i < 100; ++i) {
        const u32 token = i * 1517 % p.tokens;
        words[token / 32] |= 1u << token % 32;
    }
    CHECK(cudaMemcpy(mask, words.data(), words.size() * 4, cudaMemcpyHostToDevice));
    for (Row& row : p.host_rows) row.mask = mask, row.mask_words = words.size();
    p.copy_rows();
    say("mask of 100", time_of([&] { launch_knobs(p, {}); }));
    cudaFree(mask);
    // Another mask for each row.
    mask = device<u32>((u64)p.rows * words.size(), 0);
    std::vector<u32> all(p.rows * words.size());
    for (u32 r = 0; r < p.rows; ++r)
        for (u32 i = 0; i < 100; ++i) {
            const u32 token = philox4x32_10({{r, i, 1, 1}}, 5, 5).w[0] % p.tokens;
            all[r * words.size() + token / 32] |= 1u << token % 32;
        }
    CHECK(cudaMemcpy(mask, all.data(), all.size() * 4, cudaMemcpyHostToDevice));
    for (u32 r = 0; r < p.rows; ++r) p.host_rows[r].mask = mask + r * words.size();
    p.copy_rows();
    say("another mask of 100 for each row", time_of([&] { launch_knobs(p, {}); }));
    check_masks(p, all, words.size());
    for (Row& row : p.host_rows) row.mask = nullptr, row.mask_words = 0;
    p.copy_rows();
    cudaFree(mask);
}

int main(int argc, char** argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    folder = argc > 1 ? argv[1] : ".";
    CHECK(cudaFree(nullptr));
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    sms = prop.multiProcessorCount;
    cudaDriverEntryPointQueryResult q;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&encode, 12000, cudaEnableDefault, &q));
    printf("%s, %d SMs\n", prop.name, sms);
    flush_buffer = device<u8>(256 << 20);
    for (u32 rows : {1u, 64u, 256u}) {
        // Integers: many logits are equal, also at the edge of top-k.
        for (u32 tokens : {1000u, 6000u, 33000u}) {
            Problem p(tokens, 200, rows, rows == 64 ? 37 : 0);
            fill_small<<<1024, 256>>>(p.w, (u64)tokens * 200, 5, 2);
            fill_small<<<1024, 256>>>(p.h, (u64)rows * 200, 6, 2);
            for (u32 r = 0; r < rows; ++r) p.host_rows[r].inv_temperature = r % 3 ? 0.125f : 0.7f;
            p.copy_rows();
            char what[32];
            snprintf(what, sizeof what, "%u integers", tokens);
            check(p, what, false);
            check(p, what, true);
        }
    }
    for (u32 rows : {1u, 64u, 256u}) {
        Problem p(151936, 4096, rows, 0);
        fill_normal<<<1024, 256>>>(p.w, (u64)p.tokens * p.hidden, 1, 2.2f / 64);
        fill_normal<<<1024, 256>>>(p.h, (u64)rows * p.hidden, 2, 1.0f);
        add_peaks<<<dim3(rows, 6), 256>>>(p.w, p.h, p.tokens, p.hidden);
        bench(p);
        if (rows <= 64) check(p, "peaks", false);
        check(p, "peaks", true);
    }
    // Rows of equal logits: no list is short, and all are left open.
    for (u32 rows : {64u, 256u}) {
        Problem p(151936, 4096, rows, 0);
        CHECK(cudaMemset(p.w, 0, (u64)p.tokens * p.hidden * 2));
        CHECK(cudaMemset(p.h, 0, (u64)rows * p.hidden * 2));
        const float plain = time_of([&] { launch_plain(p); });
        for (int c : {1, 2}) {
            p.filter(std::vector<RowFilters>(rows, cases[c].f));
            const float fused = time_of([&] { launch_lists(p); launch_selection(p); });
            printf("%3u rows of equal logits: plain %.1f, %s %.1f (%.3f)\n", rows, plain, cases[c].name, fused, fused / plain);
        }
    }
    printf("failures: %d\n", failures);
    return failures != 0;
}
