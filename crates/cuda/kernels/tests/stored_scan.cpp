// Runs the scans of stored logits on the processor. Reads a stored row and requests from standard input, and writes the kernels'
// results to standard output. crates/cuda/tests/stored_scan.rs compares them with core's plain scan.
#include "emulator.hpp"

#include "../stored_scan.cu"

static void put_kept(const std::vector<KeptToken>& kept, u64 count) {
    put(count);
    for (u64 i = 0; i < count; ++i) put(kept[i].key), put(kept[i].logit);
}

int main() {
    const u32 first = get<u32>(), tokens = get<u32>();
    Row row{};
    row.seed = get<u64>();
    row.position = get<u64>();
    row.draw = get<u32>();
    row.inv_temperature = get<float>();
    const float floor = get<float>();
    std::vector<SumQuery> places(get<u32>());
    for (SumQuery& place : places) place = {1, get<u32>(), get<float>(), 0};
    const SumQuery scale{1, 0, get<float>(), 0};
    // Row 1 of two. The kernels must not read the other row.
    const u64 stride = (tokens + 3) / 4 * 4;
    std::vector<float> logits(2 * stride, NAN);
    for (u32 t = 0; t < tokens; ++t) logits[stride + t] = get<float>();
    const StoredLogits stored{logits.data(), stride, first, tokens};

    u64 count = 0;
    std::vector<KeptToken> kept(tokens);
    const Item item{1, 0xffffffffu, floor, 0};
    const ScanTokens of_tokens{stored, {kept.data(), &count, kept.size()}, &row, &item};
    emulator::launch((first + tokens - first / TILE * TILE + TOKENS - 1) / TOKENS, 1, THREADS, [&] { frontiers(of_tokens); });
    put_kept(kept, count);
    count = 0;
    const u32 blocks = (tokens + TOKENS - 1) / TOKENS;
    emulator::launch(blocks, 1, THREADS, [&] { tokens_above(of_tokens); });
    put_kept(kept, count);
    std::vector<u64> sums(places.size(), 0);
    const ScanSums of_places{stored, places.data(), sums.data()};
    if (!places.empty()) emulator::launch(blocks, static_cast<u32>(places.size()), THREADS, [&] { prefix_masses(of_places); });
    for (const u64 sum : sums) put(sum);
    std::fill(sums.begin(), sums.end(), 0);
    if (!places.empty()) emulator::launch(blocks, static_cast<u32>(places.size()), THREADS, [&] { prefix_counts(of_places); });
    for (const u64 sum : sums) put(sum);
    u64 words[9] = {};
    const ScanSums of_row{stored, &scale, words};
    emulator::launch(blocks, 1, THREADS, [&] { moments(of_row); });
    for (const u64 word : words) put(word);
}
