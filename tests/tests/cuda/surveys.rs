//! What shards on a GPU tell of rows with filters: every bit of what the reference tells, where dot products are exact.

use super::runs_here;
use flash_sampling_conformance::data::normal;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_core::backend::selection::PrefixMass;
use flash_sampling_core::backend::{Batch, Request, RowSummary, check_rows};
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{
    DType, Domain, Head, LogitRank, LogprobsMode, Matrix, Noise, Order, PerturbedArgmax, Plan, RowParams, Stage,
    StagedError,
};
use flash_sampling_cuda::{CudaTiled, Device};

const PLAN: Plan = Plan { max_rows: 64, max_draws: 12, max_logprobs: Some(6), canonical: false };

/// Rows with every filter, of every kind of answer.
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
        // One over it is beyond float32: the host looks.
        RowParams { top_p: 0.9, temperature: 1e-39, ..last },
        RowParams { top_p: 0.9, mask: Some(mask), logit_bias: &[(4, 3.0), (8, f32::NEG_INFINITY)], ..row },
        RowParams { top_p: 0.9, mask: Some(none), ..row },
        RowParams { top_n_sigma: 1.0, mask: Some(none), ..row },
        raw,
        RowParams { top_p: 0.9, mask: Some(mask), ..raw },
        RowParams { mask: Some(none), logprobs: Some(0), ..raw },
        row,
        RowParams { top_p: f32::NAN, ..row },
    ]
}

/// All that a survey says of a row that asked so; or its error.
fn told(row: &RowParams<'_>, survey: &RowSummary) -> Result<String, StagedError> {
    survey.error.map_or(Ok(()), Err)?;
    let is_raw = row.logprobs_mode == LogprobsMode::Raw;
    let raw = is_raw.then(|| (survey.raw_mass.clone().unwrap_or_default(), survey.raw_top.as_slice()));
    let tokens = (raw, &survey.logits, &survey.prefix_counts);
    // Every float as its shortest digits, which differ where bits do; the two zeros are equal logits.
    let all =
        (&survey.draws, &survey.list, &survey.mass, survey.moments, survey.frontiers(), &survey.prefix_masses, tokens);
    Ok([",", " ", ")", "}"]
        .iter()
        .fold(format!("{all:?}"), |all, end| all.replace(&format!("-0.0{end}"), &format!("0.0{end}"))))
}

