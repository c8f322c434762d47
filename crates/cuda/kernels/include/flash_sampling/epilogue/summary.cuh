// The epilogue of the grouped and online variants (paper Alg. I.2 and I.3, first pass): a log-mass and an exact local sample for
// every row and group.
//
// The plain version, for a row:
//
//   for each token of the group
//       l = transform(dot)
//       mass = mass + e^l
//       sample = max(sample, l + gumbel(seed, position, draw, token))
//
// The deviations, and why each keeps the result:
//
// 1. A warp takes 32 x 4 tokens at a time. e^l is e^edge e^r, where edge is the next lower multiple of 1/8, so r is exact in
//    float32. e^(edge - largest edge) comes from two small tables. The relative error of a mass is below 2^-26.
// 2. Few tokens are scored: see sample.cuh.
#pragma once

#include "../summary/mass_histogram.cuh"
#include "partial.cuh"
#include "../perturb.cuh"
#include "sample.cuh"

namespace flash_sampling {

// Returns e^r - 1 for r in [0, 1/8].
FS_FUNCTION float expm1_of_rest(float r) {
    const float p = fma_rn(fma_rn(bits_to_f32(0x3d341741u), r, bits_to_f32(0x3e2a7721u)), r, bits_to_f32(0x3f000057u));
    return fma_rn(mul_rn(r, r), p, r);
}

// The output for the summaries of groups: the kernel's last parameter.
struct Summaries {
    Partial* partials;  // [row_count, slots]
    u32 size;           // tokens of a group: a multiple of 64
    u32 slots;          // per row
};
FS_LAYOUT(Summaries, 16, FS_AT(partials, 0) && FS_AT(size, 8) && FS_AT(slots, 12));

#ifdef __CUDACC__

template <int COLUMNS>
struct SummaryEpilogue {
    static constexpr u32 GRANULE = Groups::GRANULE;

    using Arguments = Summaries;

    struct Shared {
        double nats[MASS_BINS / 8];  // e^-i
        double eighths[8];           // e^(-i / 8)
        Partial open[COLUMNS];       // of the current group of each row
        u32 words[PART_COLUMNS<COLUMNS>][TILE_GRANULES];
    };

    static constexpr u32 ALL = 0xffffffffu;

    const Call& call;
    const Arguments& arguments;
    const Run& run;
    Shared& shared;

    __device__ __forceinline__ void begin() {
        const u32 i = threadIdx.x;
        if (i < MASS_BINS / 8) shared.nats[i] = ::exp(-1.0 * i);
        if (i < 8) shared.eighths[i] = ::exp(-0.125 * i);
        __syncthreads();
    }

    __device__ __forceinline__ void tile(const DotTile& tile) {
        each_granule(call, tile, threadIdx.x, [&](u32 c, u32 place, u32 word) { shared.words[c][place] = word; });
        __syncthreads();
        const u32 first = call.first_token + tile.first, last = first + tile.tokens - 1;
        for (u32 c = threadIdx.x / 32; c < tile.columns; c += WARPS) {
            u32 token = first;
            while (true) {
                // Adds the part of the tile that is within one group.
                const u32 group = token / arguments.size;
                const u32 left = arguments.size - 1 - (token - group * arguments.size);
                const u32 stop = left < last - token ? token + left : last;
                add(tile, c, group, token, stop);
                if (stop == last) break;
                token = stop + 1;
            }
        }
    }

    __device__ __forceinline__ void end() {
        if (run.first == run.end) return;
        const u32 group = (call.first_token + run.end - 1) / arguments.size;
        for (u32 row = threadIdx.x / 32; row < call.row_count; row += WARPS) flush(row, group);
    }

    // Returns e^(edge - top).
    __device__ __forceinline__ double weight(float top, float edge) const {
        const float steps = (top - edge) * 8.0f;
        if (!(steps < static_cast<float>(MASS_BINS))) return 0.0;
        const u32 i = static_cast<u32>(steps);
        return shared.nats[i / 8] * shared.eighths[i % 8];
    }

