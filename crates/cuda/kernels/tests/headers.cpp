// The headers as plain C++: writes the results of their functions on fixed inputs to standard output, as little-endian words.
// crates/cuda/tests/headers.rs computes the same results in Rust and compares every bit.
#include <algorithm>
#include <cstdio>
#include <vector>

// CUDA has this function without a namespace.
using std::min;

#include "flash_sampling/abi.cuh"
#include "flash_sampling/mainloop/dot_tile.cuh"
#include "flash_sampling/selection/block_maxima.cuh"
#include "flash_sampling/selection/row_lists.cuh"
#include "flash_sampling/summary/group_summary.cuh"
#include "flash_sampling/fused_hopper/schedule.cuh"
#include "flash_sampling/mainloop/swizzle.cuh"
#include "flash_sampling/summary/mass_histogram.cuh"
#include "flash_sampling/noise/noise.cuh"
#include "flash_sampling/selection/undecided_rows.cuh"
#include "flash_sampling/exchange/peers.cuh"
#include "flash_sampling/perturb.cuh"
#include "flash_sampling/noise/bound.cuh"

using namespace flash_sampling;

static void put(u32 word) { fwrite(&word, 4, 1, stdout); }
static void put(float x) { put(f32_to_bits(x)); }
static void put(u64 x) {
    put(static_cast<u32>(x));
    put(static_cast<u32>(x >> 32));
}
static void put(double x) {
    u64 bits;
    memcpy(&bits, &x, 8);
    put(bits);
}

// Returns word i of the input stream.
static u32 input(u32 i) { return Noise{1, 2}.word(Domain::Generator, 3, i); }

// Returns a finite float of any size, from a word.
static float any_float(u32 word) {
    const float x = bits_to_f32(word);
    return is_finite(x) ? x : 1.0f;
}

// Returns the next float below x; 0 and -0 count as one number; -inf stays.
static float next_below(float x) {
    if (x == 0.0f) return bits_to_f32(0x80000001u);
    return x == -f32_infinity() ? x : from_monotone_bits(to_monotone_bits(x) - 1);
}

// Rounds to the nearest f16, with ties to even; infinity beyond the largest.
static float to_f16(float x) {
    if (!is_finite(x) || x == 0.0f) return x;
    const int exponent = std::max(ilogb(x), -14);
    const double rounded = ldexp(nearbyint(ldexp(static_cast<double>(x), 10 - exponent)), exponent - 10);
    if (fabs(rounded) < 65536.0) return static_cast<float>(rounded);
    return x < 0.0f ? -f32_infinity() : f32_infinity();
}

// Counts granules with a raw logit that a pass would skip, and granules whose lower bound exceeds their largest logit.
static u32 broken_block_maxima() {
    u32 broken = to_f16(65519.996f) != 65504.0f || to_f16(65520.0f) != f32_infinity() || to_f16(-65520.0f) != -f32_infinity();
    broken += to_f16(0x1p-25f) != 0.0f || to_f16(0x1.8p-24f) != 0x1p-23f || to_f16(2049.0f) != 2048.0f;
    const float edges[] = {0.0f,    0x1p-149f, 0x1p-126f, 0x1p-25f, 0x1.8p-24f, 0x1p-14f, 0x1.ffcp-15f, 1.0f,
                           2049.0f, 64999.0f,  65000.0f,  65504.0f, 65519.996f, 65520.0f, 65536.0f,     0x1.fffffep127f};
    constexpr u32 EDGES = sizeof(edges) / sizeof(float);
    u32 passed = 0, bounds = 0;
    for (u32 i = 0; i < 300000; ++i) {
        const float any = i % 3 == 0 ? any_float(input(i)) : (static_cast<i32>(input(i)) * 0x1p-31f) * (i % 3 == 1 ? 40.0f : 70000.0f);
        const float size = i < 2 * EDGES ? edges[i / 2] : any, t = i % 2 ? -size : size;
        const float stored = to_f16(t);
        const float below = nextafterf(t, -f32_infinity()), lower = t - fabsf(t) * 0x1p-11f;
        const float raws[] = {t, below, lower, t - 0x1p-25f, -f32_infinity()};
        for (float raw : raws) broken += !(stored >= BlockMaxima::least_maximum(raw));
        // The control: a slightly larger logit skips some granules.
        passed += stored < BlockMaxima::least_maximum(t + fabsf(t) * 0x1p-8f + 0x1p-22f);
        if (!(stored <= 65000.0f)) continue;
        broken += !(BlockMaxima::lower_bound(stored) <= t);
        bounds += BlockMaxima::lower_bound(stored) >= t - fabsf(t) * 0x1p-8f - 0x1p-22f;
    }
    return broken + (passed < 100000) + (bounds < 100000);
}

