// Runs blocks of the fused Hopper kernel on the processor, one after another. Reads launches from standard input, and writes
// draws and lists to standard output. crates/cuda/tests/fused_hopper.rs makes the launches and compares the results with core's
// reference.
#pragma GCC optimize("no-strict-aliasing")
#include "emulator.hpp"

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline bool __all_sync(unsigned mask, bool vote) { return !__any_sync(mask, !vote); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) { return value; }

#define FS_EMULATED "../../../tests/hopper_ptx.hpp"
#include "flash_sampling/noise/bound.cuh"

// The negative control makes the noise bounds smaller than the noise.
static float bound_factor;
#define noise_bound(word) (bound_factor * (noise_bound)(word))
#include "flash_sampling/fused_hopper/kernel.cuh"

using namespace flash_sampling;
using fused_hopper::FusedVariant;

template <class T>
static std::vector<T> get_all(size_t count) {
    std::vector<T> values(count);
    if (count && fread(values.data(), sizeof(T), count, stdin) != count) abort();
    return values;
}

// A launch and all data of its rows.
struct Launch {
    Call call{};
    u32 blocks;
    std::vector<u16> weight, hidden;
    std::vector<Row> rows;
    std::vector<std::vector<u32>> masks;
    std::vector<std::vector<LogitBias>> biases;
    std::vector<RowFilters> filters;
    std::vector<float> bias;

    Launch() {
        call.row_count = get<u32>();
        call.tokens = get<u32>();
        call.first_token = get<u32>();
        call.hidden = get<u32>();
        blocks = get<u32>();
        bound_factor = get<float>();
        call.head = {get<float>(), get<float>()};
        bias = get_all<float>(call.tokens);
        call.bias = bias.data();
        weight = get_all<u16>(static_cast<size_t>(call.tokens) * call.hidden);
        hidden = get_all<u16>(static_cast<size_t>(call.row_count) * call.hidden);
        for (u32 r = 0; r < call.row_count; ++r) {
            Row row{};
            row.seed = get<u64>();
            row.position = get<u64>();
            row.inv_temperature = get<float>();
            row.draw = get<u32>();
            row.greedy = get<u32>();
            filters.push_back({-INFINITY, 1.0f, get<u32>(), 1.0f, 0});
            filters.back().ln_min_p = get<double>();
            masks.push_back(get_all<u32>(get<u32>()));
            biases.push_back(get_all<LogitBias>(get<u32>()));
            row.mask_words = static_cast<u32>(masks[r].size());
            row.mask = masks[r].empty() ? nullptr : masks[r].data();
            row.biases = static_cast<u32>(biases[r].size());
            row.bias = biases[r].data();
            for (const LogitBias& b : biases[r]) row.largest_bias = fmaxf(row.largest_bias, b.value);
            rows.push_back(row);
        }
        call.rows = rows.data();
    }

    template <int COLUMNS, FusedVariant VARIANT>
    void run() {
        using T = fused_hopper::Tile<COLUMNS, COLUMNS >= 192 ? 1 : 2, 1, VARIANT>;
        std::vector<u64> best(call.row_count), invalid(call.row_count, ~0ull);
        std::vector<float> logits(call.row_count * blocks);
        std::vector<Draw> draws(call.row_count);
        u32 arrived = 0;
        call.best = best.data(), call.invalid = invalid.data(), call.logits = logits.data();
        call.arrived = &arrived, call.draws = draws.data();
        std::vector<ListCounters> counters(call.row_count);
        std::vector<u32> posted(call.row_count * RowLists::POSTS);
        std::vector<u64> keys(call.row_count * RowLists::ROOM);
        const RowLists lists{filters.data(), counters.data(), posted.data(), keys.data()};
        const auto map_of = [&](const std::vector<u16>& matrix, u32 rows, u32 box) {
            return ptx::TensorMap{{reinterpret_cast<u64>(matrix.data()), rows, call.hidden, box}};
        };
        const fused_hopper::Maps maps{map_of(weight, call.tokens, 64), map_of(weight, call.tokens, 16),
                                      map_of(hidden, call.row_count, T::loaded_rows(call.row_count))};
        gridDim.x = blocks;
        for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
            // Poisoned, so that a use of unwritten bytes is detected.
            memset(ptx::shared_memory, 0xff, sizeof(ptx::shared_memory));
            emulator::run(T::THREADS, [&] {
                fused_hopper::block<T, ptx::Operand::BF16>(call, maps, LogitStore{}, lists, Masses{}, Peers{},
                                                           ptx::shared_memory + 16);
            });
        }
        for (u32 r = 0; r < call.row_count; ++r) {
            if (best[r] != 0 || invalid[r] != ~0ull || arrived != 0) abort();
            fwrite(&draws[r], sizeof(Draw), 1, stdout);
            if (VARIANT != FusedVariant::Lists) continue;
            fwrite(&counters[r], sizeof(ListCounters), 1, stdout);
            fwrite(&keys[r * RowLists::ROOM], sizeof(u64), min(counters[r].count, RowLists::ROOM), stdout);
        }
    }

    template <FusedVariant VARIANT>
    void run(u32 columns) {
        if (columns == 8) run<8, VARIANT>();
        if (columns == 16) run<16, VARIANT>();
        if (columns == 32) run<32, VARIANT>();
        if (columns == 96) run<96, VARIANT>();
        if (columns == 192) run<192, VARIANT>();
        if (columns == 256) run<256, VARIANT>();
    }
};

int main() {
    for (u32 launches = get<u32>(); launches > 0; --launches) {
        const u32 columns = get<u32>(), variant = get<u32>();
        emulator::is_backwards = get<u32>();
        Launch launch;
        if (variant == 0) launch.run<FusedVariant::Plain>(columns);
        if (variant == 1) launch.run<FusedVariant::MasksPenalties>(columns);
        if (variant == 2) launch.run<FusedVariant::Lists>(columns);
    }
    return 0;
}
