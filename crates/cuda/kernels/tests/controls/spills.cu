// CI's guard must reject this kernel: 96 live values in at most 64 registers, and an array with a run-time index.

extern "C" __global__ void __launch_bounds__(1024) spills(float* x, int n) {
    float a[96];
#pragma unroll
    for (int i = 0; i < 96; ++i) a[i] = x[i * 1024 + threadIdx.x];
    for (int k = 0; k < n; ++k) {
#pragma unroll
        for (int i = 0; i < 96; ++i) a[i] = a[i] * a[(i * 7 + 3) % 96] + k;
    }
#pragma unroll
    for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = a[i];
}

extern "C" __global__ void indexes(float* x, int n) {
    float a[64];
    for (int i = 0; i < 64; ++i) a[i] = x[i * n];
    for (int i = 0; i < n; ++i) a[(i * n) & 63] += a[(i + n) & 63];
    x[threadIdx.x] = a[n & 63];
}