// Counts errors of runs. Runs must be consecutive and cover all tokens, and owner() must return the run of each token.
static u32 broken_runs() {
    u32 broken = 0;
    for (u32 i = 0; i < 3000; ++i) {
        const u32 granule = 16u << i % 4, tokens = 1 + (input(i) >> (i % 3 ? 20 : 14));
        const u32 granules = (tokens + granule - 1) / granule, most = 1 + input(i + 1) % 300;
        const u32 blocks = granules < most ? granules : most;
        u32 next = 0;
        for (u32 block = 0; block < blocks; ++block) {
            const Run run = Run::of(block, blocks, tokens, granule);
            broken += run.first != next || run.end <= run.first || run.first % granule != 0;
            next = run.end;
            const u32 inside[] = {run.first, run.end - 1, run.first + (run.end - run.first) / 2};
            for (u32 token : inside) broken += Run::owner(blocks, tokens, granule, token) != block;
        }
        broken += next != tokens;
    }
    return broken;
}

// The sizes of fused_hopper::Tile that the schedule reads.
template <u32 CLUSTER_, bool EVEN_, u32 UNITS>
struct Shares {
    static constexpr int ELEMENT_BYTES = 2;
    static constexpr bool EVEN = EVEN_;
    static constexpr u32 CLUSTER = CLUSTER_, TILE_UNITS = UNITS, UNIT_GRANULES = 4, GRANULE = 16, UNIT = 64;
};

// Counts errors of schedules. The blocks' tiles must contain every token once, each tile must have at most the maximum size, and
// owner() must return the block of each token. The loading threads of all blocks of a cluster must count the warps without
// tokens. In a run that is not divided evenly, such warps occur only at its end.
template <u32 CLUSTER, bool EVEN, u32 UNITS = 2>
static u32 broken_schedules() {
    using Schedule = fused_hopper::Schedule<Shares<CLUSTER, EVEN, UNITS>>;
    u32 broken = 0, turns = 0, absences = 0;
    for (u32 i = 0; i < 400; ++i) {
        const u32 tokens = 1 + input(i) % (i % 4 ? 3000 : 60000), most = 1 + input(i + 1) % (i % 3 ? 132 : 7);
        const u32 clusters = (tokens + 16 * CLUSTER - 1) / (16 * CLUSTER), groups = clusters < most ? clusters : most;
        Call call{};
        call.hidden = i % 2 ? 8192 : 8191;
        const bool in_turn = Schedule::by_turns(call);
        std::vector<u32> seen(tokens);
        for (u32 block = 0; block < groups * CLUSTER; ++block) {
            const Schedule schedule(tokens, in_turn, block / CLUSTER, groups, block % CLUSTER);
            turns += schedule.waves;
            for (u32 t = 0; t < schedule.tiles; ++t) {
                u32 start, size;
                schedule.tile(t, start, size);
                broken += size > 64 * UNITS || (size > 0 && start % 16 != 0);
                u32 absent = 0;
                for (u32 rank = 0; rank < CLUSTER; ++rank) {
                    const Schedule of(tokens, in_turn, block / CLUSTER, groups, rank);
                    u32 begins, has;
                    of.tile(t, begins, has);
                    absent += 4 * (UNITS - (has > 64 ? (has + 63) / 64 : 1));
                }
                broken += schedule.absent(t) != absent || (absent && !EVEN && t + 1 < schedule.tiles);
                absences += absent;
                for (u32 token = start; token < start + size; ++token) {
                    if (token >= tokens) return ~0u / 2;
                    ++seen[token];
                    broken += Schedule::owner(tokens, in_turn, groups, token) != block;
                }
            }
        }
        for (u32 times : seen) broken += times != 1;
    }
    return broken + (turns == 0 || absences == 0);
}

