// Computes log-probabilities and kept tokens of rows on the processor. Reads rows, their draws and raw logits from standard input,
// and writes the results of both laws to standard output. crates/cuda/tests/row_logprobs.rs compares them with the reference.
#include <algorithm>

#include "emulator.hpp"

#include "flash_sampling/row_summary/call.cuh"
#include "flash_sampling/row_summary/load_part.cuh"
#include "flash_sampling/selection/row_logprobs.cuh"

using namespace flash_sampling;

// The kernels have types with the names of other types.
namespace row_summary {
#include "../row_summary.cu"
}

static u32 count, first_token, tokens, top_n, first_row, launch_rows;
static u64 capacity, stride;
// The number of tokens with requested log-probabilities, for each row.
constexpr u32 GIVEN = 3;
static std::vector<long long> given;
static std::vector<double> weights;
static std::vector<Row> rows;
static std::vector<RowFilters> filters;
static std::vector<Draw> draws;
static std::vector<u32> invalid;

// Replaces each -1 by the lowest token that the list does not have.
static void complete_plainly(i32* tokens, u32 n) {
    for (i32* at = tokens; at != tokens + n; ++at)
        if (*at < 0)
            for (*at = 0; std::find(tokens, at, *at) != at;) ++*at;
}

// Lists of few different tokens, of any length.
static void check_complete() {
    u32 word = 1;
    const auto next = [&](u32 below) { return (word = word * 1664525 + 1013904223) % 65521 % below; };
    for (u32 i = 0; i < 300; ++i) {
        const u32 n = 1 + next(LogprobColumns::TOP_N_MAX), most = n + next(9);
        std::vector<i32> tokens;
        for (u32 listed = next(n + 1); tokens.size() < listed;) {
            const i32 token = static_cast<i32>(next(most));
            if (std::find(tokens.begin(), tokens.end(), token) == tokens.end()) tokens.push_back(token);
        }
        tokens.resize(n, -1);
        auto wanted = tokens;
        complete_plainly(wanted.data(), n);
        emulator::launch(1, 1, RowLogprobs::THREADS, [&] { RowLogprobs::complete(tokens.data(), n); });
        if (tokens != wanted) abort();
    }
}

// The results of a law, with elements before and after the rows that no kernel may write.
struct Law {
    std::vector<double> log_z;
    std::vector<float> log_probs, top_log_probs, given_log_probs;
    std::vector<i32> ranks, top_tokens;

    Law()
        : log_z(first_row + count + 1, 7.0), log_probs(first_row + count + 1, 7.0f),
          top_log_probs((first_row + count + 1) * top_n, 7.0f), given_log_probs((first_row + count + 1) * GIVEN, 7.0f),
          ranks(first_row + count + 1, 7),
          top_tokens((first_row + count + 1) * top_n, 7) {}

    LogprobColumns columns() {
        return {log_z.data(), log_probs.data(), ranks.data(), top_tokens.data(), top_log_probs.data(),
                given.data(), given_log_probs.data(), top_n, GIVEN};
    }
    void complete() {
        for (u32 r = first_row; r < first_row + count; ++r) complete_plainly(top_tokens.data() + r * top_n, top_n);
    }
    bool operator==(const Law& other) const {
        return log_z == other.log_z && log_probs == other.log_probs && top_log_probs == other.top_log_probs &&
               given_log_probs == other.given_log_probs && ranks == other.ranks && top_tokens == other.top_tokens;
    }
    template <class T>
    static void write(const std::vector<T>& values, u32 each) {
        for (u32 i = 0; i < values.size(); ++i) {
            const bool is_of_row = i / each >= first_row && i / each < first_row + count;
            if (!is_of_row && values[i] != 7) abort();
            if (is_of_row) put(values[i]);
        }
    }
    void write() const {
        write(log_z, 1), write(log_probs, 1), write(ranks, 1);
        if (top_n) write(top_tokens, top_n), write(top_log_probs, top_n);
        write(given_log_probs, GIVEN);
    }
};

struct Kept {
    std::vector<long long> begin;
    std::vector<i32> tokens;
    Kept() : begin(first_row + count + 1, 7), tokens(capacity + 1, 7) { begin[first_row] = 3; }
    KeptColumns columns() { return {begin.data(), tokens.data(), capacity}; }
};

// Runs the kernels as selection/row_logprobs.rs does, for the rows of a launch.
static void run_law(FilterCall filtered, u32 at, const LogprobColumns& columns, u64* least, u32* kept, bool is_complete) {
    const u32 n = filtered.count, blocks = (tokens + TOKENS - 1) / TOKENS;
    std::vector<SummaryRequest> requests(n);
    for (u32 i = 0; i < n; ++i) requests[i] = RowLogprobs::request(filtered, i, top_n);
    std::vector<SummaryResult> results(n);
    std::vector<KeptToken> top(n * top_n), listed(n * RowSummaries::LISTED);
    std::vector<PartMasses> parts(n * blocks);
    std::vector<u32> listed_counts(n), before(n);
    const StoredLogits stored{filtered.logits, stride, first_token, tokens};
    const Row* const of_rows = filtered.is_transformed ? nullptr : filtered.rows;
    const RowSummaries summaries{stored, filtered.logits, nullptr, of_rows, requests.data(), results.data(), top.data(), nullptr,
                                 parts.data(), listed.data(), listed_counts.data(), weights.data(), stride, Element::F32, top_n, before.data()};
    emulator::launch(n, blocks, THREADS, [&] { row_summary::part_summaries(summaries); });
    emulator::launch(n, 1, THREADS, [&] { row_summary::row_summaries(summaries); });
    const LogprobCall call{filtered, invalid.data() + at, weights.data(), results.data(), top.data(), before.data(), least, kept, columns, first_row + at, is_complete};
    static RowLogprobs::Shared shared;
    emulator::launch(n, 1, RowLogprobs::THREADS, [&] { RowLogprobs::run(call, shared); });
}

