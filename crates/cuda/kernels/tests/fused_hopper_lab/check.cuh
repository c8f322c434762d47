// Every variant against the scalar definition, on integer inputs.
#pragma once

#include "variants.cuh"

static int failures = 0;

// The scalar definition, one thread a token and row; integer inputs, so the sum is exact in any order.
__global__ void reference(Call call, const __nv_bfloat16* w, const __nv_bfloat16* h, u64* best, float* logits) {
    const u32 token = blockIdx.x * 32 + threadIdx.x % 32, r = blockIdx.y * 8 + threadIdx.x / 32;
    if (token >= call.tokens || r >= call.row_count) return;
    float dot = 0;
    for (u32 k = 0; k < call.hidden; ++k)
        dot += __bfloat162float(w[(u64)token * call.hidden + k]) * __bfloat162float(h[(u64)r * call.hidden + k]);
    const Row& row = call.rows[r];
    float l = call.head.apply(dot, call.bias ? call.bias[token] : 0, call.bias != nullptr);
    l = row.transform().apply(l, call.first_token + token);
    if (l == -INFINITY) return;
    const Noise noise{row.seed, row.position};
    const float score = row.greedy ? l : l + noise.gumbel(Domain::Token, row.draw, call.first_token + token);
    atomicMax(&best[r], to_ordered_bits(Winner::of(score, call.first_token + token)));
}

static void check(u32 V, u32 D, u32 R, u32 first, int kind, u32 seed) {
    auto* w = device<__nv_bfloat16>((u64)V * D);
    auto* h = device<__nv_bfloat16>((u64)R * D);
    fill_small<<<1024, 256>>>(w, (u64)V * D, seed, 2);
    fill_small<<<1024, 256>>>(h, (u64)R * D, seed + 1, 2);
    Call c = scratch(R);
    c.row_count = R;
    c.hidden = D;
    c.first_token = first;
    c.tokens = V;
    if (kind == 1) c.head = {30.0f, 1.5f};
    std::vector<float> bias(V);
    for (u32 i = 0; i < V; ++i) bias[i] = (int)(i * 2654435761u >> 28) * 0.25f;
    if (kind == 2) {
        float* b = device<float>(V);
        CHECK(cudaMemcpy(b, bias.data(), V * 4, cudaMemcpyHostToDevice));
        c.bias = b;
    }
    u32 words = (first + V + 31) / 32;
    std::vector<u32> mask(words);
    for (u32 i = 0; i < words; ++i) mask[i] = philox4x32_10({{i, 1, 2, 3}}, seed, 5).w[0] & (i % 3 ? 0 : ~0u);
    u32* dmask = device<u32>(words);
    CHECK(cudaMemcpy(dmask, mask.data(), words * 4, cudaMemcpyHostToDevice));
    std::vector<LogitBias> lb = {{first + 1, 3.5f}, {first + V / 2, -INFINITY}, {first + V - 1, 7.25f}};
    LogitBias* dlb = device<LogitBias>(3);
    CHECK(cudaMemcpy(dlb, lb.data(), 24, cudaMemcpyHostToDevice));
    std::vector<Row> rows(R);
    const float temps[] = {1.0f, 0.7f, 30.0f, 1000.0f, 1.3f, 100.0f, 0.01f, 50.0f};
    for (u32 r = 0; r < R; ++r) {
        Row q{};
        q.seed = 0x123456789abcdefull * (r + 1) + seed;
        q.position = r * 0x1000000ull + 5;
        q.inv_temperature = r % 8 == 0 ? 1.0f : 1.0f / temps[r % 8];
        q.draw = r % 3;
        q.greedy = r % 11 == 3;
        if (q.greedy) q.inv_temperature = 1.0f;
        if (kind == 3 && r % 2) q.mask = dmask, q.mask_words = words;
        if (kind == 3 && r % 3 == 0) q.bias = dlb, q.biases = 3, q.largest_bias = 7.25f;
        rows[r] = q;
    }
    CHECK(cudaMemcpy((void*)c.rows, rows.data(), R * sizeof(Row), cudaMemcpyHostToDevice));
    u64* best = device<u64>(R);
    CHECK(cudaMemset(best, 0, R * 8));
    reference<<<dim3((V + 31) / 32, (R + 7) / 8), 256>>>(c, w, h, best, nullptr);
    CHECK(cudaDeviceSynchronize());
    std::vector<u64> want(R);
    CHECK(cudaMemcpy(want.data(), best, R * 8, cudaMemcpyDeviceToHost));
    for (const auto& v : variants) {
        if (v.columns < (int)R) continue;
        for (int round = 0; round < 2; ++round) {
            CHECK(cudaMemset(c.draws, 0xcd, R * sizeof(Draw)));
            v.launch({w, h, c});
            CHECK(cudaDeviceSynchronize());
            std::vector<Draw> got(R);
            CHECK(cudaMemcpy(got.data(), c.draws, R * sizeof(Draw), cudaMemcpyDeviceToHost));
            int bad = 0;
            for (u32 r = 0; r < R; ++r) {
                Winner x = from_ordered_bits(want[r]);
                bool ok = got[r].status == Status::Drawn && got[r].token == x.token &&
                          f32_to_bits(got[r].score) == f32_to_bits(x.score);
                if (ok && rows[r].greedy) ok = got[r].logit == got[r].score;
                if (ok && !rows[r].greedy) {
                    const float g = Noise{rows[r].seed, rows[r].position}.gumbel(Domain::Token, rows[r].draw, x.token);
                    ok = got[r].logit + g == got[r].score;
                }
                if (!ok && bad++ < 3)
                    printf("   row %u: got %u %.9g (%.9g) status %u, want %u %.9g\n", r, got[r].token, got[r].score,
                           got[r].logit, (u32)got[r].status, x.token, x.score);
            }
            if (bad == 0) continue;
            ++failures;
            printf("FAIL V %u D %u R %u first %u kind %d %s round %d: %d rows\n", V, D, R, first, kind, v.name, round, bad);
        }
    }
    cudaFree(w), cudaFree(h);
}