// Counts errors of the swizzle. Every chunk has its own place, and eight adjacent rows of a column are in eight banks of 16
// bytes.
template <int DEPTH>
static u32 broken_swizzle() {
    const u32 rows = 32, chunks = Swizzle<DEPTH>::CHUNKS;
    u32 broken = 0;
    bool taken[rows * chunks] = {};
    for (u32 row = 0; row < rows; ++row) {
        for (u32 chunk = 0; chunk < chunks; ++chunk) {
            const u32 at = Swizzle<DEPTH>::at(row, chunk);
            broken += at % 16 != 0 || at / 16 >= rows * chunks || taken[at / 16];
            taken[at / 16] = true;
            for (u32 other = row / 8 * 8; other < row; ++other) broken += at / 16 % 8 == Swizzle<DEPTH>::at(other, chunk) / 16 % 8;
        }
    }
    return broken;
}

// Biases and their penalties, in their memory layout.
struct Penalised {
    LogitBias bias[3];
    Penalty least;
    Penalty penalties[3];
};

// Counts draws that their keys do not reproduce, and wrong orders of keys. The order is: invalid, drawn, none. Among invalid
// rows, raw ones come first; then the larger score, then the lower token. Also counts slots accepted for a step although one of
// their words is of another step.
static u32 keys_broken() {
    u32 broken = 0;
    std::vector<Draw> ascending = {{0xffffffffu, -f32_infinity(), -f32_infinity(), Status::NoFiniteLogit}};
    for (const float score : {-3e38f, -1.0f, -1e-45f, 0.0f, 1e-45f, 7.0f, 3e38f})
        for (const u32 token : {0xfffffffeu, 0x80000000u, 70u, 3u, 0u})
            ascending.push_back({token, score, score / 2, Status::Drawn});
    for (const float transformed : {1.0f, 0.0f})
        for (const u32 token : {0xfffffffeu, 0x80000000u, 70u, 3u, 0u})
            for (const Status status : {Status::NaN, Status::PositiveInfinity})
                ascending.push_back({token, transformed, 0.0f, status});
    u64 before = 0;
    for (const Draw& draw : ascending) {
        const u64 key = key_of(draw);
        const Draw back = draw_of(key, draw.logit);
        broken += key < before || (key == before && draw.status != Status::NoFiniteLogit);
        broken += back.token != draw.token || back.score != draw.score || back.logit != draw.logit;
        broken += back.status != draw.status;
        before = key;
        Slot slot = Slot::of(key, draw.logit, 7, 9);
        broken += slot.key() != key || f32_to_bits(slot.logit_value()) != f32_to_bits(draw.logit);
        broken += slot.digest_value() != 7 || !slot.is_of(9) || slot.is_of(8);
        for (u64* word : {&slot.key_high, &slot.key_low, &slot.logit, &slot.digest}) {
            const u64 kept = *word;
            *word = Slot::word(static_cast<u32>(kept >> 32), 7);
            broken += slot.is_of(9);
            *word = kept;
        }
    }
    Row row = {5, 6, nullptr, nullptr, 1, 2, 0.5f, 0.0f, 3, 0};
    const u32 digest = digest_of(row, 4, 0);
    broken += digest_of(row, 5, 0) == digest || digest_of(row, 4, 1) == digest;
    broken += digest_of(row, 4, 0x102) == digest_of(row, 4, 0x202) || digest_of(row, 4, 0x102) == digest_of(row, 4, 0x103);
    row.seed ^= 1ull << 63;
    broken += digest_of(row, 4, 0) == digest;
    row.seed ^= 1ull << 63;
    row.greedy = 1;
    broken += digest_of(row, 4, 0) == digest;
    row.greedy = 0;
    const u32 word = 0;
    row.mask = &word;
    broken += digest_of(row, 4, 0) == digest;
    // A rank may have only its share of a list.
    row.mask = nullptr;
    row.biases = 7, row.mask_words = 9;
    broken += digest_of(row, 4, 0) != digest;
    broken += step_after(0) != 1 || step_after(0xffffffffu) != 2 || step_after(0xfffffffeu) != 0xffffffffu;
    return broken;
}