// Runs all launches of a call. With the largest logits of granules, a launch has one row, and uses them if the row is bare.
static void run(const std::vector<float>& logits, bool is_transformed, Law& processed, Law* raw, Kept& kept,
                const std::vector<u16>* maxima = nullptr, bool is_complete = false) {
    const u32 most = maxima ? 1 : launch_rows;
    for (u32 at = 0; at < count; at += most) {
        const u32 n = min(most, count - at);
        const u64 of_row = BlockMaxima::octet(at, BlockMaxima::granules_of(tokens));
        const u16* const of_launch = maxima && !rows[at].mask && !rows[at].biases ? maxima->data() + of_row : nullptr;
        FilterCall filtered{logits.data() + at * stride, stride, nullptr, rows.data() + at, filters.data() + at, draws.data() + at,
                            first_token, tokens, is_transformed, n, of_launch, {}};
        std::vector<u64> least(n);
        std::vector<u32> counts(n, 99);
        run_law(filtered, at, processed.columns(), least.data(), counts.data(), is_complete);
        FilterCall of_raw = filtered;
        of_raw.filters = nullptr, of_raw.is_transformed = 1;
        if (raw) run_law(of_raw, at, raw->columns(), nullptr, nullptr, is_complete);
        const KeptCall call{filtered, least.data(), counts.data(), kept.columns(), first_row + at, 0};
        static KeptRow::Shared shared;
        emulator::launch(n, 1, KeptRow::THREADS, [&] { KeptRow::run(call, shared); });
    }
}

int main() {
    check_complete();
    count = get<u32>(), first_row = get<u32>(), launch_rows = get<u32>(), first_token = get<u32>(), tokens = get<u32>();
    top_n = get<u32>(), capacity = get<u32>();
    stride = (tokens + 7) / 8 * 8;
    weights = get_all<double>(MASS_BINS);
    rows.resize(count), filters.resize(count), draws.resize(count), invalid.resize(count);
    given.resize((first_row + count + 1) * GIVEN, -1);
    std::vector<std::vector<u32>> masks(count);
    std::vector<std::vector<LogitBias>> lists(count);
    std::vector<float> raw(count * stride), transformed(count * stride);
    // An octet per row, whose other rows have NaN.
    const u32 granules = BlockMaxima::granules_of(tokens);
    std::vector<u16> maxima(BlockMaxima::octet(count, granules), 0x7e00);
    for (u32 r = 0; r < count; ++r) {
        Row& row = rows[r];
        row.inv_temperature = get<float>();
        masks[r] = get_all<u32>(get<u32>());
        row.mask = masks[r].empty() ? nullptr : masks[r].data();
        row.mask_words = static_cast<u32>(masks[r].size());
        const u32 members = get<u32>();
        // The penalties follow the biases; the first has their smallest values.
        lists[r].resize(2 * members + 1);
        Penalty* const penalties = reinterpret_cast<Penalty*>(lists[r].data() + members);
        for (u32 i = 0; i < members; ++i) lists[r][i] = get<LogitBias>(), penalties[1 + i] = get<Penalty>();
        row.bias = members ? lists[r].data() : nullptr;
        row.biases = members ? members | PENALISED : 0;
        filters[r] = get<RowFilters>();
        draws[r] = get<Draw>();
        invalid[r] = get<u32>();
        for (u32 t = 0; t < GIVEN; ++t) given[(first_row + r) * GIVEN + t] = static_cast<long long>(get<u64>());
        for (u32 t = 0; t < tokens; ++t) {
            const float logit = get<float>();
            raw[r * stride + t] = logit;
            transformed[r * stride + t] = row.transform().apply(logit, first_token + t);
        }
        for (u32 g = 0; g < granules; ++g) maxima[BlockMaxima::octet(r, granules) + BlockMaxima::ROWS * g] = get<u16>();
    }
    Law processed, of_raw, again;
    Kept kept, kept_again;
    run(raw, false, processed, &of_raw, kept);
    run(transformed, true, again, nullptr, kept_again);
    if (!(processed == again) || kept.begin != kept_again.begin || kept.tokens != kept_again.tokens) abort();
    Law by_maxima;
    Kept kept_by_maxima;
    run(raw, false, by_maxima, nullptr, kept_by_maxima, &maxima);
    if (!(processed == by_maxima) || kept.begin != kept_by_maxima.begin || kept.tokens != kept_by_maxima.tokens) abort();
    Law completed, raw_completed, wanted = processed, raw_wanted = of_raw;
    Kept kept_completed;
    run(raw, false, completed, &raw_completed, kept_completed, nullptr, true);
    wanted.complete(), raw_wanted.complete();
    if (!(completed == wanted) || !(raw_completed == raw_wanted)) abort();
    processed.write(), of_raw.write();
    if (kept.begin[first_row] != (first_row ? 3 : 0) || kept.tokens[capacity] != 7) abort();
    for (u32 r = first_row; r <= first_row + count; ++r) put(kept.begin[r]);
    for (u32 i = 0; i < capacity; ++i) put(kept.tokens[i]);
}
