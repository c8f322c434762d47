// The entry points of draws with top-p alone over the shards of several ranks. They follow the exchange of the draws without
// filters, which gives the plain winners of the vocabulary.
//
//   top_p_ranks            sums the masses of a shard, exchanges the sums, and lists the undecided rows
//   top_p_block_max_ranks  the same with block maxima (top_p_block_max_ranks.cuh)
//   top_p_resolve_ranks    top_p_resolve.cuh over a shard, with an exchange of the bins of undecided rows
//
// `top_p_ranks` replaces the raw logits of rows with masks or biases by transformed logits. Every rank adds up the same sums in
// the order of ranks, so all ranks decide alike. The host decides rows that the bins leave in doubt.
#include "flash_sampling/exchange/top_p_block_max_ranks.cuh"
#include "flash_sampling/selection/top_p_resolve.cuh"

using namespace flash_sampling;

using Select = TopPResolve<RankSums>;

// For the host's launches: threads per block, tokens per step of a block of `top_p_ranks`, and the bytes of dynamic shared memory
// of `top_p_resolve_ranks` and `top_p_block_max_ranks`.
extern "C" {
__constant__ u32 top_p_ranks_launch[4] = {TopPSearch::THREADS, TopPSearch::STEP, sizeof(Select::Shared), sizeof(TopPBlockMaxRanks::Shared)};
}
static_assert(TopPBlockMaxRanks::THREADS == TopPSearch::THREADS && Select::THREADS == TopPSearch::THREADS,
              "the host launches all with as many threads");

// Adds a thread's share of a row's masses. Transforms the logits of a row with masks or biases in place. Returns the maximum
// number of tokens that a thread adds up.
static __device__ u32 weigh(TopPSearch::Weights& weights, const ExistingRow& row, float* logits, const Row& parameters) {
    const u32 warp = Team::rank() * TopPSearch::WARPS + threadIdx.x / 32, warps = Team::size() * TopPSearch::WARPS;
    if (!parameters.mask && !parameters.biases) {
        TopPSearch::Lines lines(row, warp, warps);
        lines.each(parameters.inv_temperature, [&](const float(&l)[4], u32 first) { weights.add(l, first); });
        return lines.most();
    }
    const u32 lane = threadIdx.x % 32, begin = row.begin_part(), end = row.end_part();
#pragma unroll 1
    for (u32 part = begin + warp; part < end; part += warps) {
        const u32 first = part * SCAN_TOKENS;
        float4 four[2];
        float l[8];
        // Modulo 2^32, because the first part may begin before the row. All four tokens are in the row or none, except at its end.
        u32 at[2];
#pragma unroll
        for (u32 g = 0; g < 2; ++g) {
            at[g] = first + group_offset<Element::F32>(lane, g) - row.first_token;
            // A row has room for whole 16 bytes.
            four[g] = at[g] < row.tokens ? *reinterpret_cast<const float4*>(logits + at[g]) : float4{};
            const float of[4] = {four[g].x, four[g].y, four[g].z, four[g].w};
#pragma unroll
            for (u32 i = 0; i < 4; ++i) l[4 * g + i] = at[g] < row.tokens && at[g] + i < row.tokens ? of[i] : -f32_infinity();
        }
        transform_lane<Element::F32>(parameters.transform(), first, lane, l);
#pragma unroll
        for (u32 g = 0; g < 2; ++g) {
            const float of[4] = {l[4 * g], l[4 * g + 1], l[4 * g + 2], l[4 * g + 3]};
            weights.add(of, first + group_offset<Element::F32>(lane, g));
            if (at[g] < row.tokens) *reinterpret_cast<float4*>(logits + at[g]) = {of[0], of[1], of[2], of[3]};
        }
    }
    return 8 * ((end - begin) / warps + 2);
}

extern "C" __global__ void __launch_bounds__(TopPSearch::THREADS, 2)
    top_p_ranks(const __grid_constant__ FilterCall call, const __grid_constant__ UndecidedRows open,
                const __grid_constant__ PeerRecords records) {
    __shared__ TopPSearch::Shared shared;
    const RankSums ranks{RecordsStep(records, RecordKind::First), call.draws};
    const u32 i = blockIdx.x / Team::size();
    const RowFilters filters = call.filters[i];
    const Draw plain = call.draws[i];
    // Invalid rows stay invalid.
    if (plain.status == Status::Drawn && filters.is_by_mass()) {
        call.begin(i, shared.row);
        const Row& row = shared.row;
        TopPSearch::Weights weights(plain.logit, plain.token);
        double error = TopPSearch::error_of(weigh(weights, call.row(i), const_cast<float*>(call.logits) + i * call.row_stride, row));
        const TopPSearch::Masses sums = TopPFirstPass::masses_of(shared, weights);
        Team::sync_relaxed();
        double before = sums.before, all = sums.all;
        if (threadIdx.x == 0 && Team::rank() == 0 && ranks.sums(i, before, all, error) &&
            !(before * (1.0 + error) < filters.top_p * all * (1.0 - error))) {
            const float left = row.mask || row.biases ? 1.0f : row.inv_temperature;
            open.add({before, all * (1.0 - error), row.seed, row.position, plain.logit, plain.token, left, filters.top_p,
                      static_cast<float>(error) * 1.000001f, row.draw, i, 0});
        }
    }
}

extern "C" __global__ void __launch_bounds__(TopPBlockMaxRanks::THREADS, 2)
    top_p_block_max_ranks(const __grid_constant__ FilterCall call, const __grid_constant__ UndecidedRows open,
                 const __grid_constant__ PeerRecords records) {
    extern __shared__ __align__(16) u8 memory[];
    const RankSums ranks{RecordsStep(records, RecordKind::First), call.draws};
    TopPBlockMaxRanks{call, open, ranks, *reinterpret_cast<TopPBlockMaxRanks::Shared*>(memory)}.run();
}

extern "C" __global__ void __launch_bounds__(Select::THREADS, 2)
    top_p_resolve_ranks(const __grid_constant__ FilterCall call, const __grid_constant__ UndecidedRows open,
              const __grid_constant__ PeerRecords records) {
    extern __shared__ __align__(16) u8 memory[];
    const RankSums ranks{RecordsStep(records, RecordKind::Second), call.draws};
    Select{call, open, ranks, *reinterpret_cast<Select::Shared*>(memory)}.run();
}