// Counts dot products that can win although they are at or below the threshold. The inverse transform scales them out of the
// range of normal numbers: zeros, the smallest numbers and the threshold itself.
static u32 broken_thresholds_out_of_range() {
    u32 broken = 0;
    for (u32 i = 0; i < 200000; ++i) {
        const auto power = [i](u32 j) { return exp2f(static_cast<float>(static_cast<i32>(input(i + j)) >> 24)); };
        Row row{};
        row.inv_temperature = i % 2 ? power(0) : 1.0f;
        HeadTransform head{i % 5 == 0 ? power(1) : 0.0f, i % 3 ? power(2) : 1.0f};
        // A soft-cap of a few bits.
        if (i % 10 == 0) head = {exp2f(-130.0f - i % 16), 0x1p127f}, row.inv_temperature = exp2f(i % 32);
        const LogitBias bias{7, (input(i + 3) >> 24) * 0.1f * power(4)};
        const Penalty penalty{power(5), (static_cast<i32>(input(i + 6)) >> 24) * power(7)};
        const Penalty least{fminf(penalty.repetition, 1.0f), fminf(penalty.subtract, 0.0f)};
        const Penalised list{{bias, {8, 0.0f}, {9, 0.0f}}, least, {penalty, {1.0f, 0.0f}, {1.0f, 0.0f}}};
        if (i % 7 == 0) row.bias = list.bias, row.biases = 3 | PENALISED, row.largest_bias = bias.value;
        const float best = static_cast<i32>(input(i + 8)) * 0x1p-26f;
        const float threshold = dot_threshold(best, noise_bound(1u << 24), head, row);
        const float noise = Granule::of_word(1u << 28, [] { return 0u; }).largest_gumbel();
        const float dots[] = {0.0f, -0.0f, bits_to_f32(0x80000001u), bits_to_f32(1), -1e-38f, threshold, next_below(threshold)};
        for (float dot : dots) {
            if (dot > threshold) continue;
            const float l = row.transform().apply(head.apply(dot, 0.0f, false), 7);
            broken += l > -f32_infinity() && add_rn(l, noise) >= best;
        }
    }
    return broken;
}

// Counts tokens whose scores exceed the bound of their granule, and leaders' scores below their lower bound. The controls: the
// bounds of most granules are close.
static u32 broken_noise_bounds() {
    u32 broken = 0, loose = 0, low = 0;
    for (u32 i = 0; i < 200000; ++i) {
        const u32 word = i < 8192 ? i : i < 16384 ? ~i : input(i) >> i % 32, bits = Granule::minimum_bits(word);
        const Granule granule = Granule::of_word(word, [&] { return i % 2 ? input(i + 1) : 0; });
        const float top = static_cast<i32>(input(i + 2)) * 0x1p-31f * (i % 3 ? 20.0f : 3000.0f);
        const float leader = add_rn(top, granule.largest_gumbel());
        const float other = -ln(granule.exponential_of(granule.leader ^ 1, [&] { return input(i + 3) >> i / 32 % 32; }));
        broken += !(top > logit_threshold(leader, noise_bound(bits)));
        broken += !(top > logit_threshold(add_rn(top, other), noise_bound(bits)));
        broken += leader_score_at_least(top, noise_bound(bits), bits) >= leader;
        loose += bits > 1000 && bits < 1u << 20 && top > logit_threshold(leader + 0.01f, noise_bound(bits));
        low += bits > 4096 && bits < 1u << 20 && leader_score_at_least(top, noise_bound(bits), bits) < leader - 0.01f;
    }
    broken += -f32_infinity() > logit_threshold(-f32_infinity(), NOISE_CEILING);
    return broken + loose + low;
}

