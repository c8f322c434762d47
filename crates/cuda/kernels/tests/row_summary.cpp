// Runs the summaries of stored rows on the processor. Reads a row and requests from standard input, and writes the kernel's
// results to standard output. crates/cuda/tests/row_summary.rs compares them with core's results. Also checks the copies of 16-bit
// logits.
#include "emulator.hpp"

// No case has logits of 16 bits.
#define asm(...) (static_cast<void>(bits), abort())
#include "../row_summary.cu"

#include "flash_sampling/selection/row_filters.cuh"
namespace widen {
#include "../widen_rows.cu"
}  // namespace widen

// Checks copies of bf16 rows that begin at odd elements. The draw without filters has no copy.
static void check_copies() {
    constexpr u32 TOKENS = 4099, STRIDE = 4103, COPY_STRIDE = 4100, DRAWS = 4;
    const RowFilters off{-INFINITY, 1.0f, 0, 1.0f, 0}, top_k{-INFINITY, 1.0f, 5, 1.0f, 0};
    const RowFilters filters[DRAWS] = {top_k, off, {-3.0, 1.0f, 0, 1.0f, 0}, {-INFINITY, 0.5f, 0, 1.0f, 0}};
    const u32 sources[DRAWS] = {2, 0, 1, 2}, own[DRAWS] = {0, 1, 2, 3};
    std::vector<u16> logits(DRAWS * STRIDE);
    for (u32 i = 0; i < logits.size(); ++i) logits[i] = static_cast<u16>(i * 40503u >> 3);
    for (const bool has_sources : {false, true}) {
        std::vector<float> copies(DRAWS * COPY_STRIDE, 0.5f);
        const widen::WidenRows call{&logits[1], has_sources ? sources : nullptr, filters, copies.data(), STRIDE, COPY_STRIDE,
                                    Element::BF16, TOKENS};
        emulator::launch(3, DRAWS, widen::THREADS, [&] { widen::widen_rows(call); });
        for (u32 draw = 0; draw < DRAWS; ++draw)
            for (u32 t = 0; t < COPY_STRIDE; ++t) {
                const u32 bits = static_cast<u32>(logits[1 + (has_sources ? sources : own)[draw] * STRIDE + t]) << 16;
                const u32 want = draw == 1 || t >= TOKENS ? f32_to_bits(0.5f) : bits;
                if (f32_to_bits(copies[draw * COPY_STRIDE + t]) != want) abort();
            }
    }
}

int main() {
    check_copies();
    const u32 first = get<u32>(), tokens = get<u32>(), limit = get<u32>(), is_raw = get<u32>();
    Row row{};
    row.inv_temperature = get<float>();
    const auto mask = get_all<u32>(get<u32>());
    row.mask = mask.empty() ? nullptr : mask.data();
    row.mask_words = static_cast<u32>(mask.size());
    // Row 1 of three. The other rows make no list, and store nothing. Row 2 has the logits of row 0.
    const u64 stride = (tokens + 3) / 4 * 4;
    std::vector<float> logits(2 * stride);
    for (u32 t = 0; t < tokens; ++t) logits[t] = logits[stride + t] = get<float>();
    const auto weights = get_all<double>(MASS_BINS);
    const u32 blocks = (tokens + TOKENS - 1) / TOKENS, top_stride = limit + 1;
    const std::vector<Row> rows{row, row, row};
    const std::vector<u32> sources{0, 1, 0};
    const std::vector<SummaryRequest> requests{{0, 0, 1, 0, 0.0f}, {limit, 1, 1, 0, 0.0f}, {0, 0, 0, 0, 0.0f}};
    std::vector<SummaryResult> results(3);
    memset(results.data(), 0xff, sizeof(SummaryResult) * results.size());
    std::vector<u64> words(3 * (1 + MASS_BINS), 7);
    std::vector<PartMasses> parts(3 * blocks);
    std::vector<KeptToken> listed(3 * RowSummaries::LISTED), top(3 * top_stride);
    std::vector<u32> listed_counts(3);
    const RowSummaries call{{logits.data(), stride, first, tokens}, logits.data(), sources.data(), is_raw ? rows.data() : nullptr,
                            requests.data(), results.data(), top.data(), words.data(), parts.data(), listed.data(),
                            listed_counts.data(), weights.data(), stride, Element::F32, top_stride, nullptr};
    emulator::launch(3, blocks, THREADS, [&] { part_summaries(call); });
    emulator::launch(3, 1, THREADS, [&] { row_summaries(call); });
    // All rows have the same masses. The last row writes only their sum.
    if (memcmp(&words[0], &words[1 + MASS_BINS], 8 * (1 + MASS_BINS))) abort();
    for (u32 i = 0; i < 1 + MASS_BINS; ++i) {
        if (words[2 * (1 + MASS_BINS) + i] != 7) abort();
        put(words[1 + MASS_BINS + i]);
    }
    const SummaryResult& result = results[1];
    for (const SummaryResult& each : results)
        if (memcmp(&each, &result, __builtin_offsetof(SummaryResult, listed))) abort();
    put(result);
    if (results[0].listed || results[2].listed) abort();
    for (u32 i = 0; i < result.listed && result.listed != SummaryResult::LOST; ++i) {
        if (top[top_stride + i].item != 1) abort();
        put(top[top_stride + i].key), put(top[top_stride + i].logit);
    }
    // Two wrong sums: from the lowest bin up, and with one rounding too few.
    double upwards = 0.0, fused = 0.0;
    const u32 slot = result.max == -f32_infinity() ? 0 : mass_slot(result.max);
    const auto mass = [&](u32 i) { return static_cast<double>(words[1 + MASS_BINS + 1 + ((slot - i) & (MASS_BINS - 1))]) / 1073741824.0; };
    for (u32 i = MASS_BINS; i-- > 0;) upwards += mass(i) * weights[i];
    for (u32 i = 0; i < MASS_BINS; ++i) fused = fma(mass(i), weights[i], fused);
    put(upwards), put(fused);
    for (u32 t = 0; t < tokens; ++t) put(logits[stride + t]);
}
