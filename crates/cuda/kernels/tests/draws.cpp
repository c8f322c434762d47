// Runs the draw kernels on the processor: the epilogues of the portable kernels, the selection from groups, the sampler over
// existing logits, and the lists of stored logits. Reads problems from standard input, and writes draws and log Z to standard
// output. crates/cuda/tests/draws.rs makes the problems and compares the results with core's reference.
#include <algorithm>

#include "emulator.hpp"

#include "flash_sampling/selection/digit.cuh"
#include "flash_sampling/epilogue/draw.cuh"
#include "flash_sampling/epilogue/summary.cuh"
#include "flash_sampling/ptx/ordered.cuh"
#include "flash_sampling/summary/row_mass.cuh"
#include "flash_sampling/scan/scan.cuh"
#include "flash_sampling/selection/groups.cuh"
#include "flash_sampling/scan/stored.cuh"

namespace f32 {
#define FS_ELEMENT F32
#define standalone standalone_f32
#include "../standalone.cu"
}  // namespace f32
#undef FS_ELEMENT
#undef standalone
namespace bf16 {
#define FS_ELEMENT BF16
#define standalone standalone_bf16
#include "../standalone.cu"
}  // namespace bf16
#undef FS_ELEMENT
#undef standalone
namespace lists {
#include "../top_list.cu"
}  // namespace lists
namespace ties {
#include "../near_ties.cu"
}  // namespace ties

using namespace flash_sampling;
constexpr int COLUMNS = 16;

// Further codes besides the rules of groups: the fused draw, and draws from existing logits of two types.
constexpr u32 FUSED = 3, EXISTING_F32 = 4, EXISTING_BF16 = 5;

// Runs an epilogue over the tokens from `from` on, as a launch of `blocks` blocks does. `dots` has `stride` tokens per row.
template <class Epilogue>
static void run_blocks(const Call& call, const typename Epilogue::Arguments& arguments, const float* dots, u32 stride, u32 from,
                       u32 blocks) {
    for (u32 block = 0; block < blocks; ++block) {
        const Run run = Run::of(block, blocks, call.tokens, Epilogue::GRANULE);
        typename Epilogue::Shared shared;
        memset(static_cast<void*>(&shared), 0xff, sizeof(shared));
        alignas(16) static float tile_dots[COLUMNS * TILE_TOKENS];
        emulator::run(EPILOGUE_THREADS, [&] {
            Epilogue epilogue{call, arguments, run, shared};
            epilogue.begin();
            for (u32 first = run.first; first < run.end; first += TILE_TOKENS) {
                const u32 tokens = min(run.end - first, TILE_TOKENS);
                for (u32 column = 0; column < call.row_count; column += 8) {
                    const u32 columns = min(call.row_count - column, 8);
                    __syncthreads();
                    for (u32 i = threadIdx.x; i < columns * TILE_TOKENS; i += EPILOGUE_THREADS) {
                        const u32 c = i / TILE_TOKENS, t = i % TILE_TOKENS;
                        const u64 at = static_cast<u64>(column + c) * stride + from + first + t;
                        tile_dots[c * TILE_TOKENS + t] = t < tokens ? dots[at] : NAN;
                    }
                    __syncthreads();
                    epilogue.tile(DotTile{tile_dots, TILE_TOKENS, first, tokens, column, columns});
                    __syncthreads();
                }
            }
            epilogue.end();
        });
    }
}

// Makes a fused draw. Its scratch must be unchanged afterwards.
static void draw_fused(Call call, const float* dots, u32 blocks) {
    using Epilogue = DrawEpilogue<COLUMNS>;
    const u32 granules = (call.tokens + Epilogue::GRANULE - 1) / Epilogue::GRANULE;
    blocks = min(blocks, granules);
    std::vector<u64> best(call.row_count, 0);
    std::vector<float> logits(static_cast<size_t>(blocks) * call.row_count, NAN);
    u32 arrived = 0;
    call.best = best.data(), call.logits = logits.data(), call.arrived = &arrived;
    run_blocks<Epilogue>(call, LogitStore{}, dots, call.tokens, 0, blocks);
    for (u64 key : best)
        if (key != 0) abort();
    if (arrived != 0) abort();
}