// Counts logits that min-p keeps although they are at or below the row's threshold.
static u32 broken_min_p_cuts() {
    u32 broken = 0;
    for (u32 i = 0; i < 100000; ++i) {
        RowFilters filters{-8.0 * (input(i) >> 8) * 0x1p-24, 1.0f, 0, 1.0f, 0};
        if (i % 9 == 0) filters.ln_min_p = 0.0;
        Row row{};
        row.inv_temperature = i % 3 ? 1.0f / (0.01f + (input(i + 1) >> 8) * 1e-5f) : 1.0f;
        const HeadTransform head{i % 4 == 0 ? 30.0f : 0.0f, i % 2 ? 1.0f : 0.37f};
        const float best = (static_cast<i32>(input(i + 2)) * 0x1p-31f) * (i % 7 ? 50.0f : 1e4f);
        const float threshold = dot_threshold(best, filters.min_p_cut(), head, row);
        const float dots[] = {threshold, next_below(threshold), threshold - 1e-3f};
        for (float dot : dots) broken += row.transform().apply(head.apply(dot, 0.0f, false), 7) >= filters.least(best);
    }
    return broken;
}

// Counts estimates that too few of a row's tokens reach (more often than stated), that 4096 or more reach, or that grow with less
// data.
static u32 broken_top_k_cuts() {
    constexpr u32 TOKENS = 32768, PART = 128;
    static u32 logits[TOKENS];
    u32 broken = 0, too_high = 0;
    for (u32 i = 0; i < 60; ++i) {
        for (u32 t = 0; t < TOKENS; ++t) logits[t] = 2 + input(i * TOKENS + t) / 2;
        u32 posted[RowLists::POSTS] = {};
        for (u32 p = 0; p < RowLists::POSTS; ++p)
            for (u32 t = 0; t < PART; ++t) posted[p] = logits[p * PART + t] > posted[p] ? logits[p * PART + t] : posted[p];
        const u32 k = i % 3 == 0 ? 10 : i % 3 == 1 ? 30 : 50, cut = estimated_cut(posted, k, PART, TOKENS);
        u32 reach = 0;
        for (u32 logit : logits) reach += logit >= cut;
        too_high += reach < k;
        broken += reach >= RowLists::ROOM;
        for (u32 p = 0; p < RowLists::POSTS; ++p) {
            const u32 kept = posted[p];
            posted[p] = 0;
            broken += estimated_cut(posted, k, PART, TOKENS) > cut;
            posted[p] = kept;
        }
    }
    return broken + (too_high > 3);
}

