//! Scans of shards on a GPU. For exact dot products, row summaries have the reference's bits.

use super::backends::gpu::Gpu;
use flash_sampling_conformance::data::normal;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_core::backend::selection::PrefixMass;
use flash_sampling_core::backend::{Batch, LogitRank, Request, RowSummary, Stage, StagedError, check_rows};
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{DType, Domain, Head, LogprobsMode, Matrix, Noise, Order, PerturbedArgmax, Plan, RowParams};
use flash_sampling_cuda::{CudaTiled, Device};

const PLAN: Plan = Plan { max_rows: 64, max_draws: 12, max_logprobs: Some(6), canonical: false };

/// Returns rows with every filter and every kind of result.
fn rows<'a>(mask: &'a [u32], none: &'a [u32]) -> Vec<RowParams<'a>> {
    let row = RowParams { seed: 5, position: 9, temperature: 0.9, ..RowParams::default() };
    let raw = RowParams { logprobs: Some(6), logprobs_mode: LogprobsMode::Raw, ..row };
    let last = RowParams { order: Order::LlamaCpp, ..row };
    vec![
        RowParams { top_p: 0.9, draws: 3, first_draw: 2, ..row },
        RowParams { top_k: 50, ..row },
        RowParams { top_k: 700, top_p: 0.5, ..row },
        RowParams { min_p: 0.2, ..row },
        RowParams { top_n_sigma: 1.5, draws: 2, ..row },
        RowParams { top_n_sigma: 0.5, top_p: 0.7, temperature: 30.0, ..row },
        RowParams { epsilon_cutoff: 0.004, kept: true, ..row },
        RowParams { typical_p: 0.5, seed: 77, ..row },
        RowParams { xtc_threshold: 0.01, xtc_probability: 1.0, ..row },
        RowParams { top_p: 0.8, draws: 9, ..row },
        RowParams { top_p: 0.9, without_replacement: true, draws: 6, ..row },
        RowParams { top_p: 0.9, logprobs: Some(6), ..row },
        RowParams { top_p: 0.9, temperature: 0.3, draws: 2, ..last },
        RowParams { top_n_sigma: 2.0, top_p: 0.9, temperature: 1e-37, ..last },
        // The reciprocal of this temperature exceeds float32: the host summarizes the row.
        RowParams { top_p: 0.9, temperature: 1e-39, ..last },
        RowParams { top_p: 0.9, mask: Some(mask), logit_bias: &[(4, 3.0), (8, f32::NEG_INFINITY)], ..row },
        RowParams { top_p: 0.9, mask: Some(none), ..row },
        RowParams { top_n_sigma: 1.0, mask: Some(none), ..row },
        raw,
        RowParams { top_p: 0.9, mask: Some(mask), ..raw },
        RowParams { mask: Some(none), logprobs: Some(0), ..raw },
        // The storing pass makes the only draw of a row, or finds that no token is allowed.
        RowParams { logprobs: Some(3), ..row },
        RowParams { mask: Some(none), logprobs: Some(3), ..row },
        row,
        RowParams { top_p: f32::NAN, ..row },
    ]
}

/// Formats all parts of a row's summary that must have the reference's bits, or returns the row's error.
fn comparable(row: &RowParams<'_>, summary: &RowSummary) -> Result<String, StagedError> {
    summary.error.map_or(Ok(()), Err)?;
    let is_raw = row.logprobs_mode == LogprobsMode::Raw;
    let raw = is_raw.then(|| (summary.raw_mass.clone().unwrap_or_default(), summary.raw_top.as_slice()));
    let tokens = (raw, &summary.logits, &summary.prefix_counts);
    // The shortest digits of two floats differ if their bits differ. The two zeros are equal logits.
    let all = (
        &summary.draws,
        &summary.list,
        &summary.mass,
        summary.moments,
        summary.frontiers(),
        &summary.prefix_masses,
        tokens,
    );
    Ok([",", " ", ")", "}"]
        .iter()
        .fold(format!("{all:?}"), |all, end| all.replace(&format!("-0.0{end}"), &format!("0.0{end}"))))
}