// A NaN row, a row whose mask allows nothing, then an infinite bias: each row says so, the others stay right.
static void check_bad(u32 R) {
    const u32 V = 3000, D = 256;
    auto* w = device<__nv_bfloat16>((u64)V * D);
    auto* h = device<__nv_bfloat16>((u64)R * D);
    fill_small<<<1024, 256>>>(w, (u64)V * D, 5, 2);
    fill_small<<<1024, 256>>>(h, (u64)R * D, 6, 2);
    const __nv_bfloat16 nan = __float2bfloat16(NAN);
    CHECK(cudaMemcpy(h + D + 7, &nan, 2, cudaMemcpyHostToDevice));
    Call c = scratch(R);
    c.row_count = R, c.hidden = D, c.tokens = V;
    u32* none = device<u32>((V + 31) / 32);
    CHECK(cudaMemset(none, 0, (V + 31) / 32 * 4));
    std::vector<float> bias(V);
    bias[1234] = INFINITY;
    float* infinite = device<float>(V);
    CHECK(cudaMemcpy(infinite, bias.data(), V * 4, cudaMemcpyHostToDevice));
    std::vector<Row> rows(R);
    for (u32 r = 0; r < R; ++r) {
        rows[r] = Row{};
        rows[r].seed = r, rows[r].inv_temperature = 1.0f;
        if (r == 3) rows[r].mask = none, rows[r].mask_words = (V + 31) / 32;
    }
    CHECK(cudaMemcpy((void*)c.rows, rows.data(), R * sizeof(Row), cudaMemcpyHostToDevice));
    u64* best = device<u64>(R);
    CHECK(cudaMemset(best, 0, R * 8));
    reference<<<dim3((V + 31) / 32, (R + 7) / 8), 256>>>(c, w, h, best, nullptr);
    std::vector<u64> want(R);
    CHECK(cudaMemcpy(want.data(), best, R * 8, cudaMemcpyDeviceToHost));
    for (const auto& v : variants) {
        if (v.columns < (int)R) continue;
        for (int round = 0; round < 2; ++round) {
            c.bias = round ? infinite : nullptr;
            v.launch({w, h, c});
            CHECK(cudaDeviceSynchronize());
            std::vector<Draw> got(R);
            CHECK(cudaMemcpy(got.data(), c.draws, R * sizeof(Draw), cudaMemcpyDeviceToHost));
            for (u32 r = 0; r < R; ++r) {
                bool ok = got[r].status == Status::Drawn && got[r].token == from_ordered_bits(want[r]).token;
                if (round) ok = got[r].status == Status::PositiveInfinity && got[r].token == 1234;
                if (!round && r == 3) ok = got[r].status == Status::NoFiniteLogit;
                if (r == 1) ok = got[r].status == Status::NaN && got[r].token == 0;
                if (ok) continue;
                ++failures;
                printf("FAIL bad rows %u %s round %d row %u: status %u token %u\n", R, v.name, round, r, (u32)got[r].status,
                       got[r].token);
            }
        }
    }
    cudaFree(w), cudaFree(h);
}
