// Runs blocks of the fused Hopper kernel on the processor, one after another, and the launches of a draw from a shadow by this
// kernel or by the portable kernel. Reads launches from standard input, and writes draws and lists to standard output.
// crates/cuda/tests/fused_hopper.rs makes the launches and compares the results with core's reference.
#pragma GCC optimize("no-strict-aliasing")
#include <algorithm>

#include "emulator.hpp"

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
#include "flash_sampling/fused_hopper/scaled_hidden.cuh"
#include "flash_sampling/shadow/digits.cuh"
#include "flash_sampling/epilogue/draw.cuh"
#include "flash_sampling/fused_portable.cuh"
#include "flash_sampling/mainloop/tensor.cuh"
#include "flash_sampling/shadow/winners.cuh"

// Both headers have a type of this name, and no kernel includes both.
#define Candidates ListCandidates
#include "flash_sampling/selection/filter_row.cuh"
#undef Candidates

using namespace flash_sampling;
using fused_hopper::FusedVariant;

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
    // The shadow, and its negative controls: 1 = one digit, 2 = a list that drops candidates, 4 = estimates in place of upper bounds,
    // 8 = upper bounds in place of estimates, and no record of the cutoff.
    u32 control = 0, code_stride = 0;
    float largest = 0.0f;
    std::vector<u8> codes;
    std::vector<float> scales, errors, norms;  // `scales` and `codes` also of a weight of 8-bit elements

    void read_shadow() {
        control = get<u32>();
        code_stride = get<u32>();
        largest = get<float>();
        codes = get_all<u8>(static_cast<size_t>(call.tokens) * code_stride);
        scales = get_all<float>(call.tokens);
        errors = get_all<float>(call.tokens);
        norms = get_all<float>(call.tokens);
    }

    void read_scaled() {
        codes = get_all<u8>(static_cast<size_t>(call.tokens) * call.hidden);
        scales = get_all<float>(call.tokens);
    }

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
            filters.back().top_p = get<float>();
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

    struct Matrix {
        const void* elements;
        u32 rows, columns, bytes, stride;
        ptx::TensorMap in_boxes(u32 box) const {
            return {{reinterpret_cast<u64>(elements), rows, columns, box, bytes, stride}};
        }
    };
    Matrix map_of(const std::vector<u16>& matrix, u32 rows) const {
        return {matrix.data(), rows, call.hidden, 2, call.hidden * 2};
    }

    template <class T>
    void run_blocks(const Call& call, const Matrix& weight, const Matrix& states, const RowLists& lists,
                    const Candidates& candidates, const float* factors = nullptr, u32 bf16_row = 0) const {
        const u32 loaded = T::loaded_rows(call.row_count) * T::DIGITS;
        const WeightScales row_scales{scales.data(), 1, call.hidden, 1, 0};
        const fused_hopper::Maps maps{weight.in_boxes(64), weight.in_boxes(16), states.in_boxes(loaded), row_scales,
                                      factors, bf16_row};
        gridDim.x = blocks;
        for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
            // Poisoned, so that a use of unwritten bytes is detected.
            memset(ptx::shared_memory, 0xff, sizeof(ptx::shared_memory));
            emulator::run(T::THREADS, [&] {
                constexpr auto OPERAND = T::CANDIDATES ? ptx::Operand::S8 : ptx::Operand::BF16;
                fused_hopper::block<T, OPERAND>(call, maps, LogitStore{}, lists, Masses{}, Peers{}, candidates,
                                                ptx::shared_memory + 16);
            });
        }
    }

    // Runs the portable kernel, over factors with rows of `stride` bytes.
    template <int COLUMNS, ptx::Operand OPERAND, class Epilogue>
    void run_portable(const Call& call, const void* weight, const void* states, u32 stride,
                      const typename Epilogue::Arguments& arguments) const {
        using Kernel = FusedPortable<TensorMainloop<COLUMNS, OPERAND, true, Element::BF16>, Epilogue>;
        const auto *const at = static_cast<const u8*>(weight), *const hidden = static_cast<const u8*>(states);
        const Matrices matrices{at, hidden, stride, stride, Element::BF16, Element::BF16, 16, 16, {}};
        gridDim.x = min(blocks, (call.tokens + Epilogue::GRANULE - 1) / Epilogue::GRANULE);
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
            memset(ptx::shared_memory, 0xff, sizeof(ptx::shared_memory));
            emulator::run(Kernel::THREADS, [&] { Kernel::block(call, matrices, arguments, ptx::shared_memory); });
        }
    }

    // Makes the launches that read the shadow. With LISTS, `filtered` has the lists of rows with filters.
    template <int COLUMNS, bool LISTS, bool IS_PORTABLE = false>
    void run_shadow(const Call& call, ShadowWords& words, u32& undecided, const FilterListCall& filtered) {
        using Exact = ExactWinners<LISTS, !IS_PORTABLE>;
        constexpr auto VARIANT = LISTS ? FusedVariant::ListedCandidates : FusedVariant::Candidates;
        using T = fused_hopper::Tile<COLUMNS, COLUMNS >= 96 ? 1 : 2, 1, VARIANT>;
        const u32 rows = call.row_count, digit_rows = (rows + 7) / 8 * 16, parts = rows % 3 + 2;
        // Poisoned: `hidden_digits` must clear what the other launches read.
        memset(&words, 0xff, sizeof(words));
        std::vector<u8> digits(static_cast<size_t>(digit_rows) * code_stride, 0x7f);
        std::vector<HiddenBound> bounds(rows);
        std::vector<u32> counts(rows, 77), arrived(rows, 77);
        std::vector<u64> keys(rows * Candidates::ROOM), best(rows, 77);
        std::vector<u32> estimates(rows * Candidates::ROOM);
        std::vector<EstimateCounts> estimated(rows, EstimateCounts{1e30f, 1.0f, {}});
        std::vector<PartWinner> winners(rows * Exact::MAX_PARTS);
        const auto* const at = reinterpret_cast<const u8*>(weight.data());
        const auto* const states = reinterpret_cast<const u8*>(hidden.data());
        const u32 stride = call.hidden * 2;
        const Candidates candidates{scales.data(), errors.data(),    norms.data(), bounds.data(), counts.data(),
                                    keys.data(),   estimates.data(), at,           states,        stride,
                                    stride,        call.hidden,      Element::BF16, estimated.data()};
        const ShadowCall shadow{candidates,     digits.data(),  code_stride, bounds.data(), best.data(),
                                winners.data(), arrived.data(), &words,      largest,       0,
                                &undecided};
        emulator::launch(rows, 1, HiddenDigits::THREADS, [&] {
            static HiddenDigits::Shared shared;
            HiddenDigits::block<Element::BF16>(shadow, blockIdx.x, shared);
        });
        if (control & 1)
            for (u32 row = 0; row < digit_rows; ++row)
                if (row % 16 >= 8) memset(digits.data() + static_cast<size_t>(row) * code_stride, 0, code_stride);
        Call of_candidates = call;
        of_candidates.best = best.data(), of_candidates.arrived = &words.published;
        if constexpr (IS_PORTABLE)
            run_portable<COLUMNS, ptx::Operand::S8, CandidatesEpilogue<COLUMNS>>(of_candidates, codes.data(), digits.data(),
                                                                                 code_stride, candidates);
        else
            run_blocks<T>(of_candidates, {codes.data(), call.tokens, call.hidden, 1, code_stride},
                          {digits.data(), digit_rows, call.hidden, 1, code_stride}, filtered.lists, candidates);
        if (control & 2)
            for (u32& count : counts) count = min(count, Candidates::ROOM);
        for (size_t i = 0; i < keys.size(); ++i) {
            if (control & 4) keys[i] = static_cast<u64>(estimates[i]) << 32 | static_cast<u32>(keys[i]);
            if (control & 8) estimates[i] = static_cast<u32>(keys[i] >> 32);
        }
        memset(ptx::shared_memory, 0xff, sizeof(ptx::shared_memory));
        emulator::launch(parts * rows, 1, Exact::THREADS, [&] {
            static typename Exact::Shared shared;
            Exact{call, shadow, filtered, shared, blockIdx.x / parts, blockIdx.x % parts, parts}
                .template block<ptx::Operand::BF16>(ptx::shared_memory);
        });
    }

    // Draws from a shadow in a call with filters. Rows that need all logits are undecided.
    template <int COLUMNS>
    void run_shadow_lists() {
        std::vector<Draw> draws(call.row_count, Draw{0, 0.0f, 0.0f, Status::LateRank});
        std::vector<ListCounters> counters(call.row_count);
        std::vector<u32> posted(call.row_count * RowLists::POSTS);
        std::vector<u64> keys(call.row_count * RowLists::ROOM);
        FilterPasses passes = FilterPasses::Lists;
        const FilterListCall filtered{{filters.data(), counters.data(), posted.data(), keys.data()}, rows.data(), draws.data(), &passes};
        ShadowWords words{};
        u32 undecided = 0;
        call.draws = draws.data();
        run_shadow<COLUMNS, true>(call, words, undecided, filtered);
        const bool is_open = words.open;
        if (is_open != (passes == FilterPasses::Both)) abort();
        for (u32 r = 0; r < call.row_count; ++r) {
            Draw draw = draws[r];
            if (control & 8) counters[r].cut = 0;
            if (draw.status == Status::Drawn && !rows[r].greedy && filters[r].is_listed()) {
                static FilterRow::Shared shared;
                shared.row = rows[r];
                emulator::run(FilterRow::THREADS, [&] {
                    FilterRow select{filters[r], ExistingRow{nullptr, 0, 0}, shared};
                    const Draw found = select.draw_listed(keys.data() + r * RowLists::ROOM, counters[r]);
                    if (threadIdx.x == 0) draw = found;
                });
            }
            put(draw);
            put(counters[r].count);
        }
    }

    // Copies the hidden states, and runs the kernel over a weight of 8-bit elements.
    template <class T>
    void multiply_scaled(const RowLists& lists) const {
        const u32 copied = T::loaded_rows(call.row_count), stride = (call.hidden + 15) / 16 * 16;
        std::vector<u16> copies(2 * copied * stride, 0xffff);
        std::vector<float> factors(copied, NAN);
        // Rows are multiples of 16 bytes apart, with NaN between them.
        const u32 padded = (call.hidden + 7) / 8 * 8;
        std::vector<u16> states(call.row_count * padded, 0x7fff);
        for (u32 r = 0; r < call.row_count; ++r)
            std::copy_n(hidden.begin() + r * call.hidden, call.hidden, states.begin() + r * padded);
        const ScaledHidden scaled{reinterpret_cast<const u8*>(states.data()), padded * 2, copies.data(), factors.data(),
                                  call.row_count, copied, call.hidden, stride};
        emulator::launch(copied, 1, HiddenScaler::THREADS, [&] {
            static HiddenScaler::Shared shared;
            HiddenScaler::block(scaled, blockIdx.x, shared);
        });
        const Matrix elements{codes.data(), call.tokens, call.hidden, 1, call.hidden};
        run_blocks<T>(call, elements, {copies.data(), 2 * copied, stride, 2, stride * 2}, lists, Candidates{}, factors.data(),
                      copied);
    }
    template <int COLUMNS, Element WEIGHT>
    void run_scaled() { run<COLUMNS, FusedVariant::MasksPenalties, false, WEIGHT>(); }

    // With IS_PORTABLE, by the portable kernel, which makes plain draws.
    template <int COLUMNS, FusedVariant VARIANT, bool IS_PORTABLE = false, Element WEIGHT = Element::BF16>
    void run(bool has_shadow = false) {
        constexpr bool SCALED = has_scales(WEIGHT), IS_WIDE = COLUMNS >= (SCALED ? 64 : 192);
        using T = fused_hopper::Tile<COLUMNS, IS_WIDE ? 1 : 2, 1, VARIANT, WEIGHT, SCALED && IS_WIDE ? 3 : 2>;
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
        ShadowWords words{};
        u32 undecided = 0;
        if constexpr (COLUMNS <= 96 && !SCALED)
            if (has_shadow) {
                run_shadow<COLUMNS, false, IS_PORTABLE>(call, words, undecided, FilterListCall{});
                call.skip_if = {&words.open, 0, 0};
            }
        if constexpr (SCALED)
            multiply_scaled<T>(lists);
        else if constexpr (IS_PORTABLE)
            run_portable<COLUMNS, ptx::Operand::BF16, DrawEpilogue<COLUMNS>>(call, weight.data(), hidden.data(),
                                                                             2 * call.hidden, {});
        else
            run_blocks<T>(call, map_of(weight, call.tokens), map_of(hidden, call.row_count), lists, Candidates{});
        if (has_shadow) put(undecided);
        for (u32 r = 0; r < call.row_count; ++r) {
            if (best[r] != 0 || invalid[r] != ~0ull || arrived != 0) abort();
            fwrite(&draws[r], sizeof(Draw), 1, stdout);
            if (VARIANT != FusedVariant::Lists) continue;
            fwrite(&counters[r], sizeof(ListCounters), 1, stdout);
            fwrite(&keys[r * RowLists::ROOM], sizeof(u64), min(counters[r].count, RowLists::ROOM), stdout);
        }
    }

};

