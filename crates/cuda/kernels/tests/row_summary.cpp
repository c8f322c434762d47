// The summaries of stored rows on the processor: reads a row and requests from standard input, and writes the kernel's results to
// standard output. crates/cuda/tests/row_summary.rs compares them with core's.
#include "emulator.hpp"

// No case has logits of 16 bits.
#define asm(...) (static_cast<void>(bits), abort())
#include "../row_summary.cu"

template <class T>
static T get() {
    T value;
    if (fread(&value, sizeof(T), 1, stdin) != 1) abort();
    return value;
}

template <class T>
static void put(const T& value) {
    fwrite(&value, sizeof(T), 1, stdout);
}

int main() {
    const u32 first = get<u32>(), tokens = get<u32>(), limit = get<u32>(), is_raw = get<u32>();
    Row row{};
    row.inv_temperature = get<float>();
    std::vector<u32> mask((first + tokens + 31) / 32);
    for (u32& word : mask) word = get<u32>();
    row.mask = mask.data();
    row.mask_words = static_cast<u32>(mask.size());
    // Row 1 of two; the other one makes no list, and stores nothing.
    const u64 stride = (tokens + 3) / 4 * 4;
    std::vector<float> logits(2 * stride);
    for (u32 t = 0; t < tokens; ++t) logits[t] = logits[stride + t] = get<float>();
    const u32 blocks = (tokens + TOKENS - 1) / TOKENS;
    const std::vector<Row> rows{row, row};
    const std::vector<SummaryRequest> requests{{0, 0}, {limit, 1}};
    std::vector<u64> invalid(2, ~0ull), words(2 * (1 + MASS_BINS), 7);
    std::vector<PartMasses> parts(2 * blocks);
    std::vector<KeptToken> listed(2 * RowSummaries::LISTED), kept(tokens);
    std::vector<SummaryCounters> counters(2);
    u64 count = 0;
    const RowSummaries call{{logits.data(), stride, first, tokens}, {kept.data(), &count, kept.size()}, logits.data(), nullptr,
                            is_raw ? rows.data() : nullptr, requests.data(), invalid.data(), words.data(), parts.data(),
                            listed.data(), counters.data(), stride, Element::F32, 0};
    emulator::launch(blocks, 2, THREADS, [&] { row_summaries(call); });
    for (const SummaryCounters& each : counters)
        if (each.arrived || each.listed) abort();
    if (memcmp(&words[0], &words[1 + MASS_BINS], 8 * (1 + MASS_BINS))) abort();
    for (u32 i = 0; i < 1 + MASS_BINS; ++i) put(words[1 + MASS_BINS + i]);
    put(invalid[1]);
    put(count);
    for (u64 i = 0; i < count; ++i) {
        if (kept[i].item != 1) abort();
        put(kept[i].key), put(kept[i].logit);
    }
    for (u32 t = 0; t < tokens; ++t) put(logits[stride + t]);
}
