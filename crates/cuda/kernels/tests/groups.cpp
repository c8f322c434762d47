// The kernels of the grouped and online variants on the processor: reads a problem from standard input, writes a row's
// draws and log Z to standard output. crates/cuda/tests/groups.rs makes the problems and compares with core's reference.
#include "emulator.hpp"

#include "flash_sampling/epilogue/summary.cuh"
#include "flash_sampling/select.cuh"

using namespace flash_sampling;
constexpr int COLUMNS = 16;
using Epilogue = SummaryEpilogue<COLUMNS>;

template <class T>
static T get() {
    T value;
    if (fread(&value, sizeof(T), 1, stdin) != 1) abort();
    return value;
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
    // Poisoned: what is not written must not be read.
    std::vector<Partial> partials(static_cast<size_t>(call.row_count) * slots, Partial{NAN, NAN, NAN, 12345, NAN});
    const Epilogue::Arguments arguments{partials.data(), size, slots};
    for (u32 block = 0; block < blocks; ++block) {
        const Run run = Run::of(block, blocks, call.tokens, Epilogue::GRANULE);
        Epilogue::Shared shared;
        alignas(16) static float tile_dots[COLUMNS * TILE_TOKENS];
        emulator::run(EPILOGUE_THREADS, [&] {
            Epilogue epilogue{call, arguments, run, shared};
            epilogue.begin();
            for (u32 first = run.first; first < run.end; first += TILE_TOKENS) {
                const u32 tokens = run.end - first < TILE_TOKENS ? run.end - first : TILE_TOKENS;
                for (u32 column = 0; column < call.row_count; column += 8) {
                    const u32 columns = call.row_count - column < 8 ? call.row_count - column : 8;
                    __syncthreads();
                    for (u32 i = threadIdx.x; i < columns * TILE_TOKENS; i += EPILOGUE_THREADS) {
                        const u32 c = i / TILE_TOKENS, t = i % TILE_TOKENS;
                        const u64 at = static_cast<u64>(column + c) * whole.tokens + from + first + t;
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
    selection.partials = partials.data();
    for (u32 row = 0; row < call.row_count; ++row) {
        Select::Shared shared;
        emulator::run(Select::THREADS, [&] {
            Select{selection, call.rows[row], partials.data() + static_cast<size_t>(row) * slots, shared}.block(row);
        });
    }
}

int main() {
    const u32 cases = get<u32>();
    for (u32 i = 0; i < cases; ++i) {
        Call call{};
        call.row_count = get<u32>();
        call.tokens = get<u32>();
        call.first_token = get<u32>();
        const u32 size = get<u32>(), blocks = get<u32>(), part = get<u32>();
        const Rule rule = static_cast<Rule>(get<u32>());
        call.head = {get<float>(), get<float>()};
        std::vector<float> bias(call.tokens);
        for (float& b : bias) b = get<float>();
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
            masks[r].resize(get<u32>());
            for (u32& word : masks[r]) word = get<u32>();
            biases[r].resize(get<u32>());
            for (LogitBias& b : biases[r]) b = {get<u32>(), get<float>()};
            row.mask = masks[r].empty() ? nullptr : masks[r].data();
            row.mask_words = static_cast<u32>(masks[r].size());
            row.bias = biases[r].data();
            row.biases = static_cast<u32>(biases[r].size());
        }
        std::vector<float> dots(static_cast<size_t>(call.row_count) * call.tokens);
        for (float& dot : dots) dot = get<float>();
        std::vector<u64> invalid(call.row_count, ~0ull);
        std::vector<Running> running(call.row_count, Running{{{NAN, NAN}, {{NAN, 0}, NAN}}, NAN});
        std::vector<Draw> draws(call.row_count);
        std::vector<double> log_z(call.row_count, NAN);
        call.rows = rows.data();
        call.invalid = invalid.data();
        Selection selection{};
        selection.rows = rows.data();
        selection.running = running.data();
        selection.invalid = invalid.data();
        selection.draws = draws.data();
        selection.log_z = log_z.data();
        selection.row_count = call.row_count;
        selection.rule = rule;
        // Launches end at multiples of `part` on the absolute grid; 0 = one launch.
        for (u32 from = 0; from < call.tokens;) {
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
