use super::*;
use crate::options::CpuOptions;
use crate::variants::Tiled;
use flash_sampling_core::backend::{MassHistogram, check_rows};
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{LogprobsMode, Order, PerturbedArgmax, Plan, RowParams};

const VOCAB: usize = 3000;
const WIDTH: usize = 16;
const TOKENS: [u32; 5] = [2, 2999, 1503, 1027, 2];

fn integers(n: usize, salt: u64) -> Vec<f32> {
    let mut state = salt;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % 7) as f32 - 3.0
    };
    (0..n).map(|_| next()).collect()
}

fn raw(summary: &RowSummary) -> Option<&MassHistogram> {
    summary.raw_mass.as_ref().filter(|mass| !mass.is_empty())
}

/// Integer inputs, so that dot products are exact and all bits must agree.
#[test]
fn a_scan_is_the_plain_one_of_the_reference() {
    let weight = integers(VOCAB * WIDTH, 7);
    let head = Head::new(Matrix::new(&weight, VOCAB, WIDTH).unwrap()).unwrap().with_scale(0.125).unwrap();
    let base = RowParams { seed: 9, draws: 2, temperature: 0.75, ..RowParams::default() };
    let bias = [(700, f32::NEG_INFINITY), (1503, 9.0)];
    let rows = [
        RowParams { top_p: 0.9, ..base },
        base,
        RowParams { top_k: 70, logprobs: Some(5), logit_bias: &bias, ..base },
        RowParams { top_p: 0.99, top_n_sigma: 1.5, order: Order::LlamaCpp, ..base },
        RowParams { temperature: -1.0, top_k: 3, ..base },
        RowParams { kept: true, draws: 9, ..base },
        RowParams { mask: Some(&[]), top_k: 3, ..base },
        RowParams { mask: Some(&[]), logprobs: Some(4), logprobs_mode: LogprobsMode::Raw, ..base },
        RowParams { top_p: 0.8, logprobs: Some(5), logprobs_mode: LogprobsMode::Raw, ..base },
        RowParams { without_replacement: true, draws: 9, logprobs: Some(3), ..base },
        RowParams { temperature: 0.0, draws: 3, logprobs: Some(5), ..base },
    ];
    let input = integers(rows.len() * WIDTH, 3);
    let input = Matrix::new(&input, rows.len(), WIDTH).unwrap();
    let plan = Plan { max_rows: rows.len(), max_draws: 9, max_logprobs: Some(5), canonical: false };
    for tokens in [&[0u32][..], &[0, 1027, 2048, 2048]] {
        for shard in head.split(tokens) {
            let mut want = Reference::new(shard, plan, ReferenceVariant::Tiled);
            let options = CpuOptions { threads: Some(2), ..CpuOptions::default() };
            let mut tiled = Tiled::new(shard, plan, &options).unwrap();
            let mut scan_both = |requests: &[Request<'_>]| {
                let (mut a, mut b) = (vec![RowSummary::default(); rows.len()], vec![RowSummary::default(); rows.len()]);
                let mut checked = Vec::new();
                check_rows(&rows, &want.description(), &mut checked);
                let batch = Batch { input, params: &rows, rows: &checked };
                want.scan().unwrap().scan(&batch, requests, &mut a).unwrap();
                tiled.scan().unwrap().scan(&batch, requests, &mut b).unwrap();
                for (r, (a, b)) in a.iter().zip(&b).enumerate() {
                    assert_eq!(a.error, b.error, "row {r}");
                    if a.error.is_none() {
                        assert_eq!((raw(a), a.raw_top.as_slice()), (raw(b), b.raw_top.as_slice()), "row {r}");
                        assert_eq!((&a.logits, &a.prefix_counts), (&b.logits, &b.prefix_counts), "row {r}");
                        assert_eq!((&a.draws, &a.list, &a.mass), (&b.draws, &b.list, &b.mass), "row {r}");
                        assert_eq!(
                            (a.moments.to_words(), &a.prefix_masses),
                            (b.moments.to_words(), &b.prefix_masses),
                            "row {r}"
                        );
                        let finite = a.frontiers().iter().any(|f| !f.is_empty());
                        assert!(!finite || a.frontiers() == b.frontiers(), "row {r}");
                    }
                }
                b
            };
            let overview = scan_both(&[Request::Overview; 11]);
            let draws = |r: usize| overview[r].draws.len();
            assert_eq!(
                (overview[1].error, draws(0), draws(1)),
                (None, 0, if shard.tokens().is_empty() { 0 } else { 2 })
            );
            assert!(overview[6].list.is_empty());
            let place = flash_sampling_core::backend::LogitRank { logit: 1.0, token: 1600 };
            let (before, ranks) = ([PrefixMass::new(place)], [place; 2]);
            let mut requests = [Request::Skip; 11];
            requests[0] = Request::PrefixMass { points: &before, below: 0.5 };
            requests[2] = Request::List { floor: 0.5 };
            requests[5] = Request::List { floor: f32::NEG_INFINITY };
            requests[8] = Request::Logits { tokens: &TOKENS, stage: Stage::Raw };
            requests[9] = Request::Logits { tokens: &TOKENS, stage: Stage::Transformed };
            requests[10] = Request::PrefixCount { ranks: &ranks, stage: Stage::Transformed };
            let summaries = scan_both(&requests);
            let own = TOKENS.iter().filter(|t| shard.tokens().contains(t)).count();
            assert_eq!((summaries[8].logits.len(), summaries[9].logits.len()), (own, own));
            let counts = summaries[10].prefix_counts.clone();
            assert!(counts.len() == 2 && counts[0] == counts[1] && (own == 0 || counts[0] > 0));
            assert!(overview[7].raw_top.as_slice().len() == 4.min(shard.tokens().len()));
            assert_eq!(summaries[5].list.len(), shard.tokens().len());
            // By raw logits, and by logits after masks and biases.
            let mut requests = [Request::Skip; 11];
            requests[7] = Request::PrefixCount { ranks: &ranks, stage: Stage::Raw };
            requests[2] = Request::PrefixCount { ranks: &ranks, stage: Stage::Transformed };
            requests[8] = Request::PrefixCount { ranks: &ranks, stage: Stage::Raw };
            scan_both(&requests);
        }
    }
}
