// The canonical arithmetic of core's canonical.rs: a warp recomputes a token's logit in float64. Lane j sums the products whose
// index is j modulo 32, in ascending order. Then pairs of lanes are added by halving.
#include "flash_sampling/noise/noise.cuh"
#include "flash_sampling/quantised.cuh"
#include "flash_sampling/scan/stored.cuh"

using namespace flash_sampling;

constexpr u32 THREADS = 256;

struct Canonical {
    KeptTokens out;        // evaluated in place
    const Item* items;  // [items]
    const Row* noise;   // [items] seed, position, draw, greedy
    const Row* rows;    // [rows] mask, bias, temperature
    const u8* weight;    // [tokens, hidden], its rows weight_stride apart
    const void* hidden;  // [rows, hidden], its rows hidden_stride apart
    const float* bias;   // [tokens], or null
    u64 weight_stride;   // bytes
    u64 hidden_stride;   // elements
    HeadTransform head;
    Element weight_type;
    Element hidden_type;
    u32 width;  // columns of both
    u32 first_token;
    WeightScales scales;
};
FS_LAYOUT(Canonical, 136,
          FS_AT(out, 0) && FS_AT(items, 24) && FS_AT(noise, 32) && FS_AT(rows, 40) && FS_AT(weight, 48) &&
          FS_AT(hidden, 56) && FS_AT(bias, 64) && FS_AT(weight_stride, 72) && FS_AT(hidden_stride, 80) && FS_AT(head, 88) &&
          FS_AT(weight_type, 96) && FS_AT(hidden_type, 100) && FS_AT(width, 104) && FS_AT(first_token, 108) &&
          FS_AT(scales, 112));

// Returns a weight of row `t`, exactly.
template <Element TYPE>
__device__ __forceinline__ double weight_at(const Canonical& call, u32 t, const u8* row, u32 k) {
    if constexpr (TYPE <= Element::F32) {
        return static_cast<double>(element<TYPE>(row, k));
    } else {
        return quantised<TYPE>(row, k, has_scales(TYPE) ? call.scales.at(t, k) : 1.0f).to_f64();
    }
}

template <Element TYPE>
__device__ __forceinline__ double dot(const Canonical& call, u32 t, u32 source) {
    const u32 lane = threadIdx.x % 32;
    const u8* const row = call.weight + t * call.weight_stride;
    double sum = 0.0;
#pragma unroll 4
    for (u32 k = lane; k < call.width; k += 32) {
        const float b = element(call.hidden_type, call.hidden, source * call.hidden_stride + k);
        sum = add_rn(sum, mul_rn(weight_at<TYPE>(call, t, row, k), static_cast<double>(b)));
    }
    for (u32 distance = 16; distance > 0; distance /= 2) sum = add_rn(sum, __shfl_down_sync(0xffffffffu, sum, distance));
    return sum;
}

struct QuantisedDot {
    const Canonical& call;
    u32 t, source;
    double sum;

    template <Element TYPE>
    __device__ __forceinline__ void run() {
        sum = dot<TYPE>(call, t, source);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 4) canonical(const __grid_constant__ Canonical call) {
    const u64 count = min(*call.out.count, call.out.capacity);
    const u64 warp = (static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x) / 32, warps = gridDim.x * (THREADS / 32);
    for (u64 e = warp; e < count; e += warps) {
        const KeptToken kept = call.out.tokens[e];
        const Item item = call.items[kept.item];
        const u32 token = from_ordered_bits(kept.key).token, t = token - call.first_token;
        double sum = 0.0;
        switch (call.weight_type) {
            case Element::BF16: sum = dot<Element::BF16>(call, t, item.source); break;
            case Element::F16: sum = dot<Element::F16>(call, t, item.source); break;
            case Element::F32: sum = dot<Element::F32>(call, t, item.source); break;
            default: {
                QuantisedDot quantised{call, t, item.source, 0.0};
                with_quantised_type(call.weight_type, quantised);
                sum = quantised.sum;
            }
        }
        if (threadIdx.x % 32 != 0) continue;
        const float raw = call.head.apply(static_cast<float>(sum), call.bias ? call.bias[t] : 0.0f, call.bias != nullptr);
        const float logit = call.rows[item.source].transform().apply(raw, token);
        const Row& row = call.noise[kept.item];
        const Noise noise{row.seed, row.position};
        const float score = row.greedy ? logit : add_rn(logit, noise.gumbel(Domain::Token, row.draw, token));
        // Key 0: the canonical logit forbids the token.
        const u64 key = logit > -f32_infinity() ? to_ordered_bits(Winner::of(score, token)) : 0;
        call.out.tokens[e] = {key, logit, kept.item};
    }
}
