// Kernels of calls whose parameters are in device memory. `encode_rows` converts the arrays of parameters into the rows that the
// other kernels read, with one block per row. `write_tokens` writes the results as one array per field.
//
// An adjusted token has a bias, a ban or a penalty. `encode_rows` marks the adjusted tokens of a row in a bit set, and lists them
// in ascending order without a sort: the place of a token in the list is the number of smaller tokens in the set.
#include "flash_sampling/exchange/row_contents.cuh"
#include "flash_sampling/selection/logprob_columns.cuh"
#include "flash_sampling/selection/row_lists.cuh"
#include "flash_sampling/warp.cuh"

using namespace flash_sampling;

using i64 = long long;

constexpr u32 THREADS = 512;
constexpr u32 TOP_K_MAX = 1024;
// Tokens of a window of the vocabulary. Each window fills the bit set anew.
constexpr u32 WINDOW = 327680;
constexpr u32 CHUNK = 256;  // tokens that share a count of smaller tokens
constexpr float LARGEST_PENALTY = 18446744073709551616.0f;

// The first invalid parameter of a row, in the order of `PARAMETERS` of abi/columns.rs.
enum class Parameter : u32 {
    None = 0,
    Position = 1,
    Temperature = 2,
    TopK = 3,
    TopP = 4,
    MinP = 5,
    RepetitionPenalty = 6,
    FrequencyPenalty = 7,
    PresencePenalty = 8,
    LogitBias = 9,
    Adjusted = 10,  // more adjusted tokens than planned
};

// List e has tokens[begin[e]] to tokens[end[e] - 1]. Null tokens: every list is empty.
struct TokenLists {
    const i64* begin;
    const i64* end;
    const i32* tokens;
};
FS_LAYOUT(TokenLists, 24, FS_AT(begin, 0) && FS_AT(end, 8) && FS_AT(tokens, 16));

// One array per parameter; a null array gives all rows the default. Positions and masks have one element per row. Of other
// parameters, row r has element or list index[r], or r without an index.
struct RowColumns {
    const i32* index;
    const u64* seed;
    const u64* position;
    const float* temperature;
    const i32* top_k;
    const float* top_p;
    const float* min_p;
    const float* repetition_penalty;
    const float* frequency_penalty;
    const float* presence_penalty;
    const i32* min_tokens;
    const u32* mask;
    u64 mask_stride;
    u32 mask_words;
    u32 has_short_positions;  // positions are i32
    TokenLists logit_bias;
    const float* logit_bias_values;
    TokenLists banned;
    TokenLists stop_tokens;
    TokenLists prompt;
    TokenLists output;
};
FS_LAYOUT(RowColumns, 240,
          FS_AT(index, 0) && FS_AT(seed, 8) && FS_AT(position, 16) && FS_AT(temperature, 24) && FS_AT(top_k, 32) &&
          FS_AT(top_p, 40) && FS_AT(min_p, 48) && FS_AT(repetition_penalty, 56) && FS_AT(frequency_penalty, 64) &&
          FS_AT(presence_penalty, 72) && FS_AT(min_tokens, 80) && FS_AT(mask, 88) && FS_AT(mask_stride, 96) &&
          FS_AT(mask_words, 104) && FS_AT(has_short_positions, 108) && FS_AT(logit_bias, 112) && FS_AT(logit_bias_values, 136) &&
          FS_AT(banned, 144) && FS_AT(stop_tokens, 168) && FS_AT(prompt, 192) && FS_AT(output, 216));

struct EncodeRows {
    RowColumns columns;
    Row* rows;          // [gridDim.x]
    RowFilters* filters;
    Parameter* invalid;
    LogitBias* lists;   // [gridDim.x, 2 * max_adjusted + 1]
    u32* counts;        // [gridDim.x, max_adjusted] scratch
    u32 first_row;      // the row of the first block
    u32 max_adjusted;       // adjusted tokens of a row
    u32 first_token;
    u32 tokens;
    u32 vocab_size;
    u32 largest_top_k;  // with `passes`, rows with a larger top-k need all logits
    u32* contents;      // [gridDim.x] the digests of row_contents.cuh; null = none
    FilterPasses* passes;  // null: one pass
};
FS_LAYOUT(EncodeRows, 320,
          FS_AT(columns, 0) && FS_AT(rows, 240) && FS_AT(filters, 248) && FS_AT(invalid, 256) && FS_AT(lists, 264) &&
          FS_AT(counts, 272) && FS_AT(first_row, 280) && FS_AT(max_adjusted, 284) && FS_AT(first_token, 288) &&
          FS_AT(tokens, 292) && FS_AT(vocab_size, 296) && FS_AT(largest_top_k, 300) && FS_AT(contents, 304) &&
          FS_AT(passes, 312));