// Draws from existing logits, with rows that 16-byte loads can read or not. Their scratch must be unchanged afterwards.
template <class T, class Existing, class Kernel>
static void draw_existing(Call call, const float* dots, u32 blocks, bool aligned, Kernel kernel) {
    const u32 parts = (call.first_token + call.tokens - 1) / SCAN_TOKENS + 1 - call.first_token / SCAN_TOKENS;
    const u32 each = (parts + blocks - 1) / blocks, stride = aligned ? (call.tokens + 7) / 8 * 8 : call.tokens;
    std::vector<float4> memory((static_cast<size_t>(call.row_count) * stride + 16) * sizeof(T) / sizeof(float4) + 1);
    T* const logits = reinterpret_cast<T*>(memory.data()) + (aligned ? call.first_token % 8 : 1);
    for (u32 r = 0; r < call.row_count; ++r)
        for (u32 t = 0; t < call.tokens; ++t) {
            const float raw = call.head.apply(dots[r * call.tokens + t], call.bias[t], true);
            logits[r * stride + t] = static_cast<T>(f32_to_bits(raw) >> (32 - 8 * sizeof(T)));
        }
    std::vector<u64> best(call.row_count, 0);
    std::vector<u32> arrived(call.row_count, 0);
    call.best = best.data(), call.arrived = arrived.data();
    const Existing existing{logits, nullptr, stride, (parts + each - 1) / each, each};
    emulator::launch(existing.blocks * call.row_count, 1, 128, [&] { kernel(call, existing); });
    for (u32 r = 0; r < call.row_count; ++r)
        if (best[r] != 0 || arrived[r] != 0) abort();
}

// Checks log Z of rows that are hard to sum: very low logits beside others, very large logits, ascending logits, two values.
static void check_row_mass() {
    constexpr u32 TOKENS = 3000, ROWS = 9, AT_ONCE = 12;
    static float logits[TOKENS];
    const float low[4] = {-3.4028235e38f, -3.3895e38f, -1e10f, -1e20f};
    for (u32 r = 0; r < ROWS; ++r) {
        for (u32 t = 0; t < TOKENS; ++t) {
            float logit = static_cast<float>(t * 2654435761u >> 8) * 0x1p-22f;
            if (r < 4 && t % 700 < 300) logit = low[r];
            if (r == 4) logit = t / 8 * 0x1p-6f;
            if (r == 5) logit = t == 2900 ? 3e38f : -3e38f;
            if (r == 6) logit = t % 2 ? 1e30f : 1.5e9f;
            if (r == 7) logit = 20.0f * logit - 1000.0f;
            if (r == 8) logit = t % 100 ? 0.0f : 7.9f;
            logits[t] = logit;
        }
        static double found;
        emulator::run(32, [&] {
            RowMass mass = RowMass::empty();
            for (u32 first = AT_ONCE * threadIdx.x; first < TOKENS; first += AT_ONCE * 32) {
                float2 parts[AT_ONCE];
                for (u32 i = 0; i < AT_ONCE; ++i) parts[i] = {logits[first + i], 1.0f};
                mass = mass.with(parts);
            }
            const RowMass whole = mass.of_warp();
            if (threadIdx.x == 31) found = whole.log_z();
        });
        const double high = *std::max_element(logits, logits + TOKENS);
        double sum = 0.0;
        for (const float logit : logits) sum += ::exp(logit - high);
        const double error = fabs(found - (high + ::log(sum)));
        if (!(error < 2e-6)) fprintf(stderr, "log Z of row %u is %g off\n", r, error), abort();
    }
}

// Checks that both kernels list exactly the tokens whose score is within a slack of a row's draw.
static void check_lists(const Call& call, const float* dots) {
    for (u32 r = 0; r < call.row_count; ++r) {
        const Draw& draw = call.draws[r];
        if (draw.status != Status::Drawn) continue;
        Row row = call.rows[r];
        const Item item{0, 1, 0.75f, 0};
        std::vector<float> logits(call.tokens);
        std::vector<u64> want, found[2];
        for (u32 t = 0; t < call.tokens; ++t) {
            const u32 token = call.first_token + t;
            logits[t] = row.apply(call.head.apply(dots[r * call.tokens + t], call.bias[t], true), token);
            const float noise = row.greedy ? 0.0f : Noise{row.seed, row.position}.gumbel(Domain::Token, row.draw, token);
            const Winner winner = Winner::of(add_rn(logits[t], noise), token);
            if (winner.score >= sub_rn(draw.score, item.slack)) want.push_back(to_ordered_bits(winner));
        }
        row.mask = nullptr, row.biases = 0, row.inv_temperature = 1.0f;
        const StoredLogits stored{logits.data(), call.tokens, call.first_token, call.tokens};
        std::vector<u32> scores(call.tokens);
        for (u32 kernel = 0; kernel < 2; ++kernel) {
            u64 count = 0;
            std::vector<KeptToken> kept(call.tokens);
            const KeptTokens out{kept.data(), &count, kept.size()};
            const u32 parts = (call.first_token + call.tokens - 1) / SCAN_TOKENS + 1 - call.first_token / SCAN_TOKENS;
            if (kernel == 0) {
                const lists::TopLists top{stored, out, &row, &item, scores.data(), 1, 0};
                emulator::launch(1, 1, lists::THREADS, [&] { lists::top_list(top); });
            } else {
                const ties::NearTies near{stored, out, &row, &item, &draw, 2, (parts + 1) / 2};
                emulator::launch(2, 1, 32 * ties::WARPS, [&] { ties::near_ties(near); });
            }
            for (u64 i = 0; i < count; ++i) found[kernel].push_back(kept[i].key);
            std::sort(found[kernel].begin(), found[kernel].end());
        }
        std::sort(want.begin(), want.end());
        if (found[0] != want || found[1] != want) abort();
    }
}

