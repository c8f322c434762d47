// Runs draws with filters on the processor: from the list of one GPU, from the lists of several ranks, and from all logits, with or
// without the largest logits of granules. Reads a row and its filters from standard input, and writes its draws to standard output.
// crates/cuda/tests/lists.rs compares them with the reference.
#include "emulator.hpp"

#define FS_EMULATED "../../../tests/half_ptx.hpp"

#include <algorithm>

#include "flash_sampling/selection/exact_filters.cuh"
#include "flash_sampling/selection/granule_candidates.cuh"
#include "flash_sampling/selection/find_block_maxima.cuh"

using namespace flash_sampling;

static FilterRow::Shared shared;

// The fused kernel's list of a shard: the tokens that reach the cutoff.
struct List {
    std::vector<u64> keys;
    ListCounters counters;
};

static List list_of(const std::vector<float>& logits, u32 first, u32 end, float cut) {
    List list{{}, {0, cut == -f32_infinity() ? 0 : to_monotone_bits(cut)}};
    for (u32 t = first; t < end; ++t)
        if (logits[t] >= cut) list.keys.push_back(to_ordered_bits(Winner::of(logits[t], t)));
    list.counters.count = static_cast<u32>(list.keys.size());
    return list;
}

// Runs one block on a row with these filters.
static void run(const RowFilters& filters, const std::function<void(FilterRow&)>& body,
                const ExistingRow& logits = {nullptr, 0, 0}) {
    emulator::run(FilterRow::THREADS, [&] {
        FilterRow select{filters, logits, shared};
        body(select);
    });
}

// Draws as filter_list_ranks.cu, without the exchange: each shard shortens its list, and the draw is from all lists.
static Draw draw_joined(const RowFilters& filters, const std::vector<List>& lists, float largest, u32 room) {
    List all{{}, {0, 0}};
    for (const List& list : lists) {
        ListCounters received{};
        run(filters, [&](FilterRow& select) {
            const ListCounters mine = select.shorten(list.keys.data(), list.counters, largest, room);
            if (threadIdx.x == 0) received = mine;
        });
        for (u32 i = 0; i < received.count; ++i) all.keys.push_back(shared.candidates.keys[i]);
        all.counters.cut = max(all.counters.cut, received.cut);
    }
    all.counters.count = static_cast<u32>(all.keys.size());
    Draw draw{0, 0.0f, 0.0f, Status::Undecided};
    if (all.counters.count == 0) return draw;
    run(filters, [&](FilterRow& select) {
        select.copy_list(all.keys.data(), all.counters.count);
        const Draw found = select.draw_copied(all.counters.cut);
        if (threadIdx.x == 0) draw = found;
    });
    return draw;
}

// Returns the keys that min-p first and top-k keep, sorted.
static std::vector<u64> kept(const RowFilters& filters, const std::vector<float>& logits, float inv_temperature) {
    std::vector<u64> keys;
    for (u32 t = 0; t < logits.size(); ++t) keys.push_back(to_ordered_bits(Winner::of(mul_rn(logits[t], inv_temperature), t)));
    std::sort(keys.rbegin(), keys.rend());
    const float least = filters.is_min_p_first() ? filters.least(from_ordered_bits(keys[0]).score) : -f32_infinity();
    size_t count = filters.top_k ? filters.top_k : keys.size();
    while (from_ordered_bits(keys[count - 1]).score < least) --count;
    keys.resize(count);
    return keys;
}

// Draws from the granules that their largest logits select. The status is 0x100 if these have exactly the kept tokens, 0x200 if
// not.
static Draw by_maxima(FilterRow& select, const u16* maxima, const std::vector<u64>& wanted) {
    if (!GranuleCandidates::gather(select, maxima)) {
        select.gather();
        return select.draw();
    }
    std::vector<u64> found;
    if (threadIdx.x == 0) found.assign(shared.candidates.keys, shared.candidates.keys + shared.candidates.count);
    std::sort(found.rbegin(), found.rend());
    // The sort of few candidates drops those after the k-th.
    if (select.filters.top_k && found.size() > wanted.size() && found.size() <= 128) found.resize(wanted.size());
    __syncthreads();
    Draw draw = select.draw();
    draw.status = static_cast<Status>(static_cast<u32>(draw.status) | (found == wanted ? 0x100 : 0x200));
    return draw;
}