struct TokenColumns {
    i64* tokens;
    float* scores;
    float* logits;
    u32* statuses;
    LogprobColumns processed, raw;  // for row_logprobs.cu, as the kept tokens
    KeptColumns kept;
    u32 is_complete;  // a row without a draw has token 0 instead of -1
    u32 padding;
};
FS_LAYOUT(TokenColumns, 192,
          FS_AT(tokens, 0) && FS_AT(scores, 8) && FS_AT(logits, 16) && FS_AT(statuses, 24) && FS_AT(processed, 32) &&
          FS_AT(raw, 96) && FS_AT(kept, 160) && FS_AT(is_complete, 184) && FS_AT(padding, 188));

struct WriteTokens {
    TokenColumns columns;
    const Draw* draws;
    const Parameter* invalid;
    u32 first_row;
    u32 row_count;
    FilterPasses* passes;  // for the next call
};
FS_LAYOUT(WriteTokens, 224,
          FS_AT(columns, 0) && FS_AT(draws, 192) && FS_AT(invalid, 200) && FS_AT(first_row, 208) && FS_AT(row_count, 212) &&
          FS_AT(passes, 216));

// The tokens of one row.
struct List {
    const i32* tokens;
    u64 len;

    __device__ __forceinline__ List(const TokenLists& lists, u32 entry) : tokens(nullptr), len(0) {
        if (!lists.tokens) return;
        const i64 begin = lists.begin[entry], end = lists.end[entry];
        tokens = lists.tokens + begin;
        len = end > begin ? static_cast<u64>(end - begin) : 0;
    }
};

// The parameters of one row.
struct RowParameters {
    u64 seed, position;
    float temperature, top_p, min_p, repetition, frequency, presence;
    u32 top_k;  // 0 = off
    i32 min_tokens;
};

struct Shared {
    RowParameters row;
    u32 set[WINDOW / 32];
    u32 before[WINDOW / CHUNK];  // adjusted tokens before each chunk, earlier windows included
    u32 members;                 // adjusted tokens so far
    u32 invalid;                 // a `Parameter`
    u32 largest_bias;            // float bits; not negative
    u32 least_repetition;        // float bits; positive
    u32 least_subtract;          // monotone bits
    u32 contents;                // the digest of row_contents.cuh
};

constexpr u32 IS_IN_PROMPT = 1u << 31;  // flag in a token's count: the prompt has the token

template <class T>
__device__ __forceinline__ T entry_or(const T* column, u32 entry, T otherwise) {
    return column ? column[entry] : otherwise;
}

// Encodes one row: its parameters and lists, for the threads of its block.
struct RowEncoding {
    const EncodeRows& call;
    Shared& shared;
    u32 row;
    u32 entry;

    __device__ __forceinline__ RowEncoding(const EncodeRows& call, Shared& shared)
        : call(call), shared(shared), row(call.first_row + blockIdx.x) {
        entry = call.columns.index ? static_cast<u32>(call.columns.index[row]) : row;
    }

    __device__ __forceinline__ LogitBias* list() const {
        return call.lists + static_cast<u64>(blockIdx.x) * (2 * call.max_adjusted + 1);
    }
    __device__ __forceinline__ u32* counts() const { return call.counts + static_cast<u64>(blockIdx.x) * call.max_adjusted; }

