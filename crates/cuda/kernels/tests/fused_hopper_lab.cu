// A stand-alone check and timing of the fused Hopper kernel, built by nvcc.
#include "fused_hopper_lab/bench.cuh"
#include "fused_hopper_lab/check.cuh"

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
        for (u32 R : {5u, 16u, 64u, 128u, 256u}) {
            check(700, 200, R, 37, R % 3 + 1, R);
            check(700, 2048, R, 38, 0, R + 1);
            check_bad(R);
        }
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
        check(50000, 512, 256, 16, 1, 7);
        check(50000, 512, 64, 2, 3, 4);
        check(33000, 1024, 128, 2, 2, 5);
        check(151936, 512, 256, 0, 0, 6);
        // Hidden sizes, and shards that begin within a granule.
        for (u32 R : {64u, 100u, 128u, 255u, 256u})
            for (u32 D : {1536u, 2048u, 2880u, 4096u}) check(12000 + R, D, R, D % 7, R % 4, D + R);
        printf("checks: %d failures\n", failures);
    }
    if (what != "check") {
        bench(151936, 4096, {1, 16, 32, 64, 128, 256});
        bench(128256, 8192, {1, 16, 64, 128, 256});
    }
    return failures != 0;
}