fn survey(
    sampler: &mut dyn PerturbedArgmax,
    input: Matrix<'_>,
    rows: &[RowParams<'_>],
    inquiries: &[Request<'_>],
) -> Vec<RowSummary> {
    // More entries than rows, as of a larger call before.
    let mut out = vec![RowSummary::default(); rows.len() + 3];
    let (can, plan, vocab_size, mut checked) =
        (sampler.capabilities(), sampler.plan(), sampler.shape().vocab_size, Vec::new());
    check_rows(rows, &can, &plan, vocab_size, &mut checked);
    let batch = Batch { input, params: rows, rows: &checked };
    sampler.scan().expect("it scans").scan(&batch, inquiries, &mut out).unwrap();
    out.truncate(rows.len());
    out
}

/// Compares all inquiries about rows of a head with the reference's answers.
fn compare(name: &str, head: Head<'_>, input: Matrix<'_>, rows: &[RowParams<'_>]) {
    let input = input.row_range(0..rows.len());
    let mut cuda = CudaTiled::new(head, PLAN, &Device::new(0).unwrap()).unwrap();
    let mut reference = Reference::new(head, PLAN, ReferenceVariant::Tiled);
    let mut same = |what: &str, rows: &[RowParams<'_>], inquiries: &[Request<'_>]| {
        let want = survey(&mut reference, input, rows, inquiries);
        let found = survey(&mut cuda, input, rows, inquiries);
        for (r, (found, want)) in found.iter().zip(&want).enumerate() {
            let (found, want) = (told(&rows[r], found), told(&rows[r], want));
            if found != want {
                let show =
                    |told: &Result<String, StagedError>| format!("{told:?}").chars().take(700).collect::<String>();
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
    // A second call finds nothing of the first.
    let overview = same("a second call", rows, &vec![Request::Overview; rows.len()]);
    // The negative control: other noise, another frontier.
    assert_ne!(told(&rows[0], &overview[0]), told(&fewer[0], &other[0]));

    let first = head.tokens().start;
    let places: Vec<Vec<PrefixMass>> = overview
        .iter()
        .map(|survey| {
            let points = survey.frontiers().iter().flat_map(|frontier| frontier.iter().map(|c| c.logit_rank()));
            let listed = survey.list.iter().take(3).map(|c| c.logit_rank());
            let others = [LogitRank { logit: 0.5, token: first }, LogitRank { logit: -1e9, token: u32::MAX }];
            points.chain(listed).chain(others).map(PrefixMass::new).collect()
        })
        .collect();
    let before: Vec<_> = places.iter().map(|points| Request::PrefixMass { points, below: f32::NEG_INFINITY }).collect();
    let sums = same("masses before", rows, &before);
    assert!(sums.iter().flat_map(|survey| &survey.prefix_masses).any(|before| before.mass() > 0));

    let floors = [f32::NEG_INFINITY, -1.0, 1.25, 4.0, 1e9];
    let floor_of = |r: usize| Request::List { floor: floors[r % floors.len()] };
    let lists = same("lists", rows, &(0..rows.len()).map(floor_of).collect::<Vec<_>>());
    assert!(lists.iter().any(|survey| survey.list.len() > 64));

    let (few, many) = ([first, u32::MAX - 1, first + 1], (0..20).map(|i| first + i / 2).collect::<Vec<_>>());
    for stage in [Stage::Raw, Stage::Transformed] {
        let tokens = |r: usize| if r.is_multiple_of(2) { &few[..] } else { &many };
        let logits = |r: usize| Request::Logits { tokens: tokens(r), stage };
        same("logits", rows, &(0..rows.len()).map(logits).collect::<Vec<_>>());
        let ranks: Vec<Vec<LogitRank>> =
            places.iter().map(|points| points.iter().map(|point| point.rank).collect()).collect();
        let counts = |r: usize| Request::PrefixCount { ranks: &ranks[r], stage };
        let counts = same("ranks", rows, &(0..rows.len()).map(counts).collect::<Vec<_>>());
        assert!(counts.iter().flat_map(|survey| &survey.prefix_counts).any(|&count| count > 0));
    }

    let mixed = |r: usize| match r % 4 {
        0 => before[r],
        1 => Request::Overview,
        2 => floor_of(r),
        _ => Request::Skip,
    };
    same("a bit of each", rows, &(0..rows.len()).map(mixed).collect::<Vec<_>>());
}

#[test]
fn shards_tell_every_bit_of_what_the_reference_tells() {
    if !runs_here() {
        return;
    }
    let masks = |vocab: usize| {
        let words = vocab.div_ceil(32);
        ((0..words as u32).map(|w| w.wrapping_mul(0x9e37_79b9) | 1 << (w % 32)).collect::<Vec<_>>(), vec![0; words])
    };
    // Many ties; the fastest kernel.
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
    // Few ties, a heavy head, logits of -inf.
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

/// Logits that fall as the noise rises, half as fast: every token is on the frontier.
#[test]
fn a_frontier_of_all_tokens_finds_room() {
    if !runs_here() {
        return;
    }
    let (vocab, noise) = (9000, Noise::new(8, 1).unwrap());
    let logits: Vec<f32> = (0..vocab).map(|t| -0.5 * noise.gumbel(Domain::Token, 0, t)).collect();
    let row = RowParams { seed: 8, position: 1, top_p: 0.9, ..RowParams::default() };
    let rows = vec![row; 12];
    let problem = Problem::of_logits(&logits, rows.len());
    let mut cuda = CudaTiled::new(problem.head(), PLAN, &Device::new(0).unwrap()).unwrap();
    let mut reference = Reference::new(problem.head(), PLAN, ReferenceVariant::Tiled);
    let inquiries = vec![Request::Overview; rows.len()];
    let want = survey(&mut reference, problem.input(), &rows, &inquiries);
    assert!(want[0].frontiers()[0].len() > 6000, "{} points", want[0].frontiers()[0].len());
    let found = survey(&mut cuda, problem.input(), &rows, &inquiries);
    for (found, want) in found.iter().zip(&want) {
        assert!(found.frontiers() == want.frontiers() && found.list == want.list && found.mass == want.mass);
    }
}