    // Reads the parameters. The loads do not depend on each other: an array may be in host memory, far away.
    __device__ __forceinline__ RowParameters read() const {
        const RowColumns& columns = call.columns;
        const i32 top_k = entry_or(columns.top_k, entry, 0);
        return {entry_or(columns.seed, entry, u64{0}),
                read_position(),
                entry_or(columns.temperature, entry, 1.0f),
                entry_or(columns.top_p, entry, 1.0f),
                entry_or(columns.min_p, entry, 0.0f),
                entry_or(columns.repetition_penalty, entry, 1.0f),
                entry_or(columns.frequency_penalty, entry, 0.0f),
                entry_or(columns.presence_penalty, entry, 0.0f),
                // Off, also if k is at least the size of the vocabulary.
                top_k > 0 && static_cast<u32>(top_k) < call.vocab_size ? static_cast<u32>(top_k) : 0,
                entry_or(columns.min_tokens, entry, 0)};
    }
    __device__ __forceinline__ u64 read_position() const {
        const u64* const positions = call.columns.position;
        if (!call.columns.has_short_positions) return entry_or(positions, row, u64{0});
        // A negative position becomes one above the limit.
        return static_cast<u64>(static_cast<i64>(entry_or(reinterpret_cast<const i32*>(positions), row, 0)));
    }

    __device__ __forceinline__ float repetition() const { return shared.row.repetition; }
    __device__ __forceinline__ float frequency() const { return shared.row.frequency; }
    __device__ __forceinline__ float presence() const { return shared.row.presence; }
    __device__ __forceinline__ bool has_counts() const { return frequency() != 0.0f || presence() != 0.0f; }

    __device__ __forceinline__ const float* bias_values() const {
        return call.columns.logit_bias_values + call.columns.logit_bias.begin[entry];
    }

    // Checks the biases of the whole vocabulary, so that all ranks of a group report the same error. All threads.
    __device__ __forceinline__ void check_biases() {
        const List bias{call.columns.logit_bias, entry};
        for (u64 i = threadIdx.x; i < bias.len; i += THREADS) {
            // Also false for NaN.
            const bool is_valid = bias_values()[i] < f32_infinity();
            if (!is_valid && static_cast<u32>(bias.tokens[i]) < call.vocab_size)
                atomicMax(&shared.invalid, static_cast<u32>(Parameter::LogitBias));
        }
        __syncthreads();
    }

    // Returns the first invalid parameter. The comparisons are false for NaN.
    static __device__ __forceinline__ Parameter check(const RowParameters& of) {
        const float t = of.temperature, r = of.repetition;
        if (of.position >> 56) return Parameter::Position;
        if (!(t >= 0.0f && is_finite(t)) || (t > 0.0f && !is_finite(div_rn(1.0f, t)))) return Parameter::Temperature;
        if (t > 0.0f && of.top_k > TOP_K_MAX) return Parameter::TopK;
        if (!(of.top_p > 0.0f && of.top_p <= 1.0f)) return Parameter::TopP;
        if (!(of.min_p >= 0.0f && of.min_p <= 1.0f)) return Parameter::MinP;
        if (!(r > 0.0f && is_finite(r))) return Parameter::RepetitionPenalty;
        if (!(fabsf(of.frequency) <= LARGEST_PENALTY)) return Parameter::FrequencyPenalty;
        if (!(fabsf(of.presence) <= LARGEST_PENALTY)) return Parameter::PresencePenalty;
        return Parameter::None;
    }

    // Calls `of(token - first token of the window, index in the list)` for the tokens of a list in a window of the shard.
    template <class Of>
    __device__ __forceinline__ void each(const List& list, u32 window, u32 size, const Of& of) const {
        for (u64 i = threadIdx.x; i < list.len; i += THREADS) {
            const u32 token = static_cast<u32>(list.tokens[i]) - call.first_token - window;
            if (token < size) of(token, i);
        }
    }

    __device__ __forceinline__ u32 place(u32 token) const {
        u32 place = shared.before[token / CHUNK];
        for (u32 word = token / CHUNK * (CHUNK / 32); word < token / 32; ++word) place += __popc(shared.set[word]);
        return place + __popc(shared.set[token / 32] & ((1u << (token & 31)) - 1));
    }

    // Counts the adjusted tokens before each chunk, and adds the set's tokens to `members`. All threads.
    __device__ __forceinline__ void count(u32 chunks) {
        for (u32 chunk = threadIdx.x; chunk < chunks; chunk += THREADS) {
            u32 members = 0;
            for (u32 word = 0; word < CHUNK / 32; ++word) members += __popc(shared.set[chunk * (CHUNK / 32) + word]);
            shared.before[chunk] = members;
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            u32 before = shared.members;
            for (u32 from = 0; from < chunks; from += 32) {
                const u32 chunk = from + threadIdx.x, own = chunk < chunks ? shared.before[chunk] : 0;
                const u32 sum = sum_to_lane(own);
                if (chunk < chunks) shared.before[chunk] = before + sum - own;
                before += __shfl_sync(0xffffffffu, sum, 31);
            }
            // All lanes have read `members`.
            __syncwarp();
            if (threadIdx.x == 0) shared.members = before;
        }
        __syncthreads();
    }