// Calls `run` with the one of COLUMNS that equals `columns`, as a constant.
template <int... COLUMNS, class Run>
static void with_columns(u32 columns, Run run) {
    ((columns == COLUMNS ? run(std::integral_constant<int, COLUMNS>{}) : void()), ...);
}

template <FusedVariant VARIANT>
static void run_plain(Launch& launch, u32 columns) {
    with_columns<8, 16, 32, 96, 192, 256>(columns, [&](auto c) { launch.run<c.value, VARIANT>(); });
}

int main() {
    for (u32 launches = get<u32>(); launches > 0; --launches) {
        const u32 columns = get<u32>(), variant = get<u32>();
        emulator::is_backwards = get<u32>();
        Launch launch;
        if (variant >= 3 && variant <= 5) launch.read_shadow();
        if (variant >= 6) launch.read_scaled();
        if (variant == 0) run_plain<FusedVariant::Plain>(launch, columns);
        if (variant == 1) run_plain<FusedVariant::MasksPenalties>(launch, columns);
        if (variant == 2) run_plain<FusedVariant::Lists>(launch, columns);
        if (variant == 3)
            with_columns<8, 16, 32, 96>(columns, [&](auto c) { launch.run<c.value, FusedVariant::MasksPenalties>(true); });
        if (variant == 4) with_columns<8, 16, 32, 96>(columns, [&](auto c) { launch.run_shadow_lists<c.value>(); });
        if (variant == 5)
            with_columns<8, 16, 32, 64>(columns, [&](auto c) { launch.run<c.value, FusedVariant::Plain, true>(true); });
        if (variant == 6)
            with_columns<8, 32, 64, 128>(columns, [&](auto c) { launch.run_scaled<c.value, Element::F8_E4M3>(); });
        if (variant == 7) with_columns<8, 32, 64, 128>(columns, [&](auto c) { launch.run_scaled<c.value, Element::I8>(); });
    }
    return 0;
}