// Returns the maxima of the granules of draw 3, by the kernel. The logits of the other draws are not read.
static std::vector<u16> maxima_of(const RowFilters& filters, const float* logits, u32 tokens) {
    constexpr u32 DRAW = 3;
    std::vector<RowFilters> of_draws(DRAW + 1, RowFilters{-INFINITY, 1.0f, 0, 1.0f, 0});
    of_draws[DRAW] = filters;
    const std::vector<u32> sources(DRAW + 1, 0);
    const std::vector<Row> rows(DRAW + 1, Row{});
    FilterCall call{};
    call.logits = logits;
    call.sources = sources.data();
    call.rows = rows.data();
    call.filters = of_draws.data();
    call.tokens = tokens;
    const u32 granules = BlockMaxima::granules_of(tokens);
    std::vector<u16> all(BlockMaxima::ROWS * granules, 0x7e00), found(granules);
    const FindBlockMaxima kernel{call, all.data()};
    emulator::launch((tokens + FindBlockMaxima::TOKENS - 1) / FindBlockMaxima::TOKENS, DRAW + 1, FindBlockMaxima::THREADS,
                     [&] { kernel.block(blockIdx.x, blockIdx.y); });
    for (u32 g = 0; g < granules; ++g) found[g] = all[BlockMaxima::ROWS * g + DRAW];
    return found;
}

int main() {
    const auto filters = get<RowFilters>();
    Row row{};
    row.seed = get<u64>();
    row.position = get<u64>();
    row.inv_temperature = get<float>();
    const u32 draws = get<u32>(), shards = get<u32>(), room = get<u32>();
    const float cut = get<float>();
    std::vector<float> logits(get<u32>());
    float largest = -f32_infinity();
    for (float& logit : logits) logit = get<float>(), largest = logit > largest ? logit : largest;
    const u32 tokens = static_cast<u32>(logits.size()), granules = get<u32>();
    const std::vector<u64> wanted = granules ? kept(filters, logits, row.inv_temperature) : std::vector<u64>();
    // Large values follow the logits. The maxima of other rows are NaN.
    logits.resize(tokens + 8, 1e30f);
    std::vector<u16> maxima(BlockMaxima::ROWS * granules, 0x7e00);
    for (u32 g = 0; g < granules; ++g) maxima[BlockMaxima::ROWS * g + 3] = get<u16>();
    // The weights of mass bins, for the draw from all logits.
    std::vector<double> weights(MASS_BINS);
    for (u32 bin = 0; bin < MASS_BINS; ++bin) weights[bin] = exp(bin * -0.125);
    std::vector<List> lists;
    for (u32 s = 0; s < shards; ++s) lists.push_back(list_of(logits, s * tokens / shards, (s + 1) * tokens / shards, cut));
    for (row.draw = 0; row.draw < draws; ++row.draw) {
        shared.row = row;
        Draw draw{};
        if (shards == 0) {
            const auto body = [&](FilterRow& select) {
                Draw found = granules ? by_maxima(select, maxima.data() + 3, wanted) : ExactFilters{select, weights.data()}.draw();
                if (threadIdx.x == 0) draw = found;
            };
            run(filters, body, ExistingRow{logits.data(), 0, tokens});
        } else if (shards > 1) {
            draw = draw_joined(filters, lists, largest, room);
        } else {
            run(filters, [&](FilterRow& select) {
                const Draw found = select.draw_listed(lists[0].keys.data(), lists[0].counters);
                if (threadIdx.x == 0) draw = found;
            });
        }
        fwrite(&draw, sizeof(Draw), 1, stdout);
    }
    if (granules)
        for (const u16 largest : maxima_of(filters, logits.data(), tokens)) put(largest);
}