    // Adds the adjusted tokens of a window to the list. All threads.
    __device__ __forceinline__ void add_window(u32 window) {
        const u32 size = min(WINDOW, call.tokens - window), chunks = (size + CHUNK - 1) / CHUNK;
        const List bias{call.columns.logit_bias, entry}, banned{call.columns.banned, entry}, prompt{call.columns.prompt, entry};
        const List output{call.columns.output, entry}, stop{call.columns.stop_tokens, entry};
        const bool has_repetition = repetition() != 1.0f;
        const i32 min_tokens = shared.row.min_tokens;
        const bool bans_stops = min_tokens > 0 && output.len < static_cast<u64>(min_tokens);
        for (u32 word = threadIdx.x; word < chunks * (CHUNK / 32); word += THREADS) shared.set[word] = 0;
        __syncthreads();
        const auto mark = [&](u32 token, u64) { atomicOr(&shared.set[token / 32], 1u << (token & 31)); };
        each(bias, window, size, mark);
        each(banned, window, size, mark);
        if (bans_stops) each(stop, window, size, mark);
        if (has_repetition) each(prompt, window, size, mark);
        if (has_repetition || has_counts()) each(output, window, size, mark);
        __syncthreads();
        count(chunks);
        if (shared.members > call.max_adjusted) return;
        for (u32 word = threadIdx.x; word < chunks * (CHUNK / 32); word += THREADS) {
            u32 rest = shared.set[word], at = rest ? place(32 * word) : 0;
            for (; rest; rest &= rest - 1, ++at) {
                const u32 token = call.first_token + window + 32 * word + static_cast<u32>(__ffs(static_cast<i32>(rest)) - 1);
                list()[at] = LogitBias{token, 0.0f};
                counts()[at] = 0;
            }
        }
        __syncthreads();
        each(bias, window, size, [&](u32 token, u64 i) { list()[place(token)].value = bias_values()[i]; });
        if (has_repetition) each(prompt, window, size, [&](u32 token, u64) { atomicOr(&counts()[place(token)], IS_IN_PROMPT); });
        if (has_repetition || has_counts()) each(output, window, size, [&](u32 token, u64) { atomicAdd(&counts()[place(token)], 1u); });
        __syncthreads();
        const auto ban = [&](u32 token, u64) { list()[place(token)].value = -f32_infinity(); };
        each(banned, window, size, ban);
        if (bans_stops) each(stop, window, size, ban);
        __syncthreads();
    }

    // Computes penalties from the counts, and returns `Row::biases`: the length of the list, and flags. All threads.
    __device__ __forceinline__ u32 complete() {
        const u32 members = shared.members;
        LogitBias* const biases = list();
        Penalty* const penalties = reinterpret_cast<Penalty*>(biases + members);
        const bool has_repetition = repetition() != 1.0f;
        // Frequency and presence penalties alone are negative biases, which are faster.
        const bool is_penalised = has_repetition || (has_counts() && call.columns.logit_bias.tokens);
        for (u32 i = threadIdx.x; i < members; i += THREADS) {
            const u32 count = counts()[i], outputs = count & ~IS_IN_PROMPT;
            const Penalty penalty{has_repetition && count ? repetition() : 1.0f,
                                  outputs ? add_rn(mul_rn(frequency(), u32_to_f32(outputs)), presence()) : 0.0f};
            if (is_penalised) {
                penalties[1 + i] = penalty;
                atomicMin(&shared.least_repetition, f32_to_bits(penalty.repetition));
                atomicMin(&shared.least_subtract, to_monotone_bits(penalty.subtract));
            } else if (penalty.subtract != 0.0f && biases[i].value == 0.0f) {
                biases[i].value = -penalty.subtract;
            }
            if (biases[i].value > 0.0f) atomicMax(&shared.largest_bias, f32_to_bits(biases[i].value));
        }
        __syncthreads();
        if (members == 0 || !is_penalised) return members;
        if (threadIdx.x == 0) penalties[0] = Penalty{bits_to_f32(shared.least_repetition), from_monotone_bits(shared.least_subtract)};
        return members | PENALISED;
    }