int main() {
    for (u32 i = 0; i < 4000; ++i) {
        const u64 position = input(i + 2) * 0x1000001ull & 0xffffffffffffffull;
        const Noise noise{static_cast<u64>(input(i)) << 32 | input(i + 1), position};
        const Domain domain = static_cast<Domain>(i % 10);
        const Words words = noise.words(domain, i, input(i + 3));
        for (u32 j = 0; j < 4; ++j) put(words.w[j]);
        put(noise.word(domain, i, input(i + 4)));
        put(noise.refinement(domain, i, input(i + 4)));
        put(noise.gumbel(domain, i, input(i + 4)));
        put(noise.coin(i, input(i + 5)));
        // Every word of the refined tail, words of every size, and the ends.
        const u32 word = i < 300 ? i : i < 310 ? ~(i - 300) : input(i) >> i % 32;
        const auto refinement = [&] { return input(i + 6); };
        put(gumbel_of_word(word, refinement));
        const Granule granule = Granule::of_word(word << 4 | i % 16, refinement);
        put(granule.leader);
        put(granule.minimum);
        put(granule.exponential_of(i / 16, [&] { return word; }));
        put(granule.largest_gumbel());
        float four[4];
        noise.gumbels(i % 2 ? Domain::Token : Domain::Residual, i, input(i + 4) & ~3u, four);
        for (float gumbel : four) put(gumbel);
    }
    for (u32 i = 0; i < 20000; ++i) {
        const float x = any_float(input(i));
        const float unit = (input(i + 1) + 0.5f) * 0x1p-33f;
        put(ln(x > 1e-37f ? x : unit));
        put(neg_ln_1m(unit));
        put(flash_sampling::exp(x));
        put(flash_sampling::exp((unit - 0.25f) * 400.0f));
        put(flash_sampling::tanh(x));
        put(flash_sampling::tanh((unit - 0.25f) * 8.0f));
        put(to_ordered_bits(Winner::of(x, i)));
        const Winner back = from_ordered_bits(to_ordered_bits(Winner::of(x, i)));
        put(back.score);
        put(back.token);
        put(HeadTransform{30.0f, 0.5f}.apply(x, unit, true));
        put(HeadTransform{0.0f, 1.0f}.apply(x, unit, false));
        const u32 mask[] = {input(i), input(i + 2), input(i + 3)};
        const LogitBias bias[] = {{3, 1.5f}, {17, -2.25f}, {90, x}};
        put(RowTransform{mask, 3, 3, bias, 0.7f}.apply(x, input(i + 4) % 100));
        put(RowTransform{nullptr, 0, 0, nullptr, 1.0f}.apply(x, i));
        const Penalised list{{{3, 1.5f}, {17, -2.25f}, {90, x}}, {1.0f, 0.0f}, {{1.3f, 0.0f}, {0.7f, -0.75f}, {1.0f, unit}}};
        put(RowTransform{nullptr, 0, 3 | PENALISED, list.bias, 0.7f}.apply(x, list.bias[i % 3].token));
        const float logit = (unit - 0.25f) * 200.0f;
        const float logits[] = {logit, x};
        for (float l : logits) {
            const float edge = mass_edge(l);
            put(edge);
            put(mass_slot(edge));
            put(mass_units(l, edge));
        }
    }
    // The pruning threshold: every dot product at or below it must lose.
    u32 broken = 0;
    for (u32 i = 0; i < 200000; ++i) {
        Row row{};
        row.inv_temperature = i % 3 ? 1.0f / (0.01f + (input(i) >> 8) * 1e-5f) : 1.0f;
        const LogitBias bias[] = {{7, (input(i + 1) >> 24) * 0.1f}};
        if (i % 5 == 0) row.bias = bias, row.biases = 1, row.largest_bias = bias[0].value;
        const Penalty penalty{i % 2 ? 1.0f : 0.1f + (input(i + 3) >> 24) * 0.01f, ((input(i + 4) >> 24) - 128.0f) * 0.1f};
        const Penalty least{penalty.repetition < 1.0f ? penalty.repetition : 1.0f, penalty.subtract < 0.0f ? penalty.subtract : 0.0f};
        const Penalised list{{bias[0], {8, 0.0f}, {9, 0.0f}}, least, {penalty, {1.0f, 0.0f}, {1.0f, 0.0f}}};
        if (i % 11 == 0) row.bias = list.bias, row.biases = 3 | PENALISED, row.largest_bias = bias[0].value;
        const HeadTransform head{i % 4 == 0 ? 30.0f : 0.0f, i % 2 ? 1.0f : 0.37f};
        const float best = (static_cast<i32>(input(i + 2)) * 0x1p-31f) * (i % 7 ? 50.0f : 1e4f);
        const u32 minimum_bits = i % 6 ? 1u << 20 : 1u << 24;
        const float threshold = dot_threshold(best, noise_bound(minimum_bits), head, row);
        const float noise = Granule::of_word(minimum_bits << 4, [] { return 0u; }).largest_gumbel();
        const float dots[] = {threshold, next_below(threshold), threshold - 1e-3f, threshold - 10.0f};
        for (float dot : dots) {
            const float l = row.transform().apply(head.apply(dot, 0.0f, false), 7);
            if (l > -f32_infinity() && add_rn(l, noise) >= best) ++broken;
        }
        // The Hopper kernel's thresholds, with its own bound.
        const float bound = noise_bound(input(i + 5) >> (4 + input(i + 6) % 28));
        broken += ThresholdLine::of(best, head, row).dot_threshold(bound, head) > dot_threshold(best, bound, head, row);
    }
    put(broken + broken_thresholds_out_of_range());
    put(broken_runs());
    put(broken_schedules<1, false>() + broken_schedules<2, false>() + broken_schedules<1, true>() +
        broken_schedules<2, true>() + broken_schedules<2, false, 3>() + broken_schedules<2, true, 3>());
    put(broken_swizzle<32>() + broken_swizzle<64>() + broken_swizzle<128>());
    put(broken_noise_bounds());
    put(keys_broken());
    put(broken_min_p_cuts());
    put(broken_top_k_cuts());
    put(broken_block_maxima());
    return 0;
}
