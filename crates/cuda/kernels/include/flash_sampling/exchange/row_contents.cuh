// A digest of a row's mask, lists, penalties and filters. Ranks compare the digests if each rank decides the filters of a row
// from the logits of all ranks: with other filters or biases, ranks would draw other tokens.
#pragma once

#include "../abi.cuh"

namespace flash_sampling {

// Returns the share of a pair of words in a digest, which is the sum of all shares.
FS_FUNCTION u32 share_of_contents(u64 key, u64 value) {
    u64 hash = (key ^ 0xcbf29ce484222325ull) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 29;
    hash = (hash ^ value) * 0x9e3779b97f4a7c15ull;
    return static_cast<u32>(hash >> 32);
}

FS_FUNCTION u64 two_words(u32 high, u32 low) { return static_cast<u64>(high) << 32 | low; }

// Tokens are below 2^31, so the keys of words of a mask, and of filters, differ from the keys of tokens.
constexpr u64 MASK_CONTENTS = 1ull << 63, FILTER_CONTENTS = 3ull << 62;

FS_FUNCTION u32 share_of_filters(float min_p, float top_p, u32 top_k) {
    return share_of_contents(FILTER_CONTENTS | f32_to_bits(min_p), two_words(f32_to_bits(top_p), top_k));
}

// Returns the shares of every `threads`-th word of a mask and token of a list, beginning at number `thread`.
FS_FUNCTION u32 share_of_transform(const RowTransform& row, u32 vocab_size, u32 thread, u32 threads) {
    u32 digest = 0;
    for (u32 i = thread; i < row.bias_count(); i += threads) {
        const LogitBias bias = row.bias[i];
        const Penalty none{1.0f, 0.0f}, penalty = row.is_penalised() ? row.penalties()[1 + i] : none;
        digest += share_of_contents(two_words(bias.token, f32_to_bits(bias.value)),
                                    two_words(f32_to_bits(penalty.repetition), f32_to_bits(penalty.subtract)));
    }
    for (u32 word = thread; row.mask && word < row.mask_words && word <= (vocab_size - 1) / 32; word += threads) {
        // Bits beyond the vocabulary do not matter.
        const u32 tokens = vocab_size - 32 * word, bits = tokens < 32 ? (1u << tokens) - 1 : 0xffffffffu;
        digest += share_of_contents(MASK_CONTENTS | word, row.mask[word] & bits);
    }
    return digest;
}

}  // namespace flash_sampling
