// Runs the kernels over quantised weights on the processor: the decoding of weights, the products of the kernel without tensor
// cores, and the canonical logits. Reads problems from standard input, and writes all results to standard output.
// crates/cuda/tests/quantised_weights.rs makes the problems and compares the results with core's.
#include "emulator.hpp"

#include "flash_sampling/mainloop/plain.cuh"
#include "flash_sampling/noise/noise.cuh"
#include "flash_sampling/scan/stored.cuh"

namespace canonical_logits {
#include "../canonical.cu"
}  // namespace canonical_logits

using namespace flash_sampling;

// Keeps the products of all tiles.
struct Keep {
    float* dots;  // [rows, tokens]
    u32 tokens;

    void begin() {}
    void tile(const DotTile& tile) {
        for (u32 i = threadIdx.x; i < tile.columns * tile.tokens; i += EPILOGUE_THREADS) {
            const u32 c = i / tile.tokens, t = i % tile.tokens;
            dots[static_cast<u64>(tile.column + c) * tokens + tile.first + t] = tile.dots[c * tile.stride + t];
        }
        __syncthreads();
    }
    void end() {}
};

// Multiplies by the kernel for COLUMNS rows, in three blocks.
template <int COLUMNS>
static std::vector<float> multiply(const Call& call, const Matrices& matrices) {
    using Mainloop = PlainMainloop<COLUMNS, true>;
    std::vector<float> dots(static_cast<size_t>(call.row_count) * call.tokens, NAN);
    alignas(16) static u8 memory[Mainloop::template Memory<0>::BYTES];
    for (u32 block = 0; block < 3; ++block) {
        memset(memory, 0xff, sizeof(memory));
        const Run run = Run::of(block, 3, call.tokens, 16);
        Keep keep{dots.data(), call.tokens};
        emulator::run(EPILOGUE_THREADS, [&] { Mainloop::template run<0>(call, matrices, run, memory, keep); });
    }
    return dots;
}

// Evaluates every token of a greedy row.
static std::vector<float> canonical_row(const Call& call, const Matrices& matrices, u32 r) {
    std::vector<KeptToken> kept(call.tokens);
    for (u32 t = 0; t < call.tokens; ++t) kept[t] = {to_ordered_bits(Winner::of(0.0f, call.first_token + t)), NAN, 0};
    u64 count = call.tokens;
    Row row{};
    row.inv_temperature = 1.0f, row.greedy = 1;
    const std::vector<Row> rows(call.row_count, row);
    const Item item{r, 1, 0.0f, 0};
    canonical_logits::Canonical canonical{};
    canonical.out = {kept.data(), &count, count};
    canonical.items = &item, canonical.noise = &row, canonical.rows = rows.data();
    canonical.weight = matrices.weight, canonical.hidden = matrices.hidden;
    canonical.weight_stride = matrices.weight_stride, canonical.hidden_stride = matrices.hidden_stride / 4;
    canonical.head = call.head;
    canonical.weight_type = matrices.weight_type, canonical.hidden_type = matrices.hidden_type;
    canonical.width = call.hidden, canonical.first_token = call.first_token, canonical.scales = matrices.scales;
    emulator::launch(2, 1, canonical_logits::THREADS, [&] { canonical_logits::canonical(canonical); });
    std::vector<float> logits;
    for (const KeptToken& token : kept) logits.push_back(token.logit);
    return logits;
}

// Writes a weight.
struct PutWeight {
    const u8* row;
    const WeightScales& scales;
    u32 t, k;

    template <Element TYPE>
    void run() const {
        const QuantisedWeight weight = quantised<TYPE>(row, k, has_scales(TYPE) ? scales.at(t, k) : 1.0f);
        put(weight.to_f32());
        put(weight.to_f64());
    }
};

// Checks the conversions of all elements of a type with 8 bits, to f16 and to bf16.
template <Element TYPE>
static void check_conversions() {
    const auto check = [](float found, u32 code) {
        const float want = TYPE == Element::I8 ? blocks::signed_byte(code) : blocks::e4m3(code);
        if (f32_to_bits(found) != f32_to_bits(want) && !(is_nan(found) && is_nan(want))) abort();
    };
    for (u32 code = 0; code < 256; ++code) {
        const u32 codes[] = {code, 255 - code, code ^ 0x55, code ^ 0x0f};
        const u32 word = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24;
        const u32 f16[] = {bytes_to_f16<TYPE, false>(word), bytes_to_f16<TYPE, true>(word)};
        const u32 bf16[] = {bytes_to_bf16<TYPE, false>(word), bytes_to_bf16<TYPE, true>(word)};
        for (u32 i = 0; i < 4; ++i) {
            check(widen<Element::F16>(f16[i / 2], i % 2), codes[i]);
            check(widen<Element::BF16>(bf16[i / 2], i % 2), codes[i]);
        }
    }
}

int main() {
    check_conversions<Element::F8_E4M3>();
    check_conversions<Element::I8>();
    const u32 cases = get<u32>();
    for (u32 i = 0; i < cases; ++i) {
        Call call{};
        call.head.scale = 1.0f;
        const u32 type = get<u32>(), stride = get<u32>();
        call.tokens = get<u32>(), call.hidden = get<u32>(), call.row_count = get<u32>(), call.first_token = get<u32>();
        WeightScales scales{};
        scales.block_rows = get<u32>(), scales.block_cols = get<u32>(), scales.row_blocks = get<u32>();
        scales.first_row = get<u32>();
        const auto values = get_all<float>(get<u32>());
        if (!values.empty()) scales.values = values.data();
        // Blocks of f16 scales begin at addresses that are not multiples of 4.
        std::vector<u64> memory(static_cast<size_t>(stride) * call.tokens / 8 + 2);
        u8* const weight = reinterpret_cast<u8*>(memory.data()) + 2;
        for (u32 b = 0; b < stride * call.tokens; ++b) weight[b] = get<u8>();
        auto hidden = get_all<float>(static_cast<size_t>(call.row_count) * call.hidden);
        const Element element = static_cast<Element>(type);
        for (u32 t = 0; t < call.tokens; ++t)
            for (u32 k = 0; k < call.hidden; ++k) {
                const PutWeight weights{weight + t * stride, scales, t, k};
                with_quantised_type(element, weights);
            }
        const Matrices matrices{weight,  reinterpret_cast<u8*>(hidden.data()), stride, call.hidden * 4ull,
                                element, Element::F32,                         2,      4,
                                scales};
        for (float dot : multiply<8>(call, matrices)) put(dot);
        for (float dot : multiply<64>(call, matrices)) put(dot);
        for (u32 r = 0; r < call.row_count; ++r)
            for (float logit : canonical_row(call, matrices, r)) put(logit);
    }
}
