// Softmax and inverse CDF over logits in memory: a fast sampler without Gumbel noise. The logits are read once, in parts; each
// part writes its maximum and its mass (online softmax, Milakov & Gimelshein 2018). Then one block per row scans the parts, and
// reads only the part of the uniform a second time. FS_TYPE is 0 for bf16, 1 for f16.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 THREADS = 256;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 VECTOR = 8;

struct Softmax {
    const u16* logits;     // [rows, vocab], rows `stride` elements apart
    const u64* positions;  // [rows]; row r draws with seed r
    float* parts;          // [rows, parts, 2]: largest logit in powers of two, and mass relative to it
    u32* tokens;           // [rows]
    u64 stride;            // a multiple of VECTOR
    u32 vocab;
    u32 part;        // tokens of a part, a multiple of THREADS * VECTOR
    u32 part_count;  // at most THREADS
    float scale;     // log2(e) over the temperature
};
static_assert(sizeof(Softmax) == 56, "the host has this layout");

__device__ __forceinline__ float f32_infinity() { return __int_as_float(0x7f800000); }

// A uniform in [0, 1) by the finalizer of SplitMix64 (Steele et al. 2014).
__device__ __forceinline__ float uniform(u64 seed, u64 position) {
    u64 x = (seed << 32 ^ position) + 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return static_cast<float>((x ^ x >> 31) >> 40) * 0x1p-24f;
}

__device__ __forceinline__ float logit(u16 bits) {
#if FS_TYPE == 0
    return __uint_as_float(static_cast<u32>(bits) << 16);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}

// Eight scaled logits from a multiple of eight; -inf beyond the vocabulary.
__device__ __forceinline__ void load(const Softmax& s, const u16* row, u32 first, float (&out)[VECTOR]) {
    if (first + VECTOR <= s.vocab) {
        u32 w[4];
        asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(row + first));
#pragma unroll
        for (u32 i = 0; i < VECTOR; ++i) out[i] = s.scale * logit(static_cast<u16>(w[i / 2] >> (i % 2 * 16)));
    } else {
#pragma unroll
        for (u32 i = 0; i < VECTOR; ++i) out[i] = first + i < s.vocab ? s.scale * logit(row[first + i]) : -f32_infinity();
    }
}

// 2^(x - max); 0 if x is -inf, also if max is.
__device__ __forceinline__ float weight(float x, float max) { return x == -f32_infinity() ? 0.0f : exp2f(x - max); }

__device__ __forceinline__ float max_of_block(float x, float* shared) {
#pragma unroll
    for (u32 step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    for (u32 w = 0; w < WARPS; ++w) x = fmaxf(x, shared[w]);
    __syncthreads();
    return x;
}

// The sum up to and including this thread; `total` is the sum of the block.
__device__ __forceinline__ float scan_of_block(float x, float* shared, float& total) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(~0u, x, step);
        if (lane >= step) x += other;
    }
    if (lane == 31) shared[warp] = x;
    __syncthreads();
    float before = 0.0f;
    total = 0.0f;
    for (u32 w = 0; w < WARPS; ++w) {
        before += w < warp ? shared[w] : 0.0f;
        total += shared[w];
    }
    __syncthreads();
    return before + x;
}

// The first thread whose running sum exceeds the target; if rounding leaves none, the last thread with any mass.
__device__ __forceinline__ u32 choose(float mass, float up_to, float target, u32* first, u32* last) {
    if (threadIdx.x == 0) *first = THREADS, *last = 0;
    __syncthreads();
    if (mass > 0.0f) {
        if (up_to > target) atomicMin(first, threadIdx.x);
        atomicMax(last, threadIdx.x);
    }
    __syncthreads();
    const u32 chosen = *first < THREADS ? *first : *last;
    __syncthreads();
    return chosen;
}

// Grid: parts, rows.
extern "C" __global__ void __launch_bounds__(THREADS) softmax_parts(const __grid_constant__ Softmax s) {
    __shared__ float shared[WARPS];
    const u16* row = s.logits + blockIdx.y * s.stride;
    const u32 begin = blockIdx.x * s.part, end = begin + s.part < s.vocab ? begin + s.part : s.vocab;
    float max = -f32_infinity(), sum = 0.0f;
    for (u32 first = begin + threadIdx.x * VECTOR; first < end; first += THREADS * VECTOR) {
        float x[VECTOR];
        load(s, row, first, x);
        float larger = max;
#pragma unroll
        for (u32 i = 0; i < VECTOR; ++i) larger = fmaxf(larger, x[i]);
        sum *= weight(max, larger);
#pragma unroll
        for (u32 i = 0; i < VECTOR; ++i) sum += weight(x[i], larger);
        max = larger;
    }
    const float largest = max_of_block(max, shared);
    float total;
    scan_of_block(sum * weight(max, largest), shared, total);
    if (threadIdx.x == 0) {
        float* part = s.parts + 2 * (static_cast<u64>(blockIdx.y) * s.part_count + blockIdx.x);
        part[0] = largest;
        part[1] = total;
    }
}

// Grid: rows.
extern "C" __global__ void __launch_bounds__(THREADS) softmax_draw(const __grid_constant__ Softmax s) {
    __shared__ float shared[WARPS], rest;
    __shared__ u32 first_, last_;
    const u32 r = blockIdx.x, t = threadIdx.x;
    const float* parts = s.parts + 2 * static_cast<u64>(r) * s.part_count;
    const float part_max = t < s.part_count ? parts[2 * t] : -f32_infinity();
    const float max = max_of_block(part_max, shared);
    const float mass = t < s.part_count ? parts[2 * t + 1] * weight(part_max, max) : 0.0f;
    float total;
    const float up_to = scan_of_block(mass, shared, total);
    const float target = uniform(r, s.positions[r]) * total;
    const u32 part = choose(mass, up_to, target, &first_, &last_);
    if (t == part) rest = target - (up_to - mass);
    __syncthreads();

    // Reads the part a second time; each thread has a run of consecutive tokens.
    const u16* row = s.logits + r * s.stride;
    const u32 run = s.part / THREADS, begin = part * s.part + t * run;
    float sum = 0.0f, x[VECTOR];
    for (u32 i = 0; i < run && begin + i < s.vocab; i += VECTOR) {
        load(s, row, begin + i, x);
#pragma unroll
        for (u32 j = 0; j < VECTOR; ++j) sum += weight(x[j], max);
    }
    const float through = scan_of_block(sum, shared, total);
    if (t == choose(sum, through, rest, &first_, &last_)) {
        float before = through - sum;
        u32 token = s.vocab;
        for (u32 i = 0; i < run && begin + i < s.vocab; ++i) {
            const float w = weight(s.scale * logit(row[begin + i]), max);
            before += w;
            if (w > 0.0f) token = begin + i;
            if (before > rest) break;
        }
        s.tokens[r] = token;
    }
}