    // All threads. Only the first thread's result is complete.
    __device__ __forceinline__ void encode() {
        if (threadIdx.x == 0) {
            const RowParameters of = read();
            shared.row = of;
            shared.members = shared.largest_bias = shared.contents = 0;
            shared.invalid = static_cast<u32>(check(of));
            shared.least_repetition = f32_to_bits(1.0f);
            shared.least_subtract = to_monotone_bits(0.0f);
        }
        __syncthreads();
        check_biases();
        const RowColumns& columns = call.columns;
        const bool has_lists = columns.logit_bias.tokens || columns.banned.tokens || columns.stop_tokens.tokens ||
                               columns.prompt.tokens || columns.output.tokens;
        for (u32 window = 0; has_lists && window < call.tokens && !shared.invalid && shared.members <= call.max_adjusted; window += WINDOW)
            add_window(window);
        const u32 beyond = shared.members > call.max_adjusted ? static_cast<u32>(Parameter::Adjusted) : 0;
        const u32 invalid = shared.invalid ? shared.invalid : beyond, biases = has_lists && !invalid ? complete() : 0;
        const RowParameters& of = shared.row;
        const float t = of.temperature;
        const bool greedy = t == 0.0f || invalid;
        const u32* const mask = columns.mask && !invalid ? columns.mask + row * columns.mask_stride : nullptr;
        if (call.contents) {
            const RowTransform transform{mask, columns.mask_words, biases, list(), 1.0f};
            atomicAdd(&shared.contents, share_of_transform(transform, call.vocab_size, threadIdx.x, THREADS));
            __syncthreads();
        }
        if (threadIdx.x) return;
        if (call.contents) call.contents[blockIdx.x] = shared.contents + (greedy ? 0 : share_of_filters(of.min_p, of.top_p, of.top_k));
        const float inv_temperature = greedy ? 1.0f : div_rn(1.0f, t);
        call.rows[blockIdx.x] = Row{of.seed,
                                    invalid ? 0 : of.position,
                                    mask,
                                    biases ? list() : nullptr,
                                    mask ? columns.mask_words : 0,
                                    biases,
                                    inv_temperature,
                                    bits_to_f32(shared.largest_bias),
                                    0,
                                    greedy};
        const double off = -static_cast<double>(f32_infinity());
        const RowFilters filters = greedy ? RowFilters{off, 1.0f, 0, 1.0f, 0}
                                          : RowFilters{of.min_p > 0.0f ? log(static_cast<double>(of.min_p)) : off, of.top_p, of.top_k, 1.0f, 0};
        call.filters[blockIdx.x] = filters;
        const bool needs_logits = filters.is_any() && (!filters.is_listed() || filters.top_k > call.largest_top_k);
        if (call.passes && needs_logits) *call.passes = FilterPasses::Logits;
        call.invalid[blockIdx.x] = static_cast<Parameter>(invalid);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) encode_rows(const __grid_constant__ EncodeRows call) {
    __shared__ Shared shared;
    RowEncoding{call, shared}.encode();
}

extern "C" __global__ void __launch_bounds__(256) write_tokens(const __grid_constant__ WriteTokens call) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= call.row_count) return;
    if (i == 0) *call.passes = FilterPasses::Lists;
    const Draw draw = call.draws[i];
    const u32 invalid = static_cast<u32>(call.invalid[i]), row = call.first_row + i;
    const bool is_drawn = !invalid && draw.status == Status::Drawn;
    const TokenColumns& to = call.columns;
    if (to.tokens) to.tokens[row] = is_drawn ? static_cast<i64>(draw.token) : to.is_complete ? 0 : -1;
    if (to.scores) to.scores[row] = is_drawn ? draw.score : -f32_infinity();
    if (to.logits) to.logits[row] = is_drawn ? draw.logit : -f32_infinity();
    if (!to.statuses) return;
    // After a failed exchange, the token is the failed rank.
    const bool is_failed = draw.status == Status::LateRank || draw.status == Status::OtherCall;
    const u32 status = static_cast<u32>(draw.status) | (is_failed ? draw.token << 8 : 0);
    to.statuses[row] = invalid ? static_cast<u32>(Status::Parameters) | invalid << 8 : status;
}