    // Stores the summary of a group. The warp of the row calls this.
    __device__ __forceinline__ void flush(u32 row, u32 group) {
        const u32 slot = run.block + (group - call.first_token / arguments.size);
        if (threadIdx.x % 32 == 0) arguments.partials[static_cast<u64>(row) * arguments.slots + slot] = shared.open[row];
    }

    // Adds the tokens from `token` to `stop`, all in one group, of row `c` of the tile.
    __device__ __forceinline__ void add(const DotTile& tile, u32 c, u32 group, u32 token, u32 stop) {
        const u32 lane = threadIdx.x % 32, index = tile.column + c;
        const Row& row = call.rows[index];
        GroupSummary open = GroupSummary::empty();
        const bool is_first = token == call.first_token + run.first;
        if (!is_first) {
            if (token == group * arguments.size)
                flush(index, group - 1);
            else
                open = {shared.open[index].mass(), shared.open[index].sample()};
        }
        for (u32 base = token & ~3u; base <= stop && base >= (token & ~3u); base += 128)
            add_quads(tile, c, row, base + 4 * lane, token, stop, open);
        __syncwarp();
        if (lane == 0) shared.open[index] = Partial::of(open);
        __syncwarp();
    }

    // Adds four tokens per lane, starting at `mine`. Ignores tokens outside [token, stop].
    __device__ __forceinline__ void add_quads(const DotTile& tile, u32 c, const Row& row, u32 mine, u32 token, u32 stop,
                                              GroupSummary& open) {
        float logits[4];
        load(tile, c, row, mine, token, stop, logits);
        const float high = fmaxf(fmaxf(logits[0], logits[1]), fmaxf(logits[2], logits[3]));
        const float largest = from_monotone_bits(__reduce_max_sync(ALL, to_monotone_bits(high)));
        if (largest == -f32_infinity()) return;

        // Adds the masses.
        const float edge = mass_edge(largest);
        const float top = edge > open.mass.max ? edge : open.mass.max;
        double sum = 0.0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float below = mass_edge(logits[j]);
            const double unit = weight(top, below);
            if (unit != 0.0) sum = fma(unit, static_cast<double>(expm1_of_rest(sub_rn(logits[j], below))), sum + unit);
        }
#pragma unroll
        for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
        const double old = open.mass.is_empty() ? 0.0 : open.mass.sum * weight(top, open.mass.max);
        open.mass = {top, old + sum};

        raise_best(row, logits, mine, shared.words[c][granule_of_tile(call.first_token + tile.first, mine)], open.sample);
    }

    // Computes transformed logits of four tokens; -inf outside [token, stop] and for invalid logits, which it records.
    __device__ __forceinline__ void load(const DotTile& tile, u32 c, const Row& row, u32 mine, u32 token, u32 stop,
                                         float (&logits)[4]) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) logits[j] = -f32_infinity();
        if (mine > stop) return;
        const RowTransform transform = row.transform();
        // In an aligned head, a lane's four products are adjacent.
        const float* const dots = tile.dots + c * tile.stride;
        const u32 place = mine - call.first_token - tile.first;
        float4 side_by_side{};
        const bool is_aligned = place % 4 == 0;
        if (is_aligned) side_by_side = *reinterpret_cast<const float4*>(dots + place);
        const float four[4] = {side_by_side.x, side_by_side.y, side_by_side.z, side_by_side.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 t = mine + j;
            if (t < token || t > stop) continue;
            const u32 at = t - call.first_token;
            const float dot = is_aligned ? four[j] : dots[place + j];
            const float raw = call.head.apply(dot, call.bias ? call.bias[at] : 0.0f, call.bias != nullptr);
            logits[j] = checked_logit(raw, transform, t, &call.invalid[tile.column + c]);
        }
    }
};

#endif

}  // namespace flash_sampling