// Summarizes the tokens from `from` to `to` as a launch of `blocks` blocks does, then selects.
static void launch(const Call& whole, const float* dots, u32 from, u32 to, u32 size, u32 blocks, Selection selection) {
    Call call = whole;
    call.first_token += from;
    call.tokens = to - from;
    if (call.bias) call.bias += from;
    const u32 granules = (call.tokens + Groups::GRANULE - 1) / Groups::GRANULE;
    if (blocks > granules) blocks = granules;
    selection.groups = {size, call.first_token, call.tokens, blocks};
    selection.begins = from == 0;
    selection.ends = to == whole.tokens;
    const u32 slots = selection.groups.slots();
    // Poisoned, so that a read of unwritten partials is detected.
    std::vector<Partial> partials(static_cast<size_t>(call.row_count) * slots, Partial{NAN, NAN, NAN, 12345, NAN});
    run_blocks<SummaryEpilogue<COLUMNS>>(call, {partials.data(), size, slots}, dots, whole.tokens, from, blocks);
    selection.partials = partials.data();
    for (u32 row = 0; row < call.row_count; ++row) {
        Select::Shared shared;
        emulator::run(Select::THREADS, [&] {
            Select{selection, call.rows[row], partials.data() + static_cast<size_t>(row) * slots, shared}.block(row);
        });
    }
}

int main() {
    check_row_mass();
    const u32 cases = get<u32>();
    for (u32 i = 0; i < cases; ++i) {
        Call call{};
        call.row_count = get<u32>();
        call.tokens = get<u32>();
        call.first_token = get<u32>();
        const u32 size = get<u32>(), blocks = get<u32>(), part = get<u32>();
        const u32 rule = get<u32>();
        call.head = {get<float>(), get<float>()};
        const auto bias = get_all<float>(call.tokens);
        call.bias = bias.data();
        std::vector<Row> rows(call.row_count);
        std::vector<std::vector<u32>> masks(call.row_count);
        std::vector<std::vector<LogitBias>> biases(call.row_count);
        for (u32 r = 0; r < call.row_count; ++r) {
            Row& row = rows[r];
            row.seed = get<u64>();
            row.position = get<u64>();
            row.inv_temperature = get<float>();
            row.draw = get<u32>();
            row.greedy = get<u32>();
            masks[r] = get_all<u32>(get<u32>());
            biases[r] = get_all<LogitBias>(get<u32>());
            row.mask = masks[r].empty() ? nullptr : masks[r].data();
            row.mask_words = static_cast<u32>(masks[r].size());
            row.bias = biases[r].data();
            row.biases = static_cast<u32>(biases[r].size());
            for (const LogitBias& b : biases[r]) row.largest_bias = fmaxf(row.largest_bias, b.value);
        }
        const auto dots = get_all<float>(static_cast<size_t>(call.row_count) * call.tokens);
        std::vector<u64> invalid(call.row_count, ~0ull);
        std::vector<Running> running(call.row_count, Running{{{NAN, NAN}, {{NAN, 0}, NAN}}, NAN});
        std::vector<Draw> draws(call.row_count);
        std::vector<double> log_z(call.row_count, NAN);
        call.rows = rows.data();
        call.invalid = invalid.data();
        call.draws = draws.data();
        if (rule == FUSED) draw_fused(call, dots.data(), blocks);
        if (rule == EXISTING_F32) draw_existing<u32, f32::Existing>(call, dots.data(), blocks, part == 0, f32::standalone_f32);
        if (rule == EXISTING_F32) check_lists(call, dots.data());
        if (rule == EXISTING_BF16) draw_existing<u16, bf16::Existing>(call, dots.data(), blocks, part == 0, bf16::standalone_bf16);
        Selection selection{};
        selection.rows = rows.data();
        selection.running = running.data();
        selection.invalid = invalid.data();
        selection.draws = draws.data();
        selection.log_z = log_z.data();
        selection.row_count = call.row_count;
        selection.rule = static_cast<Rule>(rule);
        // Launches end at multiples of `part` on the absolute grid; 0 = one launch.
        for (u32 from = 0; rule < FUSED && from < call.tokens;) {
            u32 to = call.tokens;
            if (part) {
                const u64 next = (static_cast<u64>(call.first_token + from) / part + 1) * part - call.first_token;
                if (next < to) to = static_cast<u32>(next);
            }
            launch(call, dots.data(), from, to, size, blocks, selection);
            from = to;
        }
        fwrite(draws.data(), sizeof(Draw), draws.size(), stdout);
        fwrite(log_z.data(), sizeof(double), log_z.size(), stdout);
        for (u64 key : invalid)
            if (key != ~0ull) abort();
    }
    return 0;
}
