// Times the standalone kernel without Rust, beside a plain streaming read of the same bytes in the same run.
//   nvcc -std=c++17 -arch=sm_90a -DFS_ELEMENT=F32 -I ../include standalone_lab.cu -o lab && ./lab [vocab]
#include "../standalone.cu"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

static void check(cudaError_t code) {
    if (code == cudaSuccess) return;
    std::printf("%s\n", cudaGetErrorString(code));
    std::exit(1);
}

// Logits of standard deviation 2.2, the sum of twelve uniforms.
__global__ void fill(void* logits, u64 count) {
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < count; i += gridDim.x * 256ull) {
        float sum = -6.0f;
        for (u32 k = 0; k < 3; ++k) {
            const Words w = philox4x32_10({{static_cast<u32>(i), static_cast<u32>(i >> 32), k, 5}}, 1, 2);
            for (u32 word : w.w) sum += word * WORD_SCALE;
        }
        const float logit = 2.2f * sum;
        if (TYPE == Element::F32) static_cast<float*>(logits)[i] = logit;
        else static_cast<u16*>(logits)[i] = f32_to_bits(logit) >> 16;
    }
}

__global__ void __launch_bounds__(512) read_all(const uint4* from, u64 count, u32* out) {
    u32 seen = 0;
    for (u64 i = blockIdx.x * 512ull + threadIdx.x; i < count; i += gridDim.x * 512ull) {
        const uint4 x = from[i];
        seen ^= x.x ^ x.y ^ x.z ^ x.w;
    }
    if (seen == 0x12345678u) *out = seen;
}

template <class Launch>
static void time(const char* what, u32 rows, u64 bytes, void* flush, Launch launch) {
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin));
    check(cudaEventCreate(&end));
    std::vector<float> cold, warm;
    for (int round = 0; round < 45; ++round) {
        check(cudaMemsetAsync(flush, round, 256 << 20));
        for (std::vector<float>* times : {&cold, &warm}) {
            check(cudaEventRecord(begin));
            launch();
            check(cudaEventRecord(end));
            check(cudaEventSynchronize(end));
            float ms;
            check(cudaEventElapsedTime(&ms, begin, end));
            if (round >= 15) times->push_back(ms * 1e3f);
        }
    }
    std::sort(cold.begin(), cold.end());
    std::sort(warm.begin(), warm.end());
    std::printf("%-18s rows %3u  cold %7.2f (median %7.2f) us  %5.2f TB/s   warm %7.2f us\n", what, rows, cold[0],
                cold[cold.size() / 2], bytes / cold[0] * 1e-6, warm[0]);
}

int main(int argc, char** argv) {
    const u32 vocab = argc > 1 ? std::atoi(argv[1]) : 151936, most = 256;
    int multiprocessors;
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    void *logits, *flush;
    const u64 bytes = element_bytes(TYPE);
    check(cudaMalloc(&logits, bytes * vocab * most));
    check(cudaMalloc(&flush, 256 << 20));
    fill<<<2048, 256>>>(logits, static_cast<u64>(vocab) * most);
    std::vector<Row> rows(most);
    for (u32 r = 0; r < most; ++r) rows[r] = {r, 7, nullptr, nullptr, 0, 0, 1.0f, 0.0f, 0, 0};
    Row *sampled, *greedy;
    u64* scratch;
    Draw* draws;
    check(cudaMalloc(&sampled, sizeof(Row) * most));
    check(cudaMalloc(&greedy, sizeof(Row) * most));
    check(cudaMalloc(&scratch, 20 * most));
    check(cudaMalloc(&draws, sizeof(Draw) * most));
    check(cudaMemcpy(sampled, rows.data(), sizeof(Row) * most, cudaMemcpyHostToDevice));
    for (Row& row : rows) row.greedy = 1;
    check(cudaMemcpy(greedy, rows.data(), sizeof(Row) * most, cudaMemcpyHostToDevice));
    check(cudaMemset(scratch, 0, 20 * most));
    check(cudaMemset(scratch + most, 0xff, 8 * most));

    for (u32 count : {1u, 4u, 16u, 64u, 128u, 256u}) {
        const u64 all = bytes * vocab * count;
        time("read", count, all, flush, [&] {
            read_all<<<std::min<u64>(4 * multiprocessors, (all / 16 + 511) / 512), 512>>>(
                static_cast<const uint4*>(logits), all / 16, reinterpret_cast<u32*>(draws));
        });
        const u32 parts = (vocab - 1) / SCAN_TOKENS + 1;
        for (u32 target : {4u, 8u, 16u, 32u, 64u}) {
            const u32 wanted = std::max<u32>(target * multiprocessors / count, 1);
            const u32 each = ((parts + wanted - 1) / wanted + WARPS - 1) / WARPS * WARPS, blocks = (parts + each - 1) / each;
            for (const Row* kind : {sampled, greedy}) {
                if (kind == greedy && target != 16) continue;
                const Call call{kind, nullptr, scratch, scratch + most, nullptr, reinterpret_cast<u32*>(scratch + 2 * most),
                                draws, {0.0f, 1.0f}, count, 0, 0, vocab};
                const Existing existing{logits, nullptr, vocab, blocks, each};
                char what[64];
                std::snprintf(what, sizeof what, "%s %u a SM", kind == greedy ? "greedy" : "draw", target);
                time(what, count, all, flush, [&] { standalone<<<blocks * count, 32 * WARPS>>>(call, existing); });
            }
        }
    }
    check(cudaDeviceSynchronize());
    return 0;
}
