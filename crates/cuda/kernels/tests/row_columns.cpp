// Encodes rows from arrays of parameters, and writes draws to arrays, on the processor. Reads the arrays from standard input, and
// writes rows, lists and results to standard output. The unit tests of device/row_columns.rs compare them with the host's.
#include "emulator.hpp"
#include "../row_columns.cu"

template <class T>
static void put(const T* values, size_t count) {
    fwrite(values, sizeof(T), count, stdout);
}

// Reads an array: a flag, and if it is set, the values. Arrays stay until the end of the program.
template <class T>
static const T* array(size_t count) {
    if (!get<u32>()) return nullptr;
    return (new std::vector<T>(get_all<T>(count)))->data();
}

static TokenLists lists(u32 entries) {
    const u32 count = get<u32>();
    const i64* begin = array<i64>(entries);
    const i64* end = array<i64>(entries);
    return {begin, end, array<i32>(count)};
}

int main() {
    const u32 first_row = get<u32>(), count = get<u32>(), entries = get<u32>(), rows = first_row + count;
    EncodeRows call{};
    call.first_row = first_row;
    call.first_token = get<u32>(), call.tokens = get<u32>(), call.vocab_size = get<u32>(), call.max_adjusted = get<u32>();
    RowColumns& columns = call.columns;
    columns.index = array<i32>(rows);
    columns.seed = array<u64>(entries);
    const u64* positions = array<u64>(rows);
    columns.position = positions;
    columns.temperature = array<float>(entries);
    columns.top_k = array<i32>(entries);
    columns.top_p = array<float>(entries);
    columns.min_p = array<float>(entries);
    columns.repetition_penalty = array<float>(entries);
    columns.frequency_penalty = array<float>(entries);
    columns.presence_penalty = array<float>(entries);
    columns.min_tokens = array<i32>(entries);
    columns.mask_words = get<u32>();
    columns.mask_stride = columns.mask_words + 1;
    columns.mask = array<u32>(rows * columns.mask_stride);
    columns.logit_bias = lists(entries);
    const u32 values = get<u32>();
    columns.logit_bias_values = array<float>(values);
    columns.banned = lists(entries);
    columns.stop_tokens = lists(entries);
    columns.prompt = lists(entries);
    columns.output = lists(entries);

    const u64 stride = 2 * call.max_adjusted + 1;
    std::vector<Row> encoded(count);
    std::vector<RowFilters> filters(count);
    std::vector<Parameter> invalid(count);
    std::vector<LogitBias> biases(count * stride);
    std::vector<u32> counts(count * call.max_adjusted + 1), contents(count);
    call.rows = encoded.data(), call.filters = filters.data(), call.invalid = invalid.data();
    call.lists = biases.data(), call.counts = counts.data(), call.contents = contents.data();
    FilterPasses passes = FilterPasses::Lists;
    call.passes = &passes;
    call.largest_top_k = count % 2 ? TOP_K_MAX : 300;
    // Positions of i32 are those of u64; a negative position is invalid.
    std::vector<i32> short_positions(rows, -1);
    for (u32 i = 0; i < count; ++i)
        if (positions && positions[first_row + i] < 1u << 31) short_positions[first_row + i] = static_cast<i32>(positions[first_row + i]);
    columns.position = reinterpret_cast<const u64*>(short_positions.data()), columns.has_short_positions = 1;
    emulator::launch(count, 1, THREADS, [&] { encode_rows(call); });
    for (u32 i = 0; i < count; ++i) {
        const bool is_short = short_positions[first_row + i] >= 0, is_valid = invalid[i] == Parameter::None;
        if (is_short ? is_valid && encoded[i].position != positions[first_row + i] : is_valid) abort();
    }
    columns.position = positions, columns.has_short_positions = 0, passes = FilterPasses::Lists;
    for (const bool is_backwards : {true, false}) {
        const auto earlier = biases;
        const auto earlier_rows = encoded;
        emulator::is_backwards = is_backwards;
        emulator::launch(count, 1, THREADS, [&] { encode_rows(call); });
        // The order of threads does not matter.
        if (!is_backwards && (memcmp(earlier.data(), biases.data(), biases.size() * sizeof(LogitBias)) ||
                              memcmp(earlier_rows.data(), encoded.data(), count * sizeof(Row)))) abort();
    }
    for (u32 i = 0; i < count; ++i) {
        const Row& row = encoded[i];
        if (row.mask && row.mask != columns.mask + (first_row + i) * columns.mask_stride) abort();
        const u32 members = row.biases & ~PENALISED;
        if (row.bias && row.bias != biases.data() + i * stride) abort();
        const u32 head[] = {static_cast<u32>(row.seed), static_cast<u32>(row.seed >> 32), static_cast<u32>(row.position),
                            static_cast<u32>(row.position >> 32), row.mask != nullptr, row.mask_words, row.biases,
                            f32_to_bits(row.inv_temperature), f32_to_bits(row.largest_bias), row.draw, row.greedy,
                            static_cast<u32>(invalid[i])};
        put(head, 12);
        put(&filters[i], 1);
        put(row.bias, members);
        if (row.biases & PENALISED) put(reinterpret_cast<const Penalty*>(row.bias + members), members + 1);
        put(&contents[i], 1);
    }

    // All logits are needed if the filters of a row have no list, or too large a top-k.
    bool needs_logits = false;
    for (const RowFilters& each : filters)
        needs_logits |= each.top_k > call.largest_top_k || (each.is_any() && !each.top_k && !each.is_listed_by_min_p());
    if (passes != (needs_logits ? FilterPasses::Logits : FilterPasses::Lists)) abort();

    // Draws with every status. The elements of other rows stay.
    std::vector<Draw> draws(count);
    for (u32 i = 0; i < count; ++i) draws[i] = Draw{i, 0.5f * static_cast<float>(i), -1.0f, static_cast<Status>(i % 7)};
    std::vector<i64> tokens(rows, 77);
    std::vector<float> scores(rows, 7.0f);
    std::vector<u32> statuses(rows, 77);
    const WriteTokens write{{tokens.data(), scores.data(), nullptr, statuses.data(), {}, {}, {}, 0, 0}, draws.data(), invalid.data(), first_row, count, &passes};
    emulator::launch((count + 255) / 256, 1, 256, [&] { write_tokens(write); });
    if (passes != FilterPasses::Lists) abort();
    std::vector<i64> completed(rows, 77);
    WriteTokens complete = write;
    complete.columns.tokens = completed.data(), complete.columns.is_complete = 1;
    emulator::launch((count + 255) / 256, 1, 256, [&] { write_tokens(complete); });
    for (u32 i = 0; i < rows; ++i)
        if (completed[i] != (tokens[i] < 0 ? 0 : tokens[i])) abort();
    put(tokens.data(), rows), put(scores.data(), rows), put(statuses.data(), rows);
}