/// Scans rows once.
fn scan(
    sampler: &mut dyn PerturbedArgmax,
    input: Matrix<'_>,
    rows: &[RowParams<'_>],
    requests: &[Request<'_>],
) -> Vec<RowSummary> {
    // `out` has more entries than rows, as after a larger call.
    let mut out = vec![RowSummary::default(); rows.len() + 3];
    let mut checked = Vec::new();
    check_rows(rows, &sampler.description(), &mut checked);
    let batch = Batch { input, params: rows, rows: &checked };
    sampler.scan().expect("the sampler has a scan").scan(&batch, requests, &mut out).unwrap();
    out.truncate(rows.len());
    out
}

/// Compares the summaries of rows with the reference's, for every kind of request.
fn compare(name: &str, head: Head<'_>, input: Matrix<'_>, rows: &[RowParams<'_>]) {
    let input = input.row_range(0..rows.len());
    let mut cuda = CudaTiled::new(head, PLAN, &Device::new(0).unwrap()).unwrap();
    let mut reference = Reference::new(head, PLAN, ReferenceVariant::Tiled);
    let mut same = |what: &str, rows: &[RowParams<'_>], requests: &[Request<'_>]| {
        let want = scan(&mut reference, input, rows, requests);
        let found = scan(&mut cuda, input, rows, requests);
        for (r, (found, want)) in found.iter().zip(&want).enumerate() {
            let (found, want) = (comparable(&rows[r], found), comparable(&rows[r], want));
            if found != want {
                let show = |row: &Result<String, StagedError>| format!("{row:?}").chars().take(700).collect::<String>();
                let (a, b) = (format!("{found:?}"), format!("{want:?}"));
                let at = a.bytes().zip(b.bytes()).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len()));
                let near = |s: &str| s.chars().skip(at.saturating_sub(80)).take(200).collect::<String>();
                println!(
                    "found {}\n want {}\nfound near {}\n want near {}",
                    show(&found),
                    show(&want),
                    near(&a),
                    near(&b)
                );
                panic!("{name}, {what}, row {r}: {:?}", rows[r]);
            }
        }
        want
    };
    let fewer = [RowParams { seed: 6, ..rows[0] }, rows[rows.len() - 1]];
    let other = same("overview", &[fewer.as_slice(), &rows[2..]].concat(), &vec![Request::Overview; rows.len()]);
    // A second call reuses the memory of the first, and none of its results.
    let overview = same("a second call", rows, &vec![Request::Overview; rows.len()]);
    // The negative control: another seed gives another frontier.
    assert_ne!(comparable(&rows[0], &overview[0]), comparable(&fewer[0], &other[0]));

    let first = head.tokens().start;
    let points: Vec<Vec<PrefixMass>> = overview
        .iter()
        .map(|summary| {
            let frontiers = summary.frontiers().iter().flat_map(|frontier| frontier.iter().map(|c| c.logit_rank()));
            let listed = summary.list.iter().take(3).map(|c| c.logit_rank());
            let others = [LogitRank { logit: 0.5, token: first }, LogitRank { logit: -1e9, token: u32::MAX }];
            frontiers.chain(listed).chain(others).map(PrefixMass::new).collect()
        })
        .collect();
    let prefix_masses: Vec<_> =
        points.iter().map(|points| Request::PrefixMass { points, below: f32::NEG_INFINITY }).collect();
    let sums = same("prefix masses", rows, &prefix_masses);
    assert!(sums.iter().flat_map(|summary| &summary.prefix_masses).any(|prefix| prefix.mass() > 0));

    let floors = [f32::NEG_INFINITY, -1.0, 1.25, 4.0, 1e9];
    let floor_of = |r: usize| Request::List { floor: floors[r % floors.len()] };
    let lists = same("lists", rows, &(0..rows.len()).map(floor_of).collect::<Vec<_>>());
    assert!(lists.iter().any(|summary| summary.list.len() > 64));

    let (few, many) = ([first, u32::MAX - 1, first + 1], (0..20).map(|i| first + i / 2).collect::<Vec<_>>());
    for stage in [Stage::Raw, Stage::Transformed] {
        let tokens = |r: usize| if r.is_multiple_of(2) { &few[..] } else { &many };
        let logits = |r: usize| Request::Logits { tokens: tokens(r), stage };
        same("logits", rows, &(0..rows.len()).map(logits).collect::<Vec<_>>());
        let ranks: Vec<Vec<LogitRank>> =
            points.iter().map(|points| points.iter().map(|point| point.rank).collect()).collect();
        let counts = |r: usize| Request::PrefixCount { ranks: &ranks[r], stage };
        let counts = same("prefix counts", rows, &(0..rows.len()).map(counts).collect::<Vec<_>>());
        assert!(counts.iter().flat_map(|summary| &summary.prefix_counts).any(|&count| count > 0));
    }

    let mixed = |r: usize| match r % 4 {
        0 => prefix_masses[r],
        1 => Request::Overview,
        2 => floor_of(r),
        _ => Request::Skip,
    };
    same("mixed requests", rows, &(0..rows.len()).map(mixed).collect::<Vec<_>>());
}

#[test]
fn scans_of_shards_have_the_reference_bits() {
    let Some(_) = Gpu::TILED.device() else { return };
    let masks = |vocab: usize| {
        let words = vocab.div_ceil(32);
        ((0..words as u32).map(|w| w.wrapping_mul(0x9e37_79b9) | 1 << (w % 32)).collect::<Vec<_>>(), vec![0; words])
    };
    // Many ties, on the fastest kernel.
    let vocab = 5003;
    let (mask, none) = masks(vocab);
    let rows = rows(&mask, &none);
    let problem = Problem::integers(Size::new(rows.len(), vocab, 64), DType::BF16, DType::BF16, 5);
    compare("integers", problem.head(), problem.input(), &rows);
    for starts in [[0, 3, 1001], [0, 4095, 4097]] {
        for (s, shard) in problem.head().split(&starts).into_iter().enumerate() {
            if shard.tokens().len() > 100 {
                compare(&format!("shard {s} at {starts:?}"), shard, problem.input(), &rows);
            }
        }
    }
    // Few ties, a few heavy tokens, and logits of -inf.
    let vocab = 40_000;
    let (mask, none) = masks(vocab);
    let rows = self::rows(&mask, &none);
    let logit = |i: usize| match i % 97 {
        0 => f32::NEG_INFINITY,
        1 => 6.0 + 2.0 * normal(3, i as u64) as f32,
        _ => 2.0 * normal(3, i as u64) as f32,
    };
    let logits: Vec<f32> = (0..vocab).map(logit).collect();
    let problem = Problem::of_logits(&logits, rows.len());
    compare("logits", problem.head(), problem.input(), &rows);
    compare("a shard of logits", problem.head().slice(12_345..33_333), problem.input(), &rows);
}

/// Each logit is minus half of its token's noise, so every token is on the frontier.
#[test]
fn a_frontier_of_all_tokens_fits() {
    let Some(device) = Gpu::TILED.device() else { return };
    let (vocab, noise) = (9000, Noise::new(8, 1).unwrap());
    let logits: Vec<f32> = (0..vocab).map(|t| -0.5 * noise.gumbel(Domain::Token, 0, t)).collect();
    let row = RowParams { seed: 8, position: 1, top_p: 0.9, ..RowParams::default() };
    let rows = vec![row; 12];
    let problem = Problem::of_logits(&logits, rows.len());
    let mut cuda = CudaTiled::new(problem.head(), PLAN, &device).unwrap();
    let mut reference = Reference::new(problem.head(), PLAN, ReferenceVariant::Tiled);
    let requests = vec![Request::Overview; rows.len()];
    let want = scan(&mut reference, problem.input(), &rows, &requests);
    assert!(want[0].frontiers()[0].len() > 6000, "{} points", want[0].frontiers()[0].len());
    let found = scan(&mut cuda, problem.input(), &rows, &requests);
    for (found, want) in found.iter().zip(&want) {
        assert!(found.frontiers() == want.frontiers() && found.list == want.list && found.mass == want.mass);
    }
}
